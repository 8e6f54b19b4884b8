"""The kernel of decode steps for GPUs, in JAX's interpreter of such kernels on a CPU."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import UnsupportedError
from jaxllm.models.build_options import Options
from jaxllm.nn.attention import Scores, attend, implementation_for
from jaxllm.training import with_classifier

interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
mosaic = pytest.importorskip("jaxllm.nn.platform.mosaic")

INTERPRETER = params.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of an attention: rows, heads of the cache, heads of queries for each, queries, size of
    a head, slots; and what there is beside the queries."""

    rows: int = 2
    kv_heads: int = 1
    group: int = 1
    queries: int = 1
    size: int = 64
    slots: int = 136
    writes: bool = True
    has_bias: bool = False
    sees_earlier: bool = True
    """Queries see the new columns before their own, as a sequence; otherwise they are branches."""


CASES = {
    "grouped heads": Case(kv_heads=2, group=4),
    "branches with a bias": Case(queries=2, slots=72, has_bias=True, sees_earlier=False),
    "six tiles, more than there are buffers": Case(rows=1, slots=360),
    "wide heads": Case(rows=3, kv_heads=2, group=3, size=128, slots=200),
    "bias of each row": Case(rows=3, kv_heads=2, has_bias=True),
    "four queries of one mask, nothing new": Case(kv_heads=2, queries=4, slots=104, writes=False),
    "a sequence": Case(group=2, queries=3, slots=72),
}
IN_CI = (
    "grouped heads",
    "wide heads",
    "bias of each row",
    "four queries of one mask, nothing new",
    "a sequence",
)


def arrays_of(case: Case) -> tuple[jax.Array, KV, jax.Array, jax.Array | None, tuple | None]:
    """Arguments of `attend`, and the new columns. Row 0 sees nothing before the new columns."""
    random = np.random.default_rng(0)

    def normal(*shape: int, dtype: type = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    B, K, T, H, S = case.rows, case.kv_heads, case.queries, case.size, case.slots
    N = K * case.group
    kv = KV(normal(B * K, S, H), normal(B * K, S, H))
    first = random.integers(0, S // 4, B)
    slots = random.integers(S // 2, S - T + 1, B)
    slots[-1] = S - T
    columns = np.arange(S)
    visible = (
        (columns >= first[:, None]) & (columns < slots[:, None]) & (random.random((B, S)) < 0.8)
    )
    visible[0] &= B == 1
    visible = np.repeat(visible[:, None], T if case.writes else 1, axis=1)
    new = None
    if case.writes:
        new = (normal(B, T, K, H), normal(B, T, K, H), jnp.asarray(slots, jnp.int32))
        for t in range(T):
            for j in range(0 if case.sees_earlier else t, t + 1):
                visible[np.arange(B), t, slots + j] = True
    bias = normal(B if B > 2 else 1, N, T, S, dtype=jnp.float32) if case.has_bias else None
    return normal(B, T, N, H), kv, jnp.asarray(visible)[:, None], bias, new


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.ci) if x in IN_CI else x for x in CASES]
)
def test_the_kernel_attends_as_the_reference(name: str) -> None:
    case = CASES[name]
    q, kv, visible, bias, new = arrays_of(case)
    scale = case.size**-0.5
    out, written = mosaic.attend_step(
        q, kv, visible, bias, new, scale=scale, interpreter=INTERPRETER
    )
    expected_kv = kv if new is None else kv.write(*new)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), written, expected_kv))
    exact = [x.astype(jnp.float32) for x in (q, expected_kv.k, expected_kv.v)]
    expected = attend(exact[0], KV(*exact[1:]), visible, bias, scores=Scores(scale))
    # The output and the weights are rounded to eight bits.
    error = jnp.abs(out.astype(jnp.float32) - expected).max()
    assert error < 2**-8 * jnp.abs(expected).max()
    assert expected.std() > 0.05
    assert not interpreter.get_races().races_found


def test_columns_beyond_the_cache_are_not_written() -> None:
    q, kv, visible, _, new = arrays_of(Case(rows=1))
    beyond = (*new[:2], jnp.full((1,), 136, jnp.int32))
    _, written = mosaic.attend_step(
        q, kv, visible, None, beyond, scale=1.0, interpreter=INTERPRETER
    )
    assert (written.k == kv.k).all()
    assert (written.v == kv.v).all()


@pytest.mark.parametrize("writes", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_it_has_the_gradients_of_the_reference(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "INTERPRETER", INTERPRETER)
    q, kv, visible, _, new = arrays_of(Case(rows=1, slots=64, writes=writes))

    def plain(q: jax.Array, kv: KV, visible: jax.Array, bias: None) -> jax.Array:
        return attend(q, kv, visible, bias, scores=Scores(0.5))

    def squares(q: jax.Array, kv: KV, kernel: bool) -> jax.Array:
        if kernel:
            out, kv = mosaic.attend_or_step(plain, q, kv, new, visible, None, scale=0.5)
        else:
            kv = kv if new is None else kv.write(*new)
            out = plain(q, kv, visible, None)
        return (out.astype(jnp.float32) ** 2).sum() + kv.k.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(squares, argnums=(0, 1)), static_argnums=2)
    found, expected = (gradients(q, kv, x) for x in (True, False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(y).max() > 0.1
        # The gradient of the square has the kernel's output as its factor.
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.05, atol=0.02
        )


MODELS: dict[str, tuple[dict[str, int], int]] = {
    "llama": ({"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}, 1),
    "gpt2": ({"n_embd": 128, "n_head": 2}, 1),
    "t5": ({"d_kv": 64, "num_heads": 2}, 2),
}
"""Family -> sizes with heads of 64, and attentions of a layer."""


@pytest.mark.parametrize("family", [pytest.param(x, marks=pytest.mark.ci) for x in MODELS])
def test_models_decode_with_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a row with padding, no further from float32 than the reference in bfloat16."""
    sizes, attentions = MODELS[family]
    depth = {"gpt2": "n_layer", "t5": "num_decoder_layers"}.get(family, "num_hidden_layers")
    ids, mask = jnp.asarray(tiny.ids(2, 6)), np.ones((2, 6), bool)
    mask[0, :2] = False
    kernels = []

    def logits(attention: str, dtype: type) -> np.ndarray:
        options = Options(dtype, dtype, attn_implementation=attention)
        model = tiny.make(family, options=options, **sizes, **{depth: 1})
        source = {"input_ids": tiny.ids(2, 64, seed=1)} if model.is_encoder_decoder else {}
        cache, found = model.init_cache(2, 64, **source), []
        for columns in (slice(0, 4), slice(4, 5), slice(5, 6)):
            out = model.decode(ids[:, columns], jnp.asarray(mask[:, columns]), cache)
            cache = out.cache
            found.append(np.asarray(out.logits, np.float32))
        return np.concatenate(found[1:], axis=1)

    exact, rounded = logits("eager", jnp.float32), logits("eager", jnp.bfloat16)
    monkeypatch.setattr(mosaic, "INTERPRETER", params.InterpretGPUParams())
    run = mosaic.attend_step
    monkeypatch.setattr(
        mosaic, "attend_step", lambda *x, **options: kernels.append(x) or run(*x, **options)
    )
    found = logits("mosaic", jnp.bfloat16)
    assert len(kernels) >= 2 * attentions
    assert exact.std() > 0.5
    assert np.abs(found - exact).max() < 1.5 * np.abs(rounded - exact).max()


class Device:
    """A device of this process with a compute capability."""

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="mosaic is a kernel for GPUs, and this runs on cpu"):
        implementation_for("mosaic", "cpu")
    assert implementation_for("mosaic", "gpu") == "mosaic"
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("8.0")])
    with pytest.raises(UnsupportedError, match=r"of compute capability 9, and this one has 8"):
        implementation_for("mosaic", "gpu")
    assert implementation_for("mosaic", "cuda") == "mosaic"  # a plan for a GPU that is not there
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("gfx942")])
    assert implementation_for("eager", "gpu") == "eager"
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    with pytest.raises(UnsupportedError, match=r"mosaic needs jax\.experimental"):
        implementation_for("mosaic", "gpu")


def test_a_classifier_made_of_a_model_keeps_it() -> None:
    model = tiny.make("llama", options=Options(attn_implementation="mosaic"))
    made = with_classifier(model, num_labels=3, key=0)
    assert made.backbone.stack.blocks[0].attn.attn_implementation == "mosaic"
