"""Helpers for generation tests: ragged prompts, a compile counter, copies in a compiled loop."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from compiling import compiled_as_users
from conformance_runs import model

from jaxllm.cache.attention_view import make_view, mask_array
from jaxllm.generation.generate import prepare_call, run_prefill
from jaxllm.generation.loop import decode_program, prefill_program
from jaxllm.nn.block import Context

FAMILIES = ("s_llama", "s_gpt2", "s_t5_gated")
NO_EOS = {"eos_token_id": None, "pad_token_id": 0}


def padded(rows, side="left") -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of rows of unequal lengths."""
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), int), np.zeros((len(rows), width), int)
    for i, row in enumerate(rows):
        index = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, index], mask[i, index] = row, 1
    return ids, mask


def turns(seed: int, *lengths: int) -> list[list[int]]:
    """Rows of random token ids, for models of `tiny`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 50, n).tolist() for n in lengths]


def prompts(name: str, lengths=(7, 3, 5), seed=0, side="left"):
    """Ragged prompts, padded on either side: the rows, ids and mask."""
    rng = np.random.default_rng(seed)
    vocab = model(name).config.vocab_size
    rows = [rng.integers(3, vocab - 1, n) for n in lengths]
    return rows, *padded(rows, side)


def repeating_prompts(batch=3, seed=0, side="left", width=12):
    """Ragged prompts with repetitions, which a lookup finds; the first is as wide as the batch."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(batch):
        n = width if i == 0 else int(rng.integers(3, width + 1))
        rows.append(np.resize(rng.integers(3, 40, (n + 1) // 2), n))
    return padded(rows, side)


DRAFTS = ("assistant", "early exit", "lookup")


def drafts(name: str) -> dict[str, dict]:
    """Each kind of draft, as arguments of `generate`."""
    return {
        "assistant": {"assistant_model": model(f"{name}_draft"), "num_assistant_tokens": 4},
        "early exit": {"assistant_early_exit": 1, "num_assistant_tokens": 4},
        "lookup": {"prompt_lookup_num_tokens": 4},
    }


def compilations(call) -> list[str]:
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


def started(name: str, ids, mask, **fields) -> tuple[Any, Any, Any]:
    """The model as the programs run it, the prepared call, and the state after prefill."""
    call = prepare_call(model(name), ids, mask, None, 0, fields)
    bare = call.model
    return bare, call, run_prefill(call, prefill_program)


def compiled_loop(bare, call, state) -> str:
    """The loop as XLA runs it."""
    lowered = decode_program.lower(
        call.strategy, bare, state, call.settings, np.int32(call.request.max_length)
    )
    return compiled_as_users(lowered).as_text()


def sorted_sizes(program: str) -> list[int]:
    """Numbers in a row of each sort."""
    actual = re.findall(r"= \(?\w+\[([\d,]+)\].* sort\(", program)
    return [int(dims.split(",")[-1]) for dims in actual]


def cache_copies(bare, call, state) -> list[int]:
    """Sizes of the copies and transpositions in the compiled loop as large as a layer's cache."""
    program = compiled_loop(bare, call, state)
    actual = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", program)
    sizes = [int(np.prod([int(d) for d in dims.split(",")])) for dims in actual]
    return [size for size in sizes if size >= state.cache.layers[0].k.size]


def loop_is_in_place(bare, call, state) -> bool:
    """Runs the loop; whether the cache was donated and updated in its own buffer."""
    before = state.cache.layers[0].k
    address = before.unsafe_buffer_pointer()
    after = decode_program(
        call.strategy, bare, state, call.settings, np.int32(call.request.max_length)
    )
    kept = not jax.tree.leaves(bare)[0].is_deleted()
    same = after.cache.layers[0].k.unsafe_buffer_pointer() == address
    return before.is_deleted() and same and kept


def banded(model, row: list[int], window: int, source=None) -> np.ndarray:
    """Logits of one uncached row in which each token sees itself and window - 1 before it."""
    ids = np.array([row])
    view = make_view(np.ones(ids.shape, bool))
    near = np.subtract.outer(np.arange(len(row)), np.arange(len(row))) < window
    view = dataclasses.replace(view, visible=mask_array(view.visible) & near)
    if source is None:
        return np.asarray(model.logits(model.backbone.run(ids, view).x))[0]
    mask = np.ones((1, len(source)), bool)
    states = model.encode(np.array([source]), mask).x
    context = Context(view=view, cross_visible=mask[:, None, None, :])
    out = model.decoder(model.shared(ids), context, cross_kv=model.decoder.project_cross_kv(states))
    return np.asarray(model.logits(out.x))[0]
