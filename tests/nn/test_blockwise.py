"""Attention without an array of queries x keys: blocks of queries, kernels for TPUs and GPUs, and
cuDNN."""

from __future__ import annotations

import re
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from devices import on_devices
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxllm.cache.attention_view import SequenceMask, make_view
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import UnsupportedError
from jaxllm.models.build_options import Options
from jaxllm.nn.attention import (
    GPU_KERNELS,
    QUERY_BLOCK,
    Attention,
    ColumnBias,
    Scores,
    attend,
    implementation_for,
    warn_of_blockwise,
)
from jaxllm.nn.linear import Linear
from jaxllm.nn.platform import flash
from jaxllm.nn.platform.flash import flash_applies
from jaxllm.nn.positions import RelativeBias
from jaxllm.training.losses import loss_for

B, T, N, K, H = 4, 300, 4, 2, 8


def arrays():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((B, T, N, H)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, B, T, K, H)), jnp.float32)
    mask = np.ones((B, T), bool)
    mask[0, :50] = mask[1, -40:] = False  # pads left and right
    mask[2, 100:130] = False  # and inside
    mask[3] = False  # a row without tokens
    return q, k, v, jnp.asarray(mask)


def layer(implementation, **options):
    """An attention layer of which only the attention itself is used."""
    options = {"heads": N, "kv_heads": K, "head_dim": H, "scores": Scores(0.5), **options}
    unused = Linear(1, 1, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    return Attention(*[unused] * 4, implementation=implementation, **options)


def output_and_gradients(attention, q, k, v, **options):
    def run(q, k, v, bias):
        eager = {"scores": attention.scores, "head_mask": None}
        kv = attention.kv_of_sequence(k, v)
        return attention._attend_sequence(q, kv, options["mask"], bias, eager, None)

    def eager(q, k, v, bias):
        bias = None if bias is None else bias.array()
        kv, visible = KV.from_sequence(k, v), options["mask"].array()
        return attend(q, kv, visible=visible, bias=bias, scores=Scores(0.5))

    arguments = (q, k, v, options.get("bias"))
    way = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    rows = options.get("rows", jnp.ones(q.shape[:2], bool))[..., None, None]
    results = []
    for function in (run, eager):

        def scalar(*arguments, function=function):
            out = jnp.where(rows, function(*arguments), 0)
            return jnp.vdot(out, way), out

        grad = jax.grad(scalar, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)
        gradients, out = jax.jit(grad)(*arguments)
        floats = [g for g in jax.tree.leaves(gradients) if g.dtype == jnp.float32]
        results.append([out, *floats])
    return results


def check(results, rtol=2e-5):
    for actual, expected in zip(*results, strict=True):
        scale = float(jnp.abs(expected).max())
        assert scale > 0.1
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize(("implementation", "axes"), [("splash", 4), ("triton", 3), ("eager", 3)])
def test_only_a_tpu_keeps_rows_and_heads_apart(implementation, axes):
    _, k, v, _ = arrays()
    assert layer(implementation).kv_of_sequence(k, v).k.ndim == axes


@pytest.mark.ci
@pytest.mark.parametrize("masked", ["causal", "window", "packed", "bias"])
def test_blocks_of_queries_equal_eager(masked):
    q, k, v, mask = arrays()
    segments = jnp.asarray(np.arange(T) // 70 + 1) * mask if masked == "packed" else None
    view = make_view(mask, segments=segments, causal=masked != "bias")
    bias = None
    if masked == "window":
        view = view.for_layer(60)
    if masked == "bias":
        table = RelativeBias(
            8,
            16,
            N,
            bidirectional=True,
            std=1.0,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
        bias = ColumnBias(table, view.query_columns, view.key_columns)
    assert T > QUERY_BLOCK
    for implementation in ("blockwise", "triton"):  # float32, which the kernel does not take
        results = output_and_gradients(layer(implementation), q, k, v, mask=view.visible, bias=bias)
        check(results)
        assert len(results[0]) == (5 if bias is not None else 4)
        if masked != "bias":  # the first pads of a row on the left see nothing
            assert (np.asarray(results[0][0])[0, :50] == 0).all()


@pytest.mark.parametrize(
    ("implementation", "length", "loops"),
    [("triton", 2, 0), ("cudnn", 2, 0), ("triton", 3, 1), ("splash", 2, 1), ("blockwise", 2, 1)],
)
def test_only_a_gpu_runs_two_blocks_of_queries_without_a_loop(implementation, length, loops):
    q = jnp.zeros((1, length * QUERY_BLOCK, N, 8))  # float32, which the kernels do not take
    mask = make_view(jnp.ones(q.shape[:2], bool)).visible

    def run(q):
        options = {"mask": mask, "bias": None, "key": None, "eager": {"scores": Scores(0.5)}}
        options["eager"] |= {"head_mask": None}
        return layer(implementation)._attend_sequence(q, KV.from_sequence(q, q), **options)

    assert jax.jit(run).lower(q).as_text().count("stablehlo.while") == loops


@pytest.mark.ci
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["splash", "triton", "cudnn"])
def test_the_kernels_equal_eager(kernel, packed, monkeypatch, highest_precision):
    """Interpreted, with grouped heads, pads on all sides and a length that fills no tile. In place
    of cuDNN, XLA computes what cuDNN is asked for."""
    q, k, v, mask = arrays()
    segments = jnp.asarray(np.arange(T) // 70 + 1) * mask if packed else None
    visible = make_view(mask, segments=segments).visible
    monkeypatch.setattr(flash, "INTERPRET", True)
    assert flash_applies(kernel, q, visible, Scores(0.5))
    # The kernels for GPUs give zeros at pads, which `attend` computes like tokens.
    rows = jnp.ones_like(mask) if kernel == "splash" else mask
    results = output_and_gradients(layer(kernel), q, k, v, mask=visible, rows=rows)
    check(results, rtol=1e-4)


@pytest.mark.by_default("window", "cross")
@pytest.mark.parametrize("masked", ["window", "both sides", "cross", "packed, cross"])
def test_masks_that_only_cudnn_takes_equal_eager(masked, monkeypatch, highest_precision):
    q, k, v, mask = arrays()
    visible, rows = make_view(mask, causal=False).visible, jnp.ones_like(mask)
    if masked == "window":
        visible, rows = make_view(mask).for_layer(60).visible, mask
    if "cross" in masked:
        segments = jnp.asarray(np.arange(T) // 70 + 1) * mask
        parts = {"query_segments": segments[:, :200], "key_segments": segments}
        visible = SequenceMask(mask, **(parts if "packed" in masked else {}))
        q, rows = q[:, :200], rows[:, :200]
    monkeypatch.setattr(flash, "INTERPRET", True)
    assert flash_applies("cudnn", q, visible, Scores(0.5))
    assert not flash_applies("triton", q, visible, Scores(0.5))
    check(output_and_gradients(layer("cudnn"), q, k, v, mask=visible, rows=rows))


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_the_kernels_for_gpus_give_zeros_at_pads(kernel, monkeypatch, highest_precision):
    monkeypatch.setattr(flash, "INTERPRET", True)
    q, k, v, mask = arrays()
    visible, kv = make_view(mask).visible, KV.from_sequence(k, v)
    out = flash.attend_flash(kernel, q, kv, mask=visible, scores=Scores(0.5))
    assert bool((out[~mask] == 0).all() & (out[mask] != 0).all())


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from jaxllm.cache.attention_view import make_view
from jaxllm.cache.kv_cache import KV
from jaxllm.nn.attention import Scores
from jaxllm.nn.platform import flash
from jaxllm.parallel.sharding import make_mesh, use_mesh

flash.INTERPRET = True
q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 128, 4, 8)), jnp.float32)
mask = jnp.asarray(np.arange(128) >= np.array([[0], [9], [60], [128]]))

def run(q, k, v):
    mask_parts, kv = make_view(mask).visible, KV.from_sequence(k, v, head_axis=True)
    return flash.attend_flash("cudnn", q, kv, mask=mask_parts, scores=Scores(0.5))

alone = jax.jit(run)(q, k, v)
with use_mesh(make_mesh(fsdp=2, tensor=2)):
    there = jax.jit(run)(q, k, v)
assert there.addressable_shards[0].data.shape == (2, 128, 2, 8)
np.testing.assert_allclose(there, alone, atol=1e-6)
"""


@pytest.mark.ci
def test_rows_and_heads_of_cudnn_on_a_mesh():
    on_devices(ON_A_MESH, devices=4)


def test_masks_and_scores_that_the_kernels_lack_are_computed_by_blocks():
    view = make_view(jnp.ones((1, T), bool))
    q = jnp.zeros((1, T, N, 16), jnp.bfloat16)
    plain = Scores(0.5)
    both_sides = make_view(jnp.ones((1, T), bool), causal=False)
    packed = make_view(jnp.ones((1, T), bool), segments=jnp.ones((1, T), jnp.int32))
    for kernel in ("splash", "triton", "cudnn"):
        only_cudnn = kernel == "cudnn"
        assert flash_applies(kernel, q, view.for_layer(T).visible, plain)
        assert flash_applies(kernel, q, view.for_layer(T - 1).visible, plain) == only_cudnn
        assert flash_applies(kernel, q, packed.visible, plain)
        assert not flash_applies(kernel, q, packed.for_layer(T - 1).visible, plain)
        assert not flash_applies(kernel, q[:, :64], view.visible, plain)
        assert not flash_applies(kernel, q.astype(jnp.float32), view.visible, plain)
        assert flash_applies(kernel, q, both_sides.visible, plain) == only_cudnn
        assert not flash_applies(kernel, q, both_sides.for_layer(T - 1).visible, plain)
    capped, wide = Scores(0.5, softcap=30.0), jnp.zeros((1, T, N, 512), jnp.bfloat16)
    assert flash_applies("splash", q, view.visible, capped)
    for kernel in GPU_KERNELS:
        assert not flash_applies(kernel, q, view.visible, capped)
        assert not flash_applies(kernel, wide, view.visible, plain)
    assert not flash_applies("cudnn", q[..., :12], view.visible, plain)


@pytest.mark.parametrize(("capability", "widest"), [("8.9", 128), ("9.0", 256), ("10.0", 256)])
def test_heads_that_cudnn_takes(capability, widest, monkeypatch):
    gpu = SimpleNamespace(compute_capability=capability)  # no GPU runs the tests
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    mask = make_view(jnp.ones((1, T), bool)).visible
    for width in (128, 136, 256, 264):
        q = jnp.zeros((1, T, N, width), jnp.bfloat16)
        assert flash_applies("cudnn", q, mask, Scores(0.5)) == (width <= widest)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("gpt2"))
def test_dropout_is_drawn_for_each_block(family):
    rates = {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_positions": T}
    if family != "gpt2":
        rates = {"dropout_rate": 0.5} if family == "t5" else {"attention_dropout": 0.5}
        rates |= {} if family == "t5" else {"max_position_embeddings": T}
    make = partial(tiny.make, family, **rates)
    model = make(options=Options(attn_implementation="blockwise"))
    ids = np.random.default_rng(0).integers(3, 50, (1, T)).astype(np.int32)
    batch = {"input_ids": ids, "labels": ids}
    run = jax.jit(lambda key: loss_for(model)(model, batch, key).loss)
    losses = [float(run(jax.random.key(seed))) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ["blockwise", "splash", "triton", "cudnn"])
@pytest.mark.parametrize("family", tiny.mostly("llama"))
def test_a_training_step_holds_no_array_of_tokens_x_tokens(family, implementation, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    platform = "cuda" if implementation in GPU_KERNELS else "tpu"
    length = 531
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    h100 = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    sizes = {"gpt2": {"n_positions": length}, "llama": {"max_position_embeddings": length}}
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def squares(implementation):
        options = Options(jnp.bfloat16, jnp.bfloat16, attn_implementation=implementation)
        model = tiny.make(family, options=options, **sizes.get(family, {}))
        gradient = jax.jit(jax.grad(lambda model, batch: loss_for(model)(model, batch).loss))
        with jax.sharding.use_abstract_mesh(h100):  # Triton's lowering asks for the kind of GPU
            batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
            traced = gradient.trace(model, batch)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = {"__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("}
        assert all((call in text) == (implementation == "cudnn") for call in calls)
        # cuDNN gets whole tiles of 128 columns.
        assert implementation != "cudnn" or "tensor<2x640x" in text
        squares = (rf"tensor<(?:\d+x)*{n}x(?:\d+x)*{n}x\w+>" for n in (length, 640))
        return [found for square in squares for found in re.findall(square, text)]

    assert squares(implementation) == []
    if implementation == "splash":
        assert squares("eager") != []


def test_auto_is_resolved_by_platform():
    assert implementation_for("auto", "cpu") == "eager"
    assert implementation_for("auto", "tpu") == "splash"
    assert implementation_for("auto", "gpu") == "triton"
    assert implementation_for("xla", "tpu") == "xla"
    with pytest.raises(UnsupportedError, match="cudnn is a kernel for GPUs, and this runs on cpu"):
        implementation_for("cudnn", "cpu")
    with pytest.raises(UnsupportedError, match="splash is a kernel for TPUs, and this runs on cpu"):
        implementation_for("splash", "cpu")
    with pytest.raises(UnsupportedError, match="triton is a kernel for GPUs, and this runs on tpu"):
        implementation_for("triton", "tpu")


@pytest.mark.parametrize(("capability", "expected"), [("7.5", "blockwise"), ("9.0", "triton")])
def test_auto_is_resolved_by_the_generation_of_the_gpu(capability, expected, monkeypatch):
    gpu = SimpleNamespace(compute_capability=capability)  # no GPU runs the tests
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert implementation_for("auto", "gpu") == expected
    assert implementation_for("auto", "cuda") == "triton"  # a planned device, not this machine's


def remove_kernel(kernel, monkeypatch):
    """Makes the import of JAX's module of a kernel fail."""
    for name in list(sys.modules):  # as before the first import
        if name.startswith(flash.MODULES[kernel]):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, flash.MODULES[kernel], None)


@pytest.mark.parametrize(
    ("kernel", "platform"), [("triton", "gpu"), ("triton", "cuda"), ("splash", "tpu")]
)
def test_auto_is_blockwise_where_jax_lacks_the_kernels(kernel, platform, monkeypatch):
    remove_kernel(kernel, monkeypatch)
    warn_of_blockwise.cache_clear()
    missing = "triton or cudnn" if kernel == "triton" else "splash"
    with pytest.warns(
        UserWarning, match=f"auto is blockwise, since JAX .* does not have {missing}$"
    ):
        assert implementation_for("auto", platform) == "blockwise"
    assert implementation_for("auto", platform) == "blockwise"  # without a second warning
    with pytest.raises(UnsupportedError, match=f"{kernel} needs jax.* choose auto or blockwise"):
        implementation_for(kernel, platform)
    q, k, v, mask = arrays()
    visible, kv = make_view(mask).visible, KV.from_sequence(k, v)
    with pytest.raises(UnsupportedError, match="install an earlier version of JAX"):
        flash.attend_flash(kernel, q, kv, mask=visible, scores=Scores(0.5))
    for other in ("eager", "blockwise", "xla"):
        assert implementation_for(other, platform) == other


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_auto_is_cudnn_where_jax_lacks_triton(platform, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"cudnn needs cuDNN.* choose auto or blockwise"):
        implementation_for("cudnn", platform)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    assert implementation_for("cudnn", platform) == "cudnn"
    assert implementation_for("auto", platform) == "triton"
    remove_kernel("triton", monkeypatch)
    assert implementation_for("auto", platform) == "cudnn"


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_t5_by_blocks_equal_eager(remat):
    """Relative biases of encoder and decoder, cross-attention and padding, over two blocks."""
    ids = np.random.default_rng(0).integers(3, 50, (2, T)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[0, 200:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 1, ids, -100)}

    def gradients(implementation, remat=False):
        options = Options(attn_implementation=implementation, remat=remat)
        model = tiny.make("t5", num_layers=1, num_decoder_layers=1, options=options)
        return jax.jit(jax.grad(lambda model: loss_for(model)(model, batch).loss))(model)

    expected = jax.tree.leaves(gradients("eager"))
    scale = max(float(jnp.abs(x).max()) for x in expected)
    for actual, leaf in zip(jax.tree.leaves(gradients("blockwise", remat)), expected, strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-5 * scale)
