"""Generation on meshes: the tokens of one device, and only the collectives that it takes."""

from __future__ import annotations

import pytest
from devices import on_devices, on_processes

COMMON = """
import re, sys
import jax, numpy as np, pytest
import jaxllm, tiny
from compiling import compiled_as_users
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import UnsupportedError
from jaxllm.generation import loop
from jaxllm.generation.generate import prepare_call
from jaxllm.parallel.sharding import make_mesh, use_mesh
from jaxllm.parallel.placement import put_tree
from tiny_meshes import make, mesh

ids = tiny.ids(8)
mask = np.ones_like(ids)
for row in range(8):
    mask[row, : row % 4] = 0  # padded on the left, each row otherwise

def tokens(model, **fields):
    inputs = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 12}
    return np.asarray(jaxllm.generate(model, **inputs | fields).sequences)

SETTINGS = {
    "greedy": {},
    "sample": dict(do_sample=True, temperature=1.5, key=3, num_return_sequences=2),
    "beam": dict(num_beams=3, length_penalty=0.7),
}
"""

EVERY_FAMILY = """
DEPTH = {"llama": ["num_hidden_layers"], "gpt2": ["n_layer"]}
for family in tiny.FAMILIES:
    model = make(family, **{k: 1 for k in DEPTH.get(family, ["num_layers", "num_decoder_layers"])})
    there = put_tree(model, mesh(data=2, fsdp=2, tensor=2))
    np.testing.assert_array_equal(tokens(there), tokens(model), err_msg=family)
print("done")
"""

OTHER_CALLS = """
model = make("llama", num_hidden_layers=1)
there = put_tree(model, mesh(data=2, tensor=2))
for name in ("sample", "beam"):
    np.testing.assert_array_equal(
        tokens(there, **SETTINGS[name]), tokens(model, **SETTINGS[name]), err_msg=name)
call = dict(attention_mask=mask, eos_token_id=[2, *range(3, 40, 4)], pad_token_id=9)
for fields in SETTINGS.values():
    here, apart = (
        jaxllm.generate(m, ids, max_new_tokens=12, **call, **fields) for m in (model, there))
    assert len(set(here.lengths)) > 1
    np.testing.assert_array_equal(apart.lengths, here.lengths)
    assert apart.finish_reason_names() == here.finish_reason_names()
# Rows that cannot be split.
three = dict(input_ids=ids[:3], attention_mask=mask[:3])
np.testing.assert_array_equal(tokens(there, **three), tokens(model, **three))

whole = tokens(there, max_new_tokens=10)
clock = CompileClock()
fields = dict(attention_mask=mask, pad_token_id=0, max_new_tokens=10, chunk_size=4)
chunks = np.concatenate(list(jaxllm.stream(there, ids, **fields)), axis=1)
np.testing.assert_array_equal(chunks, whole[:, ids.shape[1] :])
tokens(there, max_new_tokens=9)
assert clock.programs == 0, clock.programs

pairs = [[3, 4, 5], [6, 7], [8]], [[9, 10], [11], [12, 13, 14]]
found, expected = jaxllm.score(there, *pairs), jaxllm.score(model, *pairs)
np.testing.assert_allclose(found.log_likelihoods, expected.log_likelihoods, atol=1e-5)

with pytest.raises(UnsupportedError, match="cannot run in programs of several devices"):
    tokens(there, prefix_allowed_tokens_fn=lambda row, ids: [5, 6])
print("done")
"""

# The loop of tensor parallelism: one sum after each attention and each MLP, one for the embedding
# (GPT-2's is added to that of its first layer), and each device's best token: no weight moves. That
# of data parallelism: only whether any row is unfinished.
COLLECTIVES = """
def collectives(model, **fields):
    fields = {"max_new_tokens": 12, "pad_token_id": 0, **fields}
    call = prepare_call(model, ids, mask, None, None, fields)
    bare = call.model
    with use_mesh(call.mesh):
        state = loop.prefill_program(
            call.strategy, bare, call.inputs, call.settings,
            capacity=call.capacity,
            new_token_bucket=call.request.new_token_bucket)
        compiled = compiled_as_users(loop.decode_program.lower(
            call.strategy, bare, state, call.settings, np.int32(20)))
    found = re.findall(
        r"= (\\S+?)\\{?[\\d,]*\\}? (all-\\w+|reduce-scatter|collective-permute)(?:-start)?\\(",
        compiled.as_text())
    return sorted(f"{kind} {shape}" for shape, kind in found), state.cache

LAYERS = 2
for family, sums in (("llama", 2), ("gpt2", 2), ("t5", 3)):
    model = make(family)
    embedding = family != "gpt2"
    expected = ["all-gather f32[8,4]", "all-gather s32[8,4]"]  # each device's best token
    expected += ["all-reduce f32[8,1,32]"] * embedding
    expected += ["all-reduce f32[8,32]"] * (sums * LAYERS)  # products of two matrices
    found, cache = collectives(put_tree(model, mesh(tensor=4)))
    assert found == expected, (family, found)
    for kv in cache.layers:  # a quarter of the heads on each device
        assert kv.k.shape[:2] == (8, 4) and kv.k.addressable_shards[0].data.shape[:2] == (8, 1)
found, cache = collectives(put_tree(model, mesh(data=4)))
assert found == ["all-reduce pred[]"], found
rows = cache.layers[0].k.shape[0]
assert cache.layers[0].k.addressable_shards[0].data.shape[0] == rows // 4
# Without a mesh there is nothing of all this.
assert collectives(model)[0] == []
print("done")
"""

ALL_COMBINATIONS = """
for sizes in (dict(data=8), dict(fsdp=4), dict(tensor=2), dict(tensor=4, data=2), dict()):
    for family in tiny.FAMILIES:
        model = make(family)
        there = put_tree(model, mesh(**sizes))
        for name, fields in SETTINGS.items():
            np.testing.assert_array_equal(
                tokens(there, **fields), tokens(model, **fields), err_msg=f"{family} {name}")
    jax.clear_caches()
print("done")
"""

ALL_STRATEGIES = """
model = make("llama")
there = put_tree(model, mesh(data=2, tensor=2))
draft = make("llama", num_hidden_layers=1)
WINDOW = dict(cache_implementation="sliding_window", cache_config={"sliding_window": 8})
for fields in (
    dict(cache_implementation="quantized", cache_config={"nbits": 8}),
    WINDOW,
    dict(num_beams=3, **WINDOW),
    dict(penalty_alpha=0.6, top_k=3),
    dict(assistant_model=draft),
    dict(prompt_lookup_num_tokens=3),
    dict(assistant_early_exit=1),
    dict(num_beams=3, do_sample=True, key=1),
    dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    dict(num_beams=3, force_words_ids=[[7, 8]]),
    dict(guidance_scale=1.5),
    dict(dola_layers=[0, 1]),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=2, do_sample=True, top_p=0.9, key=2),
    dict(max_time=1000.0),
):
    np.testing.assert_array_equal(tokens(there, **fields), tokens(model, **fields), err_msg=fields)

for kind, guided in (({}, {}), (WINDOW, dict(guidance_scale=1.5))):
    kept = {}
    for name, one in (("there", there), ("here", model)):
        first = jaxllm.generate(one, ids, max_new_tokens=4, return_past_key_values=True, **kind)
        text = np.concatenate([first.sequences, tiny.ids(8, 3, seed=9)], axis=1)
        kept[name] = jaxllm.generate(
            one, text, max_new_tokens=4, past_key_values=first.past_key_values, **guided).sequences
    np.testing.assert_array_equal(kept["there"], kept["here"])

print("done")
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "code", [EVERY_FAMILY, OTHER_CALLS, COLLECTIVES], ids=["families", "calls", "collectives"]
)
def test_on_eight_devices(code):
    assert on_devices(COMMON + code) == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("code", [ALL_COMBINATIONS, ALL_STRATEGIES], ids=["meshes", "strategies"])
def test_everything_on_eight_devices(code):
    assert on_devices(COMMON + code) == "done\n"


TWO_PROCESSES = """
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, index)
model = make("llama", num_hidden_layers=1)
across = put_tree(model, make_mesh(data=1, tensor=4))
np.testing.assert_array_equal(tokens(across), tokens(model))
there = put_tree(model, make_mesh(data=2, tensor=2))
for name, fields in SETTINGS.items():
    np.testing.assert_array_equal(
        tokens(there, **fields), tokens(model, **fields), err_msg=name)
fields = dict(attention_mask=mask, pad_token_id=0, max_new_tokens=12, chunk_size=5)
chunks = np.concatenate(list(jaxllm.stream(there, ids, **fields)), axis=1)
np.testing.assert_array_equal(chunks, tokens(model)[:, ids.shape[1] :])
pairs = [[3, 4, 5], [6, 7], [8]], [[9, 10], [11], [12, 13, 14]]
found, expected = jaxllm.score(there, *pairs), jaxllm.score(model, *pairs)
np.testing.assert_allclose(found.log_likelihoods, expected.log_likelihoods, atol=1e-5)
first = jaxllm.generate(there, ids, max_new_tokens=4, return_past_key_values=True)
text = np.concatenate([first.sequences, tiny.ids(8, 3, seed=9)], axis=1)
past = first.past_key_values
again = jaxllm.generate(there, text, max_new_tokens=4, past_key_values=past).sequences
np.testing.assert_array_equal(again, jaxllm.generate(there, text, max_new_tokens=4).sequences)
with pytest.raises(UnsupportedError, match="max_time: the clocks of several processes differ"):
    tokens(there, max_time=10.0)
# Without a key all processes draw the same.
print(tokens(there, do_sample=True, temperature=3.0).tolist())
"""


@pytest.mark.slow
def test_two_processes():
    first, second = on_processes(COMMON + TWO_PROCESSES)
    assert first == second != ""
