"""Hidden states and attentions of every strategy: those of transformers, and of a forward pass."""

from __future__ import annotations

import json

import numpy as np
import paths
import pytest
import tiny
from conformance_runs import model, run
from generation_tools import padded, turns

import jaxllm

BOTH = {"output_hidden_states": True, "output_attentions": True}
DATA = paths.DATA / "records" / "cases.json"
CASES = json.loads(DATA.read_text())
# Each case has a program of its own to compile; these stand for the rest.
FAST = ("beam-s_t5", "lookup-s_llama_loop")


def same(found, expected, where: str) -> int:
    """`expected` has the shape and three sums of each array; returns how many there were."""
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        pairs = enumerate(zip(found, expected, strict=True))
        return sum(same(part, reference, f"{where}[{i}]") for i, (part, reference) in pairs)
    x = np.asarray(found, np.float64)
    assert list(x.shape) == expected["shape"], where
    flat = x.reshape(-1)
    wave = np.cos(0.7 * np.arange(flat.size))
    sums = [flat.sum(), np.abs(flat).sum(), flat @ wave]
    np.testing.assert_allclose(sums, expected["sums"], atol=1e-3, rtol=1e-5, err_msg=where)
    return 1


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case["id"], marks=[] if case["id"] in FAST else [pytest.mark.slow])
        for case in CASES
    ],
)
@pytest.mark.usefixtures("highest_precision")
def test_as_in_transformers(case):
    out = run(case, **BOTH)
    assert out.sequences.tolist() == case["expected"]["sequences"]
    fields = {k: v for k, v in case["expected"].items() if k != "sequences"}
    assert sum(same(getattr(out, name), expected, name) for name, expected in fields.items()) >= 20


def ragged(rows: int = 2) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = tiny.ids(rows, 5), np.ones((rows, 5), int)
    mask[1, :2] = 0
    return ids, mask


@pytest.mark.ci
def test_beams_with_guidance_equal_a_forward_pass():
    """Row 1 is padded on the left, and the negative prompt is longer than the prompt.

    `beam_indices` say which beam of each step a text went through.
    """
    net, (ids, mask) = tiny.cached("gpt2"), ragged()
    out = jaxllm.generate(
        net,
        ids,
        mask,
        num_beams=3,
        num_return_sequences=2,
        guidance_scale=1.4,
        negative_prompt_ids=tiny.ids(2, 9),
        max_new_tokens=4,
        eos_token_id=None,
        **BOTH,
    )
    seen = np.repeat(np.concatenate([mask, np.ones((2, 3), int)], axis=1), 2, axis=0)
    full = net(out.sequences[:, :-1], seen, **BOTH)
    for steps, layers in (
        (out.hidden_states, full.hidden_states),
        (out.attentions, full.attentions),
    ):
        assert len(steps) == 4
        for step, actual in enumerate(steps):
            columns = slice(0, 5) if step == 0 else slice(4 + step, 5 + step)
            real = seen[:, columns]
            for result, expected in zip(actual, layers, strict=True):
                result = result[out.beam_indices[:, step]]
                expected = np.asarray(expected)[..., columns, : result.shape[-1]]
                weight = real[:, None, :, None] if result.ndim == 4 else real[..., None]
                np.testing.assert_allclose(result * weight, expected * weight, atol=2e-5)


@pytest.mark.ci
def test_drafts_of_a_batch_leave_those_of_greedy_search():
    """Rows accept different numbers of drafts; an accepted token has the record of its own pass."""
    net, (ids, mask) = model("s_llama_deep"), ragged(3)
    settings = {"max_new_tokens": 9, "eos_token_id": None, **BOTH}
    plain = jaxllm.generate(net, ids, mask, **settings)
    out = jaxllm.generate(net, ids, mask, assistant_early_exit=3, **settings)
    assert out.assisted is not None
    assert len(set(out.assisted.accepted.tolist())) > 1
    np.testing.assert_array_equal(out.sequences, plain.sequences)
    for actual, expected in (
        (out.hidden_states, plain.hidden_states),
        (out.attentions, plain.attentions),
    ):
        assert len(actual) == 9
        for a, b in zip(actual[1:], expected[1:], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-4)


def real_parts(steps, held: np.ndarray, first: int) -> list[list[np.ndarray]]:
    """Rows of each step and layer, each without pads: [D] or [heads, columns].

    `first` says where the queries of the first entry begin; later ones have one query.
    """
    actual = []
    for step, layers in enumerate(steps):
        known = np.pad(held, ((0, 0), (0, step)), constant_values=True)
        rows = []
        for x in map(np.asarray, layers):
            for row, real in zip(x, np.repeat(known, len(x) // len(held), axis=0), strict=True):
                if step == 0:
                    row = row[..., first:, :] if row.ndim == 2 else row[:, first:]
                rows.append(row if row.ndim == 2 else row[..., real])
        actual.append(rows)
    return actual


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        pytest.param("gpt2", {"num_beams": 3}, marks=pytest.mark.slow),
        pytest.param("llama", {"prompt_lookup_num_tokens": 3}, marks=pytest.mark.slow),
        pytest.param("t5", {"num_beams": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"guidance_scale": 1.5}, marks=pytest.mark.slow),
        pytest.param("llama", {"dola_layers": "low"}, marks=pytest.mark.slow),
    ],
)
def test_records_of_a_conversation_are_those_of_its_new_tokens(family, fields):
    """Records are those of the same call without `past_key_values`, from the new columns on.

    Rows have different lengths; their new parts are of one.
    """
    net, settings = tiny.cached(family), {"eos_token_id": None, "pad_token_id": 0}
    settings |= fields if "guidance_scale" in fields else {}
    rows = turns(0, 2, 6)
    source = {}
    if family == "t5":
        source = dict(zip(("input_ids", "attention_mask"), padded(turns(3, 3, 5)), strict=True))
        rows = [[0, *row] for row in rows]
    names = ("input_ids", "attention_mask")
    names = tuple(f"decoder_{name}" for name in names) if family == "t5" else names

    def sides(rows):
        return dict(zip(names, padded(rows), strict=True))

    first = jaxllm.generate(
        net, **source, **sides(rows), max_new_tokens=3, return_past_key_values=True, **settings
    )
    new = first.sequences[:, -3:].tolist()
    inputs = sides([r + n + t for r, n, t in zip(rows, new, turns(5, 2, 2), strict=True)])
    settings |= {"max_new_tokens": 4, **fields, **BOTH}
    full = jaxllm.generate(net, **source, **inputs, **settings)
    out = jaxllm.generate(net, **inputs, past_key_values=first.past_key_values, **settings)
    np.testing.assert_array_equal(out.sequences, full.sequences)
    held = inputs[names[1]].astype(bool)
    read = 3  # the newest token of the first call was not read, and there are two more
    prefix = "decoder_" if family == "t5" else ""
    for name in ("hidden_states", "attentions"):
        actual, expected = getattr(out, prefix + name), getattr(full, prefix + name)
        assert actual[0][0].shape[-2] == read
        assert all(
            a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-1]
            for a, b in zip(actual[0], expected[0], strict=True)
        )
        pairs = zip(
            real_parts(actual, held, 0),
            real_parts(expected, held, held.shape[1] - read),
            strict=True,
        )
        for a, b in pairs:
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, atol=3e-5)
    if family == "t5":
        assert out.encoder_hidden_states is None
        for a, b in zip(out.cross_attentions[1:], full.cross_attentions[1:], strict=True):
            np.testing.assert_allclose(np.stack(a), np.stack(b), atol=3e-5)


@pytest.mark.ci
def test_new_parts_of_different_lengths_stand_in_front():
    net, settings = tiny.cached("llama"), {"eos_token_id": None, "pad_token_id": 0}
    rows = turns(0, 4, 2)
    first = jaxllm.generate(
        net, *padded(rows), max_new_tokens=2, return_past_key_values=True, **settings
    )
    new = first.sequences[:, -2:].tolist()
    ids, mask = padded([r + n + t for r, n, t in zip(rows, new, turns(5, 1, 4), strict=True)])
    settings |= {"max_new_tokens": 2, **BOTH}
    full = jaxllm.generate(net, ids, mask, **settings)
    out = jaxllm.generate(net, ids, mask, past_key_values=first.past_key_values, **settings)
    for x, y in zip(out.hidden_states[0], full.hidden_states[0], strict=True):
        assert x.shape[1] == 5
        np.testing.assert_allclose(x[0, :2], y[0, -2:], atol=3e-5)
        np.testing.assert_allclose(x[1], y[1, -5:], atol=3e-5)
    for x, y in zip(out.attentions[0], full.attentions[0], strict=True):
        assert x.shape[2:] == (5, ids.shape[1])
        np.testing.assert_allclose(x[0, :, :2], y[0, :, -2:], atol=3e-5)
        np.testing.assert_allclose(x[1], y[1, :, -5:], atol=3e-5)
