"""Rows do not see their padding, wherever it is and whatever ids it holds."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

LENGTHS, ROWS, COLUMNS = (1, 4, 9), 67, 12

pytestmark = pytest.mark.usefixtures("highest_precision")


def texts(seed: int) -> list[np.ndarray]:
    """67 rows of each length."""
    return [tiny.ids(ROWS, n, seed=seed + n) for n in LENGTHS]


def scattered(groups: list[np.ndarray], seed: int, *, holes: bool) -> tuple[np.ndarray, np.ndarray]:
    """All rows in one batch, each at columns of its own (in one piece without `holes`).

    The other columns hold random ids: the mask alone says what is real.
    """
    rng = np.random.default_rng(seed)
    ids = tiny.ids(ROWS * len(groups), COLUMNS, seed=seed)
    mask = np.zeros(ids.shape, bool)
    for row, text in enumerate(text for group in groups for text in group):
        begin = rng.integers(0, COLUMNS - len(text) + 1)
        columns = np.arange(begin, begin + len(text))
        if holes:
            columns = np.sort(rng.choice(COLUMNS, len(text), replace=False))
        ids[row, columns], mask[row, columns] = text, True
    return ids, mask


def rows_of(logits: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    return [row[real] for row, real in zip(logits, mask, strict=True)]


def check(padded: list[np.ndarray], alone: list[np.ndarray]) -> None:
    assert len(padded) == len(alone) == ROWS * len(LENGTHS)
    scale = np.concatenate(alone).std()
    for a, b in zip(padded, alone, strict=True):
        assert np.abs(a - b).max() < 3e-5 * max(scale, 1)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_200_padded_rows_equal_themselves_alone(family):
    model, groups = tiny.cached(family), texts(0)
    single = [row for group in groups for row in tiny.logits(model, group)]
    for holes in (False, True):  # positions count real tokens, so even holes do not matter
        ids, mask = scattered(groups, seed=1, holes=holes)
        check(rows_of(tiny.logits(model, ids, attention_mask=mask), mask), single)


@pytest.mark.ci
def test_200_padded_rows_of_t5_equal_themselves_alone():
    model, sources, targets = tiny.cached("t5"), texts(0), texts(100)
    single = [
        row
        for source, target in zip(sources, targets, strict=True)
        for row in tiny.logits(model, source, decoder_input_ids=target)
    ]
    ids, mask = scattered(sources, seed=1, holes=False)
    decoder_ids, decoder_mask = scattered(targets, seed=2, holes=False)
    logits = tiny.logits(
        model,
        ids,
        attention_mask=mask,
        decoder_input_ids=decoder_ids,
        decoder_attention_mask=decoder_mask,
    )
    check(rows_of(logits, decoder_mask), single)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_left_is_right(family):
    """The same rows, all pads on one side; with bool, int and float masks."""
    model, text = tiny.cached(family), tiny.ids(2, 7)
    pad = np.full((2, 3), 49)
    left, right = np.hstack([pad, text]), np.hstack([text, pad])
    left_mask = np.arange(10)[None].repeat(2, 0) >= 3
    one, other = (
        tiny.logits(model, left, attention_mask=left_mask),
        tiny.logits(model, right, attention_mask=left_mask[:, ::-1].astype(np.float32)),
    )
    if family == "t5":  # the decoder's side is the same in both
        left_ids = np.hstack([text, pad])[:, ::-1]
        one, other = (
            tiny.logits(model, ids, attention_mask=mask, decoder_input_ids=left_ids)
            for ids, mask in ((left, left_mask), (right, left_mask[:, ::-1].astype(np.int64)))
        )
        np.testing.assert_allclose(one, other, atol=1e-5)
    else:
        np.testing.assert_allclose(one[:, 3:], other[:, :7], atol=2e-5)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_row_without_a_real_token_is_finite(family):
    model = tiny.cached(family)
    mask = np.ones((2, 9), int)
    mask[1] = 0
    logits = tiny.logits(model, attention_mask=mask)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[0], tiny.logits(model)[0], atol=2e-5)
