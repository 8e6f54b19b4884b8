"""Pre-norm transformer blocks and the stack of blocks, shared by all model families."""

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

from jaxllm.cache.attention_view import AttentionView, SequenceMask, mask_array
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import InputError
from jaxllm.nn.attention import Attention
from jaxllm.nn.blockwise import BY_PARTS, ColumnBias
from jaxllm.nn.dropout import dropout, split_key
from jaxllm.nn.layer_scan import scan_layers, unroll_layers
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.platform import after_gradient
from jaxllm.parallel.sharding import constrain

M = TypeVar("M")


def shallow_copy(module: M, **attributes: Any) -> M:
    """Copies a module with some attributes replaced; all others are shared."""
    copied = copy.copy(module)
    for name, value in attributes.items():
        # nnx's own setter raises while an enclosing jit is traced.
        object.__setattr__(copied, name, value)
    return copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all blocks of one call share: attention view, rotary angles, biases."""

    view: AttentionView
    rotary: tuple[Array, Array] | None = None
    """Cosines and sines [B, T, 1, H]."""
    bias: Float[Array, "#B N T S"] | ColumnBias | None = None
    """Bias added to the self-attention scores."""
    cross_visible: Bool[Array, "B 1 #T E"] | SequenceMask | None = None
    """Cross-attention mask: True at encoder positions to attend to. Required with an encoder."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Rare inputs of one block; all None in plain inference."""

    head_mask: Float[Array, " N"] | None = None
    cross_head_mask: Float[Array, " N"] | None = None
    key: Array | None = None
    """Dropout key; None in inference."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOutput:
    """Output of one block."""

    x: Float[Array, "B T D"]
    kv: KV | None
    """The layer's KV cache with the new positions written; None without a cache."""
    attentions: Float[Array, "B N T S"] | None
    """Self-attention weights, if requested."""
    cross_attentions: Float[Array, "B N T E"] | None
    """Cross-attention weights, if requested."""


@dataclasses.dataclass(frozen=True)
class StackOutput:
    """Output of all blocks and the final norm. Tuples have one entry per layer."""

    x: Float[Array, "B T D"]
    layers: tuple[KV, ...] | None
    """The layers' KV caches with the new positions written."""
    hidden_states: tuple[Float[Array, "B T D"], ...] | None
    """Input of each block, then `x`."""
    attentions: tuple[Float[Array, "B N T S"], ...] | None
    cross_attentions: tuple[Float[Array, "B N T E"], ...] | None


class Block(nnx.Module):
    """Pre-norm block: ``x += attn(norm(x))``, cross-attention if any, ``x += mlp(norm(x))``.

    `clamp` is applied after each residual addition (T5 in float16 clamps there).
    """

    def __init__(
        self,
        attn_norm: RMSNorm | LayerNorm,
        attn: Attention,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: MLP | GatedMLP,
        cross_norm: RMSNorm | LayerNorm | None = None,
        cross: Attention | None = None,
        *,
        dropout_rate: float = 0.0,
        clamp: Callable[[Array], Array] | None = None,
    ):
        self.attn_norm, self.attn = attn_norm, attn
        self.cross_norm, self.cross = cross_norm, cross
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout_rate, self.clamp = dropout_rate, clamp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: KV | None,
        cross_kv: KV | None,
        options: BlockOptions,
        *,
        cache_is_empty: bool,
        want_weights: bool,
    ) -> BlockOutput:
        keys = split_key(options.key, 7)
        attn_key, attn_drop, cross_key, cross_drop, mlp_key, mlp_drop, kv_key = keys
        y, y_of_k, y_of_v = self.attn_norm.for_products(x, 3)
        k, v = self.attn.keys_values(y_of_k, context.rotary, kv_key, value_input=y_of_v)
        kv = used_slots = None
        if cache is not None and context.view.write_slots is not None:
            cache = kv = cache.write(k, v, context.view.write_slots)
            used_slots = context.view.used_slots
        if kv is None or cache_is_empty:  # attend to the new positions only
            kv, used_slots = KV.from_sequence(k, v), None
        y, weights = self.attn(
            y,
            kv,
            visible=context.view.visible,
            rotary=context.rotary,
            bias=context.bias,
            head_mask=options.head_mask,
            key=attn_key,
            want_weights=want_weights,
            used_slots=used_slots,
        )
        x = self._add(x, y, attn_drop)
        cross_weights = None
        if self.cross is not None and self.cross_norm is not None and cross_kv is not None:
            assert context.cross_visible is not None
            (y,) = self.cross_norm.for_products(x, 1)
            y, cross_weights = self.cross(
                y,
                cross_kv,
                visible=context.cross_visible,
                head_mask=options.cross_head_mask,
                key=cross_key,
                want_weights=want_weights,
            )
            x = self._add(x, y, cross_drop)
        y = self.mlp(*self.mlp_norm.for_products(x, self.mlp.products), key=mlp_key)
        x = self._add(x, y, mlp_drop)
        return BlockOutput(x, cache, weights, cross_weights)

    def _add(self, x: Array, y: Array, key: Array | None):
        # With this constraint XLA all-reduces the partial sums of tensor parallelism.
        x = constrain(x + dropout(y, self.dropout_rate, key), "rows")
        return x if self.clamp is None else self.clamp(x)


def _run(
    block: Block,
    x: Array,
    context: Context,
    cache: KV | None,
    cross_kv: KV | None,
    options: BlockOptions,
    cache_is_empty: bool,
    want_weights: bool,
) -> BlockOutput:
    flags = {"cache_is_empty": cache_is_empty, "want_weights": want_weights}
    return block(x, context, cache, cross_kv, options, **flags)


# `_run` with rematerialization: the backward pass recomputes the activations. With `jax.checkpoint`
# the recomputation depends on the block's inputs only, so XLA on CPU may recompute all blocks up
# front and save almost no memory. Here it waits for the gradient of the block's output. There is no
# forward-mode derivative (`jax.jvp`).
_run_recomputed = jax.custom_vjp(_run, nondiff_argnums=(6, 7))


def _forward(*args: Any) -> tuple[BlockOutput, tuple[Any, ...]]:
    return _run(*args), args[:6]


def _backward(
    cache_is_empty: bool, want_weights: bool, inputs: tuple[Any, ...], gradients: BlockOutput
) -> tuple[Any, ...]:
    run = functools.partial(_run, cache_is_empty=cache_is_empty, want_weights=want_weights)
    # The barrier delays use of all inputs, all-gathered weights too, until the gradients exist.
    (block, x, *rest), gradients = jax.lax.optimization_barrier((inputs, gradients))
    return jax.vjp(run, block, after_gradient(x, gradients.x), *rest)[1](gradients)


_run_recomputed.defvjp(_forward, _backward)

# Jitted, so that identical blocks share one trace: 30 layers trace in the time of one.
_run_traced_once = jax.jit(_run, static_argnums=(6, 7))
_run_remat = jax.jit(_run_recomputed, static_argnums=(6, 7))


def _layer_head_mask(head_mask: Array | None, i: int):
    """Layer i's head mask: row i of [L, N]; a mask [N] applies to every layer."""
    if head_mask is None:
        return None
    head_mask = jnp.asarray(head_mask)
    return head_mask if head_mask.ndim == 1 else head_mask[i]


class Stack(nnx.Module):
    """Transformer blocks in sequence, then the final norm.

    `position_bias` has no entry, one relative bias for all blocks (T5), or one per block (umT5).
    With `remat` the backward pass recomputes each block's activations. With `scan_layers` calls
    without a KV cache run equal blocks in a scan, which compiles one of them.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: RMSNorm | LayerNorm,
        *,
        position_bias: Sequence[nnx.Module] = (),
        embedding_dropout: float = 0.0,
        output_dropout: float = 0.0,
        remat: bool = False,
        scan_layers: bool = False,
    ):
        self.blocks, self.norm = nnx.List(blocks), norm
        self.position_bias = nnx.List(position_bias)
        self.embedding_dropout, self.output_dropout = embedding_dropout, output_dropout
        self.remat, self.scan_layers = remat, scan_layers

    @property
    def has_windows(self) -> bool:
        """True if any block uses sliding-window attention."""
        return any(block.attn.window is not None for block in self.blocks)

    def first_blocks(self, count: int) -> Stack:
        """A stack of the first `count` blocks and the final norm, with shared parameters.

        Raises:
            InputError: `count` is not between 1 and the number of blocks.
        """
        if not 1 <= count <= len(self.blocks):
            raise InputError(
                f"assistant_early_exit: the model has {len(self.blocks)} layers, "
                f"so there are no {count}"
            )
        return shallow_copy(self, blocks=tuple(self.blocks)[:count])

    def project_cross_kv(
        self, encoder_states: Float[Array, "B E D"], key: Array | None = None
    ) -> tuple[KV, ...]:
        """Computes the cross-attention keys and values of every block, once per generation."""
        crosses = [block.cross for block in self.blocks if block.cross is not None]
        return tuple(
            KV.from_sequence(
                *cross.keys_values(encoder_states, key=k), head_axis=cross.cache_head_axis
            )
            for cross, k in zip(crosses, split_key(key, len(crosses)), strict=True)
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        *,
        layers: tuple[KV, ...] | None = None,
        cross_kv: tuple[KV, ...] | None = None,
        cache_is_empty: bool = False,
        head_mask: Float[Array, "L N"] | Float[Array, " N"] | None = None,
        cross_head_mask: Float[Array, "L N"] | Float[Array, " N"] | None = None,
        key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> StackOutput:
        """Runs the blocks and the final norm.

        Args:
            x: token embeddings.
            layers: each block's KV cache; None: no cache.
            cross_kv: each block's cross-attention keys and values (`project_cross_kv`).
            cache_is_empty: prefill; the new positions attend to each other only.
            key: dropout key; None in inference.
        """
        run = _run_remat if self.remat else _run_traced_once
        keys = split_key(key, len(self.blocks) + 2)
        x = constrain(dropout(x, self.embedding_dropout, keys[-2]), "rows")

        def step(x: Array, layer: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
            out = run(layer[0], x, *layer[1:], cache_is_empty, output_attentions)
            hidden = x if output_hidden_states else None
            return out.x, (hidden, out.kv, out.attentions, out.cross_attentions)

        inputs = self._layer_inputs(context, layers, cross_kv, head_mask, cross_head_mask, keys)
        # A scan would copy the KV caches of all layers, at every decode step.
        run_layers = scan_layers if self.scan_layers and layers is None else unroll_layers
        x, outputs = run_layers(step, x, inputs)
        (x,) = self.norm.for_products(x, 1)
        x = dropout(x, self.output_dropout, keys[-1])
        hidden, new_layers, attentions, cross_attentions = zip(*outputs, strict=True)
        crosses = output_attentions and cross_kv is not None
        return StackOutput(
            x=x,
            layers=None if layers is None else new_layers,
            hidden_states=(*hidden, x) if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
            cross_attentions=cross_attentions if crosses else None,
        )

    def _layer_inputs(
        self,
        context: Context,
        layers: tuple[KV, ...] | None,
        cross_kv: tuple[KV, ...] | None,
        head_mask: Array | None,
        cross_head_mask: Array | None,
        keys: tuple[Array | None, ...],
    ) -> list[tuple[Block, Context, KV | None, KV | None, BlockOptions]]:
        """The arguments of each block's run, except x."""
        inputs = []
        for i, (block, own) in enumerate(zip(self.blocks, self._contexts(context), strict=True)):
            options = BlockOptions(
                head_mask=_layer_head_mask(head_mask, i),
                cross_head_mask=_layer_head_mask(cross_head_mask, i),
                key=keys[i],
            )
            cache = None if layers is None else layers[i]
            cross = None if cross_kv is None else cross_kv[i]
            inputs.append((block, own, cache, cross, options))
        return inputs

    def _contexts(self, context: Context) -> list[Context]:
        """Each block's context, with its attention window and its relative bias."""
        windows = dict.fromkeys(block.attn.window for block in self.blocks)
        views = {window: context.view.for_layer(window) for window in windows}
        columns = (context.view.query_columns, context.view.key_columns)
        biases: list[Any] = [ColumnBias(bias, *columns) for bias in self.position_bias]
        if self.blocks[0].attn.implementation not in BY_PARTS:
            # Masks and biases are computed once for all layers.
            views = {window: view.with_mask_array() for window, view in views.items()}
            biases = [bias.array() for bias in biases]
            if context.cross_visible is not None:
                cross_visible = mask_array(context.cross_visible)
                context = dataclasses.replace(context, cross_visible=cross_visible)
        contexts = []
        for i, block in enumerate(self.blocks):
            # T5 has one bias for all blocks, umT5 one per block.
            bias = biases[min(i, len(biases) - 1)] if biases else context.bias
            view = views[block.attn.window]
            contexts.append(dataclasses.replace(context, view=view, bias=bias))
        return contexts
