"""Saving on one mesh and restoring on another; digests do not depend on sharding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ON_EIGHT_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.orbax.leaves import digests

devices = np.array(jax.devices())
assert len(devices) == 8
rng = np.random.default_rng(0)
host = {
    "w": rng.standard_normal((16, 24), dtype=np.float32),
    "b": rng.standard_normal(8).astype(jnp.bfloat16),
    "odd": rng.integers(0, 9, (3, 5), np.int32),
    "step": np.int32(7),
}
key = jax.random.key(3)
line, square = Mesh(devices, "x"), Mesh(devices.reshape(2, 4), ("data", "model"))
one = SingleDeviceSharding(devices[0])

def on_line(*spec): return NamedSharding(line, P(*spec))
def on_square(*spec): return NamedSharding(square, P(*spec))

places = {
    "one": dict(w=one, b=one, odd=one, step=one, key=one),
    "other": {name: SingleDeviceSharding(devices[5]) for name in ("w", "b", "odd", "step", "key")},
    "line": dict(w=on_line("x"), b=on_line("x"), odd=on_line(), step=on_line(), key=on_line()),
    "square": dict(
        w=on_square("data", "model"), b=on_square("model"), odd=on_square(), step=on_square(),
        key=on_square(),
    ),
    "square, turned": dict(
        w=on_square(("model", "data")), b=on_square(("data", "model")), odd=on_square(None, None),
        step=on_square(), key=on_square(),
    ),
}

def place(name):
    shardings = places[name]
    state = {k: jax.device_put(x, shardings[k]) for k, x in host.items()}
    return state | {"key": jax.device_put(key, shardings["key"])}

seen = {tuple(digests({k: x for k, x in place(name).items() if k != "key"}).values())
        for name in places}
assert len(seen) == 1, seen

for source in places:
    with RunCheckpoints(f"{sys.argv[1]}/{source}", on_problem=sys.exit) as checkpoints:
        checkpoints.save(1, place(source), {"from": source})
        for name, shardings in places.items():
            target = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                place("one"), shardings,
            )
            arrays, meta, step = checkpoints.restore(target=target)
            assert meta == {"from": source}
            for k, x in host.items():
                assert arrays[k].sharding.is_equivalent_to(shardings[k], x.ndim), (k, name)
                assert arrays[k].dtype == x.dtype
                assert np.asarray(arrays[k]).tobytes() == x.tobytes(), (source, name, k)
            assert (jax.random.key_data(arrays["key"]) == jax.random.key_data(key)).all()
print("done")
"""


@pytest.mark.ci
def test_restore_onto_other_meshes(tmp_path: Path) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES, str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr
