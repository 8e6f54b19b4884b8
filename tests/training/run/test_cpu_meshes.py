"""A run on virtual CPU devices, with XLA's own number of threads, as a user starts it.

XLA queues 32 programs for each device of a CPU. With more, collectives wait for threads that the
queue has taken, so each part of the run here starts a program for many more arrays than that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from devices import environment
from tiny_runs import MODELS, write_recipe

LIMIT = 300  # seconds; XLA itself ends a process that hangs after 40
RUN = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jaxllm.common.compiling import enable_compile_cache
from jaxllm.checkpoint.orbax.leaves import digests
from jaxllm.models.lora import merge_lora
from jaxllm.models.quantize import quantize_model
from jaxllm.models.weights import parameters
from jaxllm.parallel.placement import mesh_of, put_tree
from jaxllm.parallel.sharding import make_mesh
from jaxllm.training.run import setup
from jaxllm.training.run.recipe import read_recipe
from jaxllm.training.run.run import train

steps_made = []
make = setup.make_train_step
def remember(*arguments, **options):
    step = make(*arguments, **options)
    steps_made.append(step.program)
    return step
setup.make_train_step = remember

recipe, programs, sizes = sys.argv[1:]
enable_compile_cache(programs)
mesh = {f"mesh.{axis}": size for axis, size in json.loads(sizes).items()}
for steps in (2, 3):
    result = train(read_recipe(Path(recipe), mesh | {"max_steps": steps}), resume=steps > 2)
    # The state has the same shardings before and after a step.
    assert sum(program._cache_size() for program in steps_made) == 1
    steps_made.clear()
assert result.step == 3
assert mesh_of(result.model).size == len(jax.devices())

merged = merge_lora(result.model)
moved = put_tree(merged, make_mesh(data=1, fsdp=1, tensor=2, devices=jax.devices()[:2]))
assert digests(parameters(moved)) == digests(parameters(merged))
matrices = parameters(quantize_model(merged, "int8"))
assert len(digests(matrices)) > len(parameters(merged))
on_one = merge_lora(jax.tree.map(lambda x: jax.device_put(np.asarray(x)), result.model))
for path, x in parameters(on_one).items():
    np.testing.assert_allclose(x, parameters(merged)[path], atol=1e-6)
print("done")
"""


def recipe_of(folder: Path) -> Path:
    """A LoRA with DoRA on each of the 14 matrices of two layers; answers are generated too."""
    config = MODELS["llama"] | {"num_hidden_layers": 2, "num_key_value_heads": 4}
    data = {
        "path": str(folder / "rows.jsonl"),
        "format": "prompt_completion",
        "max_length": 32,
        "prompt_field": "source",
        "completion_field": "target",
        "bucket": None,  # one shape of all batches
    }
    return write_recipe(
        folder,
        model={"config": config, "tokenizer": "bytes"},
        lora={"rank": 4, "targets": ["all-linear"], "dora": True},
        data=data,
        eval_data=dict(data),
        evaluation={
            "metrics": ["exact_match"],
            "rows": 8,
            "samples": 2,
            "fields": {"max_new_tokens": 2},
        },
        batch_size=8,
        checkpoints={"every": 1},
    )


@pytest.mark.by_default("data=2, fsdp=4")
@pytest.mark.parametrize(
    "sizes", [{"data": 1, "fsdp": 2}, {"data": 2, "fsdp": 4}], ids=["fsdp=2", "data=2, fsdp=4"]
)
def test_a_run_saves_and_resumes(sizes: dict[str, int], tmp_path: Path) -> None:
    variables = environment(sizes["data"] * sizes["fsdp"])
    del variables["PJRT_NPROC"]  # more threads than users have
    arguments = [recipe_of(tmp_path), tmp_path / "programs", json.dumps(sizes)]
    command = [sys.executable, "-W", "error", "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
