"""`AsyncEngine` on a mesh: the tokens of one device, with grammars, cancellations and prefixes."""

from __future__ import annotations

import pytest
from devices import on_devices

CODE = """
import asyncio, contextlib
import tiny
from batch_tools import uneven_rows
from small_tokenizers import small_tokenizer
from tiny_meshes import mesh
from jaxllm.serve import AsyncEngine
from jaxllm.common.compiling import CompileClock
from jaxllm.generation import grammar
from jaxllm.parallel.placement import put_tree

tokenizer = small_tokenizer("llama.model")
sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
model = tiny.make("llama", num_hidden_layers=1, **sizes)
pattern = grammar.regex(" ?[0-9]{3}[a-f]{2}", tokenizer)
rows = uneven_rows(12, prompts=16, new=12, vocab=400)
for i, row in enumerate(rows):
    if i > 5:
        row["input_ids"] = [*range(5, 75), *row["input_ids"]]  # a system prompt
    if i % 3:
        row |= {"do_sample": True, "temperature": 0.5 + i / 40, "top_k": 5 + i, "seed": i}

async def answers(model):
    async with AsyncEngine(model, tokenizer, slots=6, context=128, prefill_chunk_size=32) as engine:
        with contextlib.closing(CompileClock()) as clock:
            first = engine.submit({**rows[0], "max_new_tokens": 40, "eos_token_id": None})
            await anext(first)
            first.cancel()
            outputs = await asyncio.gather(
                *(engine.generate(row, grammar=pattern if i % 4 == 1 else None)
                  for i, row in enumerate(rows))
            )
            assert clock.programs == 0, clock.programs
            assert engine.prefix_counts.hits == 4
        return engine.slots, [output.output_ids for output in outputs]

slots, there = asyncio.run(answers(put_tree(model, mesh(data=2, fsdp=2, tensor=2))))
assert slots == 8  # a multiple of data * fsdp
assert there == asyncio.run(answers(model))[1]
print("done")
"""


@pytest.mark.slow
def test_a_mesh_gives_the_tokens_of_one_device():
    assert on_devices(CODE) == "done\n"
