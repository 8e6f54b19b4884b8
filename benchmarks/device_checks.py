"""Numbers of a device beside the CPU's: logits, greedy tokens, batch engine, training step.

The first row has pads on the left for the logits and the training step. Logits of pads are not
compared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_models import small_model

import jaxllm
from jaxllm.cache.kv_cache import KV
from jaxllm.models.joined import arranged_for_inference
from jaxllm.nn.attention import Scores, attend
from jaxllm.training import (
    OptimizerConfig,
    TrainState,
    loss_for,
    make_optimizer,
    make_train_step,
)

ROWS, TOKENS, NEW = 2, 300, 16
"""More tokens than a block of attention has queries (256), and no multiple of one."""
PADS = 40
STEPS = 4
"""Columns that are read by decode steps; the cache has as many slots more, a multiple of 8."""
FLOAT32_TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.05
STEP_TOLERANCE = 0.01
EXPERTS = ("mixtral", "qwen3_moe")
"""Families whose logits are not compared in bfloat16, where a token may go to other experts."""
THOROUGH = ("llama", "gpt2", "t5")
"""Families of which the batch engine and a training step are compared too."""
THREADS = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison with the CPU, which computes in float32."""

    name: str
    difference: float
    """Logits: root mean square of the difference / standard deviation of the CPU's. Tokens: share
    that differs. Training step: largest relative difference of loss and norm of the gradients."""
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def checks(family: str, device: Any, attn_implementation: str = "auto") -> Iterator[Check]:
    """Compares a small model of a family on the device with the same on the CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    reference = small_model(family, cpu, "float32")
    model = small_model(family, device, "float32", attn_implementation)
    arranged = arranged_for_inference(small_model(family, device, "float32", attn_implementation))
    ids = np.random.default_rng(0).integers(3, 1000, (ROWS, TOKENS)).astype(np.int32)
    name = family if attn_implementation == "auto" else f"{family}, {attn_implementation}"
    # Accelerators multiply float32 in fewer bits by default.
    with jax.default_matmul_precision("highest"):
        expected = logits(reference, ids)
        difference = distance(logits(model, ids), expected)
        yield Check(f"{name}: logits in float32", difference, FLOAT32_TOLERANCE)
        tokens = greedy(reference, ids)
        difference = float(np.mean(greedy(arranged, ids) != tokens))
        yield Check(f"{name}: greedy tokens", difference, 0.0)
        if family in THOROUGH:
            difference = float(np.mean(engine_tokens(arranged, ids) != tokens))
            yield Check(f"{name}: tokens of the batch engine", difference, 0.0)
            wanted = train_metrics(reference, ids)
            difference = relative_difference(train_metrics(model, ids), wanted)
            yield Check(f"{name}: training step", difference, FLOAT32_TOLERANCE)
    if family not in EXPERTS:
        half = small_model(family, device, "bfloat16", attn_implementation)
        difference = distance(logits(half, ids), expected)
        yield Check(f"{name}: logits in bfloat16", difference, BFLOAT16_TOLERANCE)
        if family in THOROUGH:
            difference = relative_difference(train_metrics(half, ids), wanted)
            yield Check(f"{name}: training step in bfloat16", difference, BFLOAT16_TOLERANCE)


def all_checks(
    families: Sequence[str], device: Any, attn_implementation: str = "auto"
) -> list[Check]:
    """The checks of several families. Threads compile the programs of several at once. Those of
    the kernel "mosaic" are of decode steps: of the kernel itself, and of families in bfloat16."""

    def run(name: str) -> list[Check]:
        try:
            if name in STEP_CASES:
                return list(step_checks(name, device))
            if attn_implementation == "mosaic":
                return [cached_check(name, device)]
            return list(checks(name, device, attn_implementation))
        except Exception as error:  # which must not hide the others
            return [Check(f"{name}: {error}".splitlines()[0], math.nan, 0.0)]

    names = families
    if attn_implementation == "mosaic":
        names = [*STEP_CASES, *(x for x in families if x not in EXPERTS)]
    with ThreadPoolExecutor(THREADS) as pool:
        return [check for found in pool.map(run, names) for check in found]


def cached_check(family: str, device: Any) -> Check:
    """Compares the last columns of a small model, each read by a decode step."""
    cpu = jax.local_devices(backend="cpu")[0]
    ids = np.random.default_rng(0).integers(3, 1000, (ROWS, TOKENS)).astype(np.int32)
    found = cached_logits(small_model(family, device, "bfloat16", "mosaic"), ids)
    expected = cached_logits(small_model(family, cpu, "float32"), ids)
    difference = distance(found, expected)
    return Check(f"{family}, mosaic: decode steps in bfloat16", difference, BFLOAT16_TOLERANCE)


def cached_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the last STEPS columns, each of which is read alone."""
    ids, mask = jnp.asarray(tokens), jnp.asarray(padding_mask(tokens) == 1)
    name, source = "input_ids", {}
    if model.is_encoder_decoder:
        name, source = "decoder_input_ids", {"input_ids": ids, "attention_mask": mask}
    cache, found = model.init_cache(ROWS, TOKENS + STEPS, **source), []
    first = TOKENS - STEPS
    for columns in (slice(0, first), *(slice(i, i + 1) for i in range(first, TOKENS))):
        inputs = {
            name: ids[:, columns],
            name.replace("input_ids", "attention_mask"): mask[:, columns],
        }
        out = model(**inputs, cache=cache)
        cache = out.cache
        found.append(np.asarray(out.logits, np.float32))
    return np.concatenate(found[1:], axis=1)


STEP_CASES = {
    "grouped heads": (64, 8, 4, 1, 128, 640, True, False),
    "T5's bias": (8, 32, 1, 1, 64, 136, True, True),
    "beams": (8, 32, 1, 4, 64, 520, True, True),
    "cross-attention of beams": (8, 32, 1, 4, 64, 512, False, False),
    "one row": (1, 8, 4, 1, 128, 4096, True, False),
}
"""Rows, heads of the cache, heads of queries for each, queries, size of a head, cache slots;
whether there are new columns, and a bias."""


def step_checks(name: str, device: Any) -> Iterator[Check]:
    """Compares the kernel of decode steps on the device with attention on the CPU."""
    random = np.random.default_rng(0)
    rows, heads, group, queries, size, slots, is_new, has_bias = STEP_CASES[name]
    shapes = {
        "q": (rows, queries, heads * group, size),
        "k": (rows * heads, slots, size),
        "v": (rows * heads, slots, size),
        "new_k": (rows, queries, heads, size),
        "new_v": (rows, queries, heads, size),
    }
    half = {x: jnp.asarray(random.normal(size=y), jnp.bfloat16) for x, y in shapes.items()}
    last = random.integers(slots // 2, slots - queries + 1, rows)
    first = random.integers(0, slots // 4, rows)
    columns = np.arange(slots)
    visible = (columns >= first[:, None]) & (columns < last[:, None])
    visible = np.repeat(visible[:, None], queries, axis=1)
    for query in range(queries if is_new else 0):
        visible[np.arange(rows), query, last + query] = True
    bias = random.normal(size=(1, heads * group, queries, slots)) if has_bias else None
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)

    if not is_new:
        del half["new_k"], half["new_v"]
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    others = (visible[:, None], bias, last.astype(np.int32))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = jax.jit(step_by_reference)(exact, *others)
    found = jax.jit(step_by_kernel)(*jax.device_put((half, *others), device))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for what, (x, y) in zip(("output", "keys", "values"), pairs, strict=True):
        difference = distance(np.asarray(x, np.float32), np.asarray(y))
        tolerance = STEP_TOLERANCE if what == "output" else 0.0
        yield Check(f"mosaic, {name}: {what}", difference, tolerance)


def step_by_reference(x: dict[str, Any], visible: Any, bias: Any, last: Any) -> Any:
    """Attention and the cache of a case of `STEP_CASES`."""
    kv = KV(x["k"], x["v"])
    kv = kv.write(x["new_k"], x["new_v"], last) if "new_k" in x else kv
    return attend(x["q"], kv, visible, bias, scores=Scores(x["q"].shape[-1] ** -0.5)), kv


def step_by_kernel(x: dict[str, Any], visible: Any, bias: Any, last: Any) -> Any:
    """The same with the kernel, where the device has it."""
    from jaxllm.nn.platform.mosaic import attend_or_step

    new = (x["new_k"], x["new_v"], last) if "new_k" in x else None
    scale = x["q"].shape[-1] ** -0.5
    plain = functools.partial(attend, scores=Scores(scale))
    kv = KV(x["k"], x["v"])
    return attend_or_step(plain, x["q"], kv, new, visible, bias, scale=scale)


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits of all real tokens; an encoder-decoder gets the ids on both sides."""
    mask = padding_mask(ids)
    inputs = {"attention_mask": mask}
    if model.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids[:, ::-1], "decoder_attention_mask": mask}
    run = jax.jit(lambda model, ids, inputs: model(ids, **inputs).logits)
    return np.asarray(run(model, ids, inputs), np.float32)[mask == 1]


def padding_mask(ids: np.ndarray) -> np.ndarray:
    mask = np.ones_like(ids)
    mask[0, :PADS] = 0
    return mask


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative difference of two arrays."""
    return float(np.max(np.abs(found - expected) / np.abs(expected)))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference in standard deviations of what is expected."""
    return float(np.sqrt(np.mean(np.square(found - expected))) / np.std(expected))


FIELDS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def greedy(model: Any, ids: np.ndarray) -> np.ndarray:
    """The new tokens of `generate`, [ROWS, NEW]."""
    return np.asarray(jaxllm.generate(model, ids, **FIELDS).sequences)[:, -NEW:]


def engine_tokens(model: Any, ids: np.ndarray) -> np.ndarray:
    """The new tokens of the batch engine, [ROWS, NEW]."""
    outputs = jaxllm.BatchGenerator(model, slots=ROWS, **FIELDS).generate(ids.tolist())
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(f"batch engine: {errors[0]}")
    return np.asarray([output.output_ids[0] for output in outputs])


def train_metrics(model: Any, ids: np.ndarray) -> np.ndarray:
    """Loss and norm of the gradients of a training step."""
    optimizer = make_optimizer(OptimizerConfig())
    step = make_train_step(optimizer, loss_for(model))
    mask = padding_mask(ids)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 1, ids, -100)}
    _, metrics = step(TrainState.create(model, optimizer), batch)
    return np.asarray([metrics["loss"], metrics["grad_norm"]], np.float64)
