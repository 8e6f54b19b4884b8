"""Speed on one device as a share of its memory's bandwidth and of its FLOP/s."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllm
from jaxllm.planning import lower
from jaxllm.training import (
    OptimizerConfig,
    TrainState,
    loss_for,
    make_optimizer,
    make_train_step,
)
from jaxllm.training.monitor.flops import TokenCounts, model_flops, peak_flops

FIELDS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    """Rows of the decode loop."""
    prompt: int = 128
    new: int = 128
    """New tokens of a row; at least 2."""
    prefill_rows: int = 8
    prefill_tokens: int = 2048
    slots: int = 64
    """Slots of the batch engine, which gets three rows for each."""
    train_rows: int = 8
    train_tokens: int = 1024
    repeats: int = 3


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one device can do."""

    bandwidth: float
    """Bytes per second that a sum over an array reads."""
    flops: float
    """Peak FLOP/s of a data sheet, or those of a matrix product where none is known."""
    flops_source: str

    @staticmethod
    def of(device: Any) -> Limits:
        peak = peak_flops([device])
        return Limits(bandwidth(device), peak.flops, peak.source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time of one step: a token of all rows, a prefill, a training step, a run of the engine."""

    name: str
    step_seconds: float
    tokens_per_second: float
    share_of_bandwidth: float | None = None
    """Weights and KV cache that a step reads / what the memory reads in the time of the step."""
    share_of_flops: float | None = None
    """Products of the model, padding and recomputation not counted / the device's peak."""


def bandwidth(device: Any) -> float:
    """Bytes per second of a sum over 1 GiB (CPU: 256 MiB) of float32; the best of 7."""
    count = 2**26 if device.platform == "cpu" else 2**28
    x = jax.device_put(jnp.ones(count, jnp.float32), device)
    total = jax.jit(jnp.sum)
    return x.nbytes / min(seconds_of(lambda: total(x), 7))


def seconds_of(run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call of `run`, after a first one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds


def device_of(model: Any) -> Any:
    """The device that holds a model."""
    (device,) = jax.tree.leaves(model)[0].devices()
    return device


def random_ids(model: Any, rows: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, tokens), np.int32)


def measure_decode(model: Any, batch: int, sizes: Sizes, limits: Limits) -> Measurement:
    """A step of `generate`'s loop: the time of all new tokens less that of half of them.

    Both calls run the same programs, since lengths are rounded up to powers of two.
    """
    ids = random_ids(model, batch, sizes.prompt)
    half = 2 ** (math.ceil(math.log2(sizes.new)) - 1) + 1

    def run(new: int) -> float:
        def call() -> Any:
            return jaxllm.generate(model, ids, max_new_tokens=new, **FIELDS).sequences

        return statistics.median(seconds_of(call, sizes.repeats))

    seconds = (run(sizes.new) - run(half)) / (sizes.new - half)
    workload = {"batch": batch, "prompt": sizes.prompt, "new": sizes.new}
    (program,) = lower(model, "decode", **workload)
    moved = program.read_weight_bytes + program.cache_bytes
    products = model_flops(model).per_token / 3 * batch
    return Measurement(
        name=f"decode, batch {batch}",
        step_seconds=seconds,
        tokens_per_second=batch / seconds,
        share_of_bandwidth=moved / seconds / limits.bandwidth,
        share_of_flops=products / seconds / limits.flops,
    )


def measure_prefill(model: Any, sizes: Sizes, limits: Limits) -> Measurement:
    """A call of `generate` for one token, which is the prefill."""
    rows, tokens = sizes.prefill_rows, sizes.prefill_tokens
    ids = random_ids(model, rows, tokens)

    def call() -> Any:
        return jaxllm.generate(model, ids, max_new_tokens=1, **FIELDS).sequences

    seconds = statistics.median(seconds_of(call, sizes.repeats))
    flops = model_flops(model)
    # Logits are computed for the last token of a row only.
    head = 2.0 * model.head.layer.weight.size * rows * (tokens - 1)
    products = flops.of(TokenCounts(rows * tokens, rows * tokens**2)) / 3 - head
    return Measurement(
        name=f"prefill, {rows} x {tokens}",
        step_seconds=seconds,
        tokens_per_second=rows * tokens / seconds,
        share_of_flops=products / seconds / limits.flops,
    )


def measure_engine(model: Any, sizes: Sizes, limits: Limits) -> Measurement:
    """The batch engine: rows with prompts and answers of many lengths.

    The share of the bandwidth is that of as many steps as full slots would need.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(1, [sizes.prompt, sizes.new], (3 * sizes.slots, 2), endpoint=True)
    rows = [
        {"input_ids": random_ids(model, 1, prompt)[0].tolist(), "max_new_tokens": int(new)}
        for prompt, new in lengths
    ]
    engine = jaxllm.BatchGenerator(model, slots=sizes.slots, **FIELDS)

    def call() -> None:
        failed = [output.error for output in engine.generate(rows) if output.error]
        if failed:
            raise RuntimeError(f"batch engine: {failed[0]}")

    seconds = statistics.median(seconds_of(call, 1))
    count = int(lengths[:, 1].sum())
    workload = {"prompt": sizes.prompt, "new": sizes.new, "slots": sizes.slots}
    decode, _ = lower(model, "batch", **workload)
    moved = (decode.read_weight_bytes + decode.cache_bytes) * count / sizes.slots
    return Measurement(
        name=f"batch engine, {sizes.slots} slots",
        step_seconds=seconds,
        tokens_per_second=count / seconds,
        share_of_bandwidth=moved / seconds / limits.bandwidth,
    )


def measure_train(model: Any, sizes: Sizes, limits: Limits) -> Measurement:
    """A training step; its share of the FLOP/s is the MFU."""
    rows, tokens = sizes.train_rows, sizes.train_tokens
    optimizer = make_optimizer(OptimizerConfig())
    step = make_train_step(optimizer, loss_for(model))
    ids = random_ids(model, rows, tokens)
    # Counters and key, too: on no certain device they would make the second step compile anew.
    state = jax.device_put(TrainState.create(model, optimizer), device_of(model))

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        return metrics["loss"]

    seconds = statistics.median(seconds_of(call, sizes.repeats))
    products = model_flops(model).of(TokenCounts(rows * tokens, rows * tokens**2))
    return Measurement(
        name=f"training step, {rows} x {tokens}",
        step_seconds=seconds,
        tokens_per_second=rows * tokens / seconds,
        share_of_flops=products / seconds / limits.flops,
    )


def measurements(
    model: Any, sizes: Sizes, limits: Limits
) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    """What is measured: names, and functions that measure."""
    for batch in sizes.batches:
        yield f"decode, batch {batch}", lambda b=batch: measure_decode(model, b, sizes, limits)
    for name, measure in (
        ("prefill", measure_prefill),
        ("batch engine", measure_engine),
        ("training step", measure_train),
    ):
        yield name, lambda measure=measure: measure(model, sizes, limits)
