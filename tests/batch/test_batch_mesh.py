"""The engine on meshes: tokens of one device, one program a bucket, and no weight that moves."""

from __future__ import annotations

import pytest
from devices import on_devices

COMMON = """
import contextlib, re, sys
import jax, numpy as np, pytest
import tiny
from compiling import compiled_as_users
from batch_tools import differences, uneven_rows
from jaxllm import BatchGenerator
from jaxllm.common.compiling import CompileClock
from jaxllm.batch import slot_pool as pools
from jaxllm.parallel.sharding import use_mesh
from jaxllm.parallel.placement import put_tree
from tiny_meshes import make, mesh
"""

EVERY_FAMILY = """
DEPTH = {"llama": ["num_hidden_layers"], "gpt2": ["n_layer"]}
rows = uneven_rows(24, prompts=16, new=12)
for i, row in enumerate(rows):
    if i % 3:
        row |= {"do_sample": True, "temperature": 0.5 + i / 40, "top_k": i, "seed": i}
for family in sys.argv[1:]:
    model = make(family, **{k: 1 for k in DEPTH.get(family, ["num_layers", "num_decoder_layers"])})
    engine = BatchGenerator(put_tree(model, mesh(data=2, fsdp=2, tensor=2)), slots=6)
    with contextlib.closing(CompileClock()) as clock:
        outputs = engine.generate(rows)
        assert clock.programs == len(engine.counts.program_calls), engine.counts.program_calls
    assert engine.memory[0].slots == 8  # a multiple of data * fsdp
    assert outputs == BatchGenerator(model, slots=6).generate(rows), family
print("done")
"""

BEAMS = EVERY_FAMILY.replace(
    'row |= {"do_sample": True, "temperature": 0.5 + i / 40, "top_k": i, "seed": i}',
    'row |= {"length_penalty": i / 8, "num_return_sequences": 2}',
).replace("slots=6", "slots=6, num_beams=3")

CHUNKS = """
from jaxllm.nn.platform import decoding
decoding.CHUNK_SIZE["cpu"], decoding.NARROW_CHUNK_SIZE["cpu"] = 16, 8
rows = uneven_rows(80, prompts=40, new=6)
model = make("llama", num_hidden_layers=1)
engine = BatchGenerator(put_tree(model, mesh(data=2, fsdp=2, tensor=2)), slots=64)
assert engine.generate(rows) == BatchGenerator(model, slots=64).generate(rows)
# Each device reads prompts of its own, in wide chunks too.
read = sorted(name for name in engine.counts.program_calls if name.startswith("prefill"))
assert read == ["prefill 4 x 16 of 4 x 64", "prefill 4 x 8 of 4 x 64"], read
print("done")
"""

OTHER_ROWS = """
model = make("llama", num_hidden_layers=1)
there = put_tree(model, mesh(data=2, tensor=2))
rows = [{"input_ids": [5, 6, 7 + i], "max_new_tokens": 4 + i, "num_beams": 2} for i in range(3)]
rows += [{"input_ids": [5] * 9, "max_new_tokens": 3, "num_return_sequences": 3, "do_sample": True}]
rows += [{"input_ids": [999]}]
rows += [{"input_ids": [5, 6], "max_new_tokens": 8, "repetition_penalty": 1.5}]
outputs = BatchGenerator(there).generate(rows)
assert outputs == BatchGenerator(model).generate(rows)
assert [output.error_kind for output in outputs] == [None] * 4 + ["InputError", None]

# Bytes of each device, and as many slots as fit on each.
rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 20 + i} for i in range(12)]
here, engine = BatchGenerator(model, slots=8), BatchGenerator(there, slots=8)
want = here.generate(rows)
assert engine.generate(rows) == want
(found,), (whole,) = engine.memory, here.memory
assert found.weights == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(there))
assert found.cache < 0.3 * whole.cache  # half the slots, half the heads
assert "on each of 4" in str(found)
tight = BatchGenerator(there, slots=8, memory=found.weights + found.cache + found.activations // 2)
assert tight.generate(rows) == want
assert tight.memory[0].slots in (2, 4, 6)
none = BatchGenerator(there, slots=8, memory=found.weights + 1).generate(rows)
assert all("shorten the prompt" in output.error for output in none)

# A device that has less than it says.
program = pools.decode_slots
def refuse(model, slots, *arguments, **options):
    if slots.count > 2:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
    return program(model, slots, *arguments, **options)
pools.decode_slots = refuse
assert engine.generate(rows) == want
assert engine.counts.halvings == 2
print("done")
"""

# Decoding under tensor parallelism: one sum after each attention and each MLP, one for the
# embedding (GPT-2's is added to that of its first layer), and the logits. No weight moves. Under
# data parallelism: how many rows are live. Reading prompts into slots moves nothing of the cache.
COLLECTIVES = """
texts = {}
def spy(name):
    program = getattr(pools, name)
    def call(*arguments, **options):
        if name not in texts:
            texts[name] = compiled_as_users(program.lower(*arguments, **options)).as_text()
        return program(*arguments, **options)
    setattr(pools, name, call)

for name in ("decode_slots", "prefill_slots"):
    spy(name)

def collectives(model):
    texts.clear()
    BatchGenerator(model, slots=8).generate(rows)
    return [sorted(f"{kind} {shape}" for shape, kind in re.findall(
        r"= (\\S+?)\\{?[\\d,]*\\}? (all-\\w+|reduce-scatter|collective-permute)(?:-start)?\\(",
        texts[name])) for name in ("decode_slots", "prefill_slots")]

DEPTH = {"llama": ["num_hidden_layers"], "gpt2": ["n_layer"]}
rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 5}] * 8
for family in sys.argv[1:]:
    model = make(family, **{k: 1 for k in DEPTH.get(family, ["num_layers", "num_decoder_layers"])})
    expected = ["all-gather f32[8,4]", "all-gather s32[8,4]"]  # each device's best token
    expected += ["all-reduce f32[8,1,32]"] * (family != "gpt2")
    expected += ["all-reduce f32[8,32]"] * (3 if family == "t5" else 2)
    decoding, reading = collectives(put_tree(model, mesh(tensor=4)))
    assert decoding == expected, (family, decoding)
    decoding, reading = collectives(put_tree(model, mesh(data=4)))
    assert set(decoding) == {"all-reduce s32[]"}, (family, decoding)
    assert reading == [], (family, reading)  # one prompt, read on every device
print("done")
"""

BEAM_COLLECTIVES = (
    COLLECTIVES.split("DEPTH")[0]
    + """
rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 5, "num_beams": 3}] * 8
model = make("llama", num_hidden_layers=1)
decoding, reading = collectives(put_tree(model, mesh(tensor=4)))
assert decoding == ["all-gather f32[8,3,64]", *["all-reduce f32[24,32]"] * 2,
                    "all-reduce f32[8,3,32]"], decoding
decoding, reading = collectives(put_tree(model, mesh(data=4)))
assert set(decoding) == {"all-reduce s32[]"}, decoding
assert reading == [], reading
print("done")
"""
)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("code", "families"),
    [
        pytest.param(EVERY_FAMILY, ["llama"], id="llama"),
        pytest.param(CHUNKS, [], id="chunks"),
        pytest.param(EVERY_FAMILY, ["gpt2", "t5"], id="others", marks=pytest.mark.slow),
        pytest.param(BEAMS, ["llama", "gpt2", "t5"], id="beams", marks=pytest.mark.slow),
        pytest.param(OTHER_ROWS, [], id="rows", marks=pytest.mark.slow),
        pytest.param(COLLECTIVES, ["llama"], id="llama collectives", marks=pytest.mark.slow),
        pytest.param(BEAM_COLLECTIVES, [], id="beam collectives", marks=pytest.mark.slow),
        pytest.param(COLLECTIVES, ["gpt2", "t5"], id="others collectives", marks=pytest.mark.slow),
    ],
)
def test_on_eight_devices(code, families):
    assert on_devices(COMMON + code, *families) == "done\n"
