"""The default number of new tokens ends where the model ends; a number that is asked for does not.

A model with 64 positions, whose default in commands, batches and pipelines is 256 new tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
from serving_tools import running_server
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm import pipeline
from jaxllm.cli.main import main
from jaxllm.errors import InputError

POSITIONS = 64
FIELDS = {"eos_token_id": None, "forced_eos_token_id": None}
TOKENIZER = small_tokenizer("llama.model")
DECODERS, ENCODER_DECODERS = ("gpt2", "llama"), ("bart", "marian", "m2m_100")


def model(family: str) -> Any:
    positions = {"n_positions" if family == "gpt2" else "max_position_embeddings": POSITIONS}
    sizes = {"num_hidden_layers": 1} if family == "llama" else {}
    made = tiny.make(family, vocab_size=len(TOKENIZER), **positions, **sizes)
    return made


def room(family: str, prompt: int) -> int:
    return POSITIONS - (1 if family in ENCODER_DECODERS else prompt)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("gpt2", *ENCODER_DECODERS):
        jaxllm.save_hf(folder / family, model(family))
    return folder


@pytest.mark.parametrize("family", ["gpt2", *ENCODER_DECODERS])
def test_commands(family: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ids = [5, 6, 7] * 10
    words = ["--model", str(folders / family), "--no-compile-cache", "--eos-token-id", "none"]
    words += ["--forced-eos-token-id", "none", "--no-do-sample", "--num-beams", "1"]
    spelled = ",".join(map(str, ids))
    assert main(["generate", "--input-ids", spelled, *words]) == 0
    assert len(capsys.readouterr().out.replace(",", " ").split()) == room(family, len(ids))
    (tmp_path / "in.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", *files, *words]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(row["output_ids"]) == room(family, len(ids)), row
    if family != "m2m_100":  # it has further positions
        capsys.readouterr()
        assert main(["generate", "--input-ids", spelled, *words, "--max-new-tokens", "70"]) == 2
        assert f"ask for at most {room(family, len(ids))}" in capsys.readouterr().err


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_pipelines_and_python(family: str):
    task = "text-generation" if family in DECODERS else "text2text-generation"
    made = model(family)
    pipe = pipeline(task, made, tokenizer=TOKENIZER)
    (result,) = pipe("a" * 20, **FIELDS, do_sample=False, num_beams=1)
    assert result["generated_text"]
    ids = TOKENIZER.encode("a" * 20)
    out = jaxllm.generate(made, [ids], max_new_tokens=room(family, len(ids)), **FIELDS)
    start = 1 if family in ENCODER_DECODERS else len(ids)
    assert out.sequences.shape[1] - start == room(family, len(ids))
    batches = jaxllm.BatchGenerator(made, TOKENIZER, default_new_tokens=256, **FIELDS)
    (row,) = batches.generate(["a" * 20])
    assert len(row.output_ids[0]) == room(family, len(ids))


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_server(family: str):
    with running_server(model(family), TOKENIZER, context=None, embeddings=False) as server:
        for path, body in [
            ("completions", {"prompt": [5, 6, 7], "max_tokens": room(family, 3)}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ]:
            if "messages" in body and TOKENIZER.chat_template is None:
                continue
            body |= {"ignore_eos": True, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == room(family, 3)
        body = {"prompt": [5, 6, 7], "max_tokens": POSITIONS, "ignore_eos": True}
        error = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["error"]
        assert error["message"].endswith(f"ask for at most {room(family, 3)}")
        assert ("start token" in error["message"]) == (family == "bart")


@pytest.mark.parametrize(
    ("family", "decoder", "words"),
    [
        ("bart", None, "the decoder's start token and 64 new ones need 65 positions"),
        ("bart", [[0, 5, 6]], "a decoder prompt of 4 tokens and 64 new ones need 68 positions"),
        ("gpt2", None, "a prompt of 1 token and 64 new ones need 65 positions"),
    ],
)
def test_messages_count_no_start_as_a_prompt(family: str, decoder: Any, words: str):
    given = {} if decoder is None else {"decoder_input_ids": np.asarray(decoder)}
    with pytest.raises(InputError, match=words):
        jaxllm.generate(model(family), [[5]], max_new_tokens=64, **given)
    with pytest.raises(
        InputError, match=r"^the (decoder's )?prompt has . tokens?, but `max_length`"
    ):
        jaxllm.generate(model(family), [[5]], max_length=1, **given)
