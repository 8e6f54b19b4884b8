"""Random keys: a row's samples depend on its key and id alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import model
from generation_tools import prompts

import jaxllm
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError
from jaxllm.generation.registration import REGISTERED_STRATEGIES, register_strategy
from jaxllm.generation.strategies.draws import row_keys
from jaxllm.generation.strategies.sample import Sample


@pytest.mark.ci
def test_every_form_of_key():
    fields = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "top_k": 0}
    forms = [3, np.int64(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3)]
    runs = [jaxllm.generate(model("s_llama"), [[5, 6]], key=k, **fields).sequences for k in forms]
    for other in runs[1:]:
        np.testing.assert_array_equal(other, runs[0])
    under_jit = jax.jit(
        lambda key: jaxllm.generate(model("s_llama"), [[5, 6]], key=key, **fields).sequences
    )
    np.testing.assert_array_equal(under_jit(jax.random.key(3)), runs[0])
    np.testing.assert_array_equal(under_jit(jnp.int32(3)), runs[0])


@pytest.mark.parametrize("seed", [-1, 2**32, np.int64(2**40)])
def test_a_seed_of_more_than_32_bits_is_refused(seed):
    """JAX drops the higher ones: the seeds 7 and 2**32 + 7 would be one."""
    with pytest.raises(InputError, match=r"key: a seed is from 0 to 2\*\*32 - 1, found"):
        jaxllm.generate(model("s_llama"), [[5, 6]], key=seed, do_sample=True, max_new_tokens=2)


@pytest.mark.by_default("4")
@pytest.mark.parametrize("key", [None, 4])
def test_keys_of_greedy_search_compile_nothing(key):
    clock = CompileClock()
    try:
        unused = row_keys(key, None, 3, 2, sampling=False, under_jit=False)
    finally:
        clock.close()
    assert len(unused) == 3 * 2
    assert clock.programs == 0


def test_sampling_inside_jit_needs_a_key():
    _, ids, _ = prompts("s_llama")
    fields = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 0, "do_sample": True}
    call = jax.jit(lambda net, ids: jaxllm.generate(net, ids, **fields))
    with pytest.raises(InputError, match="key"):
        call(model("s_llama"), ids)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["s_llama", pytest.param("s_gpt2", marks=pytest.mark.slow), "s_t5_gated"]
)
def test_a_rows_sample_depends_on_its_key_and_id_only(name):
    net, fields = model(name), {"do_sample": True, "max_new_tokens": 10, "eos_token_id": None}
    rows, ids, mask = prompts(name)
    batch = jaxllm.generate(net, ids, mask, key=7, **fields).sequences[:, -10:]
    for i, row in enumerate(rows):
        single = jaxllm.generate(net, row[None], key=7, row_ids=[i], **fields).sequences[0, -10:]
        np.testing.assert_array_equal(single, batch[i])
    other = jaxllm.generate(net, ids, mask, key=8, **fields).sequences[:, -10:]
    assert (other != batch).any()


@pytest.mark.ci
def test_samples_differ_by_default_and_repeat_by_key():
    _, ids, _ = prompts("s_llama", (7,))
    fields = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, "top_k": 0}
    first, second = (jaxllm.generate(model("s_llama"), ids, **fields).sequences for _ in range(2))
    assert (first != second).any()
    runs = [jaxllm.generate(model("s_llama"), ids, key=1, **fields).sequences for _ in range(2)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_llama", "s_t5_gated"])
def test_num_return_sequences(name):
    _, ids, mask = prompts(name)
    fields = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0}
    out = jaxllm.generate(model(name), ids, mask, key=2, num_return_sequences=3, **fields)
    assert out.sequences.shape[0] == 9
    one = jaxllm.generate(model(name), ids, mask, key=2, **fields).sequences
    np.testing.assert_array_equal(out.sequences[::3], one)
    assert (out.sequences[0] != out.sequences[1]).any()


@pytest.mark.by_default("1")
@pytest.mark.parametrize("beams", [1, 3])
def test_a_key_of_greedy_search_compiles_nothing(beams):
    """Programs are the same without a key, with a seed and with a key of JAX."""
    fields = {"max_new_tokens": 2, "num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    net = model("s_llama")
    expected = jaxllm.generate(net, [[5, 6]], **fields).sequences
    keys = [7, jax.random.key(7), jax.random.key_data(jax.random.key(7))]
    clock = CompileClock()
    try:
        for key in keys:
            found = jaxllm.generate(net, [[5, 6]], key=key, **fields).sequences
            assert np.array_equal(found, expected)
    finally:
        clock.close()
    assert clock.programs == 0


def test_a_registered_strategy_that_draws_uses_the_key():
    register_strategy("always_sample", lambda call: True, lambda call: Sample(sampling=True))
    try:
        fields = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
        drawn = [
            jaxllm.generate(model("s_llama"), [[5, 6]], key=key, **fields).sequences.tolist()
            for key in (3, 3, 4)
        ]
    finally:
        REGISTERED_STRATEGIES.pop("always_sample")
    assert drawn[0] == drawn[1] != drawn[2]
