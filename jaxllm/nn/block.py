"""Transformer blocks, and the stack that runs them in sequence, rematerialized or in a scan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxllm.cache.attention_view import AttentionView, SequenceMask, mask_array
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import InputError, quoted
from jaxllm.nn.attention import BY_PARTS, Attention, ColumnBias
from jaxllm.nn.experts import MixtureOfExperts
from jaxllm.nn.linear import KEPT, LayerNorm, RMSNorm, dropout, split_key
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.platform.attention import cache_has_head_axis
from jaxllm.nn.platform.products import layer_by_layer
from jaxllm.nn.platform.training import after_gradient
from jaxllm.nn.positions import Alibi
from jaxllm.parallel.sharding import constrain

M = TypeVar("M")
Norm = RMSNorm | LayerNorm


def shallow_copy(module: M, **attributes: Any) -> M:
    """Copies a module with some attributes replaced; all others are shared."""
    copied = copy.copy(module)
    for name, value in attributes.items():
        # nnx's own setter raises while an enclosing jit is traced.
        object.__setattr__(copied, name, value)
    return copied


def clamp_to_float16(x: Array) -> Array:
    """Clamps float16 activations to finite values, as in Hugging Face; keeps other dtypes."""
    if x.dtype != jnp.float16:
        return x
    top = jnp.finfo(jnp.float16).max
    limit = jnp.where(jnp.isinf(x).any(), top - 1000, top).astype(x.dtype)
    return jnp.clip(x, -limit, limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs of all blocks of one call: attention view, rotary angles, biases. The stack sets those
    that depend on the block's attention."""

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
    router_logits: Float[Array, "B T E"] | None
    """Logits of the experts; None in a block without."""


class Block(nnx.Module):
    """Transformer block: residual sublayers of self-attention, cross-attention if any, and MLP.

    Each sublayer is ``x += post_norm(part(norm(x)))``, where most families have no `post_norm`.
    With `norm_last` it is ``x = norm(x + part(x))``, as in the original transformer (BART). With
    `adds_to_norm` it is ``x = norm(x) + part(norm(x))``, an option of BLOOM. Without `mlp_norm` the
    MLP reads what attention reads, ``x += attn(norm(x)) + mlp(norm(x))`` (GPT-J). `clamp` is
    applied after each sublayer (T5 in float16 clamps there).

    The sublayers `attn`, `cross` and `mlp` are attributes with these names, and their norms with
    ``_norm`` and ``_post_norm`` after them, so that paths of parameters say what each is.
    """

    def __init__(
        self,
        attn_norm: Norm,
        attn: Attention,
        mlp_norm: Norm | None,
        mlp: MLP | GatedMLP | MixtureOfExperts,
        cross_norm: Norm | None = None,
        cross: Attention | None = None,
        *,
        attn_post_norm: Norm | None = None,
        cross_post_norm: Norm | None = None,
        mlp_post_norm: Norm | None = None,
        norm_last: bool = False,
        adds_to_norm: bool = False,
        dropout_rate: float = 0.0,
        clamp: Callable[[Array], Array] | None = None,
    ):
        self.attn_norm, self.attn, self.attn_post_norm = attn_norm, attn, attn_post_norm
        self.cross_norm, self.cross, self.cross_post_norm = cross_norm, cross, cross_post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm
        self.norm_last, self.adds_to_norm = norm_last, adds_to_norm
        self.dropout_rate, self.clamp = dropout_rate, clamp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: KV | None,
        cross_kv: KV | None,
        options: BlockOptions,
        cache_is_empty: bool,
        want_weights: bool,
    ) -> BlockOutput:
        keys = split_key(options.key, 7)
        attn_key, attn_drop, cross_key, cross_drop, mlp_key, mlp_drop, kv_key = keys
        read = self._input_of("attn", x)
        k, v = self.attn.keys_values(read, context.rotary, kv_key)
        slots = context.view.write_slots
        new = None if cache is None or slots is None else (k, v, slots)
        if cache is not None and new is not None and cache_is_empty:
            cache, new = cache.write(*new), None
        # Without a cache, and in its first call, queries attend to the new positions only.
        kv = self.attn.kv_of_sequence(k, v) if cache is None or new is None else cache
        y, weights, kv = self.attn(
            read,
            kv,
            visible=context.view.visible,
            rotary=context.rotary,
            bias=context.bias,
            head_mask=options.head_mask,
            key=attn_key,
            want_weights=want_weights,
            used_slots=None if new is None else context.view.used_slots,
            new=new,
        )
        cache = cache if new is None else kv
        x = self._add("attn", read if self.adds_to_norm else x, y, attn_drop)
        cross_weights = None
        if self.cross is not None and cross_kv is not None:
            assert context.cross_visible is not None
            y, cross_weights, _ = self.cross(
                self._input_of("cross", x),
                cross_kv,
                visible=context.cross_visible,
                head_mask=options.cross_head_mask,
                key=cross_key,
                want_weights=want_weights,
            )
            x = self._add("cross", x, y, cross_drop)
        read = read if self.mlp_norm is None else self._input_of("mlp", x)
        router_logits = None
        if isinstance(self.mlp, MixtureOfExperts):
            y, router_logits = self.mlp(read, key=mlp_key)
        else:
            y = self.mlp(read, key=mlp_key)
        x = self._add("mlp", read if self.adds_to_norm else x, y, mlp_drop)
        return BlockOutput(x, cache, weights, cross_weights, router_logits)

    def _input_of(self, sublayer: str, x: Array) -> Array:
        return x if self.norm_last else getattr(self, f"{sublayer}_norm")(x)

    def _add(self, sublayer: str, x: Array, y: Array, key: Array | None) -> Array:
        """Adds the output of a sublayer to its input."""
        post_norm = getattr(self, f"{sublayer}_post_norm")
        y = y if post_norm is None else post_norm(y)
        # With this constraint XLA all-reduces the partial sums of tensor parallelism.
        x = constrain(x + dropout(y, self.dropout_rate, key), "rows")
        x = getattr(self, f"{sublayer}_norm")(x) if self.norm_last else x
        return x if self.clamp is None else self.clamp(x)


@dataclasses.dataclass(frozen=True)
class StackOutput:
    """Output of all blocks and the final norm. Tuples have one entry per layer."""

    x: Float[Array, "B T D"]
    layers: tuple[KV, ...] | None
    """The layers' KV caches with the new positions written."""
    hidden_states: tuple[Float[Array, "B T _"], ...] | None
    """Input of each block, then `x`, which OPT-350M projects to another width."""
    attentions: tuple[Float[Array, "B N T S"], ...] | None
    cross_attentions: tuple[Float[Array, "B N T E"], ...] | None
    router_logits: tuple[Float[Array, "B T E"], ...]
    """Of the layers that have experts."""


# A block with rematerialization: the backward pass recomputes the activations. With
# `jax.checkpoint` the recomputation depends on the block's inputs only, so XLA on CPU may recompute
# all blocks up front and save almost no memory. Here it waits for the gradient of the block's
# output. There is no forward-mode derivative (`jax.jvp`).
_recomputed = jax.custom_vjp(Block.__call__, nondiff_argnums=(6, 7))


def _forward(*args: Any) -> tuple[BlockOutput, tuple[Any, ...]]:
    return Block.__call__(*args), args[:6]


def _backward(
    cache_is_empty: bool, want_weights: bool, inputs: tuple[Any, ...], gradients: BlockOutput
) -> tuple[Any, ...]:
    flags = {"cache_is_empty": cache_is_empty, "want_weights": want_weights}
    run = functools.partial(Block.__call__, **flags)
    # The barrier delays use of all inputs, all-gathered weights too, until the gradients exist.
    (block, x, *rest), gradients = jax.lax.optimization_barrier((inputs, gradients))
    return jax.vjp(run, block, after_gradient(x, gradients.x), *rest)[1](gradients)


_recomputed.defvjp(_forward, _backward)

_keeping_products = jax.checkpoint(
    Block.__call__,
    static_argnums=(6, 7),
    policy=jax.checkpoint_policies.save_only_these_names(KEPT),
)

REMAT: Mapping[bool | str, Any] = {
    False: Block.__call__,
    "full": _recomputed,
    "dots": _keeping_products,
}
"""How a block is run, by what its backward pass recomputes: nothing, all from the block's input, or
all but linear layers and a TPU's attention kernel, whose results are kept. Experts are
recomputed."""
# Jitted, so that identical blocks share one trace: 30 layers trace in the time of one.
_RUN = {name: jax.jit(run, static_argnums=(6, 7)) for name, run in REMAT.items()}


def checked_remat(remat: bool | str) -> bool | str:
    """The key of `REMAT` for what is recomputed; True is "full".

    Raises:
        InputError: there is no such name.

    >>> checked_remat(True), checked_remat("dots")
    ('full', 'dots')
    """
    if isinstance(remat, bool | np.bool_):
        return "full" if remat else False
    if not isinstance(remat, str) or remat not in REMAT:
        raise InputError(
            f"remat: expected True, False, 'full' (as True) or 'dots', found {quoted(remat)}"
        )
    return remat


class Stack(nnx.Module):
    """Transformer blocks in sequence, then the final norm, if there is one.

    `position_bias` has no entry, one bias for all blocks (T5, ALiBi), or one per block (umT5).
    `remat` names what the backward pass recomputes (`REMAT`). With `scan_layers` calls
    without a KV cache run equal blocks in a scan, which compiles one of them. `platform` decides
    the layout of the KV cache, and no number.
    """

    rope_per_row = False
    """True: dynamic and longrope RoPE depend on the length of each row, or of each document in a
    packed row. False: they depend on the length of the longest row."""

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: RMSNorm | LayerNorm | None,
        *,
        position_bias: Sequence[nnx.Module] = (),
        embedding_dropout: float = 0.0,
        output_dropout: float = 0.0,
        remat: bool | str = False,
        scan_layers: bool = False,
        platform: str = "cpu",
    ):
        self.blocks, self.norm = nnx.List(blocks), norm
        self.position_bias = nnx.List(position_bias)
        self.embedding_dropout, self.output_dropout = embedding_dropout, output_dropout
        self.remat, self.scan_layers = checked_remat(remat), scan_layers
        self.platform = platform

    @property
    def counts_tokens(self) -> bool:
        """True if attention needs the indices of keys among the real tokens: windows, ALiBi."""
        windows = any(block.attn.window is not None for block in self.blocks)
        return windows or any(isinstance(bias, Alibi) for bias in self.position_bias)

    def with_rope_per_row(self) -> Stack:
        """A copy whose RoPE depends on the length of each row, not on the longest row of a call.
        Returns the stack itself if its positions depend on no length."""
        depends = any(block.attn.rope and block.attn.rope.uses_length for block in self.blocks)
        return shallow_copy(self, rope_per_row=True) if depends else self

    @property
    def cache_has_head_axis(self) -> bool:
        """True if heads have an axis of their own in the KV cache (`KV`)."""
        return cache_has_head_axis(self.platform, self.blocks[0].attn.head_dim)

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
        self,
        encoder_states: Float[Array, "B E D"],
        key: Array | None = None,
        *,
        is_inference: bool = False,
    ) -> tuple[KV, ...]:
        """Computes the cross-attention keys and values of every block, once per generation."""
        crosses = [block.cross for block in self.blocks if block.cross is not None]
        projected = []
        for cross, own_key in zip(crosses, split_key(key, len(crosses)), strict=True):
            k, v = cross.keys_values(encoder_states, key=own_key)
            kv = KV.from_sequence(k, v, head_axis=self.cache_has_head_axis)
            if is_inference:
                encoder_states, kv = layer_by_layer(encoder_states, kv)
            projected.append(kv)
        return tuple(projected)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        *,
        layers: tuple[KV, ...] | None = None,
        cross_kv: tuple[KV, ...] | None = None,
        cache_is_empty: bool = False,
        head_mask: Float[Array, "L N"] | None = None,
        cross_head_mask: Float[Array, "L N"] | None = None,
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
        run = _RUN[self.remat]
        keys = split_key(key, len(self.blocks) + 2)
        x = constrain(dropout(x, self.embedding_dropout, keys[-2]), "rows")

        def step(x: Array, layer: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
            out = run(layer[0], x, *layer[1:], cache_is_empty, output_attentions)
            kept = (out.kv, out.attentions, out.cross_attentions, out.router_logits)
            return out.x, (x if output_hidden_states else None, *kept)

        inputs = self._layer_inputs(context, layers, cross_kv, head_mask, cross_head_mask, keys)
        # A scan would copy the KV caches of all layers, at every decode step.
        run_layers = scan_layers if self.scan_layers and layers is None else unroll_layers
        x, outputs = run_layers(step, x, inputs)
        x = x if self.norm is None else self.norm(x)
        x = dropout(x, self.output_dropout, keys[-1])
        hidden, new_layers, attentions, cross_attentions, routers = zip(*outputs, strict=True)
        crosses = output_attentions and cross_kv is not None
        return StackOutput(
            x=x,
            layers=None if layers is None else new_layers,
            hidden_states=(*hidden, x) if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
            cross_attentions=cross_attentions if crosses else None,
            router_logits=tuple(logits for logits in routers if logits is not None),
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
                head_mask=None if head_mask is None else head_mask[i],
                cross_head_mask=None if cross_head_mask is None else cross_head_mask[i],
                key=keys[i],
            )
            cache = None if layers is None else layers[i]
            cross = None if cross_kv is None else cross_kv[i]
            inputs.append((block, own, cache, cross, options))
        return inputs

    def _contexts(self, context: Context) -> list[Context]:
        """Each block's context, with its attention window, its RoPE and its relative bias."""
        windows = dict.fromkeys(block.attn.window for block in self.blocks)
        views = {window: context.view.for_layer(window) for window in windows}
        length = context.view.rope_length
        if not self.rope_per_row:  # as in transformers
            length = jnp.max(length, keepdims=True)
        ropes = dict.fromkeys(block.attn.rope for block in self.blocks)
        angles = {
            rope: None if rope is None else rope.angles(context.view.positions, length)
            for rope in ropes
        }
        biases: list[Any] = [self._bias(bias, context.view) for bias in self.position_bias]
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
            own = {"view": views[block.attn.window], "rotary": angles[block.attn.rope]}
            contexts.append(dataclasses.replace(context, bias=bias, **own))
        return contexts

    def _bias(self, bias: nnx.Module, view: AttentionView) -> ColumnBias:
        """A bias of the distances between columns, or for ALiBi between real tokens."""
        if not isinstance(bias, Alibi):
            return ColumnBias(bias, view.query_columns, view.key_columns)
        assert view.query_index is not None
        assert view.key_index is not None
        return ColumnBias(bias, view.query_index, view.key_index)


Inputs = TypeVar("Inputs")
Output = TypeVar("Output")
Step = Callable[[Float[Array, "B T D"], Inputs], tuple[Float[Array, "B T D"], Output]]
"""Runs one layer, given by its parameters and other inputs: (its output, what it returns)."""


def unroll_layers(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    """``x, out = step(x, layer)`` for one layer after the other: the last x, and each `out`."""
    outputs = []
    for layer in layers:
        x, out = step(x, layer)
        outputs.append(out)
    return x, outputs


def scan_layers(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    """`unroll_layers`, with a `jax.lax.scan` over layers whose structure repeats.

    The structure is that of the pytree, its static fields included: layers with and without a
    window, or with and without LoRA, differ. Where they alternate, the body of the scan runs one
    period of the pattern (Gemma 2: two layers). The layers' arrays are copied into one array,
    except those that are the same object in all of them (masks, RoPE's angles).
    """
    outputs: list[Output] = []
    structures = [structure(layer) for layer in layers]
    start = 0
    while start < len(layers):
        # The first of T5's blocks takes bfloat16, and all give float32.
        changes_dtype = jax.eval_shape(step, x, layers[start])[0].dtype != x.dtype
        first = start + changes_dtype
        x, out = unroll_layers(step, x, layers[start:first])
        period, count = repetition(structures[first:])
        stop = first + period * count
        groups = [tuple(layers[i : i + period]) for i in range(first, stop, period)]
        run = _scan if count > 1 else unroll_layers
        x, others = run(functools.partial(unroll_layers, step), x, groups)
        outputs += [*out, *itertools.chain(*others)]
        start = stop
    return x, outputs


def repetition(values: Sequence[Hashable]) -> tuple[int, int]:
    """The period of the pattern that a sequence begins with, and how often it is repeated.

    The pattern is the one that covers most of the sequence, with the shortest period.

    >>> repetition("aaab"), repetition("ababab"), repetition("abc"), repetition("")
    ((1, 3), (2, 3), (1, 1), (1, 0))
    """
    best = (1, min(1, len(values)))
    for period in range(1, len(values) // 2 + 1):
        count = 1
        while values[count * period : (count + 1) * period] == values[:period]:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def structure(tree: object) -> Hashable:
    """Structure of a pytree, and shapes and dtypes of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _scan(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    treedef = jax.tree.structure(layers[0])
    leaves = list(zip(*map(jax.tree.leaves, layers), strict=True))
    shared = [all(x is of_layers[0] for x in of_layers) for of_layers in leaves]

    def body(x: Array, arrays: list[Array]) -> tuple[Array, Output]:
        own = iter(arrays)
        layer = [xs[0] if same else next(own) for xs, same in zip(leaves, shared, strict=True)]
        return step(x, treedef.unflatten(layer))

    stacked = [jnp.stack(xs) for xs, same in zip(leaves, shared, strict=True) if not same]
    x, outputs = jax.lax.scan(body, x, stacked)
    parts, treedef = jax.tree.flatten(outputs)
    return x, [treedef.unflatten([a[i] for a in parts]) for i in range(len(layers))]
