"""Stack of transformer blocks: runs them in sequence, with rematerialization or in a scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.cache.attention_view import mask_array
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import InputError
from jaxllm.nn.blocks import Block, BlockOptions, BlockOutput, Context, shallow_copy
from jaxllm.nn.blockwise import BY_PARTS, ColumnBias
from jaxllm.nn.dropout import dropout, split_key
from jaxllm.nn.layer_scan import scan_layers, unroll_layers
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.platform import after_gradient
from jaxllm.parallel.sharding import constrain


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
