"""Rows of a batch: how their prompts and settings are read and checked, and their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from jaxtyping import Int, Shaped

from jaxllm.batch.constraints import CONSTRAINT_KEYS, ConstraintCompiler, RowConstraint
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError, quoted, warn
from jaxllm.common.validation import check_types
from jaxllm.generation.inputs.arguments import PaddedBatch, checked_ids
from jaxllm.generation.inputs.values import to_scalar
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
from jaxllm.tokenizers.messages import read_tools
from jaxllm.tokenizers.tokenizer import Tokenizer

R = TypeVar("R", bound="RowPrompt")
PROMPT_KEYS = ("prompt", "messages", "input_ids")
MAX_SEED = 2**32 - 1
MAX_SEQUENCES = 2**20
"""Maximum `num_return_sequences`, so that a wrong number does not take the memory of all rows."""
MAX_SHARED_SETTINGS = 1024
"""Different settings of rows that are kept to be shared by later rows."""
TOTAL_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
"""Numbers of new tokens, and the total lengths over which they take precedence within a call."""


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


@dataclasses.dataclass(frozen=True)
class RowPrompt:
    """The id and the prompt of a row."""

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[list[Any] | str, "a list of messages"] | None = None
    """A list of messages, or JSON text of one."""
    tools: Any = None
    """Tools for the chat template: a list of JSON schemas, or JSON text of one."""
    input_ids: Any = None
    """Token ids; any sequence of integers."""
    src_lang: str | None = None
    """Language of the prompt's text, for a translation model."""

    @property
    def prompt_key(self) -> str:
        """The key of the prompt: prompt, messages or input_ids.

        Raises:
            InputError: the row has none of them, or several.
        """
        keys = [key for key in PROMPT_KEYS if getattr(self, key) is not None]
        if len(keys) == 1:
            return keys[0]
        raise InputError(
            "a row has exactly one of prompt, messages and input_ids; found "
            + (" and ".join(keys) or "none")
        )


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
    is_blank: bool = False
    """True for a line without text to translate, whose translation is empty too."""
    was_cut: bool = False
    """True for a text that was too long, and was cut."""

    @property
    def samples(self) -> int:
        """Number of sequences that the row returns."""
        return self.config.num_return_sequences

    @property
    def max_length(self) -> int:
        """Columns of the longest sequence."""
        return len(self.decoder_prompt) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the most probable tokens in its place.

    The log-probabilities are those of the model itself, before temperature, penalties and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token, log-probability), the most probable first."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one sample of a row or a request."""

    sample: int
    """Number of the sample, from 0."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, if a request asks for them."""
    finish_reason: str | None = None
    """In the last chunk of a sample: "eos", "length" or "stop" (a stop string)."""
    error: JaxLLMError | None = None
    """Why the sample ends here, without its result."""

    @property
    def is_last(self) -> bool:
        """True if the sample has no more chunks."""
        return self.finish_reason is not None or self.error is not None


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
    def of(cls, row: BatchRow, chunks: Iterable[Chunk], tokenizer: Tokenizer | None) -> Self:
        """The result of a row from all chunks of its samples, none of them an error."""
        samples: list[list[Chunk]] = [[] for _ in range(row.samples)]
        for chunk in chunks:
            samples[chunk.sample].append(chunk)
        output_ids = tuple([x for chunk in each for x in chunk.tokens] for each in samples)
        finish_reasons = tuple(each[-1].finish_reason or "" for each in samples)
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


def error_output(row: BatchRow | RawRow, error: JaxLLMError) -> BatchOutput:
    """The output of a row with an error."""
    row_id = row.row_id if isinstance(row, RawRow) else row.id
    return BatchOutput(row.index, row_id, error=str(error), error_kind=type(error).__name__)


class PromptReader:
    """Makes token ids of prompts.

    Args:
        chat: a `prompt` is a user message, for the model's chat template, after `system`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, chat: bool, system: str | None
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._chat, self._system = chat, system

    def is_text(self, row: RowPrompt) -> bool:
        """True if the prompt is a text that is tokenized as it is."""
        return row.prompt is not None and not self._chat

    def ids(
        self,
        row: RowPrompt,
        encode: Callable[[Tokenizer, str], list[int]] = Tokenizer.encode,
    ) -> Int[np.ndarray, " T"]:
        """The row's prompt as token ids, which `encode` gives of a text.

        Raises:
            JaxLLMError: it has none, or a wrong one.
        """
        key = row.prompt_key
        if row.src_lang is not None and not self.is_text(row):
            raise InputError(
                f"src_lang: has no effect on {key}, which is not encoded as a text; leave it out"
            )
        tools = read_tools(row.tools)
        if tools is not None and (row.input_ids is not None or self.is_text(row)):
            raise InputError(f"tools: have no effect on {key}; give messages, or use chat")
        if row.input_ids is not None:
            return checked_ids(key, _id_array(row.input_ids)[None], self._vocab_size)[0]
        if self._tokenizer is None:
            raise InputError(f"{key}: this model has no tokenizer; give input_ids")
        messages = row.messages
        if messages == []:
            raise InputError("messages: expected a list of messages, found []")
        if row.prompt is not None and self._chat:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            messages = [*system, {"role": "user", "content": row.prompt}]
        if messages is None:
            tokenizer = self._tokenizer.with_languages(row.src_lang)
            ids = [encode(tokenizer, row.prompt or "")]
        else:
            ids = [self._tokenizer.apply_chat_template(messages, tools=tools)]
        if len(ids[0]) == 0:
            raise InputError(f"{key}: is empty, and the tokenizer adds no token to it")
        return checked_ids(key, np.asarray(ids), self._vocab_size)[0]


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


def checked_row(row_class: type[R], raw: Mapping[str, Any]) -> R:
    """The keys of a row that a class of rows declares, with their types checked.

    Raises:
        InputError: a value is of the wrong type.
    """
    names = {field.name for field in dataclasses.fields(row_class)}
    values = {name: value for name, value in raw.items() if name in names}
    values |= {name: to_scalar(values[name]) for name in ("id", "seed") if name in values}
    row = row_class(**values)
    check_types(row, InputError)
    return row


def _id_array(ids: object) -> Shaped[np.ndarray, " T"]:
    """A list that should be token ids, as an array."""
    array = np.zeros(0)
    if isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str):
        with contextlib.suppress(ValueError):  # ragged nested lists
            array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"input_ids: expected a list of token ids, found {quoted(ids)}")
    return array


def checked_seed(seed: Any) -> int:
    if not is_integer(seed) or not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, found {quoted(seed)}")
    return int(seed)
