"""Prefixes of prompts whose KV caches are kept, such as a system prompt that requests share."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
from jaxtyping import Int

from jaxllm.cache.kv_cache import Cache

MIN_PREFIX = 64
"""Tokens of the shortest prefix that is kept, and by which it is longer than another one."""
RECENT_PROMPTS = 64
"""Prompts among which a prefix that recurs is looked for."""

Tokens = Int[np.ndarray, " _"]


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of a prompt, and a prompt cache that begins with them."""

    tokens: Tokens
    cache: Cache


class PrefixStore:
    """The prefixes that recent prompts had in common.

    Args:
        limit: most prefixes that are kept; the one that was not used for the longest time is
            dropped for a new one.
        empty: a prompt cache without tokens.
    """

    def __init__(self, limit: int, empty: Cache) -> None:
        self._limit = limit
        self.empty = Prefix(np.zeros(0, np.int32), empty)
        self._kept: list[Prefix] = []
        """The one that was used last comes last."""
        self._repeated: Prefix | None = None
        """The last prompt that comes again. It has a place of its own, so that prompts of which
        several samples are drawn do not drive out those that requests share."""
        self._recent_prompts: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, prompt: Tokens) -> tuple[Prefix, int]:
        """The prefix that shares most tokens with a prompt, and their number; the prompt's last
        token does not count, since the first new one is chosen from its logits."""
        prefixes = [*self._kept, self._repeated or self.empty]
        lengths = [shared_length(prefix.tokens, prompt[:-1]) for prefix in prefixes]
        if not any(lengths):
            return self.empty, 0
        longest = int(np.argmax(lengths))
        return prefixes[longest], lengths[longest]

    def length_to_keep(self, prompt: Tokens) -> int:
        """Length of a prompt's prefix that is worth keeping: one that it shares with a recent
        prompt, and that is longer than what is kept; else 0."""
        lengths = [shared_length(recent, prompt) for recent in self._recent_prompts]
        kept = [shared_length(prefix.tokens, prompt) for prefix in self._kept]
        length = max(lengths, default=0)
        return length if length - max(kept, default=0) >= MIN_PREFIX else 0

    def is_worth_repeating(self, length: int) -> bool:
        """True if a prompt that comes again is kept for that.

        Args:
            length: tokens of it that the store does not have.
        """
        return bool(self._limit) and length >= MIN_PREFIX

    def note(self, prompt: Tokens) -> None:
        """Adds a recent prompt."""
        if self._limit:
            self._recent_prompts.append(prompt)

    def clear(self) -> None:
        """Forgets all prefixes and recent prompts."""
        self._kept.clear()
        self._repeated = None
        self._recent_prompts.clear()

    def use(self, prefix: Prefix) -> None:
        """Notes that a prefix is used."""
        if prefix in self._kept:
            self._kept.remove(prefix)
            self._kept.append(prefix)

    def keep(self, prefix: Prefix) -> None:
        """Keeps a prefix."""
        self._kept = [*self._kept, prefix][-self._limit :]

    def repeat(self, prompt: Prefix) -> None:
        """Keeps a prompt that comes again."""
        self._repeated = prompt


def shared_length(a: Tokens, b: Tokens) -> int:
    """Number of tokens with which two sequences begin alike.

    >>> shared_length(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(np.argmax(differs)) if differs.any() else size
