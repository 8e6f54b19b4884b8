"""Grouped-query attention: self- and cross-attention of all model families.

`Scores` says how scores follow from the products of queries and keys, for all implementations.
`attend` is the reference; `attend_blocks` never holds an array of all queries x keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import SequenceMask, mask_array
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import UnsupportedError, quoted, warn
from jaxllm.common.hardware import own_capability
from jaxllm.common.precision import exact_products
from jaxllm.nn.linear import Linear, declare_axes, dropout, split_key
from jaxllm.nn.platform.attention import (
    NewColumns,
    attend_cache,
    head_products,
    largest_scores,
    split_heads,
    with_gradient_in_token_order,
)
from jaxllm.nn.platform.flash import attend_flash, flash_applies, import_kernel
from jaxllm.nn.rope import Rope, rotate
from jaxllm.parallel.sharding import constrain

GPUS = ("gpu", "cuda")
KERNEL_PLATFORMS = {"splash": ("tpu",), "triton": (*GPUS, "rocm"), "cudnn": GPUS}
"""Platforms of the kernels of flash attention."""
BY_PARTS = ("blockwise", *KERNEL_PLATFORMS)
"""Implementations that take masks and biases by their parts, not as arrays."""
STEP_KERNEL = "mosaic"
"""The kernel of decode steps on a GPU. Whole sequences take what "auto" selects there."""
IMPLEMENTATIONS = ("eager", "xla", *BY_PARTS, STEP_KERNEL)
# PERF(gpu): Triton's kernel has been measured, cuDNN's not; docs/decisions/gpu-programs.md.
GPU_KERNELS = ("triton", "cudnn")
"""Kernels for GPUs; "auto" selects the first one that JAX has."""
PLATFORM_KERNELS = {"tpu": ("splash",), **dict.fromkeys(GPUS, GPU_KERNELS)}
QUERY_BLOCK = 256
"""Queries of a block of `attend_blocks`; fewer are computed by `attend`."""
MAX_UNROLLED_BLOCKS = 2
"""Blocks of queries up to which a GPU runs them without a loop."""


def implementation_for(name: str, platform: str) -> str:
    """Resolves `attn_implementation` "auto" for a platform.

    "auto" is "blockwise", and a warning says so, if JAX has no kernel for the platform any more.

    Raises:
        UnsupportedError: the kernel is not one of the platform, or JAX does not have it.

    >>> implementation_for("auto", "cpu"), implementation_for("auto", "tpu")
    ('eager', 'splash')
    """
    platforms = {**KERNEL_PLATFORMS, STEP_KERNEL: GPUS}
    if platform not in platforms.get(name, (platform,)):
        kind = "TPUs" if name == "splash" else "GPUs"
        raise UnsupportedError(
            f"attn_implementation: {name} is a kernel for {kind}, and this runs on {platform}; "
            "choose auto, eager or blockwise"
        )
    if name in platforms:
        import_kernel(name)
    capability = own_capability() if platform == "gpu" else None
    if name == STEP_KERNEL and capability is not None and int(capability) != 9:
        raise UnsupportedError(
            f"attn_implementation: {name} is a kernel for GPUs of compute capability 9, and this "
            f"one has {capability:g}; choose auto"
        )
    if name != "auto":
        return name
    if platform not in PLATFORM_KERNELS:
        return "eager"
    # PERF(gpu): Triton and cuDNN need compute capability 8 or later; a T4 has 7.5.
    if capability is not None and capability < 8:
        return "blockwise"
    for kernel in PLATFORM_KERNELS[platform]:
        try:
            import_kernel(kernel)
        except UnsupportedError:
            continue
        return kernel
    warn_of_blockwise(PLATFORM_KERNELS[platform])
    return "blockwise"


@cache
def warn_of_blockwise(kernels: tuple[str, ...]) -> None:
    """Warns, once in a process, that "auto" is "blockwise" instead of a kernel."""
    missing = f"JAX {jax.__version__} does not have {' or '.join(kernels)}"
    warn(f"attn_implementation: auto is blockwise, since {missing}")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Attention scores: the scaled products of queries and keys, capped, plus the bias, masked.

    With a `softcap` c the scaled products s become ``c * tanh(s / c)`` (Gemma 2).

    >>> visible = jnp.array([True, True, False])
    >>> scores = Scores(0.5, softcap=1.0)(jnp.array([0.0, 100.0, 1.0]), visible)
    >>> scores.tolist()[:2], bool(scores[2] < -1e38)
    ([0.0, 1.0], True)
    """

    scale: float
    softcap: float | None = None

    def __call__(
        self,
        products: Float[Array, "*shape"],
        visible: Bool[Array, ...],
        bias: Float[Array, ...] | None = None,
    ) -> Float[Array, "*shape"]:
        """Float32 scores; where nothing is `visible`, the lowest number."""
        scores = products * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        return jnp.where(visible, scores, jnp.finfo(jnp.float32).min)


def attend(
    q: Float[Array, "B T N H"],
    kv: KV,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Output of `attend_with_weights` (eager attention, the reference) without the weights."""
    return attend_with_weights(q, kv, visible, bias, **options)[0]


def attend_with_weights(
    q: Float[Array, "B T N H"],
    kv: KV,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None = None,
    *,
    scores: Scores,
    head_mask: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Eager attention: the output and the attention weights.

    Scores and softmax are in float32. The mask is boolean and applied once, after the bias. A query
    with no visible key gets zeros, never NaN.
    """
    B, T, N, H = q.shape
    K, S = math.prod(kv.leading_shape) // B, kv.capacity
    G = N // K
    products = head_products(kv, G * T)
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(*kv.leading_shape, G * T, H)
    masked = scores(products.scores(grouped).reshape(B, N, T, S), visible, bias)
    # PERF(cpu): values are summed before the division by the softmax sums, as in FlashAttention
    # (Dao et al. 2022, arXiv:2205.14135): fewer passes over [T, S], gradients in half the time;
    # benchmarks/train.py.
    exps = jnp.exp(masked - jax.lax.stop_gradient(largest_scores(masked)))
    sums = exps.sum(axis=-1, keepdims=True)
    exps = dropout(exps, dropout_rate, key)
    if head_mask is not None:
        exps = exps * head_mask[None, :, None, None].astype(jnp.float32)
    summed = products.weighted_values(exps.reshape(*kv.leading_shape, G * T, S))
    # Queries without a visible key are masked last, where a TPU fuses it with the division.
    sees_any = visible.any(axis=-1, keepdims=True)
    out = jnp.where(sees_any, summed.reshape(B, N, T, H) / sums, 0)
    out = out.astype(q.dtype).transpose(0, 2, 1, 3)
    return out, jnp.where(sees_any, exps / sums, 0).astype(q.dtype)


def attend_xla(
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attention with XLA's form of `jax.nn.dot_product_attention`."""
    B, T, N, H = q.shape
    K, S = math.prod(kv.leading_shape) // B, kv.capacity
    kv = kv.dequantized()
    k, v = (x.reshape(B, K, S, H).transpose(0, 2, 1, 3) for x in (kv.k, kv.v))
    mask = jnp.broadcast_to(visible, (B, 1, T, S))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (B, N, T, S)).astype(q.dtype)
    options: dict[str, Any] = {"bias": bias, "mask": mask, "scale": scale}
    with exact_products(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)
    sees_something = mask.any(axis=-1).transpose(0, 2, 1)[..., None]
    return jnp.where(sees_something, out, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnBias:
    """Attention bias that depends on the columns of query and key only (T5), or on their indices
    among the real tokens, which are in place of the columns (ALiBi)."""

    bias: Any
    """``bias(query_columns, key_columns)`` is [#B, N, T, S]; `RelativeBias`, `Alibi`."""
    query_columns: Int[Array, " T"] | Int[Array, "B T"]
    key_columns: Int[Array, " S"] | Int[Array, "B S"]

    def array(self) -> Float[Array, "#B N T S"]:
        return self.bias(self.query_columns, self.key_columns)


def attend_blocks(
    attend: Callable[..., Float[Array, "B b N H"]],
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    mask: SequenceMask,
    bias: ColumnBias | None,
    key: Array | None,
    is_on_gpu: bool = False,
) -> Float[Array, "B T N H"]:
    """Attention of one block of queries after the other, on any platform.

    The backward pass computes the scores of each block anew, so that neither pass holds those of
    all queries.

    Args:
        attend: ``attend(q, kv, visible=, bias=, key=)`` of a block.
        key: dropout key, split over the blocks; None in inference.
    """
    T = q.shape[1]
    count = math.ceil(T / QUERY_BLOCK)

    def blocks(x: Array | None, axis: int) -> Array | None:
        """Splits the queries' axis into blocks, which come first."""
        if x is None:
            return None
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * QUERY_BLOCK - T)
        split = (*x.shape[:axis], count, QUERY_BLOCK, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(split), axis, 0)

    queries = (
        blocks(q, 1),
        blocks(mask.query_columns, 0),
        blocks(mask.query_segments, 1),
        blocks(mask.query_index, 1),
        None if bias is None else blocks(bias.query_columns, bias.query_columns.ndim - 1),
        None if key is None else jax.random.split(key, count),
    )
    # Gradients of keys and values are summed over blocks in float32.
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), kv)

    def one(_: None, block: tuple[Any, ...]) -> tuple[None, Array]:
        q, columns, segments, index, slots, key = block
        parts = {"query_columns": columns, "query_segments": segments, "query_index": index}
        out = attend(
            q,
            jax.tree.map(differentiated_as, kv, exact),
            visible=dataclasses.replace(mask, **parts).array(),
            bias=None if bias is None else bias.bias(slots, bias.key_columns),
            key=key,
        )
        return None, out

    # PERF(gpu): XLA searches the tiles of equal kernels anew in each loop, which was two thirds of
    # the time that T5's prefill compiled; docs/decisions/gpu-programs.md.
    unroll = is_on_gpu and count <= MAX_UNROLLED_BLOCKS
    _, out = jax.lax.scan(jax.checkpoint(one), None, queries, unroll=unroll)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :T]


@jax.custom_jvp
def differentiated_as(x: Array, exact: Array) -> Array:
    """Returns x, which is ``exact.astype(x.dtype)`` and has the derivative of that.

    So a pass without gradients holds no array of `exact`.
    """
    return x


@differentiated_as.defjvp
def _differentiated_as_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[0], tangents[1].astype(primals[0].dtype)


class Attention(nnx.Module):
    """Attention layer: query, key, value and output projections around `attend`.

    The caller passes positions as the angles of `rope`, as a bias, or neither. `q_norm` and
    `k_norm` normalise each head's query and key before RoPE (Qwen3). With a `window` a query
    attends to the last `window` tokens only, its own included (Mistral); without a causal mask to
    its own and `window` on either side.
    """

    def __init__(
        self,
        q: Linear,
        k: Linear,
        v: Linear,
        o: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scores: Scores,
        dropout_rate: float = 0.0,
        implementation: str = "eager",
        q_norm: Callable[[Array], Array] | None = None,
        k_norm: Callable[[Array], Array] | None = None,
        window: int | None = None,
        rope: Rope | None = None,
    ):
        if implementation not in IMPLEMENTATIONS:
            raise UnsupportedError(
                f"attn_implementation: unknown {quoted(implementation)}; "
                f"known: {', '.join(IMPLEMENTATIONS)}"
            )
        declare_axes("attn", q=q, k=k, v=v, o=o)
        self.q, self.k, self.v, self.o = q, k, v, o
        self.q_norm, self.k_norm, self.window, self.rope = q_norm, k_norm, window, rope
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.has_step_kernel = implementation == STEP_KERNEL
        if self.has_step_kernel:
            implementation = implementation_for("auto", "cuda")
        self.scores, self.dropout_rate, self.implementation = scores, dropout_rate, implementation

    @property
    def attn_implementation(self) -> str:
        """The name that it was made with."""
        return STEP_KERNEL if self.has_step_kernel else self.implementation

    def keys_values(
        self,
        x: Float[Array, "B S D"],
        rotary: tuple[Array, Array] | None = None,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Keys and values of x."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k_key, v_key = split_key(key, 2)
        k = with_gradient_in_token_order(self.k(x, k_key, self)).reshape(shape)
        v = with_gradient_in_token_order(self.v(x, v_key, self)).reshape(shape)
        k = k if self.k_norm is None else self.k_norm(k)
        k, v = constrain((k, v), "rows", None, "heads")
        return (k if rotary is None else rotate(k, *rotary)), v

    def kv_of_sequence(self, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]) -> KV:
        """Keys and values of whole sequences for self-attention without a cache."""
        # PERF(tpu): with rows and heads merged XLA writes a bias and its gradient for each row;
        # docs/decisions/tpu-training-step.md. On a GPU this would take more memory.
        return KV.from_sequence(k, v, head_axis=self.implementation == "splash")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kv: KV,
        *,
        visible: Bool[Array, "B 1 #T S"] | SequenceMask,
        rotary: tuple[Array, Array] | None = None,
        bias: Float[Array, "#B N T S"] | ColumnBias | None = None,
        head_mask: Float[Array, " N"] | None = None,
        key: jax.Array | None = None,
        want_weights: bool = False,
        used_slots: Int[Array, ""] | None = None,
        new: NewColumns | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None, KV]:
        """Attends from x to the keys and values, and applies the output projection.

        Args:
            want_weights: also return the attention weights.
            used_slots: number of the cache's first slots that hold tokens; None: any slot may.
            new: keys and values that are first written to the cache `kv`, and their slots.

        Returns:
            The output, the attention weights, and `kv` with what is new.
        """
        key, q_key, o_key = split_key(key, 3)
        key = key if self.dropout_rate else None
        is_plain = not want_weights and head_mask is None and key is None
        kernel = self._step_kernel(x, kv, visible, new) if is_plain else None
        if new is not None and kernel is None:
            kv = kv.write(*new)
        q = with_gradient_in_token_order(self.q(x, q_key, self))
        q = split_heads(q, self.heads, is_rotated=rotary is not None)
        q = constrain(q if self.q_norm is None else self.q_norm(q), "rows", None, "heads")
        if rotary is not None:
            q = rotate(q, *rotary)
        weights = None
        # Only eager attention returns weights and supports a head mask and dropout.
        eager = {"scores": self.scores, "head_mask": head_mask, "dropout_rate": self.dropout_rate}
        if kernel is None and isinstance(visible, SequenceMask) and not want_weights:
            out = self._attend_sequence(q, kv, visible, bias, eager, key)
        else:
            visible = mask_array(visible)
            bias = bias.array() if isinstance(bias, ColumnBias) else bias
            if kernel is not None:
                plain = partial(attend, scores=self.scores)
                out, kv = kernel(plain, q, kv, new, visible, bias, scale=self.scores.scale)
            elif not is_plain:
                out, weights = attend_with_weights(q, kv, visible, bias, key=key, **eager)
            elif self.implementation == "xla" and self.scores.softcap is None:
                out = attend_xla(q, kv, visible=visible, bias=bias, scale=self.scores.scale)
            else:
                options = {"visible": visible, "bias": bias, "scores": self.scores}
                plain = partial(attend, scores=self.scores)
                out = attend_cache(plain, q, kv, used_slots, **options)
        y = self.o(out.reshape(*out.shape[:2], self.heads * self.head_dim), o_key)
        return y, (weights if want_weights else None), kv

    def _step_kernel(
        self,
        x: Float[Array, "B T D"],
        kv: KV,
        visible: Bool[Array, "B 1 #T S"] | SequenceMask,
        new: NewColumns | None,
    ) -> Callable[..., tuple[Float[Array, "B T N H"], KV]] | None:
        """The kernel of a decode step; None if there is none of this attention."""
        if not self.has_step_kernel:
            return None
        if isinstance(visible, SequenceMask) and not visible.hides_pads_only:
            return None
        # Pallas is imported where it is used only, which takes half a second.
        from jaxllm.nn.platform.mosaic import attend_or_step, step_applies

        applies = step_applies(self.heads, kv, self.scores, x, new)
        return attend_or_step if applies else None

    def _attend_sequence(
        self,
        q: Float[Array, "B T N H"],
        kv: KV,
        mask: SequenceMask,
        bias: ColumnBias | Float[Array, "#B N T S"] | None,
        eager: dict[str, Any],
        key: jax.Array | None,
    ) -> Float[Array, "B T N H"]:
        """Attention of whole sequences without an array [T, S]; that of `attend` for a few queries.

        Args:
            eager: options of `attend`, except the key.
        """
        is_plain = bias is None and key is None and eager["head_mask"] is None
        has_kernel = self.implementation in KERNEL_PLATFORMS
        if has_kernel and is_plain and flash_applies(self.implementation, q, mask, self.scores):
            options = {"mask": mask, "scores": self.scores}
            return attend_flash(self.implementation, q, kv, **options)
        if q.shape[1] > QUERY_BLOCK and not isinstance(bias, jax.Array):
            is_on_gpu = "gpu" in KERNEL_PLATFORMS.get(self.implementation, ())
            options = {"mask": mask, "bias": bias, "key": key, "is_on_gpu": is_on_gpu}
            return attend_blocks(partial(attend, **eager), q, kv, **options)
        bias = bias.array() if isinstance(bias, ColumnBias) else bias
        return attend(q, kv, mask.array(), bias, key=key, **eager)
