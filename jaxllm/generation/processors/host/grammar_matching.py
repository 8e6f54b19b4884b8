"""Adapters to llguidance: grammar states cached by token sequence, and tokenizers."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.processors.host.allowed_tokens import WORD
from jaxllm.tokenizers.tokenizer import Tokenizer

_STATES = 4096  # cached states per grammar; a state is small and quick to copy
_LOCK = threading.Lock()  # programs on several devices may call at once


class Grammar:
    """Compiled grammar with a cache of its states after token sequences.

    The cache only saves time: a sequence not in it is consumed from its longest cached prefix on.

    Raises:
        InputError: No token can begin the text, or the grammar is too complex.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], vocabulary: Vocabulary) -> None:
        self.ends = ends
        self._vocabulary = vocabulary
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict({(): matcher})
        self.allowed(())

    def allowed(self, text: tuple[int, ...]) -> np.ndarray:
        """Allowed next tokens as bits, uint32 ``[W]``."""
        with _LOCK:
            state = None if self.ends.intersection(text) else self._state(text)
            if state is None:  # ended, or does not match the grammar
                bits = np.zeros(max(self.ends) // WORD + 1, np.uint32)
                for end in self.ends:
                    bits[end // WORD] |= np.uint32(1 << end % WORD)
                return bits
            bits = np.frombuffer(state.compute_bitmask(), np.uint32)
            self._check(state)
            return bits

    def _state(self, text: tuple[int, ...]) -> Any:
        """The matcher after a token sequence, or None if the grammar does not allow it."""
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


def vocabulary(tokenizer: Tokenizer, ends: tuple[int, ...]) -> tuple[Any, Vocabulary]:
    """Wraps a tokenizer for llguidance, once per tokenizer and end tokens."""
    known = _VOCABULARIES.setdefault(tokenizer, {})
    if ends not in known:
        ours = Vocabulary(tokenizer)
        known[ends] = llguidance().LLTokenizer(ours, eos_token=list(ends)), ours
    return known[ends]


class Vocabulary:
    """Tokenizer interface that llguidance expects: its attribute names and ``__call__``."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        special = {*tokenizer.special_ids, *(i for i in named if i is not None)}
        # An id without a token gets no bytes, so that no grammar can produce it.
        self.tokens = [token or b"" for token in tokenizer.token_bytes()]
        self.special_token_ids = sorted(i for i in special if i < len(self.tokens))
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_id
        # Weak: the cache must not keep the tokenizer alive.
        self._encode = weakref.WeakMethod(tokenizer.encode_user)
        self._ids = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        self._longest = max(map(len, self._ids))
        self.unwritable = b""  # rest of the last text that tokens cannot spell

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly the text's; llguidance calls it where the text is forced.

        Uses the tokenizer's own tokens if they are exact (it may put a space before the text).
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
            if end is None:  # llguidance would print an exception as a panic
                self.unwritable = text[at:]
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as failure:
        raise UnsupportedError(
            f"grammars need llguidance, which cannot be imported ({failure}): "
            "pip install 'jaxllm[grammar]'"
        ) from failure
