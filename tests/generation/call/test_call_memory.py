"""Counts that no memory holds are refused before anything is compiled."""

from __future__ import annotations

import pytest
from compiling import program_count
from conformance_runs import model

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.generation.loop import prefill_program

SAMPLING = {"do_sample": True, "key": 0}
HUGE = {
    "results": ({"num_return_sequences": 10**9} | SAMPLING, "num_return_sequences: 1000000000"),
    "results beyond int32": (
        {"num_return_sequences": 10**18} | SAMPLING,
        "`num_return_sequences` must be an integer of at most 2147483647",
    ),
    "beams": ({"num_beams": 10**9}, "num_beams: 1000000000 for each of 2 prompts"),
    "new tokens": ({"max_new_tokens": 10**9}, "max_length: 1000000003 tokens"),
    "slots": ({"max_cache_len": 10**9}, "max_cache_len: 1000000000 slots"),
    "all together": (
        {"num_return_sequences": 2**18, "max_new_tokens": 2**18} | SAMPLING,
        "of memory: lower num_return_sequences",
    ),
}


@pytest.mark.in_ci("s_llama-all together", "s_t5_gated-all together", "s_t5_gated-results")
@pytest.mark.parametrize(("settings", "message"), HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("name", ["s_llama", "s_t5_gated"])
def test_huge_counts_are_refused_before_compiling(name, settings, message):
    if name == "s_t5_gated":
        message = message.replace("1000000003", "1000000001")  # a decoder's prompt of one token
    before = program_count(prefill_program)
    with pytest.raises(InputError, match=message):
        jaxllm.generate(model(name), [[5, 6, 7], [8, 9, 1]], **settings)
    assert program_count(prefill_program) == before
