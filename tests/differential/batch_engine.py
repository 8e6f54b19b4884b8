"""Compares the batch engine with `generate` row by row, on one device and on meshes.

Rows with random settings of every kind (`batch_rows.py`) run together in `BatchGenerator`, and each
of them alone in `generate` on one device. The tokens, the reason why a sequence ended, and the
class of an error must be equal. The models are tiny and have random weights; no reference
implementation is needed.

A difference is a near tie if changing the logits of `generate` by at most 5e-5 leads it to the
tokens of the engine: programs of other shapes sum in another order. Near ties are counted and
printed, never hidden.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import helpers  # noqa: F401  (finds the modules of tests/)
import jax
import jax.numpy as jnp
import numpy as np
import tiny
from batch_rows import FEW_KINDS, KINDS, STATIC_KINDS, VOCAB, draw_rows
from compiling import FAST
from devices import environment
from jaxtyping import Array, Key
from report import Report, arguments
from tiny_meshes import mesh

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.rows import BatchOutput
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.processors.base import LogitsProcessor, logits_processor, store
from jaxllm.models.quantize import quantize_model
from jaxllm.parallel.placement import put_tree
from jaxllm.tokenizers.byte_level import byte_tokenizer

DEVICES = 8
JOB_SEED = 7
"""Seed of rows that have none."""
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
    "mistral": {"num_hidden_layers": 1},
    "qwen2": {"num_hidden_layers": 2},
}
MESHES = {"2x2x2": {"data": 2, "fsdp": 2, "tensor": 2}, "8x1": {"data": 8}}
FAMILIES = ("llama", "gpt2", "t5")
AREAS = ["one-device", *MESHES, "int8-cache", "windows", "int8-weights", "int4-weights"]
INT8_CACHE = {"cache_implementation": "quantized", "cache_config": {"nbits": 8}}
WINDOW = {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 5}}
NOISE, TRIES = 5e-5, 24
DOCUMENTED = {
    "near tie": "docs/batch.md: programs of other shapes sum in another order, so the choice "
    "between two tokens of almost equal scores may change",
}
SEQUENCE_KEYS = ("id", "input_ids", "seed")
"""Keys of a row that are not generation fields."""


@functools.cache
def small_model(family: str) -> Any:
    return tiny.make(family, **SMALL[family], vocab_size=VOCAB)


@functools.cache
def quantized(family: str, name: str) -> Any:
    return quantize_model(small_model(family), name)


def cases(area: str) -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """Name, model alone, model of the engine and fields of all rows, of each set of rows."""
    if area in MESHES:
        there = mesh(**MESHES[area])
        return [(f, small_model(f), put_tree(small_model(f), there), {}) for f in FAMILIES]
    if area == "int8-cache":
        return [(f, small_model(f), small_model(f), INT8_CACHE) for f in FAMILIES]
    if area == "windows":
        own = [(f, small_model(f), small_model(f), {}) for f in ("mistral", "qwen2")]
        return [*own, ("llama", small_model("llama"), small_model("llama"), WINDOW)]
    if area.endswith("-weights"):
        models = {f: quantized(f, area.removesuffix("-weights")) for f in FAMILIES}
        return [(f, model, model, {}) for f, model in models.items()]
    return [(f, small_model(f), small_model(f), {}) for f in FAMILIES]


def kinds_of(area: str) -> dict[str, int]:
    """Kinds of rows of an area."""
    if area == "int8-cache":
        return STATIC_KINDS
    return FEW_KINDS if area == "windows" or area.endswith("-weights") else KINDS


@logits_processor()
class Noise(LogitsProcessor):
    """Adds uniform noise to the scores, other noise in each step."""

    key_data: Array

    def __init__(self, seed: int) -> None:
        store(self, key_data=jax.random.key_data(jax.random.key(seed)))

    def process(self, history: Any, scores: Any) -> Any:
        key: Key[Array, ""] = jax.random.wrap_key_data(self.key_data)
        key = jax.random.fold_in(key, history.size.max())
        return scores + jax.random.uniform(key, scores.shape, jnp.float32, -NOISE, NOISE)


def row_alone(
    model: Any, row: Mapping[str, Any], index: int, *, noise: int | None = None
) -> list[list[int]] | JaxLLMError:
    """New tokens and pads of each sequence of `generate` on that row alone, or its error."""
    own = {name: value for name, value in row.items() if name not in SEQUENCE_KEYS}
    key = row.get("seed")
    where = {"key": JOB_SEED, "row_ids": [index]} if key is None else {"key": key}
    if noise is not None:
        own["logits_processor"] = [Noise(noise)]
    if "stop_strings" in row:
        own["tokenizer"] = byte_tokenizer()
    try:
        out = jaxllm.generate(model, [row["input_ids"]], **where, **own)
    except JaxLLMError as error:
        return error
    start = 1 if model.is_encoder_decoder else len(row["input_ids"])
    return np.asarray(out.sequences)[:, start:].tolist()


def difference(model: Any, row: Mapping[str, Any], output: BatchOutput, expected: Any) -> str:
    """What of an output is not as in the row alone; empty if nothing is."""
    if isinstance(expected, JaxLLMError):
        if output.error_kind == type(expected).__name__:
            return ""
        found = output.error_kind or f"tokens {output.output_ids}"
        return f"expected {type(expected).__name__} ({expected}), found {found}"
    if output.error is not None:
        return f"unexpected {output.error_kind}: {output.error}"
    if len(output.output_ids) != len(expected):
        return f"expected {len(expected)} sequences, found {len(output.output_ids)}"
    triples = zip(output.output_ids, output.finish_reasons, expected, strict=True)
    for number, (found, reason, padded) in enumerate(triples):
        rest = padded[len(found) :]
        if found != padded[: len(found)] or len(set(rest)) > 1:
            return f"sequence {number}: expected {padded}, found {found} ({reason})"
        if problem := wrong_reason(model, row, found, reason, rest):
            return f"sequence {number}, {found}: {problem}"
    return ""


def wrong_reason(
    model: Any, row: Mapping[str, Any], tokens: Sequence[int], reason: str, rest: Sequence[int]
) -> str:
    """Why a reason cannot be that of these tokens; empty if it can."""
    eos = row.get("eos_token_id", model.config.eos_token_ids) or ()
    if any(token in eos for token in tokens[:-1]):
        return "goes on after an end token"
    ends_with_eos = bool(tokens) and tokens[-1] in eos
    if reason == "eos":
        return "" if ends_with_eos else "the reason is eos, but the last token is no end token"
    if ends_with_eos:
        return f"the last token is an end token, but the reason is {reason}"
    if reason == "stop":
        pieces = byte_tokenizer().token_bytes()
        text = b"".join(pieces[token] or b"" for token in [*row["input_ids"], *tokens])
        found = any(text.endswith(string.encode()) for string in row.get("stop_strings", ()))
        return "" if found else "the reason is stop, but no stop string ends the text"
    start = 1 if model.is_encoder_decoder else len(row["input_ids"])
    limit = row.get("max_new_tokens") or row["max_length"] - start
    beams = row.get("num_beams", 1) > 1  # the best beam may be one that ended early
    if reason == "length" and (len(tokens) == limit or (beams and not rest)):
        return ""
    return f"{len(tokens)} of {limit} tokens, but the reason is {reason}"


def is_near_tie(model: Any, row: Mapping[str, Any], index: int, output: BatchOutput) -> bool:
    """True if `generate` with a little noise comes to the engine's tokens."""
    return any(
        not difference(model, row, output, row_alone(model, row, index, noise=seed))
        for seed in range(TRIES)
    )


def compare(
    report: Report,
    area: str,
    name: str,
    model: Any,
    engine: BatchGenerator,
    rows: Sequence[dict[str, Any]],
    wanted: Sequence[Any],
) -> None:
    """Runs the rows in the engine and records each of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outputs = engine.generate(rows)
    for index, (row, output, expected) in enumerate(zip(rows, outputs, wanted, strict=True)):
        what = difference(model, row, output, expected)
        if not what:
            report.equal(area)
        elif output.error is None and is_near_tie(model, row, index, output):
            print(f"near tie  {area}, {name}, {row['id']}: {what}", flush=True)
            report.explained(area, "near tie")
        else:
            report.differs(area, {"model": name, "index": index, **row}, what)


def row_set(
    model: Any, fields: Mapping[str, Any], kinds: Mapping[str, int] | None, seed: int
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Random rows with these fields, and what `generate` makes of each of them alone."""
    rows = [{**row, **fields} for row in draw_rows(seed, kinds)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return rows, [row_alone(model, row, index) for index, row in enumerate(rows)]


def restart_with_devices() -> None:
    """Starts this script again with eight virtual devices, since a process counts them once.

    Programs are compiled without optimization, as in the default tests: compiling is most of what
    the comparison does.
    """
    if jax.device_count() >= DEVICES:
        return
    flags = FAST if jax.__version__.startswith("0.10.") else ""  # others may not know them
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.execve(sys.executable, [sys.executable, *sys.argv], environment(DEVICES))


def main() -> int:
    options = arguments(__doc__ or "", AREAS)
    restart_with_devices()
    report = Report(DOCUMENTED)
    known: dict[tuple[str, str], tuple[list[dict[str, Any]], list[Any]]] = {}
    for area in options.area:
        sets = cases(area)
        kinds = kinds_of(area)
        if options.count is not None:
            share = options.count / (len(sets) * sum(kinds.values()))
            kinds = {name: max(1, round(count * share)) for name, count in kinds.items()}
        for number, (name, model, there, fields) in enumerate(sets):
            seed = options.seed * 100 + number
            # The meshes have the rows of one device, whose results alone are known.
            key = ("one-device" if area in MESHES else area, name)
            if key not in known:
                known[key] = row_set(model, fields, kinds, seed)
            engine = BatchGenerator(there, byte_tokenizer(), slots=16, seed=JOB_SEED)
            compare(report, area, name, model, engine, *known[key])
            print(f"{area}, {name}: {report.ran[area]} rows", flush=True)
            jax.clear_caches()
    return report.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
