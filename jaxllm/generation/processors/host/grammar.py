"""Constrains generation to a JSON schema, regular expression or grammar, with llguidance.

    processor = json_schema({"type": "array", "items": {"type": "integer"}}, tokenizer)
    jaxllm.generate(model, input_ids, logits_processor=[processor])

The grammar applies to the new tokens only. The end token is allowed if and only if the text is
complete. Needs ``pip install jaxllm[grammar]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import TokenIds, id_list, int_leaf, is_integer
from jaxllm.generation.processors.base import (
    LogitsProcessor,
    Scores,
    logits_processor,
    prompt_length,
    store,
)
from jaxllm.generation.processors.host.allowed_tokens import (
    WORD,
    HostRow,
    allowed_tokens,
    register_rule,
)
from jaxllm.generation.processors.host.grammar_matching import Grammar, llguidance, vocabulary
from jaxllm.tokenizers.tokenizer import Tokenizer


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
        known = None if prompt_len is None else int_leaf(owner, "prompt_len", prompt_len)
        store(self, rule=register_rule(rule, owner=self), prompt_len=known)

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
    """Builds a processor that allows only JSON text that is valid under a schema.

    No white space is written between the parts, unless the schema has llguidance's option for it:
    ``{"x-guidance": {"whitespace_flexible": True}, ...}``.

    Args:
        schema: The schema, or its JSON text; or a list with one for each prompt.
        tokenizer: The model's tokenizer.
        eos_token_id: End-of-sequence tokens; None: the tokenizer's own.
        prompt_len: Columns before the first new token, for calls that do not pass it.

    Raises:
        InputError: The schema is invalid; the message has llguidance's reason.
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
    """Builds a processor that allows only full matches of a regular expression (Rust's syntax).

    Sentencepiece tokens begin each word with a space, also the first word, where ``decode`` removes
    it: begin the pattern with `` ?`` to allow both forms. Syntax: Rust's ``regex`` crate.

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
    """Builds a processor for a context-free grammar in llguidance's Lark, from its rule ``start``.

    A very ambiguous grammar can take very long: do not use untrusted grammars. The arguments and
    errors are those of :func:`json_schema`.
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
    guidance = llguidance()
    given = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = [] if given is None else list(id_list(given))
    if not ends or not all(is_integer(i) and 0 <= i < len(tokenizer) for i in ends):
        raise InputError(
            f"{name}: `eos_token_id` must name tokens of the tokenizer, since a text ends with one,"
            f" but is {given!r}"
        )
    theirs, ours = vocabulary(tokenizer, tuple(map(int, ends)))
    several = isinstance(sources, Sequence) and not isinstance(sources, str)
    grammars = []
    for source in sources if several else [sources]:
        try:
            text = compiled(guidance, source)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: {error}") from None
        failed, messages = guidance.LLMatcher.validate_grammar_with_warnings(text, theirs)
        if failed:
            raise InputError(f"{name}: {messages[0].strip()}")
        matcher = guidance.LLMatcher(theirs, text)
        grammars.append(Grammar(matcher, frozenset(ends), ours))
    if not grammars:
        raise InputError(f"{name}: the list of grammars is empty: give one for each prompt")
    return GrammarLogitsProcessor(grammars, tokenizer, prompt_len)


def _allowed_rows(
    grammars: tuple[Grammar, ...], _: Tokenizer, rows: list[HostRow], size: int
) -> np.ndarray:
    if len(rows) % len(grammars):
        raise InputError(f"grammar: {len(grammars)} grammars for {len(rows)} rows")
    each = len(rows) // len(grammars)  # beams or samples of one prompt are adjacent rows
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
