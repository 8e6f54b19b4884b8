"""A [batch, length] argument with its mask: checked on the host, and padded to a bucket."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_traced
from jaxllm.models import input_checks as check

SMALLEST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A [batch, length] argument and its mask, before and after padding to a bucket."""

    ids: Any
    mask: Any
    embeds: Any = None
    before: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Columns before padding; None: it was not padded."""

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    @property
    def start_len(self) -> int:
        """Columns of the result that it fills: none, where it is embeddings alone."""
        return 0 if self.ids is None else self.length

    @property
    def unpadded(self) -> int:
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


def check_room(model: Any, given: PaddedBatch, new: int, whose: str = "this model") -> None:
    """A learned position table has a hard end; reading past it repeats its last row in silence."""
    limit = model.config.max_positions
    if limit is None:
        return
    real = given.length if is_traced(given.mask) else int(np.asarray(given.mask).sum(1).max())
    if real + new > limit:
        raise InputError(
            f"max_new_tokens: a prompt of {real} tokens and {new} new ones need {real + new} "
            f"positions, but {whose} has {limit}; ask for at most {max(limit - real, 0)}"
        )


def check_width(name: str, x: Any, width: int) -> None:
    if x.ndim != 3 or x.shape[-1] != width or 0 in x.shape:
        raise InputError(f"{name}: expected [batch, length, {width}], found {list(x.shape)}")


def checked_ids(name: str, ids: Any, vocab_size: int) -> Any:
    """Token ids [batch, length], int32, on the host where they are known."""
    checked = check.checked_token_ids(name, ids, vocab_size)
    return checked.astype(jnp.int32) if is_traced(checked) else checked


def checked_mask(mask: Any, shape: tuple[int, ...], name: str = "attention_mask") -> Any:
    """A boolean mask of that shape in which every row has a real token."""
    checked = check.mask_of(name, mask, shape)
    if is_traced(checked):
        return checked
    host = np.asarray(checked)
    if not host.any(axis=1).all():
        row = int(np.argmin(host.any(axis=1)))
        raise InputError(f"{name}: row {row} has no real token")
    return host


def checked_types(model: Any, token_type_ids: Any, given: PaddedBatch) -> Any:
    """int32 [B, T] beside the prompt, on the host where they are known; None if there are none."""
    if token_type_ids is None:
        return None
    types = check.token_ids("token_type_ids", token_type_ids, model.config.vocab_size)
    if types.shape != given.mask.shape:
        raise InputError(f"token_type_ids: expected {given.mask.shape}, found {types.shape}")
    return types if is_traced(types) else np.asarray(types)


def last_real(mask: Any) -> Any:
    """int32 [B]: the column of each row's last real token; on the host where the mask is known."""
    host = jnp if is_traced(mask) else np
    known = host.asarray(mask)
    columns = host.where(known, host.arange(known.shape[1]), 0)
    return host.max(columns, axis=-1).astype(host.int32)


def floats(x: Any) -> Any:
    """Embeddings on the host where they are known, so that padding them compiles nothing."""
    return x if is_traced(x) else np.asarray(x)


def pad_right(x: Any, extra: int, value: Any) -> Any:
    widths = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
    if isinstance(x, np.ndarray):
        return np.pad(x, widths, constant_values=value)
    return jnp.pad(x, widths, constant_values=value)
