"""Windows of layers: uncached, cached, packed and padded, each as a band in the mask."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from generation_tools import banded

from jaxllm.cache.attention_view import make_view
from jaxllm.models.build_options import Options

pytestmark = pytest.mark.usefixtures("highest_precision")

WINDOW = 3
LONG = {"max_position_embeddings": 512}


@pytest.fixture
def windowed():
    model = tiny.make("llama")
    for block in model.backbone.stack.blocks:
        block.attn.window = WINDOW
    return model


@pytest.mark.ci
def test_a_window_is_a_band_of_the_mask(windowed):
    tokens = tiny.ids(1, 10)
    expected = banded(tiny.cached("llama"), tokens[0].tolist(), WINDOW)
    np.testing.assert_allclose(tiny.logits(windowed, tokens)[0], expected, atol=1e-5)
    assert np.abs(tiny.logits(tiny.cached("llama"), tokens)[0] - expected).max() > 1e-2


@pytest.mark.ci
def test_windows_count_real_tokens_cached_and_uncached(windowed):
    """Pads on the left, on the right and between: every row is as the row alone."""
    tokens, mask = tiny.ids(3, 12), np.ones((3, 12), bool)
    mask[0, :4] = mask[1, 7:] = mask[2, 4:8] = False
    single = [tiny.logits(windowed, tokens[i : i + 1, mask[i]])[0] for i in range(3)]
    full = tiny.logits(windowed, tokens, attention_mask=mask)
    cache, parts = windowed.init_cache(3, 12), []
    for columns in (slice(0, 5), slice(5, 6), slice(6, 12)):
        out = windowed(tokens[:, columns], mask[:, columns], cache=cache)
        cache = out.cache
        parts.append(out.logits)
    for i, expected in enumerate(single):
        np.testing.assert_allclose(full[i, mask[i]], expected, atol=2e-5)
        np.testing.assert_allclose(np.hstack(parts)[i, mask[i]], expected, atol=2e-5)


@pytest.mark.ci
def test_documents_of_a_packed_row_have_windows_of_their_own(windowed):
    tokens, segments = tiny.ids(1, 11), np.repeat([1, 2, 0], [4, 6, 1])[None]
    packed = tiny.logits(windowed, tokens, segment_ids=segments)
    for number in (1, 2):
        own = segments[0] == number
        single = tiny.logits(windowed, tokens[:, own])
        np.testing.assert_allclose(packed[0, own], single[0], atol=2e-5)


def test_a_window_on_both_sides():
    """Without a causal mask: its own token and two on either side; padding does not count."""
    mask = np.array([[1, 1, 0, 1, 1, 1, 0, 1]], bool)
    view = make_view(mask, causal=False)
    assert (np.asarray(view.for_layer(None).visible.array()) == mask[:, None, None]).all()
    visible = np.asarray(view.for_layer(2).visible.array())[0, 0][mask[0]][:, mask[0]]
    distance = np.arange(6)[:, None] - np.arange(6)
    np.testing.assert_array_equal(visible, np.abs(distance) <= 2)


@pytest.mark.ci
def test_an_encoder_with_a_window():
    """In blocks of queries as in one piece, and a row as the row alone."""
    models = [
        tiny.make("bart", options=Options.on("gpu", attn_implementation=name), **LONG)
        for name in ("eager", "blockwise")
    ]
    tokens, mask = tiny.ids(2, 300), np.ones((2, 300), bool)
    mask[1, 280:] = False
    results = []
    for model in models:
        for block in model.encoder.blocks:
            block.attn.window = 5
        results.append(model.encode(tokens, mask).x)
        alone = model.encode(tokens[1:, :280]).x
        np.testing.assert_allclose(results[-1][1:, :280], alone, atol=1e-4)
    np.testing.assert_allclose(*results, atol=1e-4)
    assert np.abs(results[0] - tiny.make("bart", **LONG).encode(tokens, mask).x).max() > 1e-2
