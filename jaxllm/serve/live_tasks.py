"""Live requests: how they are read, their tasks, and the one group that all of them share.

The programs of a batch depend on which fields its rows use. A server does not know the next
request, so its group applies every field that may differ between rows, at the neutral value where
a row does not use it; a processor runs only while a row needs it. So traffic compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from jaxllm.batch.row_groups import Group, Task, fits_slots, per_row_fields
from jaxllm.batch.row_reader import RowReader
from jaxllm.batch.rows import BatchRow, RawRow
from jaxllm.batch.slots import Sizes
from jaxllm.common.errors import InputError, UnsupportedError, counted
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    signature,
    store,
)
from jaxllm.generation.processors.grammar import GrammarLogitsProcessor
from jaxllm.generation.processors.host import WORD_BITS, pack_bits, unpack_bits
from jaxllm.generation.stopping import StopStringMatcher
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
MAX_EOS_TOKENS = 8
ALL_TOKENS = np.uint32(0xFFFFFFFF)


@logits_processor(rows=True)
class TokenMaskLogitsProcessor(LogitsProcessor):
    """Forbids all tokens but those of a mask, which the host writes before each step."""

    bits: UInt32[Array, "R W"]
    """The allowed tokens, as `pack_bits` packs them."""

    def __init__(self, bits: UInt32[np.ndarray, " W"]) -> None:
        store(self, bits=bits[None])

    def is_neutral(self) -> Bool[Array, " R"]:
        return jnp.all(self.bits == ALL_TOKENS, axis=1)

    def process(self, history: History, scores: Scores) -> Scores:
        return jnp.where(unpack_bits(self.bits, scores.shape[1]), scores, -jnp.inf)


def allowed_tokens(task: Task, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """The tokens that are allowed next, as `pack_bits` packs them."""
    tokens = task.tokens
    if task.forced_token is not None:
        if not tokens:
            return pack_bits(np.arange(vocab_size)[None] == task.forced_token)[0]
        tokens = tokens[1:]
    if task.grammar is None:
        return np.full(-(-vocab_size // WORD_BITS), ALL_TOKENS)
    return task.grammar.allowed_bits(tokens, vocab_size)


def live_group(steps_per_call: int, vocab_size: int) -> Group:
    """The group of requests whose slots are read after every `steps_per_call` steps."""
    return Group(
        number=0,
        rows=(),
        vocab_size=vocab_size,
        sampling=True,
        shared_fields=tuple(sorted(per_row_fields())),
        eos_width=MAX_EOS_TOKENS,
        window=steps_per_call,
        top_logprobs=min(MAX_TOP_LOGPROBS, vocab_size),
    )


class RequestReader:
    """Reads requests: rows of `BatchGenerator` that can run in the group of live requests.

    Args:
        reader: reads the rows.
        tokenizer: the model's, for stop strings.
        sizes: of the slots; their number does not matter.
    """

    def __init__(
        self, reader: RowReader, tokenizer: Tokenizer | None, group: Group, sizes: Sizes
    ) -> None:
        self._reader, self._tokenizer, self._group, self._sizes = reader, tokenizer, group, sizes
        plain = self._reader.read(RawRow(0, 0, {"input_ids": [0], "max_new_tokens": 1}))
        self._check_fields(plain, None)
        self.eos = plain.eos
        """End tokens of requests that do not set their own."""
        self._signature = signature(group.processors(self._task(plain, 0)))

    def read(
        self,
        index: int,
        raw: Any,
        *,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> list[Task]:
        """Reads and checks a request: a task for each of its samples.

        Raises:
            JaxLLMError: it is wrong, or needs what slots do not have.
        """
        row = self._reader.read(RawRow(index, index, raw))
        if row.is_blank:
            raise InputError("prompt: has no text; there is nothing to translate")
        self._check_fields(row, raw)
        self._check_lengths(row)
        if grammar is None and row.constraint is not None:
            grammar = row.constraint.grammar
        tasks = [self._task(row, sample, logprobs, grammar) for sample in range(row.samples)]
        if signature(self._group.processors(tasks[0])) != self._signature:
            raise self._unsupported(row, raw)
        return tasks

    def _task(
        self,
        row: BatchRow,
        sample: int,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> Task:
        config, stops = row.config, None
        if self._tokenizer is not None and config.stop_strings:
            prompt = row.decoder_prompt.tolist()
            stops = StopStringMatcher(self._tokenizer, config.stop_strings, prompt)
        forced = config.forced_bos_token_id if config.begin_suppress_tokens is None else None
        names = ["stop_strings"] if forced is None else ["stop_strings", "forced_bos_token_id"]
        task = Task(
            dataclasses.replace(row, config=config.without(names), constraint=None),
            sample,
            logprobs=logprobs,
            stops=stops,
            grammar=grammar,
            forced_token=forced if len(row.decoder_prompt) == 1 else None,
        )
        mask = TokenMaskLogitsProcessor(allowed_tokens(task, self._group.vocab_size))
        return dataclasses.replace(task, processors=(mask,))

    def _check_fields(self, row: BatchRow, raw: Any) -> None:
        if row.config.num_beams > 1 or not fits_slots(row):
            raise self._unsupported(row, raw)
        if row.config.remove_invalid_values:
            raise UnsupportedError("remove_invalid_values: not in a server; use jaxllm.generate")
        if len(row.eos) > MAX_EOS_TOKENS:
            raise UnsupportedError(
                f"eos_token_id: {len(row.eos)} tokens, but a server takes {MAX_EOS_TOKENS}"
            )

    def _unsupported(self, row: BatchRow, raw: Any) -> UnsupportedError:
        fields = raw if isinstance(raw, Mapping) else row.config.to_dict()
        names = (fields.keys() & row.config.fields.keys()) - set(self._group.shared_fields)
        return UnsupportedError(
            f"a server runs greedy search and sampling only, but these settings need another "
            f"program ({', '.join(sorted(names)) or row.mode}); use jaxllm.BatchGenerator"
        )

    def _check_lengths(self, row: BatchRow) -> None:
        prompt, limit = len(row.input_ids), self._sizes.columns
        words = f"the prompt has {counted(prompt)}"
        encoder_columns = self._sizes.encoder_columns
        if encoder_columns is not None:
            if prompt > encoder_columns:
                raise InputError(
                    f"prompt: has {prompt} tokens, but the server takes {encoder_columns}"
                )
            prompt, words = 1, "the answer has its start token"
        if row.max_length > limit:
            raise InputError(
                f"max_new_tokens: {words} and {row.max_new_tokens} new tokens are asked for, but "
                f"a slot holds {limit}; ask for at most {max(limit - prompt, 0)}"
                f"{'' if encoder_columns else ', or shorten the prompt'}"
            )
