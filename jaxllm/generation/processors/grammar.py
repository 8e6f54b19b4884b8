"""Constrains generation to a JSON schema, regular expression or grammar, with llguidance.

    processor = json_schema({"type": "array", "items": {"type": "integer"}}, tokenizer)
    jaxllm.generate(model, input_ids, logits_processor=[processor])

The grammar applies to the new tokens only. The end token is allowed if and only if the text is
complete. Needs ``pip install 'jaxllm[grammar]'``.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxllm.common.arguments import checked, is_integer
from jaxllm.common.errors import InputError
from jaxllm.common.optional_packages import require
from jaxllm.generation.inputs.values import TokenIds, id_list, int_leaf
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    prompt_length,
    store,
)
from jaxllm.generation.processors.host import (
    WORD_BITS,
    HostRow,
    allowed_tokens,
    register_rule,
    rule_of,
)
from jaxllm.tokenizers.tokenizer import Tokenizer

_STATES = 4096  # cached states per grammar; a state is small and quick to copy
MAX_TOKEN_BYTES = 1024  # llguidance panics at a longer one
_LOCK = threading.Lock()  # programs on several devices may call at once


@logits_processor()
class GrammarLogitsProcessor(LogitsProcessor):
    """Forbids every token after which the new text could no longer match its grammar.

    Created by :func:`json_schema`, :func:`regex` and :func:`lark`. The host computes the allowed
    tokens for each row and step, while the device waits. They depend on the row's tokens alone, so
    beams, several samples and streams work. Changing the grammar does not compile again.

    A row that no longer matches its grammar (other processors can force this) may only end.
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
        length = None if prompt_len is None else int_leaf(owner, "prompt_len", prompt_len)
        store(self, rule=register_rule(rule, owner=self), prompt_len=length)

    def process(self, history: History, scores: Scores) -> Scores:
        first = prompt_length(self, history)
        allowed = allowed_tokens(self.rule, history, first, scores.shape[1])
        return jnp.where(allowed, scores, -jnp.inf)

    def allowed_bits(self, new_tokens: Sequence[int], vocab_size: int) -> UInt32[np.ndarray, " W"]:
        """The tokens that are allowed after some new ones of one row, as bits (`pack_bits`)."""
        ids = np.array(new_tokens, np.int64)
        row = HostRow(ids, np.ones(len(ids), bool), prompt_len=0)
        return rule_of(self.rule)([row], vocab_size)[0]


def json_schema(
    schema: Mapping[str, Any] | bool | str | Sequence[Any],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """Builds a processor that allows only JSON text that is valid under a schema.

    No white space is written between the parts, unless the schema has llguidance's option for it:
    ``{"x-guidance": {"whitespace_flexible": True}, ...}``.

    Args:
        schema: the schema, or its JSON text; or a list with one for each prompt.
        tokenizer: the model's tokenizer.
        eos_token_id: end-of-sequence tokens; None: the tokenizer's own.
        prompt_len: columns before the first new token, for calls that do not pass it.

    Raises:
        InputError: the schema is invalid; the message has llguidance's reason.
        MissingExtraError: llguidance is not installed.
    """

    def compile_schema(matcher: Any, source: Any) -> str:
        text = source if isinstance(source, str) else json.dumps(source)
        return matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})

    return _processor("json_schema", compile_schema, schema, tokenizer, eos_token_id, prompt_len)


def regex(
    pattern: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """Builds a processor that allows only full matches of a regular expression (Rust's syntax).

    Sentencepiece tokens begin each word with a space, also the first word, where ``decode`` removes
    it: begin the pattern with `` ?`` to allow both forms. Syntax: Rust's ``regex`` crate.

    The arguments and errors are those of :func:`json_schema`.
    """

    def compile_regex(matcher: Any, source: Any) -> str:
        return matcher.grammar_from_regex(source)

    return _processor("regex", compile_regex, pattern, tokenizer, eos_token_id, prompt_len)


def lark(
    grammar: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    eos_token_id: TokenIds | None = None,
    prompt_len: int | Array | None = None,
) -> GrammarLogitsProcessor:
    """Builds a processor for a context-free grammar in llguidance's Lark, from its rule ``start``.

    A very ambiguous grammar can take very long: do not use untrusted grammars. The arguments and
    errors are those of :func:`json_schema`.
    """

    def compile_lark(matcher: Any, source: Any) -> str:
        return matcher.grammar_from_lark(source)

    return _processor("lark", compile_lark, grammar, tokenizer, eos_token_id, prompt_len)


def _processor(
    name: str,
    compile_source: Callable[[Any, Any], str],
    sources: Any,
    tokenizer: Tokenizer,
    eos_token_id: TokenIds | None,
    prompt_len: int | Array | None,
) -> GrammarLogitsProcessor:
    checked(tokenizer, (Tokenizer,), "tokenizer", "a tokenizer of jaxllm")
    matcher = llguidance().LLMatcher
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = [] if eos is None else list(id_list(eos))
    if not ends or not all(is_integer(i) and 0 <= i < len(tokenizer) for i in ends):
        raise InputError(
            f"{name}: `eos_token_id` must name tokens of the tokenizer, since a text ends with one,"
            f" but is {eos!r}"
        )
    end_ids = tuple(map(int, ends))
    wrapped, vocabulary = _wrapped_tokenizer(tokenizer, end_ids)
    several = isinstance(sources, Sequence) and not isinstance(sources, str)
    grammars = []
    for source in sources if several else [sources]:
        try:
            text = compile_source(matcher, source)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: {error}") from None
        failed, messages = matcher.validate_grammar_with_warnings(text, wrapped)
        if failed:
            raise InputError(f"{name}: {messages[0].strip()}")
        grammars.append(Grammar(matcher(wrapped, text), frozenset(end_ids), vocabulary))
    if not grammars:
        raise InputError(f"{name}: the list of grammars is empty: give one for each prompt")
    return GrammarLogitsProcessor(grammars, tokenizer, prompt_len)


def _allowed_rows(
    grammars: tuple[Grammar, ...], _: Tokenizer, rows: list[HostRow], size: int
) -> np.ndarray:
    if len(rows) % len(grammars):
        raise InputError(f"grammar: {len(grammars)} grammars for {len(rows)} rows")
    rows_per_grammar = len(rows) // len(grammars)  # beams or samples of one prompt are adjacent
    words = np.zeros((len(rows), -(-size // WORD_BITS)), np.uint32)
    for number, row in enumerate(rows):
        grammar = grammars[number // rows_per_grammar]
        if max(grammar.ends) >= size:
            raise InputError(
                f"grammar: the end token {max(grammar.ends)} is beyond the model's {size} tokens: "
                "is the tokenizer another model's?"
            )
        ids = row.ids[row.prompt_len :][row.real[row.prompt_len :]]
        bits = grammar.allowed(tuple(ids.tolist()))[: words.shape[1]]
        words[number, : bits.size] = bits
    return words


class Grammar:
    """Compiled grammar with a cache of its states after token sequences.

    The cache only saves time: a sequence not in it is consumed from its longest cached prefix on.

    Raises:
        InputError: no token can begin the text, or the grammar is too complex.
    """

    def __init__(
        self, matcher: object, ends: frozenset[int], vocabulary: GrammarVocabulary
    ) -> None:
        self.ends = ends
        self._vocabulary = vocabulary
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict({(): matcher})
        self.allowed(())

    def allowed(self, ids: tuple[int, ...]) -> np.ndarray:
        """Allowed next tokens as bits, uint32 ``[W]``."""
        with _LOCK:
            state = None if self.ends.intersection(ids) else self._state(ids)
            if state is None:  # ended, or does not match the grammar
                bits = np.zeros(max(self.ends) // WORD_BITS + 1, np.uint32)
                for end in self.ends:
                    bits[end // WORD_BITS] |= np.uint32(1 << end % WORD_BITS)
                return bits
            bits = np.frombuffer(state.compute_bitmask(), np.uint32)
            self._check(state)
            return bits

    def _state(self, ids: tuple[int, ...]) -> Any:
        """The matcher after a token sequence, or None if the grammar does not allow it."""
        cached = next(n for n in range(len(ids), -1, -1) if ids[:n] in self._states)
        self._states.move_to_end(ids[:cached])
        state = self._states[ids[:cached]]
        for end in range(cached + 1, len(ids) + 1):
            if state is not None:
                state = state.deep_copy()
                accepted = state.try_consume_tokens([ids[end - 1]])
                self._check(state)
                state = state if accepted else None
            self._states[ids[:end]] = state
        self._states.move_to_end(())  # never evicted: every sequence begins here
        while len(self._states) > _STATES:
            self._states.popitem(last=False)
        return state

    def _check(self, state: Any) -> None:
        unwritable, self._vocabulary.unwritable = self._vocabulary.unwritable, b""
        if unwritable:
            text = unwritable.decode("utf-8", "replace")
            raise InputError(f"grammar: the tokenizer has no tokens for {text!r}")
        if state.is_error():
            reason = state.get_error().split("\n<")[0].strip()
            if reason == "NoExtensionBias":
                reason = "no token of the tokenizer continues the text"
            raise InputError(f"grammar: {reason}")


_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)


def _wrapped_tokenizer(
    tokenizer: Tokenizer, ends: tuple[int, ...]
) -> tuple[Any, GrammarVocabulary]:
    """llguidance's tokenizer and its vocabulary, made once per tokenizer and end tokens."""
    by_ends = _VOCABULARIES.setdefault(tokenizer, {})
    if ends not in by_ends:
        vocabulary = GrammarVocabulary(tokenizer)
        longest = max(map(len, vocabulary.tokens), default=0)
        if longest > MAX_TOKEN_BYTES:
            raise InputError(
                f"grammar: the tokenizer has a token of {longest} bytes, but a grammar takes at "
                f"most {MAX_TOKEN_BYTES}"
            )
        by_ends[ends] = llguidance().LLTokenizer(vocabulary, eos_token=list(ends)), vocabulary
    return by_ends[ends]


class GrammarVocabulary:
    """Tokenizer interface that llguidance expects: its attribute names and ``__call__``."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_tokens = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        special = {*tokenizer.special_ids, *(i for i in special_tokens if i is not None)}
        # An id without a token gets no bytes, so that no grammar can produce it.
        self.tokens = [token or b"" for token in tokenizer.token_bytes()]
        self.special_token_ids = sorted(i for i in special if i < len(self.tokens))
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_id
        # Weak: the cache must not keep the tokenizer alive.
        self._encode = weakref.WeakMethod(tokenizer.encode_user)
        self._ids = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        self._longest = max(map(len, self._ids), default=0)
        self.unwritable = b""  # rest of the last text that tokens cannot spell

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly the text's; llguidance calls it where the text is forced.

        Uses the tokenizer's own tokens if they are exact (it may put a space before the text).
        """
        encode, text_bytes = self._encode(), text.encode("utf-8")
        ids = encode(text) if encode is not None else []
        for exact in (ids, ids[1:]):
            if b"".join(self.tokens[i] for i in exact) == text_bytes:
                return exact
        return self._longest_tokens(text_bytes)

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # llguidance would print an exception as a panic
                self.unwritable = text[start:]
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def llguidance() -> Any:
    """The package; MissingExtraError if it is not installed."""
    return require("llguidance", extra="grammar", purpose="grammars")
