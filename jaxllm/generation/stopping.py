"""Stopping criteria, under the names they have in transformers: when a row ends.

Like logits processors, criteria are pytrees and pure functions of the tokens so far, inside the
compiled loop. After each new token, a criterion returns a mask of the rows that end.

Stop strings are found by an automaton of Aho and Corasick (1975), which reads bytes. The effect of
a token is a table column: for each state, the next state and whether the token completed a string.
Few columns differ (a token matters only if it continues or completes a string), so the vocabulary
is stored as a class per token and a small table with one column per class.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.arguments import checked, checked_function
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.inputs.arguments import CallArguments, needed_tokenizer
from jaxllm.generation.inputs.values import (
    TokenIds,
    any_traced,
    bucket,
    checked_by,
    id_table,
    int_rows,
    is_number,
    strings,
    to_scalar,
)
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    Scores,
    accepted_arguments,
    describe_array,
    for_sequences,
    logits_processor,
    name_of,
    store,
    tuple_of_callables,
)
from jaxllm.generation.processors.host import HostFunction, call_by_row
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.parallel.field_axes import axes
from jaxllm.tokenizers import Tokenizer

__all__ = [
    "EosTokenCriteria",
    "HostCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
]

SMALLEST_WINDOW = 16
"""Smallest bucket of the tokens that a stop string looks at."""
# Smallest buckets of states and classes: usual stop strings share one program.
_STATES, _CLASSES = 64, 128
Done: TypeAlias = Bool[Array, " B"]

stopping_criterion = logits_processor
"""Makes a class a frozen dataclass and a pytree; see :func:`logits_processor`."""


class StoppingCriteria:
    """Base class of criteria: returns a mask of the rows that end with their newest token.

    Called as ``criterion(input_ids, scores, cur_len)``, under ``jit``, ``vmap`` and
    ``lax.while_loop``. Subclasses define :meth:`reached`, or ``__call__`` itself.
    """

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores | None,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        **_: Any,
    ) -> Done:
        """Mask of the rows that end.

        Args:
            input_ids: int32 ``[B, L]``, a buffer whose first ``cur_len`` columns hold tokens; the
                last of these is the newest token.
            scores: ``[B, V]``, the scores that the newest token was chosen by. (transformers passes
                the scores of all steps.)
            cur_len: the number of columns in use, prompt included: an int, a traced scalar, or one
                per row, ``[B]``. None: all.
            mask: bool ``[B, L]``, True at real tokens; None: all of the first ``cur_len`` columns.

        Returns:
            bool ``[B]``.
        """
        return self.reached(History.of(input_ids, cur_len, mask), scores)

    def reached(self, history: History, scores: Scores | None) -> Done:
        """Applies the rule; bool ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} defines neither reached nor __call__")


@tuple_of_callables
class StoppingCriteriaList(tuple[Callable[..., Done], ...]):
    """List of criteria: a row ends when any of them is True. A pytree, called like one criterion.

    Unlike transformers' list it is immutable: add tuples instead. A member may be any traceable
    callable ``f(input_ids, scores, cur_len)`` with a result of shape ``[B]`` or ``[]``; it receives
    only the keyword arguments that it accepts. A callable that is not a pytree is static: part of
    the program, compared by identity.

    >>> import jax.numpy as jnp
    >>> from jaxllm.generation.stopping import EosTokenCriteria, MaxLengthCriteria
    >>> criteria = StoppingCriteriaList([MaxLengthCriteria(5), EosTokenCriteria(7)])
    >>> criteria(jnp.array([[3, 7], [7, 3]]), jnp.zeros((2, 9)), 2).tolist()
    [True, False]
    """

    __slots__ = ()

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores | None,
        cur_len: CurLen = None,
        **kwargs: Any,
    ) -> Done:
        """bool ``[B]``; the arguments are those of :class:`StoppingCriteria`."""
        cur_len = input_ids.shape[1] if cur_len is None else cur_len
        done = jnp.zeros(input_ids.shape[0], bool)
        for criterion in self:
            accepted = accepted_arguments("stopping_criteria", criterion, kwargs)
            out = criterion(input_ids, scores, cur_len, **accepted)
            done |= checked_done(criterion, out, done.shape)
        return done


def checked_done(criterion: Any, out: Any, shape: tuple[int, ...]) -> Done:
    """Checks that a criterion's result is one boolean per row, or one for all, which it repeats."""
    dtype = np.dtype(bool) if isinstance(out, bool) else getattr(out, "dtype", None)
    if dtype != np.dtype(bool) or np.shape(out) not in (shape, ()):
        raise InputError(
            f"stopping_criteria: {name_of(criterion)} must return booleans {list(shape)}, but "
            f"returned {describe_array(out)}"
        )
    return jnp.broadcast_to(jnp.asarray(out), shape)


@stopping_criterion()
class MaxLengthCriteria(StoppingCriteria):
    """Ends a row of ``max_length`` tokens, prompt included.

    Lacks the second argument of transformers' class, ``max_position_embeddings``, which only causes
    a warning there; ``generate`` raises if the model has too few positions.
    """

    max_length: Int[Array, " R"]

    def __init__(self, max_length: int) -> None:
        owner = type(self).__name__
        store(self, max_length=int_rows(owner, "max_length", max_length, least=1))

    def reached(self, history: History, scores: Scores | None) -> Done:
        reached = history.length[:, 0] >= self.max_length
        return jnp.broadcast_to(reached, history.ids.shape[:1])


@stopping_criterion()
class EosTokenCriteria(StoppingCriteria):
    """Ends a row whose newest token is one of ``eos_token_id`` (one or several)."""

    eos_token_id: Int[Array, "R E"]

    def __init__(self, eos_token_id: TokenIds) -> None:
        store(self, eos_token_id=id_table(type(self).__name__, "eos_token_id", eos_token_id))

    def reached(self, history: History, scores: Scores | None) -> Done:
        newest, _ = history.newest()
        return jnp.any((history.length > 0) & (newest == self.eos_token_id), axis=1)


@stopping_criterion(static=("fn",))
class HostCriteria(StoppingCriteria):
    """Runs a NumPy function ``fn(input_ids, scores) -> done`` that JAX cannot trace.

    ``fn`` receives int32 ``[B, cur_len]``, the caller's padding included as in transformers, and
    float32 ``[B, V]``, and returns booleans ``[B]``. It runs once for each new token, while the
    device waits; it must not call JAX, and its result must depend on its arguments alone. ``fn`` is
    static: the same object does not compile again, another one does. With drafts, rows differ in
    length, so ``fn`` is called separately for each row and new token, with B = 1.

    >>> import jax.numpy as jnp
    >>> criterion = HostCriteria(lambda input_ids, scores: input_ids.sum(axis=1) > 6)
    >>> criterion(jnp.array([[1, 2, 9], [3, 4, 9]]), jnp.zeros((2, 5)), 2).tolist()
    [False, True]
    """

    fn: HostFunction

    def __init__(self, fn: HostFunction) -> None:
        store(self, fn=checked_function(fn, f"{type(self).__name__}: fn"))

    def reached(self, history: History, scores: Scores | None) -> Done:
        _, is_running = history.newest()
        none = jnp.zeros_like(is_running[:, 0])
        return call_by_row(self.fn, history, scores, none, is_running[:, 0])


@stopping_criterion(static=("window",))
class StopStringCriteria(StoppingCriteria):
    """Ends a row whose newest token completes one of ``stop_strings``, a string or several.

    Follows transformers 5.23: the string ends within or at the end of the newest token, and may
    begin in any earlier token, the prompt included. A token counts as the bytes that it has in the
    middle of a text (``Tokenizer.token_bytes``). So the first word of a sentencepiece text has a
    space before it, special tokens count as their own text, and a token that ends within a
    character may complete a string. An id without a token ends every partial match. Padding is
    ignored, unlike in transformers.

    The criterion has no state: a precomputed automaton reads the last tokens of the row, as many as
    the longest string has bytes (rounded up). Changing to stop strings of similar length does not
    compile again.

    Args:
        tokenizer: the model's tokenizer.
        stop_strings: the strings.

    Raises:
        InputError: there is no string, one is empty, or no token of the vocabulary can complete
            any of them.
    """

    classes: Int[Array, " E"] = field(metadata=axes(None))
    table: Int[Array, "S C"] = field(metadata=axes(None))
    rows: Bool[Array, " R"]
    """True for the rows that it may end: by default all."""
    window: int

    def __init__(self, tokenizer: Tokenizer, stop_strings: str | Sequence[str]) -> None:
        texts = checked_by("StopStringCriteria", "stop_strings", strings, stop_strings)
        patterns = tuple(sorted({text.encode("utf-8") for text in texts}))
        checked(tokenizer, (Tokenizer,), "tokenizer", "a tokenizer of jaxllm")
        classes, table = bucketed_automaton(tokenizer, patterns)
        if not (table % 2).any():
            raise InputError(
                "stop_strings: no token of the vocabulary can complete any of "
                f"{quoted(stop_strings)}; "
                "their last characters are not in it"
            )
        window = bucket(max(map(len, patterns)), SMALLEST_WINDOW)
        store(self, classes=classes, table=table, rows=np.ones(1, bool), window=window)

    def for_rows(self, rows: Sequence[bool]) -> Self:
        """The criterion for the rows that are True."""
        criterion = copy.copy(self)
        store(criterion, rows=np.array(rows, bool))
        return criterion

    def reached(self, history: History, scores: Scores | None) -> Done:
        ids, exists = history.last(self.window)
        unknown = self.classes.shape[0] - 1
        known = exists & (ids >= 0) & (ids < unknown)
        classes = jnp.asarray(self.classes)[jnp.where(known, ids, unknown)]
        table = jnp.asarray(self.table)

        def read(code: Int[Array, " B"], column: Int[Array, " B"]) -> tuple[Array, None]:
            return table[code // 2, column], None

        # Not unrolled: XLA would fuse the chain of lookups, at exponential cost.
        code, _ = jax.lax.scan(read, jnp.zeros_like(classes[:, 0]), classes.T)
        return (code % 2 == 1) & for_sequences(self.rows, len(code))


@functools.lru_cache(maxsize=8)
def bucketed_automaton(
    tokenizer: Tokenizer, patterns: tuple[bytes, ...]
) -> tuple[Int[np.ndarray, " E"], Int[np.ndarray, "S C"]]:
    classes, table = token_automaton(tokenizer.token_bytes(), patterns)
    states, columns = table.shape
    rest = (0, bucket(states, _STATES) - states), (0, bucket(columns, _CLASSES) - columns)
    return classes, np.pad(table, rest)


def byte_automaton(
    patterns: Sequence[bytes],
) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, " S"]]:
    """Builds the next state for each state and byte, and a mask of states that complete a pattern.

    State 0 is the start. Every other state is a pattern prefix: the longest one that is a suffix of
    the bytes so far.

    >>> following, complete = byte_automaton([b"ab"])
    >>> a = following[0, ord("a")]
    >>> int(a), int(following[a, ord("b")]), int(following[a, ord("c")]), complete.tolist()
    (1, 2, 0, [False, False, True])
    """
    children: list[dict[int, int]] = [{}]
    ends = set()
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
        ends.add(state)
    following = np.zeros((len(children), 256), np.int32)
    complete = np.zeros(len(children), bool)
    complete[list(ends)] = True
    # Breadth first, so that the longest proper suffix of a state is ready before the state.
    suffix = [0] * len(children)
    queue = [0]
    for state in queue:
        if state:
            following[state] = following[suffix[state]]
            complete[state] |= complete[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = following[state, byte]
            following[state, byte] = child
            queue.append(child)
    return following, complete


def token_automaton(
    tokens: Sequence[bytes | None], patterns: Sequence[bytes]
) -> tuple[Int[np.ndarray, " E"], Int[np.ndarray, "S C"]]:
    """Builds the class of each token, and the effect of each class on each state.

    Args:
        tokens: the bytes of each id. None ends every partial match, and so does an id beyond the
            list, whose class is the last of ``classes``. Empty bytes leave the state unchanged.
        patterns: the strings to find, as non-empty bytes.

    Returns:
        ``classes``, and ``table[state, class]``: twice the next state, plus one if a pattern ended
        within the token.
    """
    following, complete = byte_automaton(patterns)
    # A code is 2 * state + ended; `ended` is sticky. Bytes with equal effects are one symbol.
    codes = np.arange(2 * len(following))
    after = following[codes // 2]
    step = 2 * after + (complete[after] | (codes % 2 == 1)[:, None])
    step, symbols = np.unique(step, axis=1, return_inverse=True)
    symbols = symbols.reshape(-1)

    columns = [codes[::2], np.zeros_like(codes[::2])]
    class_of = {column.tobytes(): number for number, column in enumerate(columns)}
    unchanged, broken = range(2)
    classes = np.array([broken if t is None else unchanged for t in (*tokens, None)])
    lengths = np.array([len(token or b"") for token in (*tokens, None)])
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(token or b"" for token in tokens), np.uint8)
    # Reads byte `position` of all tokens at once; tokens with equal effects so far share a class.
    for position in range(lengths.max()):
        active = np.flatnonzero(lengths > position)
        read = symbols[text[starts[active] + position]]
        pairs, inverse = np.unique(classes[active] * step.shape[1] + read, return_inverse=True)
        numbers = []
        for before, symbol in zip(*np.divmod(pairs, step.shape[1]), strict=True):
            column = step[columns[before], symbol]
            number = class_of.setdefault(column.tobytes(), len(columns))
            if number == len(columns):
                columns.append(column)
            numbers.append(number)
        classes[active] = np.array(numbers)[inverse]
    used, classes = np.unique(classes, return_inverse=True)
    table = np.stack([columns[number] for number in used], axis=1)
    return classes.astype(np.int32), table.astype(np.int32)


class StopStringMatcher:
    """Finds the token that completes a stop string, by the rule of `StopStringCriteria`.

    The string ends within or at the end of the newest token, and may begin in any earlier one, the
    prompt included. A token counts as its bytes in the middle of a text; an id without a token ends
    every partial match.

    Args:
        prompt: token ids before the first new token.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Iterable[int] = ()
    ) -> None:
        self._bytes = tokenizer.token_bytes()
        self._patterns = [string.encode("utf-8") for string in strings]
        self._kept = max(map(len, self._patterns)) - 1
        self._tail = b""
        for token in prompt:
            self._extend(token)

    def completes(self, token: int) -> bool:
        """Adds a new token; True if it completes a stop string."""
        before = self._tail
        text = self._extend(token)
        return any(text.find(p, max(len(before) - len(p) + 1, 0)) >= 0 for p in self._patterns)

    def first_end(self, tokens: Iterable[int]) -> int | None:
        """Adds new tokens up to the one that completes a stop string, and returns their number.
        None if no token does."""
        return next((count for count, x in enumerate(tokens, 1) if self.completes(x)), None)

    def _extend(self, token: int) -> bytes:
        """The end of the text, the token included; keeps what may be the start of a match."""
        content = self._bytes[token] if token < len(self._bytes) else None
        if content is None:
            self._tail = b""
            return b""
        text = self._tail + content
        self._tail = text[max(len(text) - self._kept, 0) :]
        return text


class MaxTimeCriteria:
    """Time limit, checked on the host: expires after ``max_time`` seconds.

    A compiled loop has no clock, so it cannot be called inside one: the caller that runs the loop
    in chunks checks :meth:`expired` between them.

    Args:
        max_time: seconds.
        initial_timestamp: start time in seconds, as from ``time.time()``. None: now.

    Raises:
        InputError: an argument is not a number.
    """

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        start = time.time() if initial_timestamp is None else initial_timestamp
        self.max_time = _seconds("max_time", max_time)
        self.initial_timestamp = _seconds("initial_timestamp", start)

    def expired(self) -> bool:
        """Returns whether more than ``max_time`` seconds have passed."""
        return time.time() - self.initial_timestamp > self.max_time

    def __call__(self, input_ids: Int[Array, "B L"], *_: object, **__: object) -> Done:
        """Mask [B]: all rows end if the limit has expired. UnsupportedError under ``jit``."""
        if any_traced(input_ids):
            raise UnsupportedError(
                "MaxTimeCriteria: a compiled loop has no clock, so it cannot be called inside one; "
                "pass max_time to generate, or call .expired() between two chunks"
            )
        return jnp.full(input_ids.shape[:1], self.expired())


def _seconds(name: str, value: float) -> float:
    value = to_scalar(value)
    if not is_number(value) or math.isnan(value):
        raise InputError(f"MaxTimeCriteria: `{name}` must be a number, but is {quoted(value)}")
    return float(value)


def build_criteria(
    config: GenerationConfig, arguments: CallArguments
) -> tuple[StoppingCriteriaList, tuple[MaxTimeCriteria, ...]]:
    """Builds the criteria of the compiled loop, and the time limits that the host checks."""
    criteria = arguments.stopping_criteria
    criteria = [] if criteria is None else criteria
    if not isinstance(criteria, list | tuple) or not all(map(callable, criteria)):
        raise InputError(
            f"stopping_criteria: expected a list of callables, found {quoted(criteria)}"
        )
    time_limits = [c for c in criteria if isinstance(c, MaxTimeCriteria)]
    if config.max_time is not None:
        time_limits.insert(0, MaxTimeCriteria(config.max_time))
    in_loop = [c for c in criteria if not isinstance(c, MaxTimeCriteria)]
    if config.stop_strings is not None:
        tokenizer = needed_tokenizer(arguments.tokenizer, "stop_strings")
        in_loop.insert(0, StopStringCriteria(tokenizer, list(config.stop_strings)))
    return StoppingCriteriaList(in_loop), tuple(time_limits)
