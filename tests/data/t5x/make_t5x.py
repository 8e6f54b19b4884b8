"""Makes small checkpoints with T5X's own models and checkpointers, and the logits of these models.

    PYTHONPATH=T5X python make_t5x.py

T5X is a copy of github.com/google-research/t5x at cc342d419ec3e3e9c4bf1df33c82330cafdc1e16, whose
`t5x/__init__.py` is empty, since it imports the whole trainer. Made with jax 0.10.2, flax 0.12.8,
orbax-checkpoint 0.12.8, tensorstore 0.1.86, tensorflow-cpu 2.21.0, clu 0.0.12 and gin-config.
An empty module stands for jestimator, an optimizer that nothing here uses.

Each checkpoint is an archive with a folder as a T5X run leaves it (`checkpoint_7` with its
arrays), and the config.json that a user puts beside it. `logits.npz` holds the inputs, and the
logits of T5X's network, which do not depend on how a checkpoint is stored (`_inline`, `_orbax`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.modules["jestimator"] = mock.MagicMock()

import flax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import traverse_util  # noqa: E402
from t5x import checkpoints, optimizers, partitioning, train_state  # noqa: E402
from t5x.examples.scalable_t5 import network as scalable  # noqa: E402
from t5x.examples.t5 import network as plain  # noqa: E402

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 256,
    "emb_dim": 8,
    "num_heads": 4,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "head_dim": 5,
    "mlp_dim": 14,
}
GATED = {"mlp_activations": ("gelu", "linear")}
CONFIG = {
    "vocab_size": 256,
    "d_model": 8,
    "d_kv": 5,
    "d_ff": 14,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 32,
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
V1_0 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "feed_forward_proj": "relu",
}
V1_1 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
UMT5 = {
    "architectures": ["UMT5ForConditionalGeneration"],
    "model_type": "umt5",
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
MT5_TIED = {
    "architectures": ["MT5ForConditionalGeneration"],
    "model_type": "mt5",
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": True,
    "transformers_version": "5.0.0",
}
TIED = {"logits_via_embedding": True}
# Name: T5X's module, the fields of its config, Hugging Face's config.json, how it is saved.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "t5_1_0": (plain, TIED, V1_0, {"adam": True}),
    "t5_1_1": (plain, GATED, V1_1, {"partitions": 2}),
    "t5_1_1_bfloat16": (plain, GATED, V1_1, {"dtype": jnp.bfloat16}),
    "mt5_tied": (plain, GATED | TIED, MT5_TIED, {"inline": True}),
    "umt5_scanned": (scalable, GATED, UMT5, {"partitions": 2}),
    "umt5_layers": (scalable, GATED | {"scan_layers": False}, UMT5, {}),
    "t5_1_1_inline": (plain, GATED, V1_1, {"inline": True}),
    "t5_1_1_orbax": (plain, GATED, V1_1, {"orbax": True}),
    "umt5_scanned_orbax": (scalable, GATED, UMT5, {"orbax": True, "partitions": 2}),
}


class Inline(partitioning.PjitPartitioner):
    """A partitioner without axes, with which the checkpointer writes arrays into the msgpack."""

    def get_mesh_axes(self, state: Any) -> Any:
        axes = super().get_mesh_axes(state)
        return jax.tree.map(
            lambda _: None, axes, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )


def random_params(shapes: Any, scan_axis: int | None) -> Any:
    """Parameters with which every layer matters, and logits have a standard deviation above 1."""
    rng = np.random.default_rng(0)

    def make(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape)
        if path[-1] == "scale":
            values = 1 + 0.3 * values
        elif path[-1] == "embedding":
            values *= 1.7
        elif path[-1] == "kernel":
            stacked = scan_axis is not None and path[0] == path[1]
            sizes = np.delete(shape, scan_axis) if stacked else shape
            inputs = np.prod(sizes[:-1]) if path[-2] == "out" else sizes[0]
            values *= (2 if path[-2] == "logits_dense" else 1) * inputs**-0.5
        return values.astype(np.float32)

    flat = traverse_util.flatten_dict(shapes)
    return traverse_util.unflatten_dict({path: make(path, x.shape) for path, x in flat.items()})


def write(name: str, folder: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Writes one checkpoint into the folder, and returns the logits."""
    module, fields, config, saved = CASES[name]
    model = module.Transformer(module.T5Config(**SIZES, dropout_rate=0.0, **fields))
    arguments = (inputs["input_ids"], inputs["decoder_input_ids"], inputs["targets"])
    options = {"enable_dropout": False}
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *arguments, **options))
    variables = flax.core.unfreeze(variables)
    scanned = module is scalable and fields.get("scan_layers", True)
    params = random_params(variables["params"], 1 if scanned else None)
    dtype = saved.get("dtype", np.float32)
    stored = jax.tree.map(lambda x: np.asarray(x.astype(dtype), np.float32), params)
    logits = model.apply({"params": stored}, *arguments, **options)

    optimizer = optimizers.adam(0.1) if saved.get("adam") else optimizers.sgd(0.1)
    variables["params"] = stored
    state = train_state.FlaxOptimTrainState.create(optimizer, flax.core.freeze(variables))
    state = state.replace_step(jnp.asarray(7))
    make = Inline if saved.get("inline") else partitioning.PjitPartitioner
    partitioner = make(num_partitions=saved.get("partitions", 1))
    axes = partitioner.get_mesh_axes(state)
    if saved.get("orbax") or saved.get("partitions"):
        with jax.sharding.set_mesh(partitioner.mesh):
            state = partitioner.move_params_to_devices(state, axes)
    if saved.get("orbax"):
        manager = checkpoints.OrbaxCheckpointManagerInterface(str(folder), state, partitioner)
        manager.save(state)
        manager.wait_until_finished()
        manager.close()
    else:
        checkpoints.Checkpointer(state, partitioner, str(folder), save_dtype=dtype).save(state)
    (folder / "config.json").write_text(json.dumps(CONFIG | config, indent=2) + "\n")
    return np.asarray(logits, np.float32)


def main() -> None:
    rng = np.random.default_rng(1)
    targets = rng.integers(2, 256, (2, 12))
    inputs = {
        "input_ids": rng.integers(2, 256, (2, 40)),
        "decoder_input_ids": np.concatenate([np.zeros((2, 1), int), targets[:, :-1]], axis=1),
        "targets": targets,
    }
    inputs["input_ids"][1, 33:] = 0  # padding
    logits: dict[str, np.ndarray] = {}
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            folder.mkdir()
            logits[name] = write(name, folder, inputs)
            archive = shutil.make_archive(str(HERE / name), "gztar", temporary, name)
            print(name, logits[name].std(), Path(archive).stat().st_size)
    same = {name: name.removesuffix("_orbax").removesuffix("_inline") for name in logits}
    for name, base in same.items():
        np.testing.assert_array_equal(logits[name], logits[base])
    np.savez_compressed(HERE / "logits.npz", **inputs, **{x: logits[x] for x in same.values()})


if __name__ == "__main__":
    main()
