"""How much code sampling adds to the programs. The time to compile it varies, its size does not."""

from __future__ import annotations

import re

import pytest
from compiling import compiled_as_users
from tiny import make

from jaxllm.planning import lower

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_sampling_is_about_twice_the_code_of_greedy_search(family):
    model = make(family, vocab_size=4000)
    sizes = {}
    for name, fields in (("greedy", {"do_sample": False}), ("sampling", SAMPLING)):
        (program,) = lower(model, "decode", batch=2, prompt=12, new=16, **fields)
        sizes[name] = program.lowered.as_text().count("\n")
    assert sizes["sampling"] < 2.25 * sizes["greedy"], sizes


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_sampling_sorts_no_vocabulary(program):
    """XLA sorts whole rows for a `top_k` whose results are sliced in more than one way."""
    (lowered,) = lower(make("llama", vocab_size=4000), program, batch=2, new=16, **SAMPLING)
    text = compiled_as_users(lowered.lowered).as_text()
    assert not re.search(r" sort\(", text)
    assert text.count('custom_call_target="TopK"') == 2
