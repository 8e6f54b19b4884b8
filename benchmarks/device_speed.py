"""Speed on one device beside the least time that its memory and its FLOP/s allow."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllm
from jaxllm.models.joined import arranged_for_inference
from jaxllm.planning import lower
from jaxllm.planning.lower import forward_flops
from jaxllm.planning.topology import CHIPS
from jaxllm.training import (
    OptimizerConfig,
    TrainState,
    loss_for,
    make_optimizer,
    make_train_step,
)
from jaxllm.training.lora import is_trainable, lora_layers
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
    """Bytes per second of a data sheet, or `read_bandwidth` where none is known."""
    bandwidth_source: str
    read_bandwidth: float
    """Bytes per second that a sum over an array reads."""
    flops: float
    """Peak FLOP/s of a data sheet, or those of a matrix product where none is known."""
    flops_source: str

    @staticmethod
    def of(device: Any) -> Limits:
        peak, read = peak_flops([device]), bandwidth(device)
        sheet = data_sheet_bandwidth(device.device_kind)
        source = "measured" if sheet is None else "data sheet"
        return Limits(sheet or read, source, read, peak.flops, peak.source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time of one step: a token of all rows, a prefill, a training step, a run of the engine."""

    name: str
    step_seconds: float
    tokens_per_second: float
    floor_seconds: float
    """The least time of a step: what it reads at the bandwidth, or what it computes at the peak."""
    share_of_bandwidth: float | None = None
    """Weights and KV cache that a step reads / what the memory reads in the time of the step."""
    share_of_flops: float
    """Products of the model, padding and recomputation not counted / the device's peak."""
    whole_tokens_per_second: float | None = None
    """New tokens of a whole call of `generate`, prefill included."""
    slots: int | None = None
    """Slots of the batch engine."""

    @staticmethod
    def of(
        name: str,
        seconds: float,
        tokens: float,
        limits: Limits,
        *,
        nbytes: float = 0.0,
        flops: float,
        **fields: Any,
    ) -> Measurement:
        """A measurement of steps of so many tokens, which read and compute so much."""
        return Measurement(
            name=name,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            floor_seconds=max(nbytes / limits.bandwidth, flops / limits.flops),
            share_of_bandwidth=nbytes / seconds / limits.bandwidth if nbytes else None,
            share_of_flops=flops / seconds / limits.flops,
            **fields,
        )


@dataclasses.dataclass(frozen=True)
class Reads:
    """Bytes that the decode steps of a model read at least."""

    weights: int
    column: int
    """Keys and values of a token of one row."""
    source: int
    """Keys and values of a token of the encoder; 0 without an encoder."""

    @staticmethod
    def of(model: Any) -> Reads:
        (program,) = lower(model, "decode", batch=1, prompt=16, new=16)
        return Reads(program.read_weight_bytes, *column_bytes(model))

    def step(self, rows: int, beams: int, prompt: int, new: float) -> float:
        """Bytes of a step after `new` new tokens. All beams of a row share the encoder's output."""
        columns = new + (0 if self.source else prompt)
        return self.weights + rows * (beams * columns * self.column + prompt * self.source)


def column_bytes(model: Any) -> tuple[int, int]:
    """Bytes of keys and values of one token in all layers: its own, and those of a token of the
    encoder."""
    layers = zip(*((block.attn, block.cross) for block in model.decoder_stack.blocks), strict=True)
    own, cross = (
        sum(2 * layer.kv_heads * layer.head_dim for layer in kind if layer is not None)
        for kind in layers
    )
    return own * model.dtype.itemsize, cross * model.dtype.itemsize


def data_sheet_bandwidth(device_kind: str) -> float | None:
    """Bytes per second of a device's memory by its name; None if unknown.

    >>> data_sheet_bandwidth("NVIDIA A100-SXM4-80GB"), data_sheet_bandwidth("NVIDIA H100 PCIe")
    (2039000000000.0, None)
    """
    words = set(device_kind.replace("-", " ").split())
    if words & {"PCIe", "PCIE", "NVL"}:  # boards with slower memory than that of the data sheets
        return None
    return next((x.bandwidth for x in CHIPS.values() if set(x.name.split()) <= words), None)


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


def measure_decode(
    model: Any,
    reads: Reads,
    limits: Limits,
    *,
    batch: int,
    prompt: int,
    new: int,
    beams: int = 1,
    repeats: int = 3,
) -> Measurement:
    """A step of `generate`'s loop: the time of all new tokens less that of half of them.

    Both calls run the same programs, since lengths are rounded up to powers of two.
    """
    ids = random_ids(model, batch, prompt)
    half = 2 ** (math.ceil(math.log2(new)) - 1) + 1

    def run(count: int) -> float:
        def call() -> Any:
            fields = {"max_new_tokens": count, "num_beams": beams, **FIELDS}
            return jaxllm.generate(model, ids, **fields).sequences

        return statistics.median(seconds_of(call, repeats))

    whole = run(new)
    step_flops, _ = forward_flops(model, prompt, new)
    return Measurement.of(
        f"decode, batch {batch}",
        (whole - run(half)) / (new - half),
        batch,
        limits,
        nbytes=reads.step(batch, beams, prompt, (half + new) / 2),
        flops=step_flops * batch * beams,
        whole_tokens_per_second=batch * new / whole,
    )


def measure_prefill(
    model: Any, limits: Limits, *, rows: int, tokens: int, repeats: int = 3
) -> Measurement:
    """A call of `generate` for one token, which is the prefill."""
    ids = random_ids(model, rows, tokens)

    def call() -> Any:
        return jaxllm.generate(model, ids, max_new_tokens=1, **FIELDS).sequences

    seconds = statistics.median(seconds_of(call, repeats))
    _, flops = forward_flops(model, tokens, 1)
    return Measurement.of(
        f"prefill, {rows} x {tokens}", seconds, rows * tokens, limits, flops=rows * flops
    )


def measure_engine(
    model: Any,
    reads: Reads,
    limits: Limits,
    lengths: Sequence[tuple[int, int]],
    slots: int | None = None,
) -> Measurement:
    """The second run of the batch engine, on rows with prompts and answers of these lengths.

    It reads at least as many steps as full slots would need.
    """
    rows = [
        {"input_ids": random_ids(model, 1, prompt)[0].tolist(), "max_new_tokens": new}
        for prompt, new in lengths
    ]
    engine = jaxllm.BatchGenerator(model, slots=slots, **FIELDS)

    def call() -> None:
        failed = [output.error for output in engine.generate(rows) if output.error]
        if failed:
            raise RuntimeError(f"batch engine: {failed[0]}")

    (seconds,) = seconds_of(call, 1)
    prompts, news = np.asarray(lengths).T
    count, used = int(news.sum()), engine.memory[0].slots
    # A row with a long answer takes part in more steps.
    prompt, new = (int(np.average(x, weights=news)) for x in (prompts, news / 2))
    step_flops, _ = forward_flops(model, prompt, 2 * new)
    _, prefill_flops = forward_flops(model, int(prompts.mean()), 1)
    return Measurement.of(
        f"batch engine, {used} slots",
        seconds,
        count,
        limits,
        nbytes=count / used * reads.step(used, 1, prompt, new),
        flops=count * step_flops + len(lengths) * prefill_flops,
        slots=used,
    )


def measure_train(
    model: Any, limits: Limits, *, rows: int, tokens: int, repeats: int = 3
) -> Measurement:
    """A training step, of the adapters alone if the model has LoRA. It uses the model up."""
    trainable = is_trainable if lora_layers(model) else None
    optimizer = make_optimizer(OptimizerConfig())
    step = make_train_step(optimizer, loss_for(model), device=device_of(model))
    ids, device = random_ids(model, rows, tokens), device_of(model)
    state = TrainState.create(model, optimizer, trainable=trainable, donate=True)
    # Of attention the half below the diagonal.
    counts = TokenCounts(rows * tokens, rows * tokens**2 // 2)
    flops = model_flops(model, None if trainable is None else state.params).of(counts)
    # Counters and key, too: on no certain device they would make the second step compile anew.
    state = jax.device_put(state, device)
    del model

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        return metrics["loss"]

    seconds = statistics.median(seconds_of(call, repeats))
    name = f"training step, {rows} x {tokens}"
    return Measurement.of(name, seconds, rows * tokens, limits, flops=flops)


def measurements(
    make: Callable[[], Any], sizes: Sizes, limits: Limits
) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    """What is measured of a model that `make` makes: names, and functions that measure."""
    model = arranged_for_inference(make())
    reads, repeats = Reads.of(model), sizes.repeats
    lengths = {"prompt": sizes.prompt, "new": sizes.new}
    for batch in sizes.batches:
        workload = {"batch": batch, **lengths, "repeats": repeats}
        yield f"decode, batch {batch}", partial(measure_decode, model, reads, limits, **workload)
    shape = {"rows": sizes.prefill_rows, "tokens": sizes.prefill_tokens}
    yield "prefill", partial(measure_prefill, model, limits, **shape, repeats=repeats)
    random = np.random.default_rng(0)
    pairs = random.integers(1, [sizes.prompt, sizes.new], (3 * sizes.slots, 2), endpoint=True)
    rows = [(int(prompt), int(new)) for prompt, new in pairs]
    yield "batch engine", partial(measure_engine, model, reads, limits, rows, sizes.slots)
    del model
    shape = {"rows": sizes.train_rows, "tokens": sizes.train_tokens}
    yield "training step", lambda: measure_train(make(), limits, **shape, repeats=repeats)
