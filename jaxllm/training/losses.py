"""Training losses as sums, so that the mean does not depend on how a batch is split.

The loss of many tokens over a large vocabulary can be computed for a few columns of logits at a
time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.arguments import checked_count
from jaxllm.common.errors import InputError
from jaxllm.common.hardware import own_memory
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier, with_rope_per_row
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.input_checks import IGNORED
from jaxllm.models.losses import (
    classification_loss,
    label_logits,
    next_labels,
    token_losses,
)
from jaxllm.models.model import Head, Model
from jaxllm.nn.lora import LoraLinear
from jaxllm.nn.platform.training import MAX_LOGITS, logits_within_memory
from jaxllm.parallel.placement import device_of_arrays
from jaxllm.parallel.sharding import (
    DATA,
    FSDP,
    ROWS,
    all_gather_fsdp,
    constrain,
    context_mesh,
    fsdp_axis,
    logical_axes,
    parameter_path,
    row_shards,
    shard_count,
)

Batch = Mapping[str, Any]
"""Arrays [B, ...] by model argument name, and `labels`."""
Sums = Any
"""A pytree of float32 scalars whose field `loss` is differentiated (`losses.LossSums`)."""
ROUTER_LOSS = "router_loss"
"""Metric of a mixture of experts: the part of its loss that its routers add."""
SumsOf = Callable[[Float[Array, "tokens V"], Int[Array, " tokens"]], Sums]
"""Sums over some tokens, from their logits and labels."""
ChunkInputs = tuple[Float[Array, "B c D"], Int[Array, "B c"], Array | None]
"""Hidden states, labels and dropout key of one chunk."""
Chunks = tuple[Float[Array, "C B c D"], Int[Array, "C B c"], Array | None]
"""The same of all chunks."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over one batch; float32 scalars."""

    loss: Float[Array, ""]
    """Loss summed over the counted labels; the training step differentiates it."""
    count: Float[Array, ""]
    """Number of counted labels (language models) or rows (classifiers)."""
    correct: Float[Array, ""]
    """Number of counted labels that are predicted: that have the first of the largest logits."""
    extra: dict[str, Float[Array, ""]] = dataclasses.field(default_factory=dict)
    """Further sums, by the names of their means among the metrics (see `dpo.DPOLoss`)."""

    def __add__(self, other: LossSums) -> LossSums:
        return jax.tree.map(jnp.add, self, other)

    @staticmethod
    def zero() -> LossSums:
        zero = jnp.zeros((), jnp.float32)
        return LossSums(loss=zero, count=zero, correct=zero)


Loss = Callable[..., LossSums]
"""``loss(model, batch, key=None) -> LossSums``; a key turns dropout on."""


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy over tokens, with label smoothing and z-loss, and the loss of a mixture of
    experts' routers if its config asks for it.

    Args:
        label_smoothing: share of the target distribution that is uniform over the vocabulary
            (Szegedy et al. 2015, arXiv:1512.00567, equation 3 in section 7), 0 to 1.
        z_loss: weight of log(Z)^2, which keeps the softmax's denominator near 1 (Chowdhery et al.
            2022, arXiv:2204.02311, section 5; 1e-4 there).
        max_logits: most logits that a device holds at once; a batch with more is computed in chunks
            of columns (`chunked_sums`).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    max_logits: int = MAX_LOGITS

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing: expected 0 to 1, found {self.label_smoothing}")
        if not 0 <= self.z_loss < math.inf:
            raise InputError(f"z_loss: expected 0 or more, found {self.z_loss}")

    def of_model(
        self,
        model: CausalLM | EncoderDecoderLM[Any],
        inputs: dict[str, Any],
        labels: Any,
        key: Array | None,
    ) -> LossSums:
        """Loss sums of a language model for labels [B, T] that its logits predict."""
        x, head_key, aux_loss = with_rope_per_row(model).head_inputs(**inputs, dropout_key=key)
        labels = jnp.asarray(labels)
        columns = columns_within(self.max_logits, labels.shape, model.config.vocab_size)
        if columns >= labels.shape[1]:
            sums: Sums = self.of_tokens(model.head(x, head_key), labels)
        else:
            # Nothing else in a head has dropout.
            head_key = head_key if isinstance(model.head.layer, LoraLinear) else None
            chunks = _chunks_of(columns, x, labels, head_key)
            sums = chunked_sums(self.of_tokens, model.head, chunks)
        if aux_loss is None:
            return sums
        assert model.config.aux_loss is not None
        added = model.config.aux_loss.weight * aux_loss * sums.count
        return dataclasses.replace(sums, loss=sums.loss + added, extra={ROUTER_LOSS: added})

    def of_tokens(self, logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> LossSums:
        """Loss sums for logits and the labels that they predict; labels of -100 are not counted."""
        losses, log_z = token_losses(logits, labels)
        if self.label_smoothing:
            uniform = log_z - jnp.mean(logits, axis=-1)
            losses = losses + self.label_smoothing * (uniform - losses)
        if self.z_loss:
            losses = losses + self.z_loss * jnp.square(log_z)
        counted = labels != IGNORED
        right = is_argmax(logits, labels)
        return LossSums(
            loss=jnp.where(counted, losses, 0.0).sum(),
            count=counted.sum(dtype=jnp.float32),
            correct=(right & counted).sum(dtype=jnp.float32),
        )


def is_argmax(logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Bool[Array, "*B"]:
    """True where the label is the index of the largest logit, of several equal ones the first.

    Half-precision logits often are equal, and those of a model that has collapsed always.
    PERF(cpu): jnp.argmax would take several times as long as max and any; benchmarks/train.py.
    """
    largest = jnp.max(logits, axis=-1)
    words = jnp.expand_dims(jnp.arange(logits.shape[-1]), tuple(range(labels.ndim)))
    before = words < labels[..., None]
    is_before = before & (logits >= largest[..., None])
    # PERF(tpu): a sum is part of the pass that adds up the softmax, where `any` is a pass of its
    # own, an eighth of the loss and its gradient. On a CPU the sum takes longer.
    any_before = jax.lax.platform_dependent(is_before, tpu=has_any_by_sum, default=has_any)
    return ~any_before & (label_logits(logits, labels) >= largest)


def has_any(x: Bool[Array, "*B V"]) -> Bool[Array, "*B"]:
    """True for rows with an entry that is true."""
    return jnp.any(x, axis=-1)


def has_any_by_sum(x: Bool[Array, "*B V"]) -> Bool[Array, "*B"]:
    """`has_any`, by the number of entries that are true."""
    return jnp.sum(x, axis=-1, dtype=jnp.float32) > 0


def inputs_and_labels(batch: Batch) -> tuple[dict[str, Any], Any]:
    """Splits a batch into the model's inputs and the labels.

    Raises:
        InputError: the batch has no labels.
    """
    if "labels" not in batch:
        raise InputError(f"labels: missing in the batch, which has {', '.join(sorted(batch))}")
    return {name: x for name, x in batch.items() if name != "labels"}, batch["labels"]


def causal_inputs_and_labels(batch: Batch) -> tuple[dict[str, Any], Array]:
    """Inputs of a causal language model, and the labels [B, T] that its logits predict."""
    inputs, labels = inputs_and_labels(batch)
    mask = batch.get("attention_mask")
    return inputs, next_labels(labels, batch.get("segment_ids"), mask)


def seq2seq_inputs_and_labels(
    model: EncoderDecoderLM[Any], batch: Batch
) -> tuple[dict[str, Any], Array]:
    """Inputs of an encoder-decoder, and the labels [B, T] that its logits predict.

    Unless the batch has other decoder inputs, the decoder reads the labels shifted right.
    """
    inputs, labels = inputs_and_labels(batch)
    labels = jnp.asarray(labels)
    if not batch.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        shifted = model.shift_right(labels, batch.get("decoder_segment_ids"))
        inputs["decoder_input_ids"] = shifted
    return inputs, labels


class CausalLoss(TokenLoss):
    """Loss of a causal language model.

    `labels` [B, T] are aligned with the input tokens; each is predicted from the position before
    it. The first token of a segment (`segment_ids`) is not predicted, nor that after left padding.
    """

    def __call__(self, model: CausalLM, batch: Batch, key: Array | None = None) -> LossSums:
        return self.of_model(model, *causal_inputs_and_labels(batch), key)


class Seq2SeqLoss(TokenLoss):
    """Loss of an encoder-decoder: the decoder reads `labels` [B, T] shifted right."""

    def __call__(
        self, model: EncoderDecoderLM[Any], batch: Batch, key: Array | None = None
    ) -> LossSums:
        return self.of_model(model, *seq2seq_inputs_and_labels(model, batch), key)


@dataclasses.dataclass(frozen=True)
class ClassificationLoss:
    """Loss of a sequence classifier according to its `problem_type`, summed over rows.

    `labels`: int32 [B] (single label; -100: the row is not counted), float [B, C] (several labels)
    or float [B] (regression, where `correct` stays 0). With several labels a row is correct if all
    of them are. `weights` [B] (0 or 1) excludes rows with float labels.
    """

    def __call__(
        self, model: SequenceClassifier, batch: Batch, key: Array | None = None
    ) -> LossSums:
        weights = batch.get("weights")
        inputs, labels = inputs_and_labels({k: v for k, v in batch.items() if k != "weights"})
        logits = with_rope_per_row(model)(**inputs, dropout_key=key).logits
        labels = jnp.asarray(labels)
        counted = jnp.ones(logits.shape[0], bool) if weights is None else jnp.asarray(weights) > 0
        problem = model.config.problem_type
        if jnp.issubdtype(labels.dtype, jnp.integer) and problem in (
            None,
            "single_label_classification",
        ):
            counted = counted & (labels.reshape(-1) != IGNORED)
        losses = jax.vmap(lambda x, y: classification_loss(x[None], y[None], problem))(
            logits, labels
        )
        right = jnp.where(counted, rows_right(logits, labels, problem), False)
        return LossSums(
            loss=jnp.where(counted, losses, 0.0).sum(),
            count=counted.sum(dtype=jnp.float32),
            correct=right.sum(dtype=jnp.float32),
        )


def rows_right(logits: Float[Array, "B C"], labels: Array, problem: str | None) -> Array:
    """True for rows whose labels are all predicted correctly; False for regression."""
    if problem == "regression" or (problem is None and logits.shape[-1] == 1):
        return jnp.zeros(logits.shape[0], bool)
    if labels.ndim == logits.ndim and labels.shape == logits.shape:
        return jnp.all((logits > 0) == (labels > 0.5), axis=-1)
    return jnp.argmax(logits, axis=-1) == labels.reshape(-1)


def loss_for(
    model: Model[Any],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    max_logits: int | None = None,
) -> Loss:
    """Returns the loss for a model's class.

    Args:
        max_logits: as in `TokenLoss`; None: what suits the devices that hold the model. Fewer take
            less memory, and a GPU more time.

    Raises:
        InputError: no loss is known for the class, or a classifier has `label_smoothing`, `z_loss`
            or `max_logits`.
    """
    if isinstance(model, SequenceClassifier):
        only = {"label_smoothing": label_smoothing, "z_loss": z_loss, "max_logits": max_logits}
        for name, value in only.items():
            if value:
                raise InputError(f"{name}: only for language models, but the model is a classifier")
        return ClassificationLoss()
    most = most_logits(model) if max_logits is None else checked_count(max_logits, "max_logits")
    if isinstance(model, CausalLM):
        return CausalLoss(label_smoothing, z_loss, most)
    if isinstance(model, EncoderDecoderLM):
        return Seq2SeqLoss(label_smoothing, z_loss, most)
    raise InputError(f"{type(model).__name__}: has no labels to predict, so no loss")


def most_logits(model: Model[Any]) -> int:
    """Most logits that a loss should hold at once on a device that holds the model."""
    device = device_of_arrays(model)
    return logits_within_memory(device.platform, model.dtype, own_memory(device))


def columns_within(limit: int, shape: tuple[int, int], vocab_size: int) -> int:
    """Number of columns of [B, T] whose logits on one device are at most `limit`, 1 or more.

    >>> columns_within(1 << 27, (8, 1024), 50257)
    256
    """
    rows, columns = shape
    shards = shard_count((rows, columns, vocab_size), "rows", None, "vocab")
    fitting = limit * shards // (rows * vocab_size)
    # The next power of two below: most lengths are multiples of it, which then need no padding.
    return columns if fitting >= columns else 1 << max(fitting.bit_length() - 1, 0)


def chunked_row_losses(
    columns: int,
    head: Head,
    x: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    key: Array | None,
) -> Float[Array, " B"]:
    """Cross-entropy summed over each row's labels, with the logits of `columns` columns at a time.

    The weight of a row in the gradient is known only after all of its columns, so the backward
    pass computes the logits a second time.
    """
    head = gathered(head)

    @jax.checkpoint
    def add(losses: Float[Array, " B"], chunk: ChunkInputs) -> tuple[Float[Array, " B"], None]:
        hidden, targets, chunk_key = chunk
        logits = head(hidden.reshape(-1, hidden.shape[-1]), chunk_key)
        tokens, _ = token_losses(constrain(logits, "rows", "vocab"), targets.reshape(-1))
        return losses + tokens.reshape(targets.shape).sum(axis=-1), None

    zeros = constrain(jnp.zeros(x.shape[0], jnp.float32), "rows")
    return jax.lax.scan(add, zeros, _chunks_of(columns, x, labels, key))[0]


def _chunks_of(
    columns: int, x: Float[Array, "B T D"], labels: Int[Array, "B T"], key: Array | None
) -> Chunks:
    """Splits columns into chunks; the last one is filled with labels that are not counted."""
    count = math.ceil(x.shape[1] / columns)
    missing = count * columns - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, missing)), constant_values=IGNORED)

    def chunks(a: Array) -> Array:
        chunked = a.reshape(a.shape[0], count, columns, *a.shape[2:]).swapaxes(0, 1)
        return constrain(chunked, None, "rows")

    keys = None if key is None else jax.random.split(key, count)
    return chunks(x), chunks(labels), keys


def _chunk_sums(sums_of: SumsOf, head: Head, x: Array, labels: Array, key: Array | None) -> Sums:
    # Tokens in one axis: with rows and columns apart a TPU copies the logits' gradients.
    logits = head(x.reshape(-1, x.shape[-1]), key)
    return sums_of(constrain(logits, "rows", "vocab"), labels.reshape(-1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_sums(sums_of: SumsOf, head: Head, chunks: Chunks) -> Sums:
    """``sums_of(head(x, key), labels)``, added up over chunks of columns.

    The gradient of a chunk is computed with its loss, while its logits are there, so that nothing
    is computed twice (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989). There is no
    forward-mode derivative.
    """
    head = gathered(head)

    def add(total: Sums, chunk: ChunkInputs) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, total, _chunk_sums(sums_of, head, *chunk)), None

    return jax.lax.scan(add, _zeros(sums_of, head, chunks), chunks)[0]


def _zeros(sums_of: SumsOf, head: Head, chunks: Chunks) -> Sums:
    first = jax.tree.map(lambda a: a[0], chunks)
    shapes = jax.eval_shape(partial(_chunk_sums, sums_of), head, *first)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def _forward(sums_of: SumsOf, head: Head, chunks: Chunks) -> tuple[Sums, tuple[Head, Array]]:
    """The sums, and the gradients of their `loss` with respect to the head and hidden states."""
    (x, _, key), mesh = chunks, context_mesh()
    # A dropout key would give the rows of all devices the same mask.
    if mesh is not None and key is None and x.shape[1] % row_shards(mesh) == 0:
        return _forward_by_rows(sums_of, head, chunks)
    sums, head_grad, x_grad = _with_gradients(sums_of, gathered(head), chunks)
    return sums, (sharded(head_grad), x_grad)


def _with_gradients(sums_of: SumsOf, head: Head, chunks: Chunks) -> tuple[Sums, Head, Array]:
    """The sums, and gradients of their `loss`; that of the head is added up in float32."""

    def loss(head: Head, x: Array, labels: Array, key: Array | None) -> tuple[Array, Sums]:
        sums = _chunk_sums(sums_of, head, x, labels, key)
        return sums.loss, sums

    def add(carry: tuple[Sums, Head], chunk: ChunkInputs) -> tuple[tuple[Sums, Head], Array]:
        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (head_grad, x_grad), sums = grad(head, *chunk)
        return jax.tree.map(jnp.add, carry, (sums, sharded(head_grad))), x_grad

    zeros = (_zeros(sums_of, head, chunks), sharded(jax.tree.map(jnp.zeros_like, head)))
    (sums, head_grad), x_grad = jax.lax.scan(add, zeros, chunks)
    return sums, head_grad, x_grad


def _forward_by_rows(
    sums_of: SumsOf, head: Head, chunks: Chunks
) -> tuple[Sums, tuple[Head, Array]]:
    """`_forward` in which each device adds up the gradients of its rows, which are then reduced
    once for all chunks."""
    dtype, (x, labels, _) = head.layer.dtype, chunks
    axes = [fsdp_axis(leaf.shape, names) for leaf, names in _parameters_of(head)]
    leaves, structure = jax.tree.flatten(head)

    def of_device(leaves: list[Array], x: Array, labels: Array) -> tuple[Sums, list[Array], Array]:
        whole = []
        for leaf, axis in zip(leaves, axes, strict=True):
            leaf = leaf.astype(dtype) if leaf.ndim == 2 else leaf
            gathers = axis is not None
            whole.append(jax.lax.all_gather(leaf, FSDP, axis=axis, tiled=True) if gathers else leaf)
        head = jax.tree.unflatten(structure, whole)
        sums, head_grad, x_grad = _with_gradients(sums_of, head, (x, labels, None))
        reduced = []
        for gradient, leaf, axis in zip(jax.tree.leaves(head_grad), leaves, axes, strict=True):
            if axis is None:
                total = jax.lax.psum(gradient, ROWS)
            else:
                total = jax.lax.psum(gradient, DATA)
                total = jax.lax.psum_scatter(total, FSDP, scatter_dimension=axis, tiled=True)
            reduced.append(total.astype(leaf.dtype))
        return jax.lax.psum(sums, ROWS), reduced, x_grad

    shards = [
        PartitionSpec(*[None] * axis, FSDP) if axis is not None else PartitionSpec()
        for axis in axes
    ]
    rows = PartitionSpec(None, ROWS)
    run = jax.shard_map(
        of_device,
        mesh=context_mesh(),
        in_specs=(shards, rows, rows),
        out_specs=(PartitionSpec(), shards, rows),
        axis_names={*ROWS},
        check_vma=False,
    )
    sums, reduced, x_grad = jax.jit(run)(leaves, x, labels)
    return sums, (jax.tree.unflatten(structure, reduced), x_grad)


def _backward(sums_of: SumsOf, gradients: tuple[Head, Array], cotangents: Sums) -> Any:
    head_grad, x_grad = jax.tree.map(lambda g: (g * cotangents.loss).astype(g.dtype), gradients)
    return head_grad, (x_grad, None, None)


chunked_sums.defvjp(_forward, _backward)


def gathered(head: Head) -> Head:
    """The head with its fsdp shards all-gathered, once for all chunks."""
    return _map_parameters(all_gather_fsdp, head)


def sharded(head: Head) -> Head:
    """The head's parameters, or their gradients, in the shards of a parameter."""
    return _map_parameters(constrain, head)


def _map_parameters(function: Callable[..., Array], head: Head) -> Head:
    """``function(parameter, *logical axes)`` of each parameter."""
    leaves = [function(leaf, *names) for leaf, names in _parameters_of(head)]
    return jax.tree.unflatten(jax.tree.structure(head), leaves)


def _parameters_of(head: Head) -> list[tuple[Array, tuple[str | None, ...]]]:
    """The head's parameters and their logical axes."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        name = parameter_path(path).removeprefix("layer.")
        found.append((leaf, logical_axes(f"lm_head.{name}")))
    return found
