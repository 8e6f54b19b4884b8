"""Reads the rows of a batch one by one, and checks them."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from jaxllm.batch.constraints import CONSTRAINT_KEYS, ConstraintCompiler
from jaxllm.batch.rows import BatchRow, PromptReader, RawRow, RowPrompt, checked_row
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, UnsupportedError, quoted, warn
from jaxllm.generation.inputs.arguments import PaddedBatch
from jaxllm.generation.registration import registered_strategy
from jaxllm.generation.request import PROMPT_TRANSFORMS, Request, decoder_prompt
from jaxllm.generation.settings.config import FIELDS, GenerationConfig, generation_mode
from jaxllm.generation.settings.resolve import (
    UnusedFieldWarning,
    check_language,
    checked_lengths,
    checked_pad,
    cut_options,
    merged_config,
    with_default_length,
)
from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.batch import Truncation
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_SEED = 2**32 - 1
MAX_SEQUENCES = 2**20
"""Maximum `num_return_sequences`, so that a wrong number does not take the memory of all rows."""
MAX_SHARED_SETTINGS = 1024
"""Different settings of rows that are kept to be shared by later rows."""
TOTAL_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
"""Numbers of new tokens, and the total lengths over which they take precedence within a call."""


@dataclasses.dataclass(frozen=True)
class RowInput(RowPrompt):
    """The keys of a row that are not generation fields."""

    seed: int | None = None
    tgt_lang: str | None = None
    """Language of the new text, for a translation model: sets `forced_bos_token_id`, or for mBART
    `decoder_start_token_id`. A row that sets it to another token is an error."""
    schema: Annotated[dict[str, Any] | bool | None, "a JSON schema"] = None
    regex: str | None = None
    grammar: str | None = None
    """A Lark grammar. The new text must match the row's schema, regex or grammar."""


ROW_KEYS = frozenset(field.name for field in dataclasses.fields(RowInput))


class RowReader:
    """Reads rows: mappings, prompts or token ids.

    Args:
        fields: generation fields of all rows; a row's own override them.
        seed: seed of rows that have none.
        default_new_tokens: `max_new_tokens` of rows for which no length is set, as far as the
            model's context reaches; None: as `generate`.
        chat: a row's `prompt` is a user message, for the model's chat template.
        system: system message of that chat.
        constraint: `schema`, `regex` or `grammar` of rows that have none.
        truncation, max_source_length: as `cut_options`.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer | None,
        fields: Mapping[str, Any],
        seed: int,
        default_new_tokens: int | None = None,
        chat: bool = False,
        system: str | None = None,
        constraint: Mapping[str, Any] | None = None,
        truncation: Truncation = False,
        max_source_length: int | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._constraints = ConstraintCompiler(tokenizer, dict(constraint or {}))
        # A language of the tokenizer's holds for all rows.
        own = fields if tokenizer is None else tokenizer.with_target(fields, None)
        self._fields, self._seed = dict(own), checked_seed(seed)
        self._default_new_tokens = default_new_tokens
        self._cut = truncation, max_source_length
        if tokenizer is not None:
            cut_options(model, tokenizer, *self._cut)  # names what is wrong, before the first row
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)
        self._settings: dict[str, tuple[GenerationConfig, tuple[int, ...]]] = {}
        self._with_default_length: dict[tuple[GenerationConfig, int | None], GenerationConfig] = {}
        if constraint:
            self._constraints.check_job(self._read_settings({})[1])

    def read(self, row: RawRow) -> BatchRow:
        """Reads and checks a row.

        Raises:
            JaxLLMError: the row is wrong.
        """
        raw = row.mapping()
        row_input = checked_row(RowInput, raw)
        fields = {name: value for name, value in raw.items() if name not in ROW_KEYS}
        if row_input.tgt_lang is not None:
            if self._tokenizer is None:
                raise InputError("tgt_lang: needs a tokenizer, which this model does not have")
            fields = self._tokenizer.with_target(fields, row_input.tgt_lang)
        config, eos = self._read_settings(fields)
        input_ids = self._prompts.ids(row_input)
        own: Any = self._tokenizer
        is_text = self._prompts.is_text(row_input)
        is_blank = is_text and own.is_blank(row_input.prompt)
        if is_blank and not own.translates:
            if self._model.is_encoder_decoder:
                own.check_not_blank(row_input.prompt, "prompt")
            elif not row_input.prompt:
                raise InputError("prompt: is empty; give a text, or input_ids with the BOS token")
        if row_input.input_ids is None:
            check_language(self._model, self._tokenizer, config)
        whole = len(input_ids)
        if is_text:
            new = config.max_new_tokens or self._default_new_tokens
            cut = cut_options(self._model, own, *self._cut, new)
            if whole > cut.get("max_length", whole):
                encode = own.with_languages(row_input.src_lang).encode
                input_ids = np.asarray(encode(row_input.prompt, **cut), input_ids.dtype)
        context = self._model.config.longest_prompt
        if context is not None and len(input_ids) > context:
            # It would cost memory and time in all slots, for a meaningless answer.
            is_learned = self._model.config.max_positions is not None
            more = "" if is_learned else ", or load the model with a larger max_position_embeddings"
            raise InputError(
                f"the prompt has {len(input_ids)} tokens, but the model's context has {context}; "
                f"shorten it, or cut it with truncation{more}"
            )
        prompt = PaddedBatch(input_ids[None], np.ones((1, len(input_ids)), bool))
        if self._model.is_encoder_decoder:
            prompt = decoder_prompt(self._model, None, None, 1, config)
        config, max_length = self._with_lengths(config, prompt)
        request = Request(self._model, config, eos, prompt, max_length)
        registered = registered_strategy(request)
        seed = row_input.seed
        own_constraint = {key: getattr(row_input, key) for key in CONSTRAINT_KEYS}
        return BatchRow(
            index=row.index,
            id=row.row_id,
            input_ids=input_ids,
            decoder_prompt=prompt.ids[0],
            config=config,
            eos=eos,
            max_new_tokens=request.max_new_tokens,
            seed=self._seed if seed is None else checked_seed(seed),
            row_number=row.index if seed is None else 0,
            mode=registered.name if registered else generation_mode(config),
            constraint=self._constraints.of_row(own_constraint, eos, prompt.length),
            is_blank=is_blank and own.translates,
            was_cut=len(input_ids) < whole,
        )

    def _with_lengths(
        self, config: GenerationConfig, prompt: PaddedBatch
    ) -> tuple[GenerationConfig, int]:
        """The settings with a `max_new_tokens` if no length is set, and the maximum length."""
        if self._default_new_tokens is not None:
            limited = with_default_length(
                config, self._model, prompt.length, self._default_new_tokens
            )
            # Rows that share their settings share one object.
            key = (config, limited.max_new_tokens)
            config = self._with_default_length.setdefault(key, limited)
        return checked_lengths(self._model, config, prompt)

    def _read_settings(self, fields: Mapping[str, Any]) -> tuple[GenerationConfig, tuple[int, ...]]:
        """Settings and end tokens of a row with these fields; rows with equal fields share them."""
        try:
            key = json.dumps(fields, sort_keys=True)
        except (TypeError, ValueError):  # values that JSON lacks, such as arrays: not cached
            return self._checked_settings(fields)
        settings = self._settings.get(key)
        if settings is None:
            settings = self._checked_settings(fields)
            if len(self._settings) == MAX_SHARED_SETTINGS:
                self._settings.clear()
                self._with_default_length.clear()
            self._settings[key] = settings
        return settings

    def _checked_settings(
        self, fields: Mapping[str, Any]
    ) -> tuple[GenerationConfig, tuple[int, ...]]:
        # A row's total length overrides the job's number of new tokens.
        job = {
            name: value
            for name, value in self._fields.items()
            if fields.get(TOTAL_LENGTHS.get(name, name)) is None
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnusedFieldWarning)
            config, eos = merged_config(self._model, None, {**job, **fields})
        for warning in caught:
            # An unused field is an error only if the row itself sets it.
            if not isinstance(warning.message, UnusedFieldWarning):
                warn(warning.message)
            elif warning.message.field in fields:
                raise InputError(str(warning.message))
        for name, value in config.to_dict().items():
            if value and (FIELDS[name].record or name in PROMPT_TRANSFORMS):
                raise UnsupportedError(f"{name}: not for rows of a batch; use jaxllm.generate")
        if config.num_return_sequences > MAX_SEQUENCES:
            raise InputError(
                f"num_return_sequences: {config.num_return_sequences} is more than a row may have, "
                f"{MAX_SEQUENCES}; give the prompt in several rows"
            )
        if config.stop_strings is not None:
            if self._tokenizer is None:
                raise InputError("stop_strings: needs a tokenizer, which this model does not have")
            StopStringCriteria(self._tokenizer, list(config.stop_strings))
        checked_pad(self._model, config, eos)
        return config, eos


def checked_seed(seed: Any) -> int:
    if not is_integer(seed) or not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, found {quoted(seed)}")
    return int(seed)
