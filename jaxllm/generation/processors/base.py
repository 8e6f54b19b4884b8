"""Logits processors: base class, lists, and the token history that they read.

A processor is a pytree. Its parameters are leaves with fixed dtypes, so a jitted function that
takes a processor as an argument compiles once for every temperature, penalty or list of ids.

The leaves of the built-in processors have a leading row axis R, since rows of one batch program may
have different temperatures, penalties and so on. R is 1 for parameters that all rows share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError

Scores = Float[Array, "B V"]
CurLen: TypeAlias = Int[Array, " ..."] | int | None
"""A number of columns: one for all rows, or one per row ``[R]``, whose sequences are adjacent."""
C = TypeVar("C", bound=type)
T = TypeVar("T")


class History(NamedTuple):
    """Tokens generated so far, prompt included, as processors read them.

    Attributes:
        ids: int32 ``[B, L]``, a buffer of fixed size.
        real: bool ``[B, L]``; True at columns before ``cur_len`` that are not padding.
        tokens: int32 ``[B, L]``; the real tokens of each row, shifted left to remove padding.
        size: int32 ``[1, 1]`` or ``[B, 1]``; the number of real tokens.
        length: int32 ``[1, 1]`` or ``[B, 1]``; the number of columns in use. Rules about lengths
            compare with it, so they count padding, as in transformers.
        prompt_len: int32 ``[1, 1]`` or ``[B, 1]``; the number of columns before the first new
            token. None if the call did not pass it.
    """

    ids: Int[Array, "B L"]
    real: Bool[Array, "B L"]
    tokens: Int[Array, "B L"]
    size: Int[Array, "#B 1"]
    length: Int[Array, "#B 1"]
    prompt_len: Int[Array, "#B 1"] | None = None

    @classmethod
    def of(
        cls,
        input_ids: Int[Array, "B L"],
        cur_len: CurLen = None,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: CurLen = None,
    ) -> Self:
        ids = jnp.asarray(input_ids, jnp.int32)
        length = per_sequence(ids.shape[1] if cur_len is None else cur_len, len(ids))
        real = jnp.broadcast_to(jnp.arange(ids.shape[1])[None] < length, ids.shape)
        tokens, size = ids, length
        if mask is not None:
            real &= jnp.asarray(mask, bool)
            tokens, size = align_left(ids, real)
        prompt = None if prompt_len is None else per_sequence(prompt_len, len(ids))
        return cls(ids, real, tokens, size, length, prompt)

    @property
    def first_new(self) -> Int[Array, "#B 1"]:
        """Column of the first new token. Without ``prompt_len``, all columns are the prompt's."""
        return self.length if self.prompt_len is None else self.prompt_len

    def newest(self) -> tuple[Int[Array, "B 1"], Bool[Array, "B 1"]]:
        """The token in the last column of each row, and whether the row was running there."""
        column = jnp.broadcast_to(jnp.maximum(self.length - 1, 0), (len(self.ids), 1))
        ids, real = (jnp.take_along_axis(x, column, axis=1) for x in (self.ids, self.real))
        return ids, real

    def last(self, count: int) -> tuple[Int[Array, "B count"], Bool[Array, "B count"]]:
        """The last ``count`` tokens of each row, and a mask of those that exist."""
        return self.back(count - jnp.arange(count)[None])

    def back(self, steps: Int[Array, " ..."]) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
        """The tokens ``steps`` before the next one (1: the last), and a mask of those that exist.

        ``steps`` has the shape ``[1, n]``, or ``[]`` for one token.
        """
        columns = self.size - steps
        columns = jnp.broadcast_to(columns, (self.tokens.shape[0], columns.shape[1]))
        tokens = jnp.take_along_axis(self.tokens, jnp.maximum(columns, 0), axis=1, mode="clip")
        return tokens, columns >= 0


def per_sequence(columns: Int[Array, " ..."] | int, count: int) -> Int[Array, "#B 1"]:
    """A number of columns for each of `count` sequences, or ``[1, 1]`` if it is one number."""
    rows = jnp.asarray(columns, jnp.int32)
    return for_sequences(rows.reshape(-1, 1), count) if rows.ndim else rows.reshape(1, 1)


def for_sequences(values: T, count: int) -> T:
    """Repeats the values of R rows for their adjacent sequences: ``[R, ...]`` to ``[count, ...]``.

    >>> for_sequences(jnp.array([3, 4]), 4).tolist()
    [3, 3, 4, 4]
    """
    return jax.tree.map(lambda x: jnp.repeat(x, count // len(x), axis=0), values)


def align_left(
    ids: Int[Array, "B L"], real: Bool[Array, "B L"]
) -> tuple[Int[Array, "B L"], Int[Array, "B 1"]]:
    """Shifts each row's real tokens to the left, in order; returns ids and their number.

    The columns after the real tokens are unspecified.
    """
    place = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    rows = jnp.arange(ids.shape[0])[:, None]
    aligned = (
        jnp.zeros_like(ids).at[rows, jnp.where(real, place, ids.shape[1])].set(ids, mode="drop")
    )
    return aligned, place[:, -1:] + 1


class LogitsProcessor:
    """Base class of processors: a pure function from the tokens so far and scores to new scores.

    Called like transformers' processors, ``processor(input_ids, scores)``, or like its Flax ones,
    ``processor(input_ids, scores, cur_len)``, also under ``jit``, ``vmap`` and ``lax.while_loop``.
    Subclasses define :meth:`process`, or ``__call__`` itself.
    """

    has_rows: ClassVar[bool] = False
    """True if its leaves have a leading row axis; see :func:`logits_processor`."""

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: CurLen = None,
        **_: Any,
    ) -> Scores:
        """Processes the scores of the next token.

        Args:
            input_ids: int32 ``[B, L]``, a buffer whose first ``cur_len`` columns hold tokens; the
                other columns have no effect.
            scores: ``[B, V]`` logits (log-probabilities in beam search), without NaN.
            cur_len: the number of columns in use, prompt included: an int, a traced scalar, or one
                per row, ``[B]``. None: all.
            mask: bool ``[B, L]``, True at real tokens. None: all of the first ``cur_len`` columns.
                Padding on either side has no effect, except on rules about lengths.
            prompt_len: the number of columns before the first new token, for rules about new
                tokens. None: the processor's own, if it has one.

        Returns:
            float32 ``[B, V]``.

        Raises:
            InputError: ``input_ids`` is None.
        """
        if input_ids is None:
            raise InputError(f"{type(self).__name__}: needs `input_ids`, the tokens so far")
        history = History.of(input_ids, cur_len, mask, prompt_len)
        return self.process(history, jnp.asarray(scores, jnp.float32))

    def process(self, history: History, scores: Scores) -> Scores:
        """Applies the rule to float32 scores."""
        raise NotImplementedError(f"{type(self).__name__} defines neither process nor __call__")

    def is_neutral(self) -> Bool[Array, " R"] | None:
        """True for the rows whose parameters change no scores; batch slots skip a processor while
        every row is neutral. None: the parameters do not tell, or have no row axis."""
        return None


class ScoresProcessor(LogitsProcessor):
    """Base class of processors that read the scores alone; ``input_ids`` may be None."""

    def __call__(
        self,
        input_ids: Int[Array, "B L"] | None,
        scores: Scores,
        cur_len: CurLen = None,
        **_: Any,
    ) -> Scores:
        scores = jnp.asarray(scores, jnp.float32)
        return self.process(History.of(jnp.zeros((scores.shape[0], 0), jnp.int32)), scores)


def logits_processor(*, static: tuple[str, ...] = (), rows: bool = False) -> Callable[[C], C]:
    """Makes a class a frozen dataclass and a pytree; all fields but ``static`` are leaves.

    The class writes its own ``__init__``, which checks its arguments and stores arrays with
    `store`; rebuilding from leaves does not call it.

    Args:
        rows: the leaves have a leading row axis, so that batch slots call the processor once for
            all rows, and not under `vmap` for each: a filter would run both branches of a
            `lax.cond` there.
    """

    def decorate(cls: C) -> C:
        cls = dataclass(frozen=True, init=False, eq=False)(cls)
        cls.has_rows = rows
        leaves = tuple(field.name for field in fields(cls) if field.name not in static)

        def flatten(processor: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            keys = map(jax.tree_util.GetAttrKey, leaves)
            children = [(key, getattr(processor, key.name)) for key in keys]
            return children, tuple(getattr(processor, name) for name in static)

        def unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> Any:
            processor = object.__new__(cls)
            store(processor, **dict(zip((*leaves, *static), (*children, *aux), strict=True)))
            return processor

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
        return cls

    return decorate


def store(
    processor: object, convert: Callable[[str, str, Any], Any] | None = None, /, **values: Any
) -> None:
    """Sets the fields of a frozen processor, in its ``__init__``.

    Args:
        convert: ``(owner, name, value) -> leaf``, such as ``values.int_rows``: checks an argument
            and converts it. None: the values are leaves.
    """
    owner = type(processor).__name__
    for name, value in values.items():
        leaf = value if convert is None else convert(owner, name, value)
        object.__setattr__(processor, name, leaf)


def tuple_of_callables(cls: C) -> C:
    """Makes a subclass of tuple a pytree; members that are not pytrees are static."""

    def flatten(members: Any) -> tuple[list[Any], tuple[Any, ...]]:
        opaque = tuple(m if jax.tree_util.all_leaves([m]) else None for m in members)
        return [None if o is not None else m for o, m in zip(opaque, members, strict=True)], opaque

    def unflatten(opaque: tuple[Any, ...], children: Iterable[Any]) -> Any:
        pairs = zip(opaque, children, strict=True)
        return cls(child if fixed is None else fixed for fixed, child in pairs)

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@tuple_of_callables
class LogitsProcessorList(tuple[Callable[..., Scores], ...]):
    """List of processors, applied in order; a pytree that is called like one processor.

    Unlike transformers' list it is immutable: add tuples instead. A member may be any callable
    ``f(input_ids, scores, cur_len)``; it receives only the keyword arguments that it accepts. A
    callable that is not a pytree is static: part of the program, compared by identity.

    >>> import jax.numpy as jnp
    >>> from jaxllm.generation.processors import TemperatureLogitsWarper, TopKLogitsWarper
    >>> processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)])
    >>> processors(jnp.zeros((1, 4), jnp.int32), jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
    [[-inf, 6.0, 4.0]]
    """

    __slots__ = ()

    def __call__(
        self,
        input_ids: Int[Array, "B L"] | None,
        scores: Scores,
        cur_len: CurLen = None,
        **kwargs: Any,
    ) -> Scores:
        """float32 ``[B, V]``; the arguments are those of :class:`LogitsProcessor`."""
        scores = jnp.asarray(scores, jnp.float32)
        if cur_len is None and input_ids is not None:
            cur_len = input_ids.shape[1]
        for processor in self:
            accepted = accepted_arguments("logits_processor", processor, kwargs)
            out = processor(input_ids, scores, cur_len, **accepted)
            scores = checked_scores(processor, out, scores.shape)
        return scores


@tuple_of_callables
class RowProcessors(LogitsProcessorList):
    """Processors of rows with different parameters, each applied to the row's adjacent sequences.

    A processor is skipped at run time while it is neutral for all rows. A processor whose leaves
    have no row axis is called with one sequence at a time.

    >>> from jaxllm.generation.processors import TemperatureLogitsWarper
    >>> lists = [LogitsProcessorList([TemperatureLogitsWarper(t)]) for t in (0.5, 2.0)]
    >>> RowProcessors.of(lists)(jnp.zeros((2, 1), int), jnp.ones((2, 1)), jnp.ones(2, int)).tolist()
    [[2.0], [0.5]]
    """

    __slots__ = ()

    @classmethod
    def of(cls, lists: Sequence[LogitsProcessorList]) -> Self:
        """Joins the lists of rows, which have equal `signature`, on the host."""

        def join(*processors: Any) -> Any:
            joined = np.concatenate if getattr(processors[0], "has_rows", False) else np.stack
            return jax.tree.map(lambda *leaves: joined(leaves), *processors)

        return cls(map(join, *lists))

    def __call__(
        self,
        input_ids: Int[Array, "B L"] | None,
        scores: Scores,
        cur_len: CurLen = None,
        **kwargs: Any,
    ) -> Scores:
        scores = jnp.asarray(scores, jnp.float32)
        repeated: Any = for_sequences((self, cur_len), len(scores))
        processors, lengths = repeated
        for processor in processors:
            neutral = None
            apply = partial(jax.vmap(_one_sequence), processor, input_ids, scores, lengths)
            if getattr(processor, "has_rows", False):
                neutral = processor.is_neutral()
                apply = partial(processor, input_ids, scores, lengths, **kwargs)
            same = partial(jnp.asarray, scores)
            out = apply() if neutral is None else jax.lax.cond(neutral.all(), same, apply)
            scores = checked_scores(processor, out, scores.shape)
        return scores


def _one_sequence(processor: Any, input_ids: Any, scores: Array, cur_len: Array) -> Array:
    return processor(input_ids[None], scores[None], cur_len)[0]


def accepted_arguments(
    field: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Filters ``kwargs`` to the keyword arguments that a processor or criterion accepts.

    Raises:
        InputError: it cannot be called with ids, scores and length; ``field`` holds it.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    try:
        signature.bind(None, None, None, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{field}: {name_of(function)} must be a function of (input_ids, scores, cur_len), but "
            f"its arguments are {signature} ({error})"
        ) from None
    return kwargs


def checked_scores(processor: Any, out: Any, shape: tuple[int, ...]) -> Scores:
    """Checks that a processor's result has the shape and dtype of scores; casts to float32."""
    dtype = getattr(out, "dtype", None)
    if dtype is None or np.shape(out) != shape or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(
            f"logits_processor: {name_of(processor)} must return scores, float32{list(shape)}, but "
            f"returned {describe_array(out)}"
        )
    return jnp.asarray(out, jnp.float32)


def name_of(function: object) -> str:
    """Name of a processor or criterion in messages."""
    return getattr(function, "__name__", type(function).__name__)


def describe_array(out: Any) -> str:
    """Dtype and shape of an array, such as ``int32[2]``, or the type of another object."""
    dtype = getattr(out, "dtype", None)
    return type(out).__name__ if dtype is None else f"{dtype}{list(np.shape(out))}"


def token_set(
    ids: Int[Array, "B n"], where: Bool[Array, "B n"], vocab_size: int
) -> Bool[Array, "B V"]:
    """Mask of the tokens that occur in each row, at the columns where ``where`` is True."""
    in_vocabulary = where & (ids >= 0) & (ids < vocab_size)
    rows = jnp.arange(ids.shape[0])[:, None]
    empty = jnp.zeros((ids.shape[0], vocab_size), bool)
    return empty.at[rows, jnp.where(in_vocabulary, ids, vocab_size)].set(True, mode="drop")


def id_mask(ids: Int[Array, "#B E"], vocab_size: int) -> Bool[Array, "#B V"]:
    """Mask of the tokens in tables of ids (see ``values.id_table``)."""
    return token_set(ids, jnp.ones(ids.shape, bool), vocab_size)


def add_at(scores: Scores, tokens: Int[Array, "#B N"], values: Float[Array, "#B N"]) -> Scores:
    """Adds values to the scores of tokens; ids beyond the vocabulary are left out."""
    if len(tokens) == 1:  # whole columns at once
        return scores.at[:, tokens[0]].add(values, mode="drop")
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, tokens].add(values, mode="drop")


def forbid(
    scores: Scores, ids: Int[Array, "#B E"], where: Bool[Array, "#B 1"] | bool = True
) -> Scores:
    """Sets the scores of a table of ids to -inf, in the rows where ``where`` is True."""
    return jnp.where(where & id_mask(ids, scores.shape[1]), -jnp.inf, scores)


def force(scores: Scores, ids: Int[Array, "#B E"], where: Bool[Array, "#B 1"]) -> Scores:
    """Sets the scores of a table of ids to 0 and all others to -inf, where ``where`` is True."""
    forced = jnp.where(id_mask(ids, scores.shape[1]), 0.0, -jnp.inf)
    return jnp.where(where, forced, scores)


def prompt_length(processor: Any, history: History) -> Int[Array, "#B 1"]:
    """Number of columns before the first new token: from the call, else from the processor.

    Raises:
        InputError: neither specifies it.
    """
    if history.prompt_len is not None:
        return history.prompt_len
    if processor.prompt_len is None:
        raise InputError(
            f"{type(processor).__name__}: needs `prompt_len`, the number of columns of the prompt: "
            "give it to the processor when it is made"
        )
    return per_sequence(processor.prompt_len, len(history.ids))


def signature(processors: LogitsProcessorList) -> Hashable:
    """Types and leaf shapes of a list, hashable; `RowProcessors` joins lists with equal ones."""
    leaves, structure = jax.tree.flatten(processors)
    return structure, tuple((np.shape(leaf), np.result_type(leaf).name) for leaf in leaves)
