"""Checks of a call's arrays on the host, before tracing.

Under jit an index out of bounds raises no error, so values are checked here. Arrays that are
already traced have no values to check, only shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, quoted

MAX_IDS = 2**30
"""Token ids in one call; an array that was broadcast may claim more than the host can check."""
IGNORED = -100
"""Label of positions that the loss ignores."""


def is_traced(x: object) -> bool:
    """True if x is a JAX tracer, whose value is not known yet."""
    return isinstance(x, Tracer)


def has_known_sizes(shape: tuple[Any, ...]) -> bool:
    """False if a size is a symbol, as `jax.export` makes of a size that it leaves open."""
    return all(isinstance(size, int) for size in shape)


def on_host(name: str, x: object) -> Any:
    """Converts x to a numpy array; tracers are returned unchanged."""
    if is_traced(x):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        raise InputError(f"{name}: rows of different lengths; pad them to one length") from None
    except TypeError:  # a key of jax.random
        raise InputError(f"{name}: expected an array of numbers, found {quoted(x)}") from None


@dataclasses.dataclass(frozen=True)
class SequenceInputs:
    """Checked inputs of one forward call, of an encoder or a decoder."""

    input_ids: Int[Array, "B T"] | None
    inputs_embeds: Float[Array, "B T D"] | None
    """Embeddings instead of token ids."""
    mask: Any
    """Padding mask, bool [B, T], True at real tokens; a numpy array unless traced."""
    segments: Any
    """Document numbers of packed rows, int32 [B, T]; None: one sequence per row."""


def sequence_inputs(
    input_ids: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    segment_ids: Any,
    *,
    vocab_size: int,
    width: int,
    side: str = "",
) -> SequenceInputs:
    """Checks token ids or embeddings with their padding mask or the segment ids of packed rows.

    Args:
        width: size of an embedding.
        side: prefix of the argument names in errors: ``"decoder_"`` or empty.
    """
    names = [side + name for name in ("input_ids", "inputs_embeds", "attention_mask")]
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError(f"{names[0]}, {names[1]}: give exactly one of the two")
    if input_ids is not None:
        input_ids = token_id_array(names[0], input_ids, vocab_size)
        shape = input_ids.shape
    else:
        inputs_embeds = embeddings(names[1], inputs_embeds, width)
        shape = inputs_embeds.shape[:2]
    segments = checked_segment_ids(
        f"{side}segment_ids", segment_ids, shape, attention_mask, names[2]
    )
    mask = mask_of(names[2], attention_mask, shape) if segments is None else segments != 0
    return SequenceInputs(input_ids, inputs_embeds, mask, segments)


def token_id_array(name: str, ids: object, vocab_size: int) -> Int[Array, "B T"]:
    """Token ids as int32, checked before the cast (int64 2**40 + 5 would become 5)."""
    return jnp.asarray(checked_token_ids(name, ids, vocab_size), jnp.int32)


def checked_token_ids(name: str, ids: Any, vocab_size: int) -> Any:
    """Checked token ids as a numpy int32 array; tracers are returned unchanged."""
    ids = on_host(name, ids)
    if ids.dtype.kind in "US" and ids.size:
        raise InputError(
            f"{name}: expected token ids, found the text {quoted(str(ids.flat[0]))}; encode it: "
            'tokenizer(texts, padding=True, return_tensors="np"), or use '
            "jaxllm.generate_texts(model, texts, tokenizer)"
        )
    if ids.ndim != 2 or ids.size == 0:
        hint = "; put a single row into a list: [ids]" if ids.ndim == 1 and ids.size else ""
        raise InputError(f"{name}: expected a non-empty [batch, length], found {ids.shape}{hint}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(f"{name}: expected integers, found {ids.dtype}")
    if not is_traced(ids):
        if ids.size > MAX_IDS:
            raise InputError(f"{name}: {ids.size} token ids at once, but at most {MAX_IDS} fit")
        bad = (ids < 0) | (ids >= vocab_size)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise InputError(
                f"{name}[{row}, {column}]: id {ids[row, column]} is not in the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
        ids = ids.astype(np.int32)  # on the host: nothing is compiled for this shape
    return ids


def embeddings(name: str, x: Any, width: int) -> Float[Array, "B T D"]:
    """`checked_embeddings` as a JAX array."""
    return jnp.asarray(checked_embeddings(name, x, width))


def checked_embeddings(name: str, x: Any, width: int) -> Any:
    """Checks embeddings or an encoder's output [B, T, D]; they stay on their device."""
    x = x if hasattr(x, "dtype") else on_host(name, x)
    if x.ndim != 3 or x.shape[-1] != width or x.size == 0:
        raise InputError(f"{name}: expected a non-empty [batch, length, {width}], found {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"{name}: expected floats, found {x.dtype}")
    return x


def mask_of(name: str, mask: Any, shape: tuple[int, ...]) -> Any:
    """Checks a padding mask (1 = real token) and casts it to bool [B, T]; None: all tokens real.

    The result is a numpy array unless traced, so that no program is compiled for its shape.
    """
    if mask is None:  # sizes are symbols where `jax.export` leaves them open
        return np.ones(shape, bool) if has_known_sizes(shape) else jnp.ones(shape, bool)
    mask = on_host(name, mask)
    if mask.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, found {mask.shape}")
    if is_traced(mask):
        return mask.astype(bool)
    is_good = np.isin(mask, (0, 1))
    if not is_good.all():
        raise InputError(f"{name}: expected 0 and 1 only, found {quoted(mask[~is_good][0])}")
    return mask.astype(bool)


def checked_segment_ids(
    name: str, ids: Any, shape: tuple[int, ...], mask: Any, mask_name: str
) -> Any:
    """Checks segment ids of packed rows, int32 [B, T]: 0 at pads, one run per document."""
    if ids is None:
        return None
    if mask is not None:
        raise InputError(f"{mask_name}: has no effect beside {name}, whose 0 are the pads; drop it")
    ids = on_host(name, ids)
    if ids.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, found {ids.shape}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(f"{name}: expected integers, found {ids.dtype}")
    if is_traced(ids):
        return ids.astype(jnp.int32)
    for row, numbers in enumerate(ids):
        runs = numbers[np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))]
        runs = runs[runs != 0]
        if (runs < 0).any() or len(set(runs.tolist())) != len(runs):
            raise InputError(
                f"{name}[{row}]: the tokens of a document stand together, under a number above 0; "
                f"found the runs {runs.tolist()[:10]}"
            )
    return ids.astype(np.int32)


def position_ids(ids: Any, shape: tuple[int, ...], limit: int | None) -> Int[Array, "B T"]:
    """Checks `position_ids`, [B, T] or [1, T], below `limit`; broadcasts them to [B, T]."""
    ids = on_host("position_ids", ids)
    if ids.shape not in (shape, (1, shape[1])):
        raise InputError(f"position_ids: expected shape {shape}, found {ids.shape}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(f"position_ids: expected integers, found {ids.dtype}")
    if not is_traced(ids):
        last = (2**31 - 1 if limit is None else limit) - 1
        if ids.min() < 0 or ids.max() > last:
            raise InputError(
                f"position_ids: expected 0 to {last}, found {ids.min()} to {ids.max()}"
            )
    return jnp.broadcast_to(jnp.asarray(ids, jnp.int32), shape)


def check_one_document(position_ids: Any) -> None:
    """Raises InputError for positions that begin anew within a row, if their values are known.

    Without a mask or a cache transformers 5 takes these for documents packed into a row, and lets
    none attend to another.
    """
    ids = on_host("position_ids", position_ids)
    if not is_traced(ids) and (np.diff(ids, axis=-1) < 0).any():
        raise InputError(
            "position_ids: they begin anew within a row; for packed documents give segment_ids, "
            "for one an attention_mask"
        )


def check_capacity(mask: Any, cache: Cache | None, limit: int | None, segments: Any = None) -> None:
    """Checks that new columns fit the cache, and each row's (or document's) tokens the positions.

    The length of a traced cache is not checked: under jit that is up to the caller.
    """
    B, T = mask.shape
    if cache is not None:
        checked(cache, (Cache,), "cache", "what init_cache returns")
        if cache.mask.shape[0] != B:
            raise InputError(f"cache: holds {cache.mask.shape[0]} rows, but the call has {B}")
        if not is_traced(cache.length) and int(cache.length) + T > cache.capacity:
            raise InputError(
                f"cache: {cache.capacity} columns, of which {int(cache.length)} are in use; {T} "
                "more do not fit"
            )
    if limit is None or not has_known_sizes((T,)):
        return  # a text that is too long for an exported program is up to the caller
    before = 0 if cache is None else cache.next_position
    needed = T
    if not is_traced(mask) and not is_traced(before):
        needed = int((np.asarray(before) + np.asarray(mask).sum(axis=-1)).max())
    if segments is not None:
        # The longest document depends on the values, which are unknown under jit.
        needed = 0 if is_traced(segments) else longest_document(segments)
    if needed > limit:
        raise InputError(f"input_ids: {needed} tokens, but this model has {limit} positions")


def longest_document(segments: np.ndarray) -> int:
    """Number of tokens of the longest document in packed rows."""
    return max(
        int(np.unique(row[row != 0], return_counts=True)[1].max(initial=0)) for row in segments
    )


def head_mask(name: str, mask: Any, layers: int, heads: int) -> Float[Array, "L N"] | None:
    """Checks a head mask, one factor per layer and head; [N] is broadcast to all layers."""
    if mask is None:
        return None
    mask = on_host(name, mask)
    if mask.shape not in ((layers, heads), (heads,)):
        raise InputError(
            f"{name}: expected shape {(layers, heads)} or {(heads,)}, found {mask.shape}"
        )
    return jnp.broadcast_to(jnp.asarray(mask, jnp.float32), (layers, heads))


def columns_to_keep(keep: Any, length: int) -> Any:
    """Index of the columns of `logits_to_keep`: the last n (0: all), or given columns."""
    keep = on_host("logits_to_keep", keep)
    if not jnp.issubdtype(keep.dtype, jnp.integer) or keep.ndim > 1:
        found = quoted(keep.tolist() if keep.dtype == object else keep)
        raise InputError(f"logits_to_keep: expected an integer or a list of them, found {found}")
    if is_traced(keep):
        if keep.ndim == 0:
            raise InputError("logits_to_keep: a number of columns must be a Python int under jit")
        return keep
    if keep.ndim == 0:
        if keep < 0:
            raise InputError(f"logits_to_keep: expected 0 or more, found {keep}")
        return slice(None) if keep == 0 else slice(-int(keep), None)
    if keep.size == 0 or keep.min() < -length or keep.max() >= length:
        raise InputError(f"logits_to_keep: expected columns 0 to {length - 1}, found {keep}")
    return keep


def checked_labels(labels: object, shape: tuple[int, ...], logits: Array) -> Int[Array, "B T"]:
    """Checks labels [B, T] for all positions of the call: token ids, or -100 (ignored)."""
    labels = label_ids(labels, logits.shape[-1])
    if labels.shape != shape:
        raise InputError(f"labels: expected shape {shape}, found {labels.shape}")
    if logits.shape[:2] != shape:
        raise InputError("logits_to_keep: the loss of labels needs all logits; drop one of the two")
    return labels


def label_ids(labels: Any, classes: int) -> Int[Array, ...]:
    """Labels as int32, checked to be in 0..classes - 1 or -100 (ignored)."""
    labels = on_host("labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels: expected integers, found {labels.dtype}")
    if not is_traced(labels):
        bad = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
        if bad.any():
            raise InputError(
                f"labels: expected 0 to {classes - 1} or {IGNORED} (none), found {labels[bad][0]}"
            )
    return jnp.asarray(labels, jnp.int32)
