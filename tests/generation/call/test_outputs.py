"""Hidden states and attentions of generate(): the reference's, and those of a forward pass."""

from __future__ import annotations

import conformance_runs
import jax
import numpy as np
import pytest
import tiny

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.generation.strategies import records

BOTH = {"output_hidden_states": True, "output_attentions": True}


def same(found, expected) -> None:
    """`expected` has shape, sum and abs_sum in place of every array."""
    assert len(found) == len(expected)
    for part, reference in zip(found, expected, strict=True):
        if isinstance(reference, list):
            same(part, reference)
            continue
        x = np.asarray(part, np.float64)
        assert list(x.shape) == reference["shape"]
        np.testing.assert_allclose(x.sum(), reference["sum"], atol=2e-3, rtol=1e-5)
        np.testing.assert_allclose(np.abs(x).sum(), reference["abs_sum"], atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("case", ["s-outputs-hidden-attn", "s-outputs-hidden-attn-t5"])
@pytest.mark.usefixtures("highest_precision")
def test_conformance(case):
    case = conformance_runs.cases()[case]
    seq2seq = conformance_runs.model(case["model"]).is_encoder_decoder
    out = conformance_runs.run(case, **BOTH)
    assert out.sequences.tolist() == case["expected"]["sequences"]
    prefix = "decoder_" if seq2seq else ""
    names = {"hidden_states": f"{prefix}hidden_states", "attentions": f"{prefix}attentions"}
    checked = 0
    for name, expected in case["expected"].items():
        if "hidden_states" in name or "attentions" in name:
            same(getattr(out, names.get(name, name)), expected)
            checked += 1
    assert checked == (4 if seq2seq else 2)


def ragged() -> tuple[np.ndarray, np.ndarray]:
    ids, mask = tiny.ids(2, 5), np.ones((2, 5), int)
    mask[1, :2] = 0
    return ids, mask


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equal_a_forward_pass_over_the_result(family):
    """Row 1 is padded on the left; every real column is what one uncached call computes."""
    model, (ids, mask) = tiny.cached(family), ragged()
    out = jaxllm.generate(model, ids, mask, max_new_tokens=4, eos_token_id=None, **BOTH)
    if family == "t5":
        full = model(ids, mask, out.sequences[:, :-1], **BOTH)
        assert out.hidden_states is None
        assert out.attentions is None
        pairs = [
            (out.decoder_hidden_states, full.decoder_hidden_states),
            (out.decoder_attentions, full.decoder_attentions),
            (out.cross_attentions, full.cross_attentions),
        ]
        for name in ("encoder_hidden_states", "encoder_attentions"):
            for a, b in zip(getattr(out, name), getattr(full, name), strict=True):
                np.testing.assert_allclose(a[0], b[0], atol=2e-5)
        valid = np.ones((2, 1), bool)
    else:
        valid = mask.astype(bool)
        seen = np.concatenate([mask, np.ones((2, 3), int)], axis=1)
        full = model(out.sequences[:, :-1], seen, **BOTH)
        assert out.decoder_hidden_states is None
        pairs = [(out.hidden_states, full.hidden_states), (out.attentions, full.attentions)]
    for steps, layers in pairs:
        assert len(steps) == 4
        first = 0
        for step in steps:
            assert len(step) == len(layers)
            for actual, expected in zip(step, layers, strict=True):
                width = actual.shape[-2]
                expected = np.asarray(expected)[..., first : first + width, : actual.shape[-1]]
                real = valid if first == 0 else np.ones((2, 1), bool)
                real = real[:, None, :, None] if actual.ndim == 4 else real[..., None]
                np.testing.assert_allclose(actual * real, expected * real, atol=2e-5)
            first += width


@pytest.mark.ci
def test_samples_of_a_row_have_rows_of_their_own():
    model, (ids, mask) = tiny.cached("gpt2"), ragged()
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 3, "key": 0}
    out = jaxllm.generate(model, ids, mask, eos_token_id=None, **settings, **BOTH)
    assert out.hidden_states is not None
    assert [[x.shape for x in step] for step in out.hidden_states] == [
        [(6, 5, 32)] * 3,
        [(6, 1, 32)] * 3,
        [(6, 1, 32)] * 3,
    ]
    assert [[x.shape for x in step] for step in out.attentions] == [
        [(6, 4, 5, 5)] * 2,
        [(6, 4, 1, 6)] * 2,
        [(6, 4, 1, 7)] * 2,
    ]
    np.testing.assert_array_equal(out.hidden_states[0][2][0], out.hidden_states[0][2][2])


@pytest.mark.ci
def test_one_of_the_two_and_neither():
    model, (ids, mask) = tiny.cached("llama"), ragged()
    out = jaxllm.generate(model, ids, mask, max_new_tokens=2)
    assert out.hidden_states is None
    assert out.attentions is None
    out = jaxllm.generate(model, ids, mask, max_new_tokens=2, output_attentions=True)
    assert out.hidden_states is None
    assert out.attentions is not None


@pytest.mark.ci
def test_inside_the_callers_jit():
    model, (ids, mask) = tiny.cached("t5"), ragged()
    settings = {"max_new_tokens": 3, "eos_token_id": None, **BOTH}
    inside = jax.jit(lambda ids: jaxllm.generate(model, ids, mask, **settings))(ids)
    outside = jaxllm.generate(model, ids, mask, **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), inside, outside)


@pytest.mark.ci
def test_dola_keeps_what_was_asked_for():
    """DoLa reads hidden states for itself at every step; they are not returned for that."""
    model, (ids, mask) = tiny.cached("llama"), ragged()
    settings = {"max_new_tokens": 3, "eos_token_id": None, "dola_layers": [0]}
    out = jaxllm.generate(model, ids, mask, output_attentions=True, **settings)
    assert out.hidden_states is None
    assert [len(step) for step in out.attentions] == [2, 2, 2]


def test_huge_records_are_refused(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 10**5)
    with pytest.raises(InputError, match=r"buffers would take [0-9,]+ bytes, more than 100,000"):
        jaxllm.generate(tiny.cached("llama"), tiny.ids(), max_new_tokens=40, **BOTH)


@pytest.mark.ci
def test_stream_gives_tokens_alone():
    with pytest.raises(InputError, match="output_attentions: stream"):
        jaxllm.stream(tiny.cached("llama"), tiny.ids(), output_attentions=True)
