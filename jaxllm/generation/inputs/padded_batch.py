"""Padded batches: [batch, length] arguments and masks, checked on the host, padded to buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxllm.common.errors import InputError, counted
from jaxllm.generation.inputs.values import HostArray, is_traced
from jaxllm.models import input_checks as check
from jaxllm.models.decoder import GenerativeModel

SMALLEST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A [batch, length] argument and its padding mask, before or after padding to a bucket."""

    ids: HostArray
    """int32; None for a prompt of embeddings alone."""
    mask: HostArray
    """bool: True at real tokens."""
    embeds: HostArray = None
    """float [B, T, D], or None."""
    before: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Number of columns before padding to a bucket; None: not padded yet."""

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    @property
    def start_len(self) -> int:
        """Number of result columns that the prompt fills: 0 for a prompt of embeddings."""
        return 0 if self.ids is None else self.length

    @property
    def unpadded(self) -> int:
        """Number of columns before padding to a bucket."""
        return self.length if self.before is None else self.before

    def pad_to(self, length: int, pad: int = 0) -> PaddedBatch:
        """Pads on the right with masked columns."""
        extra = length - self.length
        return PaddedBatch(
            None if self.ids is None else pad_right(self.ids, extra, pad),
            pad_right(self.mask, extra, False),
            None if self.embeds is None else pad_right(self.embeds, extra, 0),
            before=self.unpadded,
        )


def check_positions(
    model: GenerativeModel, prompt: PaddedBatch, new: int, whose: str = "this model"
) -> None:
    """Raises InputError if prompt and new tokens need more positions than the model has.

    JAX would clamp an index beyond a learned position table to its last row without an error.
    """
    limit = model.config.max_positions
    if limit is None:
        return
    traced = is_traced(prompt.mask)
    real = prompt.length if traced else int(np.asarray(prompt.mask).sum(1).max())
    kind = "decoder prompt" if model.is_encoder_decoder else "prompt"
    if real >= limit:
        raise InputError(
            f"the {kind} has {counted(real)}, but {whose} has {limit} positions for prompt and new "
            "tokens: shorten the prompt"
        )
    if real + new > limit:
        is_start = model.is_encoder_decoder and real == 1
        taken = "the decoder's start token" if is_start else f"a {kind} of {counted(real)}"
        raise InputError(
            f"max_new_tokens: {taken} and {new} new ones need {real + new} positions, but "
            f"{whose} has {limit}; ask for at most {limit - real}"
        )


def checked_ids(name: str, ids: object, vocab_size: int) -> HostArray:
    """Checks token ids; returns int32 [batch, length], a NumPy array unless traced."""
    checked = check.checked_token_ids(name, ids, vocab_size)
    if not check.has_known_sizes(checked.shape):
        raise InputError(
            f"{name}: generate needs the numbers of rows and columns, found {checked.shape}; "
            "export it for each size of a batch"
        )
    return checked.astype(jnp.int32) if is_traced(checked) else checked


def checked_mask(mask: object, shape: tuple[int, ...], name: str = "attention_mask") -> HostArray:
    """Checks for a mask of ``shape`` with a real token in every row; returns it as bool."""
    checked = check.mask_of(name, mask, shape)
    if is_traced(checked):
        return checked
    host = np.asarray(checked)
    if not host.any(axis=1).all():
        row = int(np.argmin(host.any(axis=1)))
        raise InputError(f"{name}: row {row} has no real token")
    return host


def checked_types(
    model: GenerativeModel, token_type_ids: object, prompt: PaddedBatch
) -> HostArray | None:
    """Checks token types; returns int32 [B, T], a NumPy array unless traced, or None."""
    if token_type_ids is None:
        return None
    types = check.token_id_array("token_type_ids", token_type_ids, model.config.vocab_size)
    if types.shape != prompt.mask.shape:
        raise InputError(f"token_type_ids: expected {prompt.mask.shape}, found {types.shape}")
    return types if is_traced(types) else np.asarray(types)


def last_token_columns(mask: HostArray) -> HostArray:
    """Column of each row's last real token, int32 [B]: a NumPy array unless traced."""
    host = jnp if is_traced(mask) else np
    real = host.asarray(mask)
    columns = host.where(real, host.arange(real.shape[1]), 0)
    return host.max(columns, axis=-1).astype(host.int32)


def padded_rows(
    rows: Sequence[Int[np.ndarray, " _"]], width: int
) -> tuple[Int[np.ndarray, "R W"], Bool[np.ndarray, "R W"]]:
    """Ids and padding mask of rows, padded on the right with 0.

    >>> [x.tolist() for x in padded_rows([np.array([5, 6]), np.array([7])], 3)]
    [[[5, 6, 0], [7, 0, 0]], [[True, True, False], [True, False, False]]]
    """
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, True
    return ids, mask


def checked_embeds(embeds: object, width: int) -> HostArray:
    """Checks `inputs_embeds`; returns a NumPy array unless traced, so that padding compiles
    nothing."""
    checked = check.checked_embeddings("inputs_embeds", embeds, width)
    return checked if is_traced(checked) else np.asarray(checked)


def pad_right(x: HostArray, extra: int, value: float) -> HostArray:
    """Appends `extra` columns of `value` to an array."""
    if isinstance(x, np.ndarray):  # np.pad takes ten times as long as this
        padded = np.full((x.shape[0], x.shape[1] + extra, *x.shape[2:]), value, x.dtype)
        padded[:, : x.shape[1]] = x
        return padded
    widths = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, widths, constant_values=value)
