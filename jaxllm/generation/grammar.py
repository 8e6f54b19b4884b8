"""Text that follows a JSON schema, a regular expression or a grammar, with llguidance.

    processor = json_schema({"type": "array", "items": {"type": "integer"}}, tokenizer)
    jaxllm.generate(model, input_ids, logits_processor=[processor])

The grammar is about the new tokens alone; the end token is allowed where, and only where, the text
is complete. Needs ``pip install jaxllm[grammar]``.
"""

from __future__ import annotations

import importlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.errors import InputError, UnsupportedError
from jaxllm.generation.processors.base import LogitsProcessor, Scores, logits_processor, store
from jaxllm.generation.processors.host_rules import WORD, HostRow, allowed_tokens, number_of
from jaxllm.generation.processors.prompt import prompt_length
from jaxllm.generation.values import TokenIds, id_list, int_leaf, is_integer
from jaxllm.tokenizers.base import Tokenizer

_STATES = 4096  # texts whose state is kept for each grammar; a state is small and quick to copy


@logits_processor()
class GrammarLogitsProcessor(LogitsProcessor):
    """Forbids every token after which the new text could not follow its grammar.

    Made by :func:`json_schema`, :func:`regex` and :func:`lark`. The tokens allowed are found on the
    host for each row and step, while the device waits. What a row may do depends on its tokens
    alone, so beams, several samples and streams are right. Another grammar compiles nothing.

    A row that has left its grammar (which other processors can force) may only end.
    """

    rule: Int[Array, ""]
    prompt_len: Int[Array, ""] | None

    def __init__(
        self,
        grammars: Sequence[Grammar],
        tokenizer: Tokenizer,
        prompt_len: int | Array | None = None,
    ) -> None:
        owner = type(self).__name__
        # The rule keeps the tokenizer alive, which llguidance may call.
        rule = partial(_allowed_rows, tuple(grammars), tokenizer)
        known = None if prompt_len is None else int_leaf(owner, "prompt_len", prompt_len)
        store(self, rule=number_of(rule, owner=self), prompt_len=known)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: Int[Array, " ..."] | int,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: Int[Array, ""] | int | None = None,
        **_: Any,
    ) -> Scores:
        """float32 ``[B, V]``; new tokens begin at column ``prompt_len``."""
        scores = jnp.asarray(scores, jnp.float32)
        start = prompt_length(self, prompt_len)
        allowed = allowed_tokens(self.rule, input_ids, cur_len, mask, start, scores.shape[1])
        return jnp.where(allowed, scores, -jnp.inf)


def json_schema(
    schema: Mapping[str, Any] | bool | str | Sequence[Any],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """JSON text that is valid under a schema.

    No white space is written between the parts, unless the schema asks for it in llguidance's way:
    ``{"x-guidance": {"whitespace_flexible": True}, ...}``.

    Args:
        schema: The schema, or its JSON text; or a list with one for each prompt.
        tokenizer: The model's.
        eos_token_id: The tokens that end a text; None: the tokenizer's own.
        prompt_len: Columns before the first new token, for calls that do not say.

    Raises:
        InputError: The schema is wrong, with llguidance's reason.
        UnsupportedError: llguidance is not installed.
    """

    def compiled(guidance: Any, one: Any) -> str:
        text = one if isinstance(one, str) else json.dumps(one)
        return guidance.LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_flexible": False}
        )

    return _processor("json_schema", compiled, schema, tokenizer, eos_token_id, prompt_len)


def regex(
    pattern: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """Text that a regular expression matches as a whole, in the syntax of Rust's ``regex`` crate.

    The tokens of a sentencepiece vocabulary begin words with a space, the first word too, which
    ``decode`` then takes away: begin the pattern with `` ?`` to leave the choice to the model.

    The arguments and errors are those of :func:`json_schema`.
    """

    def compiled(guidance: Any, one: Any) -> str:
        return guidance.LLMatcher.grammar_from_regex(one)

    return _processor("regex", compiled, pattern, tokenizer, eos_token_id, prompt_len)


def lark(
    grammar: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """Text of a context-free grammar in llguidance's variant of Lark, from its rule ``start``.

    A very ambiguous grammar can take very long: do not take grammars from strangers. The arguments
    and errors are those of :func:`json_schema`.
    """

    def compiled(guidance: Any, one: Any) -> str:
        return guidance.LLMatcher.grammar_from_lark(one)

    return _processor("lark", compiled, grammar, tokenizer, eos_token_id, prompt_len)


def _processor(
    name: str,
    compiled: Callable[[Any, Any], str],
    sources: Any,
    tokenizer: Tokenizer,
    eos_token_id: TokenIds | None,
    prompt_len: int | Array | None,
) -> GrammarLogitsProcessor:
    guidance = _llguidance()
    given = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = [] if given is None else list(id_list(given))
    if not ends or not all(is_integer(i) and 0 <= i < len(tokenizer) for i in ends):
        raise InputError(
            f"{name}: `eos_token_id` must name tokens of the tokenizer, since a text ends with one,"
            f" but is {given!r}"
        )
    theirs, ours = _vocabulary(tokenizer, tuple(map(int, ends)))
    several = isinstance(sources, Sequence) and not isinstance(sources, str)
    grammars = []
    for source in sources if several else [sources]:
        try:
            text = compiled(guidance, source)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: {error}") from None
        failed, messages = guidance.LLMatcher.validate_grammar_with_warnings(text, theirs)
        matcher = guidance.LLMatcher(theirs, text)
        if failed or matcher.is_error():
            raise InputError(f"{name}: {(messages or [matcher.get_error()])[0].strip()}")
        grammars.append(Grammar(matcher, frozenset(ends), ours))
    if not grammars:
        raise InputError(f"{name}: the list of grammars is empty: give one for each prompt")
    return GrammarLogitsProcessor(grammars, tokenizer, prompt_len)


class Grammar:
    """A compiled grammar, and its states after the texts that were asked about.

    The cache only saves time: a text that is not in it is read again from its longest known start.

    Raises:
        InputError: No token can begin the text, or the grammar is too complex.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], vocabulary: _Vocabulary) -> None:
        self.ends = ends
        self._vocabulary = vocabulary
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict({(): matcher})
        self.allowed(())

    def allowed(self, text: tuple[int, ...]) -> np.ndarray:
        """Bits of the tokens that may follow, uint32 ``[W]``."""
        with _LOCK:
            state = None if self.ends.intersection(text) else self._state(text)
            if state is None:  # ended, or not of this grammar
                bits = np.zeros(max(self.ends) // WORD + 1, np.uint32)
                for end in self.ends:
                    bits[end // WORD] |= np.uint32(1 << end % WORD)
                return bits
            bits = np.frombuffer(state.compute_bitmask(), np.uint32)
            self._check(state)
            return bits

    def _state(self, text: tuple[int, ...]) -> Any:
        """The matcher after a text, or None where the grammar does not allow it."""
        known = next(n for n in range(len(text), -1, -1) if text[:n] in self._states)
        self._states.move_to_end(text[:known])
        state = self._states[text[:known]]
        for end in range(known + 1, len(text) + 1):
            if state is not None:
                state = state.deep_copy()
                accepted = state.try_consume_tokens([text[end - 1]])
                self._check(state)
                state = state if accepted else None
            self._states[text[:end]] = state
        self._states.move_to_end(())  # never dropped: every text begins here
        while len(self._states) > _STATES:
            self._states.popitem(last=False)
        return state

    def _check(self, state: Any) -> None:
        unwritable, self._vocabulary.unwritable = self._vocabulary.unwritable, b""
        if unwritable:
            raise InputError(f"grammar: the tokenizer has no tokens for {unwritable.decode()!r}")
        if state.is_error():
            reason = state.get_error().split("\n<")[0].strip()
            if reason == "NoExtensionBias":
                reason = "no token of the tokenizer continues the text"
            raise InputError(f"grammar: {reason}")


def _allowed_rows(
    grammars: tuple[Grammar, ...], _: Tokenizer, rows: list[HostRow], size: int
) -> np.ndarray:
    if len(rows) % len(grammars):
        raise InputError(f"grammar: {len(grammars)} grammars for {len(rows)} rows")
    each = len(rows) // len(grammars)  # beams or samples of one prompt lie side by side
    words = np.zeros((len(rows), -(-size // WORD)), np.uint32)
    for number, row in enumerate(rows):
        grammar = grammars[number // each]
        if max(grammar.ends) >= size:
            raise InputError(
                f"grammar: the end token {max(grammar.ends)} is beyond the model's {size} tokens: "
                "is the tokenizer another model's?"
            )
        text = row.ids[row.prompt_len :][row.real[row.prompt_len :]]
        bits = grammar.allowed(tuple(text.tolist()))[: words.shape[1]]
        words[number, : bits.size] = bits
    return words


_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.Lock()  # programs on several devices may ask at once


def _vocabulary(tokenizer: Tokenizer, ends: tuple[int, ...]) -> tuple[Any, _Vocabulary]:
    """llguidance's view of a tokenizer, made once."""
    known = _VOCABULARIES.setdefault(tokenizer, {})
    if ends not in known:
        ours = _Vocabulary(tokenizer)
        known[ends] = _llguidance().LLTokenizer(ours, eos_token=list(ends)), ours
    return known[ends]


class _Vocabulary:
    """What llguidance asks of a tokenizer, under the names that it asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        special = {*tokenizer.special_ids, *(i for i in named if i is not None)}
        # An id without a token can never be written.
        self.tokens = [token or b"" for token in tokenizer.token_bytes()]
        self.special_token_ids = sorted(i for i in special if i < len(self.tokens))
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self._encode = weakref.WeakMethod(tokenizer.encode_user)  # the cache must not keep it
        self._ids = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        self._longest = max(map(len, self._ids))
        self.unwritable = b""  # the last text that no tokens spell

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly the text's: llguidance asks where only one text can come.

        The tokenizer's own tokens where they are exact, which a space put before the text prevents.
        """
        encode, wanted = self._encode(), text.encode("utf-8")
        ids = encode(text) if encode is not None else []
        for exact in (ids, ids[1:]):
            if b"".join(self.tokens[i] for i in exact) == wanted:
                return exact
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:  # an exception would be printed as a panic of llguidance
                self.unwritable = text[at:]
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as failure:
        raise UnsupportedError(
            f"grammars need llguidance, which cannot be imported ({failure}): "
            "pip install 'jaxllm[grammar]'"
        ) from failure
