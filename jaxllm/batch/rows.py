"""Rows of a batch, read and checked one by one, and their outputs."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

import numpy as np
from jaxtyping import Int

from jaxllm.batch.constraints import CONSTRAINT_KEYS, ConstraintCompiler, RowConstraint
from jaxllm.batch.row_prompts import PromptReader, RowPrompt, checked_row
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.common.messages import quoted
from jaxllm.generation.call import prompts
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.inputs.arguments import CallArguments
from jaxllm.generation.inputs.padded_batch import PaddedBatch
from jaxllm.generation.inputs.values import is_integer, to_scalar
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.consistency import UnusedFieldWarning
from jaxllm.generation.settings.lengths import checked_lengths, with_default_length
from jaxllm.generation.settings.mode import generation_mode
from jaxllm.generation.settings.special_tokens import checked_pad
from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.generation.strategies.select_strategy import Call, registered_strategy
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_SEED = 2**32 - 1
MAX_SEQUENCES = 2**20
"""Maximum `num_return_sequences`, so that a wrong number does not take the memory of all rows."""
MAX_SHARED_SETTINGS = 1024
"""Different settings of rows that are kept to be shared by later rows."""


@dataclasses.dataclass(frozen=True)
class RowInput(RowPrompt):
    """The keys of a row that are not generation fields."""

    seed: int | None = None
    schema: Annotated[dict[str, Any] | bool | None, "a JSON schema"] = None
    regex: str | None = None
    grammar: str | None = None
    """A Lark grammar. The new text must match the row's schema, regex or grammar."""


ROW_KEYS = frozenset(field.name for field in dataclasses.fields(RowInput))


@dataclasses.dataclass(frozen=True, eq=False)
class BatchRow:
    """A checked row, ready to run."""

    index: int
    """Number of the row in the job, from 0."""
    id: str | int
    input_ids: Int[np.ndarray, " T"]
    """Prompt ids; for an encoder-decoder, the encoder's input ids."""
    decoder_prompt: Int[np.ndarray, " C"]
    """The decoder's prompt: `input_ids`, or an encoder-decoder's start token."""
    config: GenerationConfig
    eos: tuple[int, ...]
    max_new_tokens: int
    """Maximum number of new tokens of a sequence."""
    seed: int
    row_number: int
    """`generate(..., key=seed, row_ids=[row_number])` samples the same."""
    mode: str
    """Generation mode, as `generation_mode` names it, or the name of a registered strategy."""
    constraint: RowConstraint | None = None
    """What the new text must match."""

    @property
    def samples(self) -> int:
        """Number of sequences that the row returns."""
        return self.config.num_return_sequences

    @property
    def max_length(self) -> int:
        """Columns of the longest sequence."""
        return len(self.decoder_prompt) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class BatchOutput:
    """The result of one row: `num_return_sequences` generated sequences, or an error."""

    index: int
    id: str | int
    output_ids: tuple[list[int], ...] = ()
    """New tokens of each sequence, the end token included."""
    texts: tuple[str, ...] | None = None
    """Decoded `output_ids`, without special tokens; None where there is no tokenizer."""
    finish_reasons: tuple[str, ...] = ()
    """Why each sequence ended: "eos", "length", or "stop" (a stop string)."""
    prompt_tokens: int = 0
    error: str | None = None
    """Error message of a row that cannot be answered."""
    error_kind: str | None = None
    """Class name of the error, such as "InputError"."""

    @classmethod
    def of(
        cls,
        row: BatchRow,
        output_ids: tuple[list[int], ...],
        finish_reasons: tuple[str, ...],
        tokenizer: Tokenizer | None,
    ) -> Self:
        """The result of a row from the new tokens of its sequences."""
        texts = None
        if tokenizer is not None:
            texts = tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in output_ids)
        prompt_tokens = len(row.input_ids)
        return cls(row.index, row.id, output_ids, texts, finish_reasons, prompt_tokens)

    @property
    def new_lengths(self) -> tuple[int, ...]:
        """Number of new tokens of each sequence."""
        return tuple(map(len, self.output_ids))

    @property
    def text(self) -> str | None:
        """The first text."""
        return self.texts[0] if self.texts else None

    def to_dict(self) -> dict[str, Any]:
        """The result as a line of an output file: lists where the row asked for several sequences.

        >>> BatchOutput(0, "a", ([5, 2],), ("Hi",), ("eos",), 3).to_dict()
        {'id': 'a', 'text': 'Hi', 'output_ids': [5, 2], 'finish_reason': 'eos'}
        """
        if self.error is not None:
            return {"id": self.id, "error": self.error, "error_kind": self.error_kind}
        texts = [None] * len(self.output_ids) if self.texts is None else self.texts
        columns = (texts, self.output_ids, self.finish_reasons)
        single = len(self.output_ids) == 1
        text, output_ids, reason = (column[0] if single else list(column) for column in columns)
        return {"id": self.id, "text": text, "output_ids": output_ids, "finish_reason": reason}


@dataclasses.dataclass(frozen=True)
class RawRow:
    """A row before it is read."""

    index: int
    """Number of the row in the job, from 0; its samples depend on it if it has no seed."""
    id: str | int
    """Default of its `id`."""
    raw: Any
    """A mapping, a prompt or token ids; or the error of the line that it should be on."""

    def mapping(self, keys: Collection[str] | None = None) -> dict[str, Any]:
        """The row as a mapping; a string is a prompt, anything else token ids.

        Args:
            keys: the only keys that it may have; None: any.

        Raises:
            JaxLLMError: the error that stands in its place, or a key is unknown.
        """
        if isinstance(self.raw, JaxLLMError):
            raise self.raw
        if isinstance(self.raw, str):
            return {"prompt": self.raw}
        if not isinstance(self.raw, Mapping):
            return {"input_ids": self.raw}
        for name in self.raw:
            if not isinstance(name, str):
                raise InputError(f"a row's fields have names, but one is {quoted(name)}")
            if keys is not None and name not in keys:
                raise InputError(f"{name}: unknown; this task reads {', '.join(sorted(keys))}")
        return dict(self.raw)

    @property
    def row_id(self) -> str | int:
        """The row's own `id`, or the default if it has no valid one."""
        own: Any = to_scalar(self.raw.get("id")) if isinstance(self.raw, Mapping) else None
        return own if isinstance(own, str) or is_integer(own) else self.id


def error_output(row: BatchRow | RawRow, error: JaxLLMError) -> BatchOutput:
    """The output of a row with an error."""
    row_id = row.row_id if isinstance(row, RawRow) else row.id
    return BatchOutput(row.index, row_id, error=str(error), error_kind=type(error).__name__)


@dataclasses.dataclass(frozen=True)
class SharedSettings:
    """Settings that rows with the same generation fields share."""

    config: GenerationConfig
    eos: tuple[int, ...]


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
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._constraints = ConstraintCompiler(tokenizer, dict(constraint or {}))
        self._fields, self._seed = dict(fields), checked_seed(seed)
        self._default_new_tokens = default_new_tokens
        self._prompts = PromptReader(tokenizer, model.config.vocab_size, chat, system)
        self._settings: dict[str, SharedSettings] = {}
        self._with_default_length: dict[tuple[GenerationConfig, int | None], GenerationConfig] = {}
        if constraint:
            self._constraints.check_job(self._read_settings({}).eos)

    def read(self, row: RawRow) -> BatchRow:
        """Reads and checks a row.

        Raises:
            JaxLLMError: the row is wrong.
        """
        raw = row.mapping()
        row_input = checked_row(RowInput, raw)
        settings = self._read_settings(
            {name: value for name, value in raw.items() if name not in ROW_KEYS}
        )
        input_ids = self._prompts.ids(row_input)
        decoder_prompt = input_ids
        if self._model.is_encoder_decoder:
            decoder_prompt = prompts.decoder_prompt(
                self._model, None, None, 1, settings.config
            ).ids[0]
        config, max_length = self._with_lengths(settings.config, decoder_prompt)
        call = Call(
            self._model, config, settings.eos, 1, len(decoder_prompt), max_length, CallArguments()
        )
        registered = registered_strategy(call)
        seed = row_input.seed
        own_constraint = {key: getattr(row_input, key) for key in CONSTRAINT_KEYS}
        return BatchRow(
            index=row.index,
            id=row.row_id,
            input_ids=input_ids,
            decoder_prompt=decoder_prompt,
            config=config,
            eos=settings.eos,
            max_new_tokens=max_length - len(decoder_prompt),
            seed=self._seed if seed is None else checked_seed(seed),
            row_number=row.index if seed is None else 0,
            mode=registered.name if registered else generation_mode(config),
            constraint=self._constraints.of_row(own_constraint, settings.eos, len(decoder_prompt)),
        )

    def _with_lengths(
        self, config: GenerationConfig, decoder_prompt: Int[np.ndarray, " C"]
    ) -> tuple[GenerationConfig, int]:
        """The settings with a `max_new_tokens` if no length is set, and the maximum length."""
        if self._default_new_tokens is not None:
            limited = with_default_length(
                config, self._model, len(decoder_prompt), self._default_new_tokens
            )
            # Rows that share their settings share one object.
            key = (config, limited.max_new_tokens)
            config = self._with_default_length.setdefault(key, limited)
        columns = PaddedBatch(decoder_prompt[None], np.ones((1, len(decoder_prompt)), bool))
        return checked_lengths(self._model, config, columns)

    def _read_settings(self, fields: Mapping[str, Any]) -> SharedSettings:
        """The settings of a row with these fields; rows with equal fields share them."""
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

    def _checked_settings(self, fields: Mapping[str, Any]) -> SharedSettings:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnusedFieldWarning)
            config, eos = merged_config(self._model, None, {**self._fields, **fields})
        for warning in caught:
            # An unused field is an error only if the row itself sets it.
            if isinstance(warning.message, UnusedFieldWarning) and warning.message.field in fields:
                raise InputError(str(warning.message))
        for name, value in config.to_dict().items():
            if value and FIELDS[name].per_call:
                raise UnsupportedError(f"{name}: not in a batch of rows; use jaxllm.generate")
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
        return SharedSettings(config, eos)


def checked_seed(seed: Any) -> int:
    if not is_integer(seed) or not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, found {quoted(seed)}")
    return int(seed)
