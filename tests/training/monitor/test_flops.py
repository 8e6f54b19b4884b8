"""FLOPs of a step: counted by hand and by XLA."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental import multihost_utils

from jaxllm.models.weights import parameters
from jaxllm.training.monitor import flops as flops
from jaxllm.training.monitor.flops import (
    Peak,
    TokenCounts,
    known_peak,
    model_flops,
    peak_flops,
)


def test_tokens_of_both_sides() -> None:
    counts = TokenCounts.of_lengths(np.array([[3, 2], [2, 3]]))
    assert counts == TokenCounts(5, 4 + 9, 5, 9 + 4, cross_pairs=3 * 2 + 2 * 3)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_forward_flops_are_those_that_xla_counts(family: str) -> None:
    """A third of a step is the forward pass; XLA counts norms, softmax and the like on top."""
    changes: dict[str, Any] = {} if family == "gpt2" else {"tie_word_embeddings": True}
    model = tiny.make(family, **changes)
    ids = jnp.asarray(tiny.ids(2, 24))
    inputs = {"decoder_input_ids": ids} if family == "t5" else {}
    compiled = jax.jit(lambda model: model(ids, **inputs).logits).lower(model).compile()
    counted = compiled.cost_analysis()["flops"]
    counts = TokenCounts.of_lengths(np.full((2, 2 if family == "t5" else 1), 24))
    assert model_flops(model).of(counts) / 3 == pytest.approx(counted, rel=0.25)


def test_embeddings_are_looked_up_and_tied_ones_multiplied_too() -> None:
    untied, tied = (tiny.make("llama", tie_word_embeddings=tie) for tie in (False, True))
    assert model_flops(untied) == model_flops(tied)
    weights = parameters(untied)
    matrices = sum(x.size for path, x in weights.items() if x.ndim == 2 and "embed" not in path)
    assert model_flops(untied).per_token == 6 * matrices
    assert model_flops(untied).per_pair == 12 * 2 * 32


def test_frozen_parameters_get_no_gradient() -> None:
    model = tiny.cached("gpt2")
    every = model_flops(model).per_token
    assert model_flops(model, trainable=parameters(model)).per_token == every
    lowest = "backbone.stack.blocks.0.attn.q.lora_a"
    assert model_flops(model, trainable=(lowest,)).per_token == pytest.approx(every * 4 / 6)


def test_blocks_below_the_lowest_trained_parameter_have_no_backward_pass() -> None:
    model = tiny.make("llama", num_hidden_layers=4)
    weights = parameters(model)

    def size(*parts: str) -> int:
        names = (path for path in weights if path.startswith(parts) and weights[path].ndim == 2)
        return sum(weights[path].size for path in names)

    blocks, head = size("backbone.stack.blocks.0."), size("lm_head")
    upper = [path for path in weights if ".blocks.2." in path]
    actual = model_flops(model, trainable=upper)
    assert actual.per_token == blocks * (2 + 2 + 6 + 4) + head * 4
    assert actual.per_pair == 32 * (4 + 4 + 12 + 12)
    assert model_flops(model, ["lm_head.weight"]).per_pair == 32 * 4 * 4
    t5 = model_flops(tiny.cached("t5"), ["decoder.blocks.0.cross.q.weight"])
    assert t5.per_pair == t5.per_cross_pair == 3 * t5.per_source_pair == 12 * 2 * 32


def test_each_side_of_t5_has_its_own_tokens() -> None:
    model = tiny.cached("t5")
    flops, weights = model_flops(model), parameters(model)
    encoder = sum(
        x.size
        for path, x in weights.items()
        if x.ndim == 2 and "bias" not in path and (path.startswith("encoder") or ".cross.k" in path)
    )
    values = sum(x.size for path, x in weights.items() if ".cross.v" in path)
    assert flops.per_source_token == 6 * (encoder + values)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("Tesla T4", 65e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("Radeon", None),
    ],
)
def test_peaks(kind: str, flops: float | None) -> None:
    assert known_peak(kind) == flops


def test_a_cpu_is_measured() -> None:
    peak = peak_flops()
    assert peak.source == "measured: float32 product of 1024 x 1024, machine x 1"
    assert 1e8 < peak.flops < 1e14


def test_processes_of_one_machine_share_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three processes two are on one machine; the product of each took as long."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    machines = np.array([1.0, 1.0, 2.0])
    monkeypatch.setattr(flops, "_machine_number", lambda: 1.0)
    monkeypatch.setattr(flops, "_measured_cpu", lambda device: 5e9)

    def gather(sent: np.ndarray) -> np.ndarray:
        value = np.frombuffer(sent.tobytes(), np.float64)[0]
        values = machines if value == 1.0 else np.full(3, value)
        return np.frombuffer(values.tobytes(), np.uint8).reshape(3, 8)

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert peak_flops() == Peak(1e10, "measured: float32 product of 1024 x 1024, machine x 2")


def test_an_unknown_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "ACCELERATOR_PRODUCT", (64, "bfloat16"))
    monkeypatch.setattr(jax, "device_put", lambda x, device: jnp.asarray(x))
    devices = [SimpleNamespace(platform="gpu", device_kind="Radeon", process_index=0)] * 4
    peak = peak_flops(devices)
    assert peak.source == "measured: bfloat16 product of 64 x 64, Radeon x 4"
    assert peak.flops > 0


@pytest.mark.ci
def test_load_of_other_programs_does_not_change_the_peak_of_a_cpu() -> None:
    quiet = peak_flops()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        time.sleep(0.2)
        loaded = peak_flops()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert 0.5 < loaded.flops / quiet.flops < 2
