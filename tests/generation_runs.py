"""What tests of generation share: small models, ragged prompts, the reference's cases."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm.generation.generate import prepare_call, runnable, start
from jaxllm.generation.loop import decode_program, prefill_program

DATA = Path(__file__).parent / "data" / "conformance"
sys.path.insert(0, str(DATA))
import compare  # noqa: E402


@functools.cache
def model(name: str):
    return jaxllm.load(DATA / "models" / name)[0]


@functools.cache
def arrays():
    return dict(np.load(DATA / "arrays.npz"))


def all_cases() -> list[dict]:
    return json.loads((DATA / "cases.json").read_text())["cases"]


def cases(*, mode: str | None = None, field: str | None = None) -> list[dict]:
    """The reference's calls of generate() in one mode, or with one field."""
    return [
        case
        for case in all_cases()
        if case["kind"] == "generate"
        and mode in (None, case["mode"])
        and (field is None or field in case["generate_kwargs"])
    ]


def problems(case: dict, **inputs: Any) -> list[str]:
    """What differs between a case and our run of it, scores of the chosen tokens included."""
    inputs = {name: np.array(value) for name, value in case["inputs"].items()} | inputs
    out = jaxllm.generate(
        model(case["model"]), **inputs, **case["generate_kwargs"], output_scores=True, key=0
    )
    scores = np.stack(out.scores, axis=1)
    new = out.sequences[:, -scores.shape[1] :]
    got = {
        "sequences": out.sequences.tolist(),
        "first_step_scores": out.scores[0],
        "step_token_scores": np.take_along_axis(scores, new[..., None], 2)[..., 0].tolist(),
    }
    return compare.check(case, got, arrays(), atol=1e-4)


def prompts(name: str, lengths=(7, 3, 5), seed=0, side="left"):
    """Ragged prompts, padded on either side."""
    rng = np.random.default_rng(seed)
    vocab = model(name).config.vocab_size
    rows = [rng.integers(3, vocab - 1, n) for n in lengths]
    width = max(lengths)
    ids, mask = np.zeros((len(rows), width), int), np.zeros((len(rows), width), int)
    for i, row in enumerate(rows):
        at = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    return rows, ids, mask


def compilations(call: Callable[[], Any]) -> list[str]:
    """Names of the compile events while `call` runs."""
    events = []

    def note(name, seconds, **_):
        if "backend_compile" in name or "jaxpr_trace" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return events


def check_loop_in_place(net: Any, ids, mask, **fields: Any) -> None:
    """The loop's cache is donated and updated where it lies, and its program copies none of it."""
    call = prepare_call(net, ids, mask, None, 0, {"eos_token_id": None, **fields})
    bare = runnable(net, call)
    state = start(bare, call, prefill_program)
    arguments = (call.strategy, bare, state, call.settings, np.int32(call.until))
    text = decode_program.lower(*arguments).compile().as_text()
    before = state.cache.layers[0].k
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    sizes = [int(np.prod([int(d) for d in dims.split(",")])) for dims in copies]
    # A few columns of keys move, never a layer's cache.
    assert [size for size in sizes if size >= before.size] == []
    address = before.unsafe_buffer_pointer()
    after = decode_program(*arguments)
    assert before.is_deleted()
    assert after.cache.layers[0].k.unsafe_buffer_pointer() == address
    assert not jax.tree.leaves(bare)[0].is_deleted()
