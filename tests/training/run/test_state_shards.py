"""On a mesh no device ever holds more than its shards of a training run's state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from devices import on_devices, on_processes

MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512},
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64},
    "tie_word_embeddings": False,
}
CODE = """
import collections, gc, json, math, sys, threading, time
from pathlib import Path
import jax

def held():
    '''Bytes of the live arrays of each device of this process.'''
    total = collections.Counter()
    for x in jax.live_arrays():
        # Not by `addressable_shards`, which makes an array of each shard.
        size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for device in x.sharding.addressable_devices:
            total[device.id] += size
    return total

class Watch(threading.Thread):
    '''The most that any device holds.'''
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.ends = 0, threading.Event()
    def run(self):
        while not self.ends.wait(0.01):
            self.most = max([self.most, *held().values()])

def train(overrides, resume):
    '''Bytes of a run's state; the most that a device held before the steps, and after each.'''
    from jaxllm.training.run import run as runs
    from jaxllm.training.run.recipe import read_recipe
    gc.collect()  # the run before
    found, set_up, watch = {"after": []}, runs.set_up, Watch()
    def noted(*arguments):
        setup = set_up(*arguments)
        watch.ends.set()
        watch.most = max([watch.most, *held().values()])
        state = {n: getattr(setup.state, n) for n in ("params", "opt_state", "ema", "frozen")}
        found["state"] = sum(x.nbytes for x in jax.tree.leaves(state))
        memory = memory_of_step(setup)
        found["step"] = memory.argument_size_in_bytes
        # The step writes its results where the trained state was.
        frozen = sum(x.nbytes for x in setup.state.frozen.values())
        assert memory.alias_size_in_bytes > 0.99 / 8 * (found["state"] - frozen), memory
        return setup
    def stop():
        found["after"].append(max(held().values()))
    runs.set_up = noted
    watch.start()
    recipe = read_recipe(Path(folder) / "recipe.json", overrides)
    result = runs.train(recipe, resume=resume, quiet=True, stop=stop)
    runs.set_up = set_up
    return found | {"most": watch.most}, result

def memory_of_step(setup):
    ids = jax.ShapeDtypeStruct((8, 48), "int32", sharding=batch_sharding(setup.mesh))
    with use_mesh(setup.mesh):
        traced = setup.step.trace(setup.state, {"input_ids": ids, "labels": ids})
    return traced.lower().compile().memory_analysis()

import jaxllm
from jaxllm.parallel.sharding import batch_sharding, use_mesh
for overrides, resume in json.loads(changes):
    found, result = train(overrides, resume)
    print(json.dumps(found))
    if resume:
        jaxllm.save_hf(Path(folder) / "saved", result.model, result.tokenizer)
    del result
"""
ONE = "import sys\nfolder, changes = sys.argv[1:]\n" + CODE
SEVERAL = (
    """
import sys
address, index, folder, changes = sys.argv[1:]
import jax
jax.distributed.initialize(address, 2, int(index))
"""
    + CODE
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"text": f"row {number} " * 5} for number in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "model": {"config": MODEL, "tokenizer": "bytes"},
        "data": {"path": str(tmp_path / "rows.jsonl"), "format": "text", "max_length": 48},
        **{"batch_size": 8, "max_steps": 3, "mesh": {"data": 1, "fsdp": 8}},
        "optimizer": {"learning_rate": 1e-3},
        "output_dir": str(tmp_path / "new"),
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    return tmp_path


def check(output: str) -> None:
    lines = output.splitlines()
    assert lines
    for line in lines:
        found = json.loads(line)
        assert found["state"] > 15e6
        assert len(found["after"]) >= 2
        for name in ("most", "step", "after"):
            most = np.max(found[name])
            assert most * (1.001 if name == "after" else 1.2) / found["state"] >= 1 / 8, found
            assert most <= 1.2 / 8 * found["state"], found


def runs(folder: Path) -> str:
    """A new model, and goes on; the saved model, trained whole with an average, and with LoRA."""
    loaded = {"model.config": None, "model.path": str(folder / "saved"), "model.tokenizer": None}
    average = {**loaded, "ema_decay": 0.9, "output_dir": str(folder / "average")}
    lora = {**loaded, "lora": {"rank": 16}, "output_dir": str(folder / "lora")}
    changes = [({}, False), ({"max_steps": 5}, True), (average, False), (lora, False)]
    return json.dumps(changes)


@pytest.mark.ci
def test_no_device_holds_more_than_its_shards(folder: Path) -> None:
    check(on_devices(ONE, folder, runs(folder)))


@pytest.mark.ci
def test_nor_does_one_of_two_processes(folder: Path) -> None:
    for output in on_processes(SEVERAL, folder, runs(folder), devices=4):
        check(output)
