"""`prefill_chunk_size`: the same tokens and logits as one prefill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
from generation_tools import NO_EOS

import jaxllm
from jaxllm.common.errors import UnsupportedError

IDS = np.random.default_rng(0).integers(3, 50, (3, 14)).astype(np.int32)
MASK = np.ones_like(IDS)
MASK[0, :9] = 0  # pads on the left: the first chunk of this row is empty
MASK[1, 5:] = 0  # on the right: its prompt ends in an early chunk
MASK[2, 3:6] = 0


def scores(model: Any, **fields: Any) -> Any:
    fields = {"max_new_tokens": 5, "do_sample": False, **NO_EOS, **fields}
    out = jaxllm.generate(
        model, IDS, MASK, output_logits=True, return_dict_in_generate=True, **fields
    )
    return out.sequences, np.stack(out.logits)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("size", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_chunks_equal_one_prefill(family: str, size: int) -> None:
    model = tiny.cached(family)
    tokens, logits = scores(model)
    in_chunks, chunk_logits = scores(model, prefill_chunk_size=size)
    np.testing.assert_array_equal(in_chunks, tokens)
    assert np.std(logits) > 0.5
    np.testing.assert_allclose(chunk_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"do_sample": True, "num_return_sequences": 2, "key": 3},
        {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 4}},
    ],
)
def test_strategies(fields: dict[str, Any]) -> None:
    model = tiny.cached("llama")
    common = {"max_new_tokens": 6, **fields}
    full = jaxllm.generate(model, IDS, MASK, **common).sequences
    chunked = jaxllm.generate(model, IDS, MASK, prefill_chunk_size=4, **common).sequences
    np.testing.assert_array_equal(chunked, full)


@pytest.mark.ci
def test_what_cannot_be_chunked_raises() -> None:
    def refuse(model: Any, reason: str, **fields: Any) -> None:
        with pytest.raises(UnsupportedError, match=f"chunk_size cannot be combined with {reason}"):
            jaxllm.generate(model, IDS, MASK, max_new_tokens=2, prefill_chunk_size=4, **fields)

    refuse(tiny.cached("t5"), "an encoder-decoder")
    llama = tiny.cached("llama")
    refuse(llama, "DoLa", dola_layers="high")
    refuse(llama, "a quantized cache", cache_implementation="quantized")
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    refuse(tiny.make("llama", rope_scaling=dynamic), "RoPE that depends on the length")
    # From a file it has no effect there.
    config = jaxllm.GenerationConfig.from_dict({"prefill_chunk_size": 4})
    jaxllm.generate(tiny.cached("t5"), IDS, MASK, config, max_new_tokens=2)
