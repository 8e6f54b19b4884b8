"""Several documents in a row give what each gives alone."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_runs import model

from jaxllm.common.errors import InputError

LENGTHS = (5, 1, 7, 3)
SLOW = pytest.mark.slow
DECODER_ONLY = (
    "s_llama",
    "s_gpt2",
    pytest.param("s_llama_yarn", marks=SLOW),
    pytest.param("s_gpt2_scaled", marks=SLOW),
)


def documents(vocab: int, lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]


def pack(parts: list[np.ndarray], width: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One row, and which document each of its tokens belongs to."""
    row, segments = np.full(width, fill, np.int32), np.zeros(width, np.int32)
    index = 0
    for number, part in enumerate(parts, start=1):
        row[index : index + len(part)], segments[index : index + len(part)] = part, number
        index += len(part)
    return row[None], segments[None]


def one_a_row(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same documents, one in each row, and their mask."""
    mask = np.arange(max(map(len, parts))) < np.array([len(part) for part in parts])[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(parts)
    return ids, mask


@pytest.mark.ci
@pytest.mark.parametrize("name", DECODER_ONLY)
def test_packed_documents_of_a_decoder(name):
    m = model(name)
    parts = documents(m.config.vocab_size)
    ids, segments = pack(parts, 20)
    out = m(ids, segment_ids=segments, labels=np.where(segments > 0, ids, -100))
    rows, mask = one_a_row(parts)
    single = m(rows, mask, labels=np.where(mask, rows, -100))
    np.testing.assert_allclose(
        np.asarray(out.logits)[segments > 0], np.asarray(single.logits)[mask], atol=2e-4
    )
    np.testing.assert_allclose(float(out.loss), float(single.loss), rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_t5", pytest.param("s_t5_gated", marks=SLOW)])
def test_packed_pairs_of_an_encoder_decoder(name):
    m = model(name)
    sources = documents(m.config.vocab_size)
    targets = documents(m.config.vocab_size, (4, 6, 2, 3), seed=1)
    ids, segments = pack(sources, 20)
    labels, decoder_segments = pack(targets, 18, fill=-100)
    out = m(ids, segment_ids=segments, decoder_segment_ids=decoder_segments, labels=labels)
    rows, mask = one_a_row(sources)
    target_rows, target_mask = one_a_row(targets)
    single = m(rows, mask, labels=np.where(target_mask, target_rows, -100))
    np.testing.assert_allclose(
        np.asarray(out.logits)[decoder_segments > 0],
        np.asarray(single.logits)[target_mask],
        atol=2e-4,
    )
    np.testing.assert_allclose(float(out.loss), float(single.loss), rtol=1e-5)


@pytest.mark.ci
def test_segments_change_the_result():
    m = model("s_llama")
    ids, segments = pack(documents(m.config.vocab_size), 16)
    together = m(ids, attention_mask=segments > 0).logits
    assert np.abs(np.asarray(together - m(ids, segment_ids=segments).logits))[0, 6:].max() > 0.1


@pytest.mark.ci
def test_a_packed_row_may_be_longer_than_the_positions():
    m = model("s_gpt2")
    limit = m.config.max_positions
    parts = documents(m.config.vocab_size, (limit, limit, 4))
    ids, segments = pack(parts, 2 * limit + 4)
    single = m(parts[1][None]).logits[0]
    packed = m(ids, segment_ids=segments).logits[0, limit : 2 * limit]
    np.testing.assert_allclose(packed, single, atol=5e-4)
    with pytest.raises(InputError, match=f"{limit + 1} tokens"):
        m(np.ones((1, limit + 1), np.int32), segment_ids=np.ones((1, limit + 1), np.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"segment_ids": [[1, 2, 1, 0]]}, r"segment_ids\[0\]: .*runs \[1, 2, 1\]"),
        ({"segment_ids": [[-1, 1, 1, 0]]}, "number above 0"),
        ({"segment_ids": [[1, 1, 1]]}, "expected shape"),
        ({"segment_ids": [[1.0, 1, 1, 1]]}, "expected integers"),
        ({"segment_ids": [[1] * 4], "attention_mask": [[1] * 4]}, "attention_mask: has no effect"),
    ],
)
def test_bad_segments(call, message):
    with pytest.raises(InputError, match=message):
        model("s_llama")(np.ones((1, 4), np.int32), **call)


@pytest.mark.ci
def test_segments_of_one_side_only():
    m = model("s_t5")
    ids = np.ones((1, 4), np.int32)
    with pytest.raises(InputError, match="give both or none"):
        m(ids, segment_ids=ids, labels=ids)


def test_a_cache_cannot_hold_packed_rows():
    m = model("s_llama")
    ids = np.ones((1, 4), np.int32)
    with pytest.raises(InputError, match="cache: packed rows"):
        m(ids, segment_ids=ids, cache=m.init_cache(1, 8))
