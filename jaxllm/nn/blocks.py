"""Pre-norm residual blocks and the stack that runs them; shared by the three families."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxllm.cache.attention_view import AttentionView
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import InputError
from jaxllm.nn.attention import Attention
from jaxllm.nn.dropout import dropout, split
from jaxllm.parallel.sharding import constrain

M = TypeVar("M")


def shallow_copy(module: M, **attributes: Any) -> M:
    """A copy with some attributes replaced; all others are shared."""
    copied = copy.copy(module)
    for name, value in attributes.items():
        # nnx's own setter refuses while a caller's jit traces.
        object.__setattr__(copied, name, value)
    return copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What all blocks of one call share: the view, and position as data."""

    view: AttentionView
    rotary: tuple[Array, Array] | None = None
    """Cosines and sines [B, T, 1, H]."""
    bias: Float[Array, "#B N T S"] | None = None
    """Added to the self-attention scores."""
    memory_visible: Bool[Array, "B 1 #T E"] | None = None
    """Which columns of the encoder's output cross-attention may see; there where `memory` is."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What one block gets beside its input. None everywhere in plain inference."""

    head_mask: Float[Array, " N"] | None = None
    cross_head_mask: Float[Array, " N"] | None = None
    key: Array | None = None
    """Dropout key: training."""


@dataclasses.dataclass(frozen=True)
class StackOutput:
    x: Float[Array, "B T D"]
    layers: tuple[KV, ...] | None
    hidden_states: tuple[Float[Array, "B T D"], ...] | None
    attentions: tuple[Float[Array, "B N T S"], ...] | None
    cross_attentions: tuple[Float[Array, "B N T E"], ...] | None


class Block(nnx.Module):
    """``x += attn(norm(x))``, then cross-attention if there is one, then ``x += mlp(norm(x))``.

    `limit` is applied after each residual addition (T5 in float16 clamps there).
    """

    def __init__(
        self,
        attn_norm,
        attn: Attention,
        mlp_norm,
        mlp,
        cross_norm=None,
        cross: Attention | None = None,
        *,
        dropout_rate: float = 0.0,
        limit: Callable[[Array], Array] | None = None,
    ):
        self.attn_norm, self.attn = attn_norm, attn
        self.cross_norm, self.cross = cross_norm, cross
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout_rate, self.limit = dropout_rate, limit

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: KV | None,
        memory: KV | None,
        extras: BlockOptions,
        *,
        cache_is_empty: bool,
        want_weights: bool,
    ):
        """Returns x, the updated cache of this layer, and the attention weights (self, cross)."""
        keys = split(extras.key, 7)
        y = self.attn_norm(x)
        k, v = self.attn.keys_values(y, context.rotary, keys[6])
        kv = used = None
        if cache is not None and context.view.write_at is not None:
            cache = kv = cache.write(k, v, context.view.write_at)
            used = context.view.used
        if kv is None or cache_is_empty:  # nothing older to see than what this call brings
            kv, used = KV.of(k, v), None
        y, weights = self.attn(
            y,
            kv,
            visible=context.view.visible,
            rotary=context.rotary,
            bias=context.bias,
            head_mask=extras.head_mask,
            key=keys[0],
            want_weights=want_weights,
            used=used,
        )
        x = self._add(x, y, keys[1])
        cross_weights = None
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            assert context.memory_visible is not None
            y, cross_weights = self.cross(
                self.cross_norm(x),
                memory,
                visible=context.memory_visible,
                head_mask=extras.cross_head_mask,
                key=keys[2],
                want_weights=want_weights,
            )
            x = self._add(x, y, keys[3])
        x = self._add(x, self.mlp(self.mlp_norm(x), keys[4]), keys[5])
        return x, cache, weights, cross_weights

    def _add(self, x, y, key):
        # Here the parts that heads, and slices of the MLP, computed apart are summed over devices.
        x = constrain(x + dropout(y, self.dropout_rate, key), "rows")
        return x if self.limit is None else self.limit(x)


def _run(block, x, context, cache, memory, extras, cache_is_empty, want_weights):
    return block(
        x, context, cache, memory, extras, cache_is_empty=cache_is_empty, want_weights=want_weights
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _run_twice(block, x, context, cache, memory, extras, cache_is_empty, want_weights):
    """`_run`, whose activations are computed again in the backward pass.

    `jax.checkpoint`, whose second run depends on the block's inputs alone, lets XLA on a CPU do all
    of them before the first is needed, and so saves next to nothing there. This one waits for the
    gradient that asks for it. It has no forward-mode derivative (`jax.jvp`).
    """
    return _run(block, x, context, cache, memory, extras, cache_is_empty, want_weights)


def _keep_inputs(*args):
    return _run(*args), args[:6]


def _run_again(cache_is_empty, want_weights, inputs, gradients):
    run = functools.partial(_run, cache_is_empty=cache_is_empty, want_weights=want_weights)
    # All inputs wait, weights that devices gather among them.
    (block, x, *rest), gradients = jax.lax.optimization_barrier((inputs, gradients))
    x = jax.lax.platform_dependent(x, gradients[0], cpu=_after, default=lambda x, gradient: x)
    return jax.vjp(run, block, x, *rest)[1](gradients)


def _after(x, gradient):
    """x, with a use of the gradient that stays (0 times it could be NaN): XLA on a CPU drops
    barriers before it orders the program."""
    return x + gradient * 0


_run_twice.defvjp(_keep_inputs, _run_again)

# Equal blocks share one trace: a 30-layer model is traced in the time of one layer.
_run_traced_once = jax.jit(_run, static_argnums=(6, 7))
_run_remat = jax.jit(_run_twice, static_argnums=(6, 7))


def _of_layer(head_mask, i: int):
    """Row i of a mask per layer; a mask of one row holds for every layer."""
    if head_mask is None:
        return None
    head_mask = jnp.asarray(head_mask)
    return head_mask if head_mask.ndim == 1 else head_mask[i]


class Stack(nnx.Module):
    """Blocks in a row, then the final norm. Owns the relative bias where the family has one.

    `position_bias` holds nothing, one bias for all blocks (T5), or one a block (umT5). With `remat`
    each block's activations are computed again in the backward pass instead of kept.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        norm,
        *,
        position_bias: Sequence[nnx.Module] = (),
        embedding_dropout: float = 0.0,
        output_dropout: float = 0.0,
        remat: bool = False,
    ):
        self.blocks, self.norm = nnx.List(blocks), norm
        self.position_bias = nnx.List(position_bias)
        self.embedding_dropout, self.output_dropout = embedding_dropout, output_dropout
        self.remat = remat

    @property
    def has_windows(self) -> bool:
        """Some blocks attend to the last tokens only."""
        return any(block.attn.window is not None for block in self.blocks)

    def first(self, count: int) -> Stack:
        """The first blocks and the final norm, sharing their parameters with this stack.

        Raises:
            InputError: There are not as many blocks.
        """
        if not 1 <= count <= len(self.blocks):
            raise InputError(
                f"assistant_early_exit: the model has {len(self.blocks)} layers, "
                f"so there are no {count}"
            )
        return shallow_copy(self, blocks=tuple(self.blocks)[:count])

    def project_memory(
        self, memory: Float[Array, "B E D"], key: Array | None = None
    ) -> tuple[KV, ...]:
        """Cross-attention keys and values of every block, once for a whole generation."""
        crosses = [block.cross for block in self.blocks if block.cross is not None]
        return tuple(
            KV.of(*cross.keys_values(memory, key=k))
            for cross, k in zip(crosses, split(key, len(crosses)), strict=True)
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        *,
        layers: tuple[KV, ...] | None = None,
        memory: tuple[KV, ...] | None = None,
        cache_is_empty: bool = False,
        head_mask: Float[Array, "L N"] | Float[Array, " N"] | None = None,
        cross_head_mask: Float[Array, "L N"] | Float[Array, " N"] | None = None,
        key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> StackOutput:
        run = _run_remat if self.remat else _run_traced_once
        depth = len(self.blocks)
        keys = split(key, depth + 2)
        x = constrain(dropout(x, self.embedding_dropout, keys[depth]), "rows")
        view = context.view
        windows = dict.fromkeys(block.attn.window for block in self.blocks)
        views = {window: view.for_layer(window) for window in windows}
        biases = [bias(view.query_slots, view.key_slots) for bias in self.position_bias]
        hidden, new, attentions, crosses = [], [], [], []
        for i, block in enumerate(self.blocks):
            if output_hidden_states:
                hidden.append(x)
            context = dataclasses.replace(context, view=views[block.attn.window])
            if biases:
                context = dataclasses.replace(context, bias=biases[min(i, len(biases) - 1)])
            extras = BlockOptions(
                head_mask=_of_layer(head_mask, i),
                cross_head_mask=_of_layer(cross_head_mask, i),
                key=keys[i],
            )
            x, kv, weights, cross_weights = run(
                block,
                x,
                context,
                None if layers is None else layers[i],
                None if memory is None else memory[i],
                extras,
                cache_is_empty,
                output_attentions,
            )
            new.append(kv)
            attentions.append(weights)
            crosses.append(cross_weights)
        x = dropout(self.norm(x), self.output_dropout, keys[depth + 1])
        if output_hidden_states:
            hidden.append(x)
        return StackOutput(
            x=x,
            layers=None if layers is None else tuple(new),
            hidden_states=tuple(hidden) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            cross_attentions=tuple(crosses) if output_attentions and memory is not None else None,
        )
