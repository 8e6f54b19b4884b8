"""Files of Flax classes: arrays at any byte and in chunks, torch's names and layout, errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax_bytes import CHUNKED, MALFORMED, at_odd_byte, in_chunks, packed
from weight_files import assert_same, written

from jaxllm.checkpoint.flax_file import FlaxFile, FlaxView, torch_name
from jaxllm.checkpoint.load_parameters import on_host
from jaxllm.checkpoint.msgpack import MAX_KEY_BYTES
from jaxllm.checkpoint.safetensors import SafetensorsFile, write_safetensors
from jaxllm.checkpoint.source import Index, copy_in_blocks
from jaxllm.checkpoint.weight_files import ShardedWeights
from jaxllm.common.errors import CheckpointError

WHOLE = slice(None)
INDICES: list[Index] = [(), (slice(1, 3),), (WHOLE, slice(2, 5)), (slice(2, 3), slice(0, 1))]
EMPTY: list[Index] = [(slice(2, 2),), (WHOLE, slice(3, 3))]


def numbers(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("odd", range(5))
def test_arrays_begin_at_any_byte(tmp_path, dtype, odd):
    array = numbers(4, 6, dtype=dtype)
    path = written(tmp_path / "a.msgpack", at_odd_byte({"m": {"kernel": array}}, odd))
    with FlaxFile(path) as file:
        assert file.names() == ["m/kernel"]
        for index in INDICES + EMPTY:
            assert_same(file.read("m/kernel", index), array[index])
    with FlaxView(FlaxFile(path)) as view:
        assert view.info("m.weight").shape == (6, 4)
        for index in INDICES + EMPTY:
            assert_same(view.read("m.weight", index), array.T[index])


@pytest.mark.parametrize("name", ["kernel", "embedding"])
@pytest.mark.parametrize("elements", [1, 3, 5, 6, 7, 12, 23, 24])
@pytest.mark.parametrize("shape", [(4, 6), (24, 1), (2, 3, 4), (24,)])
def test_arrays_in_chunks(tmp_path, name, elements, shape):
    array = numbers(*shape)
    path = written(tmp_path / "a.msgpack", packed({"m": {name: in_chunks(array, elements)}}))
    with FlaxFile(path) as file:
        assert file.info(f"m/{name}").nbytes == array.nbytes
        for index in (i for i in INDICES + EMPTY if len(i) <= array.ndim):
            assert_same(file.read(f"m/{name}", index), array[index])


def test_what_is_read_from_chunks_is_not_copied_again(tmp_path):
    """The loader takes over aligned arrays of its own in C order, in torch's layout."""
    tree = {"m": {"kernel": in_chunks(numbers(4, 6), 5), "embedding": in_chunks(numbers(9, 2), 4)}}
    for leaf, array in (("kernel", numbers(4, 6).T), ("embedding", numbers(9, 2))):
        path = written(tmp_path / "a.msgpack", packed({"m": {leaf: tree["m"][leaf]}}))
        with FlaxView(FlaxFile(path)) as view:
            values = view.read("m.weight")
            assert_same(values, array)
            assert on_host(values, values.dtype) is values


def test_one_rule_for_all_names(tmp_path):
    names = {
        "shared/embedding": "shared.weight",
        "h/0/ln_1/scale": "h.0.ln_1.weight",
        "h/0/ln_1/bias": "h.0.ln_1.bias",
        "block/0/layer_norm/weight": "block.0.layer_norm.weight",
        "lm_head/kernel": "lm_head.weight",
        "final_logits_bias": "final_logits_bias",
    }
    assert {name: torch_name(name) for name in names} == names
    assert {name: torch_name(name.replace("/", ".")) for name in names} == names
    tree = {"final_logits_bias": numbers(1, 5), "norm": {"scale": numbers(5)}}
    path = written(tmp_path / "a.msgpack", packed(tree))
    with FlaxView(FlaxFile(path)) as view:  # no matrix but a kernel is turned around
        assert_same(view.read("final_logits_bias"), tree["final_logits_bias"])
        assert_same(view.read("norm.weight"), tree["norm"]["scale"])


def test_safetensors_of_a_flax_class(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"m.kernel": numbers(4, 6), "m.bias": numbers(6)}, {"format": "flax"})
    with FlaxView(SafetensorsFile(path)) as view:
        assert view.names() == ["m.bias", "m.weight"] or view.names() == ["m.weight", "m.bias"]
        assert_same(view.read("m.weight"), numbers(4, 6).T)


def shards(folder: Path, *trees: dict) -> ShardedWeights:
    """Shards and their index, which does not list empty shards."""
    weight_map = {}
    for number, tree in enumerate(trees):
        name = f"flax_model-{number:05}-of-{len(trees):05}.msgpack"
        written(folder / name, packed(tree))
        weight_map |= dict.fromkeys(FlaxFile(folder / name).names(), name)
    path = folder / "flax_model.msgpack.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return ShardedWeights(path, FlaxFile, ".msgpack")


def test_shards(tmp_path):
    written(tmp_path / "flax_model-00001-of-00009.msgpack", b"left over from an earlier save")
    first, second = {"a": {"kernel": numbers(2, 3)}}, {"a": {"bias": numbers(3)}, "b": numbers(2)}
    with FlaxView(shards(tmp_path, {}, first, second)) as view:
        assert (tmp_path / "flax_model-00000-of-00003.msgpack").read_bytes() == b"\x80"
        assert sorted(view.names()) == ["a.bias", "a.weight", "b"]
        assert_same(view.read("a.weight"), numbers(2, 3).T)


def test_shards_that_do_not_agree_with_their_index(tmp_path):
    first = {"a": {"kernel": numbers(2), "bias": numbers(2)}}
    with pytest.raises(CheckpointError, match=r"'a/kernel' is in .*00001-of.* and in .*00000-of"):
        shards(tmp_path, first, {"a": {"kernel": numbers(2)}})


@pytest.mark.parametrize("name", MALFORMED)
def test_a_damaged_file_is_refused(tmp_path, name):
    data, message = MALFORMED[name]
    path = written(tmp_path / "a.msgpack", data)
    with pytest.raises(CheckpointError, match=message) as error:
        FlaxFile(path)
    assert str(error.value).startswith(f"{path}: ")


REFUSED = {
    "a list": ([1, 2], "not a checkpoint of Flax: it holds 'list'"),
    "an array": (numbers(2), "not a checkpoint of Flax: it holds 'StoredArray'"),
    "a number": (
        {"m": {"kernel": 1.5}},
        "tensor 'm/kernel' is a value of type float, not an array",
    ),
    "a list of arrays": ({"m": [numbers(2)]}, "tensor 'm' is a value of type list"),
    "one name twice": ({"a/b": numbers(2), "a": {"b": numbers(2)}}, "'a/b': two arrays have this"),
    "kernel and weight": (
        {"a": {"kernel": numbers(2, 2), "weight": numbers(2)}},
        "'a/weight' and 'a/kernel' are both 'a.weight' in torch",
    ),
    "an axis of devices": (
        {"a": {"kernel": numbers(8, 2, 3)}},
        r"'a/kernel' has shape \[8, 2, 3\], .* 8 devices, save flax.jax_utils.unreplicate",
    ),
    "long names": (
        {k * MAX_KEY_BYTES: numbers(1) for k in "ab"}
        | {
            "c" * MAX_KEY_BYTES: {
                "d" * MAX_KEY_BYTES: dict.fromkeys(map(str, range(9000)), numbers(1))
            }
        },
        "is beyond 16777216 bytes of names",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_content_is_refused(tmp_path, name):
    value, message = REFUSED[name]
    path = written(tmp_path / "a.msgpack", packed(value))
    with pytest.raises(CheckpointError, match=message) as error:
        FlaxView(FlaxFile(path))
    assert str(error.value).startswith(f"{path}: ")


def test_a_key_that_looks_like_chunks(tmp_path):
    path = written(tmp_path / "a.msgpack", packed({CHUNKED: {}, "a": numbers(2)}))
    with pytest.raises(CheckpointError, match="the outermost value is an array in chunks without"):
        FlaxFile(path)


@pytest.mark.parametrize("shape", [(3, 5), (256, 257), (600, 300), (0, 4), (7,), (2, 3, 4)])
def test_blocks_copy_every_order_and_dtype(shape):
    values = numbers(*shape) % 1000
    for target_order, order in itertools.product("CF", "CF"):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            target = np.zeros(shape, dtype, order=target_order)
            copy_in_blocks(target, np.asarray(values, order=order))
            assert_same(target, values.astype(dtype))
