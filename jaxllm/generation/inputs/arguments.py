"""Arguments of a call besides its settings, batches padded to buckets, and equal batches.

Token ids, masks and embeddings are checked on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.arguments import GENERATE, checked, drop_renamed
from jaxllm.common.errors import InputError, UnsupportedError, counted, quoted
from jaxllm.generation.inputs.values import HostArray, bucket, is_traced
from jaxllm.models import input_checks as check
from jaxllm.models.decoder import GenerativeModel

T = TypeVar("T")
R = TypeVar("R")
SMALLEST_BUCKET = 16
TokenRows: TypeAlias = Array | np.ndarray | Sequence[Sequence[int]] | Sequence[np.ndarray]
"""Token ids or masks: an array [B, T], or one sequence for each row."""


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """Arguments of a call besides its settings, as the caller passed them, before any check.

    B: batch size. T: prompt length. E: length of the encoder's input. D: model width.
    """

    input_ids: Any = None
    """int [B, T]: the prompt (decoder-only), or the encoder's input (encoder-decoder)."""
    attention_mask: Any = None
    """bool or 0/1 [B, T]: padding mask, 1 at real tokens."""
    inputs_embeds: Any = None
    """float [B, T, D]: prompt embeddings, instead of `input_ids`."""
    token_type_ids: Any = None
    """int [B, T] (GPT-2)."""
    decoder_input_ids: Any = None
    """int [B, T]: the decoder's prompt (encoder-decoder)."""
    decoder_attention_mask: Any = None
    """bool or 0/1 [B, T]."""
    encoder_outputs: Any = None
    """float [B, E, D], or an output or mapping that holds it as `last_hidden_state`."""
    encoder_hidden_states: Any = None
    """float [B, E, D] (GPT-2 with cross-attention)."""
    encoder_attention_mask: Any = None
    """bool or 0/1 [B, E]."""

    assistant_model: GenerativeModel | None = None
    """Smaller model with the same vocabulary that generates drafts."""
    tokenizer: Any = None
    stopping_criteria: Any = None
    """A list of callables."""
    logits_processor: Any = None
    """A list of callables."""
    prefix_allowed_tokens_fn: Any = None
    """`(batch_id, ids) -> token ids`."""
    negative_prompt_ids: Any = None
    """int [B, T]: unconditional contexts for classifier-free guidance."""
    negative_prompt_attention_mask: Any = None
    """bool or 0/1 [B, T]."""
    row_ids: Any = None
    """int [B]: row ids, which select the random numbers of each row."""
    past_key_values: Any = None
    """KV cache returned by an earlier call as `out.past_key_values`."""
    return_past_key_values: bool = False
    rope_length: Any = "batch"
    """"batch" or "row": the sequence length that dynamic and longrope RoPE use."""

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises InputError for the first of these arguments that is given, with the reason."""
        for name in names:
            if getattr(self, name) is not None:
                raise InputError(f"{name}: {why}")


ARGUMENTS = tuple(field.name for field in dataclasses.fields(CallArguments))
INPUTS = ARGUMENTS[: ARGUMENTS.index("assistant_model")]
"""Arguments that are inputs of the model."""
UNSUPPORTED = {
    "assistant_tokenizer": "an assistant of another vocabulary",
    "synced_gpus": "synced devices",
    "position_ids": "giving positions (they follow from attention_mask)",
    "custom_generate": "custom_generate",
}

GENERATE_ARGUMENTS = frozenset({*ARGUMENTS, *UNSUPPORTED, "streamer"})
"""Keyword arguments of generate() that are not config fields."""


def split_keywords(keywords: Mapping[str, Any]) -> tuple[CallArguments, dict[str, Any]]:
    """Splits the keyword arguments of a call into arguments and settings, the fields of
    `GenerationConfig`, which raises for unknown names.

    Raises:
        InputError: an argument of transformers' Flax classes that has another name here.
        UnsupportedError: an argument is supported by transformers only.
    """
    keywords = drop_renamed("generate()", keywords, GENERATE)
    for name, feature in UNSUPPORTED.items():
        if keywords.get(name) is not None and keywords[name] is not False:
            raise UnsupportedError(f"{name}: {feature} is not supported")
    flag = keywords.get("return_past_key_values", False)
    checked(flag, (bool, np.bool_), "return_past_key_values", "True or False")
    arguments = CallArguments(**{k: v for k, v in keywords.items() if k in ARGUMENTS})
    return arguments, {
        k: v for k, v in keywords.items() if k not in ARGUMENTS and k not in UNSUPPORTED
    }


def needed_tokenizer(tokenizer: T | None, field: str) -> T:
    """Returns the tokenizer; raises InputError if it is None, since `field` needs one."""
    if tokenizer is None:
        raise InputError(f"{field}: needs tokenizer=, the tokenizer of this model")
    return tokenizer


def processor_list(processors: object) -> tuple[Callable[..., Array], ...]:
    """Converts the caller's list of logits processors to a tuple; None gives ()."""
    if processors is None:
        return ()
    if not isinstance(processors, list | tuple):
        raise InputError(
            f"logits_processor: expected a list of callables, found {quoted(processors)}"
        )
    return tuple(processors)


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
    array = check.checked_token_ids(name, ids, vocab_size)
    if not check.has_known_sizes(array.shape):
        raise InputError(
            f"{name}: generate needs the numbers of rows and columns, found {array.shape}; "
            "export it for each size of a batch"
        )
    return array.astype(jnp.int32) if is_traced(array) else array


def checked_mask(mask: object, shape: tuple[int, ...], name: str = "attention_mask") -> HostArray:
    """Checks for a mask of ``shape`` with a real token in every row; returns it as bool."""
    is_real = check.mask_of(name, mask, shape)
    if not is_traced(is_real) and not (has_token := is_real.any(axis=1)).all():
        raise InputError(f"{name}: row {int(np.argmin(has_token))} has no real token")
    return is_real


def checked_types(
    model: GenerativeModel, token_type_ids: object, prompt: PaddedBatch
) -> HostArray | None:
    """Checks token types; returns int32 [B, T], a NumPy array unless traced, or None."""
    if token_type_ids is None:
        return None
    types = checked_ids("token_type_ids", token_type_ids, model.config.vocab_size)
    if types.shape != prompt.mask.shape:
        raise InputError(f"token_type_ids: expected {prompt.mask.shape}, found {types.shape}")
    return types


def last_token_columns(mask: HostArray) -> HostArray:
    """Column of each row's last real token, int32 [B]: a NumPy array unless traced."""
    host = jnp if is_traced(mask) else np
    real = host.asarray(mask)
    columns = host.where(real, host.arange(real.shape[1]), 0)
    return host.max(columns, axis=-1).astype(host.int32)


def padded_rows(
    rows: Sequence[Int[np.ndarray, " _"]], width: int | None = None
) -> tuple[Int[np.ndarray, "R W"], Bool[np.ndarray, "R W"]]:
    """Ids and padding mask of rows, padded on the right with 0.

    Args:
        width: number of columns. None: the bucket of the longest row.

    >>> [x.tolist() for x in padded_rows([np.array([5, 6]), np.array([7])], 3)]
    [[[5, 6, 0], [7, 0, 0]], [[True, True, False], [True, False, False]]]
    """
    width = bucket(max(map(len, rows)), SMALLEST_BUCKET) if width is None else width
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, True
    return ids, mask


def checked_embeds(embeds: object, width: int) -> HostArray:
    """Checks `inputs_embeds`; returns a NumPy array unless traced, so that padding compiles
    nothing."""
    array = check.checked_embeddings("inputs_embeds", embeds, width)
    return array if is_traced(array) else np.asarray(array)


def pad_right(x: HostArray, extra: int, value: float) -> HostArray:
    """Appends `extra` columns of `value` to an array."""
    if isinstance(x, np.ndarray):  # np.pad takes ten times as long as this
        padded = np.full((x.shape[0], x.shape[1] + extra, *x.shape[2:]), value, x.dtype)
        padded[:, : x.shape[1]] = x
        return padded
    widths = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, widths, constant_values=value)


def run_in_batches(
    run: Callable[[list[T]], Sequence[R]],
    items: Sequence[T],
    batch_size: int,
    *,
    length: Callable[[T], int],
    on_halving: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, R]]:
    """Yields the index and result of each item as soon as its batch has run.

    Items run longest first, so that a batch has items of similar length and the peak memory use
    comes first. Every batch has the same number of items, so each length compiles one program; the
    last batch repeats an item. If device memory runs out, the batch size is halved.

    Args:
        run: computes a batch; returns one result per item, in order.
        batch_size: maximum number of items per batch.
        length: length of an item.
        on_halving: called when memory ran out.

    Raises:
        jax.errors.JaxRuntimeError: memory ran out with a single item.

    >>> list(run_in_batches(lambda items: [x * x for x in items], [1, 3, 2], 2, length=int))
    [(1, 9), (2, 4), (0, 1)]
    """
    remaining = sorted(range(len(items)), key=lambda i: length(items[i]), reverse=True)
    size = min(batch_size, bucket(len(items), 1))
    while remaining:
        batch = remaining[:size]
        full_batch = batch + batch[:1] * (size - len(batch))
        try:
            results = run([items[i] for i in full_batch])
        except jax.errors.JaxRuntimeError as error:
            if size == 1 or not is_exhausted(error):
                raise
            size //= 2
            on_halving()
            continue
        yield from zip(batch, results, strict=False)
        remaining = remaining[size:]


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error means that the device ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
