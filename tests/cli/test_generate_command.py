"""generate.py: stdout and stderr, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
from paths import ROOT
from translation_tools import write

from jaxllm import save_hf
from jaxllm.cli.generate import main
from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.settings.resolve import DEFAULT_NEW_TOKENS
from jaxllm.tokenizers import load_tokenizer

MODELS = ROOT / "tests" / "data" / "conformance" / "models"
PARITY = ROOT / "tests" / "data" / "parity"
LLAMA = MODELS / "s_llama_tok"  # with a tokenizer
T5 = MODELS / "s_t5"  # without
FOR_MINUTES = ("--eos-token-id", "none", "--max-new-tokens", 30_000)
SHORT = ("--max-new-tokens", "8", "--no-compile-cache")


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """The command in this process."""

    def run(*arguments: object) -> Result:
        try:
            code = main([str(argument) for argument in arguments], program="generate.py")
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cache") / "programs"
    return {**os.environ, "JAXLLM_CACHE_DIR": str(cache), "PYTHONWARNINGS": "error"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "generate.py"), *map(str, arguments)]


def spawn(environment: dict[str, str], *arguments: object, stdin: str = "") -> Result:
    """The command in a process of its own, started in another folder."""
    done = subprocess.run(
        command(*arguments),
        env=environment,
        cwd=environment["JAXLLM_CACHE_DIR"].rsplit("/", 1)[0],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_smollm2_answers_and_keeps_compiled_programs(
    environment: dict[str, str], smollm2_gguf: Path
) -> None:
    first = spawn(environment, "--chat", "What is the capital of France?")
    assert (first.code, first.out) == (0, "The capital of France is Paris.\n"), first.err
    assert "loading SmolLM2-135M-Instruct.Q4_1.gguf" in first.err
    assert " s\n" in first.err
    assert "tokens/s" in first.err
    assert " 0 of " in first.err  # programs from the cache

    again = spawn(environment, "--chat", "-", stdin="What is the capital of France?\n")
    assert again.out == first.out
    from_cache, programs = again.err.split(" programs from the cache")[0].split()[-3::2]
    assert from_cache == programs, "a second start compiles nothing"


def test_help_lists_supported_fields_only(run) -> None:
    result = run("--help")
    assert result.code == 0
    assert "--repetition-penalty" in result.out
    assert "--num-beams" in result.out
    assert "--cache-implementation" in result.out
    hidden = ("speculation-type", "output-scores", "return-dict-in-generate", "constraints")
    for name in (*hidden, "assistant-lookbehind"):
        assert f"--{name}" not in result.out
    assert "(())" not in result.out


def test_help_names_the_default_length_of_the_command(run) -> None:
    assert str(DEFAULT_NEW_TOKENS) in FIELDS["max_new_tokens"].doc
    text = " ".join(run("--help").out.split())
    assert FIELDS["max_new_tokens"].doc in text
    assert f"{FIELDS['max_length'].doc} --max-new-tokens" in text, "no default of its own"


@pytest.mark.ci
def test_streamed_text_equals_whole_text(run) -> None:
    sampling = ("--do-sample", "--seed", 3, "--max-new-tokens", 30, "--no-compile-cache")
    streamed = run("--model", LLAMA, *sampling, "Once upon a time")
    full = run("--model", LLAMA, *sampling, "--no-stream", "Once upon a time")
    assert streamed.code == full.code == 0, streamed.err
    assert streamed.out == full.out
    assert len(streamed.out) > 10


@pytest.mark.ci
def test_config_fields_and_class_from_the_command_line(run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"logit_scale": 2.0, "note": {"a": 1}, "architectures": ["LlamaForEverything"]}
    (folder / "config.json").write_text(json.dumps(raw))
    refused = run("--model", folder, "--architecture", "LlamaForCausalLM", "a", *SHORT)
    assert refused.code == 2
    assert "logit_scale (2.0), note" in refused.err
    assert "--config KEY=null" in refused.err
    past = ("--config", "logit_scale=null", "--config", "note=null")
    named = run("--model", folder, *past, "--architecture", "LlamaForCausalLM", "a", *SHORT)
    assert (named.code, named.out) == (0, run("--model", LLAMA, "a", *SHORT).out), named.err
    assert run("--model", LLAMA, "--config", "note", "a").code == 2


@pytest.mark.ci
def test_prompt_as_option(run) -> None:
    assert (
        run("--model", LLAMA, *SHORT, "--prompt", "Once").out
        == run("--model", LLAMA, *SHORT, "Once").out
    )


@pytest.mark.ci
def test_seeds(run) -> None:
    def sample(*seed: object) -> Result:
        return run("--model", LLAMA, *SHORT, "--do-sample", *seed, "Once")

    unseeded = [sample() for _ in range(2)]
    assert unseeded[0].out != unseeded[1].out, "a constant key gives the same text at each call"
    printed = unseeded[0].err.split("seed: ")[1].split()[0]
    assert sample("--seed", printed).out == unseeded[0].out


@pytest.mark.ci
def test_several_results(run) -> None:
    result = run("--model", LLAMA, *SHORT, "--do-sample", "--num-return-sequences", 3, "Once")
    assert result.code == 0, result.err
    assert result.out.count("\n---\n") == 2


@pytest.mark.ci
def test_beams_stop_strings_and_healing(run) -> None:
    free = run("--model", LLAMA, *SHORT, "--eos-token-id", "none", "Once")
    stop = free.out[1:3]
    cut = run("--model", LLAMA, *SHORT, "--eos-token-id", "none", "--stop-strings", stop, "Once")
    assert cut.code == 0, cut.err
    assert stop in cut.out
    assert free.out.startswith(cut.out.rstrip("\n"))
    beams = run("--model", LLAMA, *SHORT, "--num-beams", 2, "--num-return-sequences", 2, "Once")
    assert (beams.code, beams.out.count("\n---\n")) == (0, 1), beams.err
    healed = run("--model", LLAMA, *SHORT, "--token-healing", "Once upon a ti")
    assert healed.code == 0, healed.err


@pytest.mark.ci
def test_no_padding_is_printed_after_a_stop_string(run) -> None:
    sampling = ("--do-sample", "--seed", 3, "--num-return-sequences", 3, "--eos-token-id", "none")
    command = ("--model", LLAMA, *SHORT, *sampling, "--show-special-tokens", "Once upon a time")
    free = run(*command).out.removesuffix("\n").split("\n---\n")
    stop = next(c for c in free[0] if c.isascii() and c.isalpha() and c not in free[1] + free[2])
    cut = run(*command, "--stop-strings", json.dumps([stop])).out.removesuffix("\n")
    first, *others = cut.split("\n---\n")
    assert others == free[1:]
    assert stop in first
    assert free[0].startswith(first)
    assert first != free[0]


@pytest.mark.ci
def test_assisted_greedy_text_is_the_same(run) -> None:
    models = LLAMA.parent
    ids = ("--model", models / "s_llama", "--input-ids", "5,6,7", *SHORT)
    drafted = run(*ids, "--assistant-model", models / "s_llama_draft", "--num-assistant-tokens", 3)
    assert drafted.code == 0, drafted.err
    assert drafted.out == run(*ids).out


def test_ids_of_an_encoder_decoder(run) -> None:
    result = run("--model", T5, *SHORT, "--eos-token-id", "none", "--input-ids", "5,6,7,1")
    assert result.code == 0, result.err
    assert len([int(index) for index in result.out.split(",")]) == 8
    full = run(
        "--model", T5, *SHORT, "--eos-token-id", "none", "--input-ids", "5,6,7,1", "--no-stream"
    )
    assert full.out == result.out


@pytest.mark.ci
def test_languages_of_a_translation(run, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, "nllb"))
    assert tokenizer is not None
    model = tiny.make("m2m_100", vocab_size=len(tokenizer), seed=1)
    save_hf(tmp_path, model)
    texts = []
    for source, target in (("deu_Latn", "zul_Latn"), ("fra_Latn", "ace_Arab")):
        languages = ("--src-lang", source, "--tgt-lang", target)
        result = run("--model", tmp_path, *SHORT, "--eos-token-id", "none", *languages, "Hello.")
        ids = tokenizer("Hello.", src_lang=source, return_tensors="np")
        fields = {"eos_token_id": None, **tokenizer.target_fields(target)}
        out = model.generate(**ids, max_new_tokens=8, **fields).sequences[0]
        assert result.out == tokenizer.decode(out, skip_special_tokens=True) + "\n", result.err
        texts.append(result.out)
    assert texts[0] != texts[1]
    refused = run("--model", tmp_path, "--tgt-lang", "xx", "Hello.")
    assert "tgt_lang: 'xx' is no language of this tokenizer" in refused.err
    both = ("--tgt-lang", "zul_Latn", "--forced-bos-token-id", 3)
    assert "3 contradicts tgt_lang 'zul_Latn'" in run("--model", tmp_path, *both, "Hello.").err


@pytest.mark.ci
def test_lists_and_end_tokens(run) -> None:
    def ids(*options: object) -> list[str]:
        result = run("--model", T5, *SHORT, "--input-ids", "5,6,7,1", *options)
        assert result.code == 0, result.err
        return result.out.strip().split(",")

    free = ids("--eos-token-id", "none")
    assert ids("--eos-token-id", f"{free[0]},1") == free[:1], "the end token is the last"
    assert free[0] not in ids("--bad-words-ids", f"[[{free[0]}]]", "--eos-token-id", "none")


@pytest.mark.ci
def test_quiet(run) -> None:
    result = run("--model", LLAMA, *SHORT, "--quiet", "Once")
    assert (result.code, result.err) == (0, "")


ERRORS = {
    "missing model": (("--model", "./nowhere", "hi"), "no such file or folder"),
    "no prompt": (("--model", LLAMA), "no prompt"),
    "two prompts": (("--prompt", "a", "b"), "not several"),
    "unknown option": (("--top-q", "3", "hi"), "--top-q"),
    "abbreviated option": (("--max-new-t=3", "hi"), "--max-new-t"),
    "an option of other programs": (("--max-tokens", "3"), "did you mean --max-new-tokens?"),
    "underscores": (("--top_p", "0.5", "hi"), "unknown option --top_p; did you mean --top-p?"),
    "a model as prompt": (("smollm2", "hi"), "unexpected argument 'hi'; usage: generate.py "),
    "an empty prompt": (("",), "the prompt is empty"),
    "not a number": (("--top-k", "many", "hi"), "`top_k` must be an integer"),
    "out of range": (("--top-p", "1.5", "hi"), "`top_p` must be a number in [0, 1]"),
    "not there yet": (
        ("--model", LLAMA, "--speculation-type", "dflash", "hi"),
        "`speculation_type`",
    ),
    "no place for it": (
        ("--model", LLAMA, "--output-scores", "hi"),
        "output_scores: this command prints only text",
    ),
    "no effect": (("--model", LLAMA, "--temperature", "0.5", "hi"), "add --do-sample"),
    "seed": (("--seed", str(2**32), "hi"), "--seed must be from 0"),
    "system alone": (("--system", "be brief", "hi"), "--chat"),
    "chat with ids": (("--chat", "--input-ids", "1"), "--chat needs a text prompt"),
    "no tokenizer": (("--model", T5, "hi"), "--input-ids"),
    "a language of ids": (("--src-lang", "de", "--input-ids", "1"), "--src-lang has no effect"),
    "a classifier": (
        ("--model", PARITY / "gpt2_cls_single", "--input-ids", "1"),
        "no language-model head",
    ),
    "an encoder": (
        ("--model", PARITY / "t5_encoder", "--input-ids", "1"),
        "no language-model head",
    ),
    "no template": (("--model", LLAMA, "--chat", "hi"), "chat template"),
    "ids beyond the vocabulary": (("--model", T5, "--input-ids", "5,100000"), "100000"),
    "not ids": (("--model", T5, "--input-ids", "a,b"), "comma separated integers, found 'a,b'"),
    "no room": (("--model", LLAMA, "--max-length", "1", "hello there"), "max_length"),
    "both caches": (("--no-compile-cache", "--compile-cache", "x", "hi"), "not allowed"),
}


@pytest.mark.in_ci("ids beyond the vocabulary", "no tokenizer")
@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_take_one_line(run, arguments: tuple[object, ...], message: str) -> None:
    cache = () if "--no-compile-cache" in arguments else ("--no-compile-cache",)
    result = run("--quiet", *cache, *arguments)
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("generate.py: error: ")
    assert message in line


def test_damaged_file_is_named(run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LLAMA, tmp_path / "broken"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("--quiet", "--model", folder, *SHORT, "Once")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert str(weights) in result.err

    debug = run("--debug", "--quiet", "--model", folder, *SHORT, "Once")
    assert debug.code == 2
    assert "Traceback" in debug.err


def test_without_the_bundled_model(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.checkpoint.hub.SMOLLM2_PACKAGE", "no-such-package-as-this")
    result = run("--quiet", "--no-compile-cache", "hi")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "make model" in result.err
    assert "--require-hashes" in result.err


@pytest.mark.ci
def test_unwritable_cache_is_not_an_error(environment: dict[str, str], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    options = ("--model", LLAMA, "--max-new-tokens", 4, "--compile-cache", blocked / "cache")
    result = spawn(environment, *options, "Once")
    assert result.code == 0, result.err
    assert result.out
    assert f"{blocked / 'cache'} cannot be written" in result.err


@pytest.mark.ci
def test_stdin_must_be_utf8(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command("--model", LLAMA, "-"), env=environment, input=b"\xff\xfe", capture_output=True
    )
    assert done.returncode == 2
    assert b"stdin is not UTF-8" in done.stderr


@pytest.fixture
def endless(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that has begun to print and would go on for minutes."""
    process = subprocess.Popen(
        command("--model", T5, "--input-ids", "5,6,7,1", *FOR_MINUTES),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1) != b""
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


@pytest.mark.ci
def test_interrupt_prints_nothing(endless: subprocess.Popen[bytes]) -> None:
    endless.send_signal(signal.SIGINT)
    assert endless.wait(timeout=60) == 130
    assert endless.stderr is not None
    assert b"Traceback" not in endless.stderr.read()


@pytest.mark.ci
def test_closed_pipe(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
    assert endless.stderr is not None
    errors = endless.stderr.read()
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


@pytest.mark.filterwarnings("default")
def test_a_warning_of_settings_is_one_line(run):
    """The settings are checked while weights are read, and again when the call begins."""
    fields = ("--max-length", 20, *SHORT)
    result = run("--model", T5, "--input-ids", "5,6", *fields)
    assert result.code == 0
    assert result.err.count("`max_length` has no effect beside `max_new_tokens`") == 1
