"""lm-evaluation-harness on local tasks: answers equal to those of its backend for transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness_runs
import pytest
import tiny
from compiling import program_count
from harness_runs import RUNS, Run
from lm_eval.api.instance import Instance
from paths import ROOT
from translation_tools import TARGETS, write_model

import jaxllm
from jaxllm.cli import eval as eval_command
from jaxllm.common.progress import Reporter
from jaxllm.evaluate.lm_eval import JaxLM, load_tasks, results_json, run_tasks
from jaxllm.generation.scoring import _score_batch

REFERENCE = json.loads(harness_runs.REFERENCE.read_text(encoding="utf-8"))
QUIET = Reporter(quiet=True)
SMALL_RUNS = [
    # The windows of a Llama run by default.
    pytest.param(run, id=run.name, marks=[pytest.mark.slow] if run.name == "t5-rolling" else [])
    for run in RUNS
    if run.model != "smollm2"
]


@pytest.fixture(autouse=True)
def local_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tasks name their data relative to their folder; `datasets` keeps its own copy of it."""
    import datasets

    monkeypatch.chdir(harness_runs.FOLDER)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small models of the reference."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "t5"):
        harness_runs.write_model(name, folder / name)
    return {name: folder / name for name in ("llama", "t5")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, JaxLM]:
    return {
        name: JaxLM(folder, dtype="auto", batch_size=4, reporter=QUIET)
        for name, folder in folders.items()
    }


def check_equal(lm: JaxLM, run: Run) -> None:
    """Prompts and answers are the reference's, log-likelihoods to 1e-4 a token."""
    tasks = load_tasks([run.task], harness_runs.FOLDER)
    results = run_tasks(lm, tasks, **run.arguments)
    json.loads(results_json(results))
    ours, reference = harness_runs.responses(results, run.task), REFERENCE[run.name]
    assert ours["prompts"] == reference["prompts"]
    assert ours["metrics"] == pytest.approx(reference["metrics"], rel=1e-3)
    samples = sorted(results["samples"][run.task], key=lambda sample: sample["doc_id"])
    for sample, answers, expected in zip(
        samples, ours["responses"], reference["responses"], strict=True
    ):
        for arguments, answer, other in zip(sample["arguments"], answers, expected, strict=True):
            if isinstance(other, str):
                assert answer == other
                continue
            # A request for a continuation's log-likelihood also says whether it is greedy.
            pair, other_pair = (
                x if isinstance(other, list) else (x, None) for x in (answer, other)
            )
            text = arguments[-1]
            tokens = len(lm.tok_encode(text, add_special_tokens=False))
            assert pair[0] == pytest.approx(other_pair[0], abs=1e-4 * tokens, rel=0), text
            assert pair[1] == other_pair[1]


@pytest.mark.ci
@pytest.mark.parametrize("run", SMALL_RUNS)
@pytest.mark.filterwarnings(
    # Prompts longer than the small models' contexts are among the tasks on purpose.
    "ignore:.* requests are longer than max_length:UserWarning"
)
def test_answers_of_small_models_are_those_of_the_harness(models: dict[str, JaxLM], run: Run):
    check_equal(models[run.model], run)


@pytest.mark.slow
def test_answers_of_smollm2_are_those_of_the_harness(smollm2_gguf: Path):
    lm = JaxLM(smollm2_gguf, dtype="float32", reporter=QUIET)
    for run in RUNS:
        if run.model == "smollm2":
            check_equal(lm, run)


def instances(arguments: Sequence[tuple[Any, ...]], kind: str) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", i, 1)) for i, args in enumerate(arguments)]


def answers(lm: JaxLM, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return lm.generate_until(instances(requests, "generate_until"))


@pytest.mark.ci
def test_programs_do_not_grow_with_the_data(models: dict[str, JaxLM]):
    lm = models["llama"]

    def run(texts: Sequence[str]) -> int:
        lm.loglikelihood(instances([(text, "a") for text in texts], "loglikelihood"))
        return program_count(_score_batch)

    count = run(["b" * n for n in range(1, 60, 2)])
    assert run(["c" * (1 + 7 * n % 60) for n in range(100)]) == count


@pytest.mark.ci
def test_each_request_has_its_own_settings(models: dict[str, JaxLM]):
    lm = models["llama"]
    sampled = ("The sea", {"max_gen_toks": 8, "temperature": 1.5})
    requests = [("The sea", {"max_gen_toks": 8}), *[sampled] * 3, ("A boat", {"max_tokens": 3})]
    first, *samples, short = answers(lm, requests)
    assert len({first, *samples}) == 4, "repeats of a request must differ"
    assert len(lm.tok_encode(short)) <= 4
    seeded = [(prompt, {**settings, "seed": 5}) for prompt, settings in requests]
    others = answers(lm, seeded)
    assert (others[0], others[-1]) == (first, short)
    assert not set(others[1:-1]) & set(samples)
    assert answers(lm, seeded) == others


@pytest.mark.ci
def test_stop_strings_count_only_where_they_are_generated(models: dict[str, JaxLM]):
    lm = models["llama"]
    (text,) = answers(lm, [("The sea", {"max_gen_toks": 12})])
    # Begins in the prompt: the engine would end there, the harness does not.
    assert answers(lm, [("The sea", {"max_gen_toks": 12, "until": "a" + text[:2]})]) == [
        text.split("a" + text[:2])[0]
    ]
    stop = text[len(text) // 2 :][:2]
    assert answers(lm, [("The sea", {"max_gen_toks": 12, "until": [stop, ""]})]) == [
        text.split(stop)[0]
    ]


def test_chats_that_continue_the_last_message(models: dict[str, JaxLM]):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    text = models["llama"].apply_chat_template(chat, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nWell, ")
    assert models["llama"].apply_chat_template(chat[:1]).endswith("<|im_start|>assistant\n")
    with pytest.raises(jaxllm.JaxLLMError, match="no default chat template"):
        models["t5"].apply_chat_template(chat)


def test_wrong_arguments_are_named(folders: dict[str, Path], models: dict[str, JaxLM]):
    model, tokenizer = models["llama"].model, models["llama"].tokenizer
    for arguments, error in [
        (
            {"parallelize": True},
            "unknown .parallelize.; the .* pretrained, tokenizer, .*, name$",
        ),
        ({"batch_size": "many"}, "batch_size: expected a positive integer or auto"),
        ({"max_length": 1}, "max_length: expected 2 to any, found 1"),
        ({"tokenizer": None}, "has no tokenizer"),
        ({"dtype": "float16"}, "dtype: has no effect on a model that is loaded"),
        ({"enable_thinking": True}, "think_end_token: enable_thinking needs it"),
    ]:
        with pytest.raises(jaxllm.JaxLLMError, match=error):
            JaxLM(model, **{"tokenizer": tokenizer, "reporter": QUIET, **arguments})
    encoder = tiny.make("t5", architecture="T5EncoderModel", num_layers=1)
    with pytest.raises(jaxllm.JaxLLMError, match="no language-model head"):
        JaxLM(encoder, tokenizer=tokenizer, reporter=QUIET)
    lm = models["llama"]
    for settings, error in [
        ({"max_gen_toks": 64}, "max_gen_toks: 64 new tokens leave none"),
        ({"until": [1]}, "until: expected a string"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences: a request has one"),
        ({"max_gen_toks": 4, "temprature": 1.0}, "request 0: .*temprature"),
    ]:
        with pytest.raises(jaxllm.JaxLLMError, match=error):
            answers(lm, [("The sea", settings)])
    with pytest.raises(jaxllm.JaxLLMError, match="has 0 tokens, but there must be 1 to 64"):
        lm.loglikelihood(instances([("The sea", "")], "loglikelihood"))


@pytest.mark.ci
def test_command(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--no-compile-cache", "--quiet"]

    def run(*arguments: str, include_path: str = ".") -> tuple[int, str, str]:
        fixed = [str(folders["llama"]), *options, "--include-path", include_path]
        code = eval_command.main([*fixed, *arguments])
        return code, *capsys.readouterr()

    output = tmp_path / "results.json"
    code, out, err = run("--tasks", "local_group", "--limit", "3", "--output", str(output))
    assert (code, err) == (0, "")
    assert "- local_choice" in out
    assert "|acc_norm|" in out.replace(" ", "")
    assert "Groups" in out
    results = json.loads(output.read_text(encoding="utf-8"))
    assert len(results["samples"]["local_choice"]) == 3
    assert results["config"]["model_name"] == str(folders["llama"])
    for arguments, error in [
        (["--tasks", "local_answer", "--output", "no/such.json"], "--output: no is not a folder"),
        (["--tasks", "local_answer", "--output", str(output)], "results.json exists already"),
        (["--tasks", "local_answer", "--output", str(tmp_path)], "exists already"),
        (["--tasks", "local_answer", "--output", "x" * 250], "File name too long"),
        (["--tasks", "local_group,local_choice"], "tasks: Duplicate task 'local_choice'"),
        (["--tasks", "local_choice", "--limit", "-1"], "limit: expected a positive number"),
    ]:
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert error in err
    code, out, err = run("--tasks", "local_choice", include_path="none")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "include_path: none is not" in err
    for arguments, error in [
        (["--tasks", "a", "--stride", "4"], "--stride: needs --perplexity"),
        (["--perplexity", "a", "--limit", "4"], "--limit: needs --tasks"),
    ]:
        assert eval_command.main([str(folders["llama"]), *arguments]) == 2
        assert error in capsys.readouterr().err


def test_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in [name for name in sys.modules if name.startswith("jaxllm.evaluate.lm_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert eval_command.main(["model", "--tasks", "a", "--quiet"]) == 2
    assert "need the package lm_eval: pip install -e '" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_of_the_harness(folders: dict[str, Path], tmp_path: Path):
    """The harness's own command line with the model's name, and a task that does not exist."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        )

    def run_harness(model_args: str) -> subprocess.CompletedProcess[str]:
        return run(
            *("jaxllm.evaluate.lm_eval", "run", "--model", "jaxllm", "--model_args", model_args),
            *("--tasks", "local_choice", "--include_path", ".", "--batch_size", "4"),
        )

    done = run_harness(f"pretrained={folders['llama']},dtype=float32")
    assert done.returncode == 0, done.stderr
    assert "|local_choice|" in done.stdout
    done = run_harness(f"pretrained={folders['llama']},parallelize=True")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model_args: unknown 'parallelize'; the")
    done = run("jaxllm", "eval", str(folders["llama"]), "--tasks", "arc_esy", "--quiet")
    assert done.returncode == 2
    assert "no task 'arc_esy'; is it arc_easy?" in done.stderr


@pytest.mark.parametrize("name", ["marian", "nllb", "mbart"])
def test_continuations_are_targets(tmp_path: Path, name: str):
    folder, row = write_model(tmp_path / name, name), TARGETS[name]["rows"][0]
    languages = {key: row.get(key) for key in ("src_lang", "tgt_lang")}
    lm = JaxLM(folder, reporter=QUIET, **languages)
    request = (row["prompt"], row["completion"])
    ((log_likelihood, _),) = lm.loglikelihood(instances([request], "loglikelihood"))
    assert log_likelihood == pytest.approx(sum(row["token_log_probs"]), rel=1e-5)
    # The decoder reads a whole text too, up to its end token.
    ids = [*row["ids"], lm.tokenizer.eos_token_id]
    expected = jaxllm.score(lm.model, [[lm.prefix_token_id]], [ids]).log_likelihoods[0]
    rolled = lm.loglikelihood_rolling(instances([(row["completion"],)], "loglikelihood_rolling"))
    assert rolled == pytest.approx([expected], rel=1e-5)
    if languages["tgt_lang"] is not None:
        with pytest.raises(jaxllm.JaxLLMError, match="tgt_lang: this translation model needs"):
            JaxLM(folder, reporter=QUIET)


@pytest.mark.ci
def test_the_command_takes_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, row = write_model(tmp_path / "nllb", "nllb"), TARGETS["nllb"]["rows"][0]
    fixed = [str(folder), "--no-compile-cache", "--quiet", "--include-path", "."]
    fixed += ["--tasks", "local_choice", "--limit", "2"]
    assert eval_command.main(fixed) == 2
    assert "--tgt-lang" in capsys.readouterr().err
    languages = ["--src-lang", row["src_lang"], "--tgt-lang", row["tgt_lang"]]
    assert eval_command.main([*fixed, *languages]) == 0
    assert "|local_choice|" in capsys.readouterr().out
