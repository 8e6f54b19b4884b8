"""Lengths and finish reasons of generate(): against a search in the returned tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from generation_tools import compilations, padded, turns

import jaxllm
from jaxllm.common.errors import NonFiniteError
from jaxllm.generation import GenerateOutput, HostCriteria
from jaxllm.generation.loop import decode_program, finish_program, prefill_program
from jaxllm.generation.registration import (
    REGISTERED_STRATEGIES,
    Sample,
    Strategy,
    register_strategy,
)
from jaxllm.generation.stopping import StopStringMatcher
from jaxllm.tokenizers.byte_level import byte_tokenizer

LIMIT = 12
ENDS = [2, *range(3, 40, 2)]
"""So many that sampled rows end early."""
SAMPLED = {"do_sample": True, "key": 3, "num_return_sequences": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": SAMPLED,
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "beam samples": {"num_beams": 3, "do_sample": True, "key": 1, "num_return_sequences": 2},
    "groups": {
        "num_beams": 4,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
        "num_return_sequences": 4,
    },
    "constraints": {"num_beams": 4, "force_words_ids": [[10, 12]], "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "early exit": {"assistant_early_exit": 1, "num_assistant_tokens": 3, **SAMPLED},
    "lookup": {"prompt_lookup_num_tokens": 3, **SAMPLED},
    "DoLa": {"dola_layers": "high"},
    "guidance": {"guidance_scale": 1.5},
}
DECODER_ONLY = {"early exit", "guidance", "DoLa"}


@functools.cache
def model(family: str) -> Any:
    """With end tokens that sampling finds often, and the byte tokenizer's vocabulary."""
    return tiny.make(family, vocab_size=258)


def batch(family: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Ragged prompts, their mask, and the columns of the prompt in the result."""
    ids, mask = padded(turns(0, 7, 3, 5), "right" if family == "t5" else "left")
    return ids, mask, 1 if family == "t5" else ids.shape[1]


def found(
    out: GenerateOutput, start: int, ends: list[int], limit: int, stops: list[str] | None = None
) -> tuple[list[int], list[str]]:
    """Lengths and reasons by a search for the first end token or stop string."""
    lengths, reasons = [], []
    for row in np.asarray(out.sequences).tolist():
        matcher = StopStringMatcher(byte_tokenizer(), stops, row[:start]) if stops else None
        length, reason = limit, "length"
        for count, token in enumerate(row[start : start + limit], 1):
            is_match = matcher is not None and matcher.completes(token)
            if token in ends or is_match:
                length, reason = count, "eos" if token in ends else "stop"
                break
        lengths.append(length)
        reasons.append(reason)
    return lengths, reasons


def check(out: GenerateOutput, start: int, lengths: list[int], reasons: list[str]) -> None:
    assert out.lengths.dtype == out.finish_reasons.dtype == np.int32
    assert out.lengths.tolist() == lengths
    assert out.finish_reason_names() == reasons
    rows = np.asarray(out.sequences).tolist()
    expected = [row[start : start + n] for row, n in zip(rows, lengths, strict=True)]
    assert out.new_tokens(start) == expected


CASES = [
    (family, name)
    for family in ("llama", "t5")
    for name in STRATEGIES
    if family == "llama" or name not in DECODER_ONLY
]


@pytest.mark.by_default("llama-sample", "llama-beams", "t5-lookup")
@pytest.mark.parametrize(("family", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_every_strategy(family, name):
    """Pads are a token of their own, an end token, or a token that stands in texts too."""
    ids, mask, start = batch(family)
    fields = {"max_new_tokens": LIMIT, "eos_token_id": ENDS, **STRATEGIES[name]}
    for pad in (0, 2, 40):
        out = jaxllm.generate(model(family), ids, mask, pad_token_id=pad, **fields)
        lengths, reasons = found(out, start, ENDS, LIMIT)
        check(out, start, lengths, reasons)
        rows = zip(out.sequences.tolist(), lengths, strict=True)
        assert {token for row, n in rows for token in row[start + n :]} <= {pad}


@pytest.mark.by_default("llama-sample", "llama-beams")
@pytest.mark.parametrize("name", ["sample", "beams", "beam samples", "lookup"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_stop_strings_at_and_before_the_limit(family, name):
    ids, mask, start = batch(family)
    fields = {"eos_token_id": ENDS, "pad_token_id": 40, "suppress_tokens": [*range(128, 256)]}
    fields |= STRATEGIES[name]
    free = jaxllm.generate(model(family), ids, mask, max_new_tokens=LIMIT, **fields)
    longest = int(np.argmax(free.lengths))
    answer = free.new_tokens(start)[longest]
    place = next(i for i in range(3, len(answer)) if answer[i] not in ENDS)
    stops = [chr(token) for token in answer[place:] if token not in ENDS]
    seen = set()
    for limit in (LIMIT, place + 1):
        out = jaxllm.generate(
            model(family),
            ids,
            mask,
            max_new_tokens=limit,
            stop_strings=stops,
            tokenizer=byte_tokenizer(),
            **fields,
        )
        check(out, start, *found(out, start, ENDS, limit, stops))
        seen.update(out.finish_reason_names())
    assert "stop" in seen


@pytest.mark.ci
@pytest.mark.parametrize("name", ["greedy", "beams", "lookup", "contrastive"])
def test_criteria_of_the_caller(name):
    """A criterion ends rows after different numbers of tokens; one ends at the limit itself."""
    ids, mask, start = batch("llama")
    fields = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, **STRATEGIES[name]}
    limits = np.array([4, 6, 99])[ids[:, -1].argsort().argsort()]
    ends = dict(zip(ids[:, -1].tolist(), limits.tolist(), strict=True))

    def reached(input_ids, scores):
        new = input_ids.shape[1] - start
        return np.array([new >= ends[row[start - 1]] for row in input_ids.tolist()])

    out = jaxllm.generate(
        model("llama"), ids, mask, stopping_criteria=[HostCriteria(reached)], **fields
    )
    samples = len(out.sequences) // 3
    lengths = np.repeat(np.minimum(limits, 6), samples)
    reasons = np.repeat(np.where(limits <= 6, "stop", "length"), samples)
    check(out, start, lengths.tolist(), reasons.tolist())


@pytest.mark.ci
@pytest.mark.parametrize("name", ["greedy", "beams", "lookup"])
def test_max_time(name):
    ids, mask, start = batch("llama")
    fields = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0, **STRATEGIES[name]}
    out = jaxllm.generate(model("llama"), ids, mask, max_time=1e-6, **fields)
    assert set(out.finish_reason_names()) == {"stop"}
    assert out.sequences.shape[1] == start + max(out.lengths) < start + 32
    out = jaxllm.generate(model("llama"), ids, mask, max_time=1e6, **fields)
    check(out, start, *found(out, start, [], 32))


@pytest.mark.ci
@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}])
def test_an_end_token_that_is_forced_at_the_limit_is_the_limit(fields):
    """As in rows of a batch: BART's configs have it."""
    ids, mask, start = batch("t5")
    ends = {"eos_token_id": ENDS, "forced_eos_token_id": 2, "max_new_tokens": 5}
    out = jaxllm.generate(model("t5"), ids, mask, pad_token_id=0, **ends, **fields)
    lengths, reasons = found(out, start, ENDS, 5)
    expected = ["length" if n == 5 else reason for n, reason in zip(lengths, reasons, strict=True)]
    assert "length" in expected
    check(out, start, lengths, expected)
    prompts = [row[real == 1] for row, real in zip(ids, mask, strict=True)]
    rows = [{"input_ids": prompt, **ends, **fields} for prompt in prompts]
    outputs = jaxllm.BatchGenerator(model("t5")).generate(rows)
    assert [output.finish_reasons[0] for output in outputs] == expected


def test_inside_the_callers_jit_and_vmap():
    """The output is a pytree of arrays of fixed shapes; the names are made outside."""
    net, (ids, mask, start) = model("llama"), batch("llama")
    fields = {"max_new_tokens": LIMIT, "eos_token_id": ENDS, "pad_token_id": 40, **SAMPLED}
    fields["key"] = jax.random.key(3)
    outside = jaxllm.generate(net, ids, mask, **fields)

    @jax.jit
    def run(net, ids, mask):
        return jaxllm.generate(net, ids, mask, **fields)

    inside = run(net, ids, mask)
    assert isinstance(inside.lengths, jax.Array)
    assert inside.sequences.shape == (9, start + LIMIT)
    check(inside, start, outside.lengths.tolist(), outside.finish_reason_names())
    assert inside.new_tokens(start) == outside.new_tokens(start)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "row"), [("greedy", 1), ("sample", 3), ("beams", 1), ("groups", 1), ("lookup", 3)]
)
def test_a_row_without_finite_logits(name, row):
    """Outside jit an error names its row, samples counted apart; inside it ends, and no other."""
    net = tiny.make("llama", vocab_size=258)
    ids = np.array([[5, 6, 7], [5, 200, 7]])
    net.backbone.embed.weight[...] = net.backbone.embed.weight[...].at[200].set(np.nan)
    fields = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, **STRATEGIES[name]}
    fields["suppress_tokens"] = [200]
    if "key" in fields:
        fields["key"] = jax.random.key(3)
    with pytest.raises(NonFiniteError, match=f"at new token 0 of row {row} "):
        jaxllm.generate(net, ids, **fields)
    out = jax.jit(lambda net, ids: jaxllm.generate(net, ids, **fields))(net, ids)
    alone = jaxllm.generate(net, ids[:1], **fields)
    samples = len(alone.lengths)
    reasons = alone.finish_reason_names() + ["nonfinite"] * samples
    assert out.lengths.tolist() == alone.lengths.tolist() + [0] * samples
    assert out.finish_reason_names() == reasons
    assert out.new_tokens(3)[:samples] == alone.new_tokens(3)


class Delegating(Strategy):
    """A strategy that leaves its state and its result to another one."""

    inner = Sample(sampling=False)

    def init(self, *arguments):
        return self.inner.init(*arguments)

    def step(self, *arguments):
        return self.inner.step(*arguments)

    def finish(self, *arguments):
        return self.inner.finish(*arguments)


@pytest.mark.ci
def test_a_registered_strategy():
    cls = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(Delegating))
    register_strategy("delegating", lambda call: True, lambda call: cls())
    try:
        ids, mask, start = batch("llama")
        out = jaxllm.generate(
            model("llama"), ids, mask, max_new_tokens=LIMIT, eos_token_id=ENDS, pad_token_id=0
        )
    finally:
        del REGISTERED_STRATEGIES["delegating"]
    check(out, start, *found(out, start, ENDS, LIMIT))


@pytest.mark.ci
def test_a_call_runs_three_programs_and_fetches_once(monkeypatch):
    """Prefill, the loop and the end, which computes lengths and reasons too."""
    ids, mask, _ = batch("llama")
    fetched, fetch = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(1) or fetch(tree))
    fields = {"max_new_tokens": LIMIT, "eos_token_id": ENDS, "pad_token_id": 0}
    fields["key"] = jax.random.key(0)
    jaxllm.generate(model("llama"), ids, mask, **fields)
    for program in (prefill_program, decode_program, finish_program):
        program.clear_cache()
    events = compilations(lambda: jaxllm.generate(model("llama"), ids, mask, **fields))
    assert len([name for name in events if "backend_compile" in name]) == 3
    assert len(fetched) == 2
