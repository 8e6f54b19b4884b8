"""jaxllm verify: distances, exit codes, and a missing reference.

torch and transformers are no test dependencies, so the reference here is jaxllm's own model behind
transformers' interface, with an error of a known size added to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import tiny
from paths import DATA
from weight_formats import FLAX, TORCH, copied, write_flax, write_torch

import jaxllm
from jaxllm.cli.main import main
from jaxllm.cli.verify import distance
from jaxllm.common.errors import InputError

MODELS = DATA / "conformance" / "models"
PARITY = DATA / "parity"


def test_distance_of_equals() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 7))
    actual = distance(logits, logits, 1.0)
    assert (actual.positions, actual.max_abs, actual.relative, actual.top1) == (5, 0, 0, 1)
    assert actual.kl_max == pytest.approx(0, abs=1e-12)


def test_distance_by_hand() -> None:
    reference = np.log([[0.5, 0.5], [0.25, 0.75]])
    ours = np.log([[0.25, 0.75], [0.25, 0.75]])
    actual = distance(ours, reference, 2.0)
    assert actual.max_abs == pytest.approx(np.log(2))
    assert actual.relative == pytest.approx(np.log(2) / 2)
    assert actual.kl_max == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))
    assert actual.kl_mean == pytest.approx(actual.kl_max / 2)
    assert actual.top1 == 0.5


def test_distance_ignores_a_constant_in_the_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 7))
    actual = distance(logits + 3, logits, 1.0)
    assert actual.max_abs == pytest.approx(3)
    assert actual.kl_max == pytest.approx(0, abs=1e-12)


def test_distance_needs_equal_shapes() -> None:
    with pytest.raises(InputError, match=r"\(1, 2\).*\(1, 3\)"):
        distance(np.zeros((1, 2)), np.zeros((1, 3)), 1.0)


class Reference:
    """transformers' interface over a model of ours, whose logits are off by `error`."""

    error = 0.0
    read: ClassVar[list[np.ndarray]] = []
    """Prompts of all calls."""

    opened: ClassVar[list[str]] = []
    """Folders of all models."""

    def __init__(self, folder: str) -> None:
        self.opened.append(folder)
        self.model, _ = jaxllm.load(folder)
        assert (Path(folder) / "model.safetensors").exists()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, attn_implementation: str
    ) -> Reference:
        assert attn_implementation == "eager"
        return cls(pretrained_model_name_or_path)

    def to(self, dtype: str) -> Reference:
        assert dtype == "a float64"
        return self

    def eval(self) -> Reference:
        return self

    def __call__(self, **inputs: np.ndarray):
        self.read.append(inputs["input_ids"])
        output = self.model(**inputs)
        if not hasattr(output, "logits"):
            return output
        return dataclasses.replace(output, logits=output.logits.at[0, -1, 0].add(self.error))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> type[Reference]:
    torch = SimpleNamespace(
        float64="a float64", no_grad=contextlib.nullcontext, from_numpy=lambda array: array
    )
    logging = SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    transformers = SimpleNamespace(
        __version__="5.0",
        logging=logging,
        AutoModelForCausalLM=Reference,
        AutoModelForSeq2SeqLM=Reference,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(Reference, "error", 0.0)
    monkeypatch.setattr(Reference, "read", [])
    monkeypatch.setattr(Reference, "opened", [])
    return Reference


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    ["s_llama_tok", *(pytest.param(n, marks=pytest.mark.slow) for n in ("s_t5", "s_gpt2_xattn"))],
)
def test_equal_models_pass(
    reference: type[Reference], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(MODELS / name)]) == 0
    printed = capsys.readouterr().out
    assert "OK: " in printed
    assert "100.00%" in printed


@pytest.mark.ci
@pytest.mark.parametrize("name", ["", FLAX, TORCH])
def test_the_reference_gets_a_copy_of_weights_of_flax_and_torch(
    reference: type[Reference], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tensors = copied(MODELS / "s_llama_tok", folder)
    write_flax(folder, tensors)
    write_torch(folder, tensors)
    assert main(["verify", str(folder / name), "--prompt", "Once"]) == 0
    (copy,) = reference.opened
    assert Path(copy) != folder
    assert not Path(copy).exists()
    assert "OK: " in capsys.readouterr().out
    opened = str(MODELS / "s_llama_tok" / "model.safetensors")
    assert main(["verify", opened, "--prompt", "Once"]) == 0
    assert reference.opened[1:] == [str(MODELS / "s_llama_tok")]


@pytest.mark.ci
def test_a_changed_number_in_a_zip_file_is_found(
    reference: type[Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    write_torch(folder, copied(MODELS / "s_llama_tok", folder))
    data = bytearray((folder / TORCH).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / TORCH).write_bytes(data)
    assert main(["verify", str(folder), "--prompt", "Once"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{TORCH}: archive/data/\d+: its checksum is not that of its bytes", error)
    assert not reference.opened


@pytest.mark.ci
def test_full_stdout(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["verify", str(MODELS / "s_llama_tok"), "--prompt", "Hello"]) == 2
    devices, error = capsys.readouterr().err.splitlines()
    assert devices.startswith("devices: ")
    assert error == "jaxllm verify: error: nothing more can be written (No space left on device)"


@pytest.mark.ci
def test_different_models_fail(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reference, "error", 0.01)
    model = str(MODELS / "s_llama_tok")
    assert main(["verify", model, "--prompt", "Once upon a time"]) == 1
    assert "BEYOND THE TOLERANCE" in capsys.readouterr().out
    assert main(["verify", model, "--tolerance", "0.5"]) == 0


@pytest.mark.ci
def test_known_reference_error_is_named(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reference, "error", 0.01)
    assert main(["verify", str(PARITY / "umt5")]) == 1
    assert "compare with that" in capsys.readouterr().out


@pytest.mark.ci
def test_nan_fails(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reference, "error", float("nan"))
    assert main(["verify", str(MODELS / "s_llama_tok"), "--prompt", "Once"]) == 1
    assert "BEYOND THE TOLERANCE" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "pad"), [("m2m_100", 1), ("marian", 7), ("llama", 0)])
def test_random_ids_hold_no_padding_and_encoder_decoders_keep_their_encoder(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    pad: int,
) -> None:
    """transformers makes positions of M2M100 from the padding token, and has a decoder-only class
    for Marian's files too, which reads only a part of them."""
    layers = {} if family == "llama" else {"encoder_layers": 1, "decoder_layers": 2}
    if layers:
        monkeypatch.delattr(sys.modules["transformers"], "AutoModelForCausalLM")
    model = tiny.make(family, vocab_size=12, pad_token_id=pad, **layers)
    jaxllm.save_hf(tmp_path, model)
    assert main(["verify", str(tmp_path)]) == 0
    ids = np.concatenate([prompt[0] for prompt in reference.read])
    assert set(ids.tolist()) == set(range(12)) - {pad}


def test_hidden_states_of_a_model_without_a_head_are_compared(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(sys.modules["transformers"], "AutoModelForCausalLM")
    monkeypatch.setattr(sys.modules["transformers"], "AutoModel", reference, raising=False)
    jaxllm.save_hf(tmp_path, tiny.make("llama"))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    assert main(["verify", str(tmp_path)]) == 0
    assert ": LlamaModel, " in capsys.readouterr().out


def test_a_decoder_without_a_start_token_begins_with_the_last_token(
    reference: type[Reference], tmp_path: Path
) -> None:
    jaxllm.save_hf(tmp_path, tiny.make("mbart", decoder_start_token_id=None))
    assert main(["verify", str(tmp_path)]) == 0


def test_the_reference_of_xglm_is_in_float32(
    reference: type[Reference], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers cannot represent the mask of XGLM in float64."""
    monkeypatch.setattr(sys.modules["torch"], "float32", "a float64", raising=False)
    monkeypatch.delattr(sys.modules["torch"], "float64")
    jaxllm.save_hf(tmp_path, tiny.make("xglm"))
    assert main(["verify", str(tmp_path)]) == 0


def test_an_error_of_the_reference_is_one_line(
    reference: type[Reference],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: Reference, **inputs: np.ndarray) -> None:
        raise IndexError("index 29 is out of bounds")

    monkeypatch.setattr(reference, "__call__", fail)
    assert main(["verify", str(MODELS / "s_llama_tok")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(
        "transformers cannot run this checkpoint: IndexError: index 29 is out of bounds"
    )


def test_missing_torch_or_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["verify", str(MODELS / "s_llama_tok")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install -e '.[verify]'" in line


def test_prompt_needs_a_tokenizer(
    reference: type[Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(MODELS / "s_t5"), "--prompt", "hello"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
