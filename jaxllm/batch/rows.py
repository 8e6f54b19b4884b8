"""Rows of a batch, read and checked one by one, and their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.call.prompts import decoder_prompt
from jaxllm.generation.inputs.padded_batch import PaddedBatch, checked_ids
from jaxllm.generation.inputs.values import is_integer
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.lengths import checked_lengths
from jaxllm.generation.settings.mode import generation_mode
from jaxllm.generation.settings.special_tokens import checked_pad
from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.models.decoder import GenerativeModel

INPUTS = ("prompt", "messages", "input_ids")
OWN = frozenset({"id", "seed", *INPUTS})
"""Keys of a row that are not generation fields."""
MAX_SEED = 2**32 - 1
MAX_SEQUENCES = 2**20
"""Most sequences of one row, so that a wrong number does not take the memory of all others."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A checked row, ready to run."""

    index: int
    """Its place among all rows."""
    id: str | int
    ids: Int[np.ndarray, " T"]
    """Prompt ids; for an encoder-decoder, the encoder's input ids."""
    start: Int[np.ndarray, " C"]
    """The decoder's prompt: `ids`, or an encoder-decoder's start token."""
    config: GenerationConfig
    eos: tuple[int, ...]
    max_new_tokens: int
    """Most new tokens of a sequence."""
    seed: int
    row_number: int
    """`generate(..., key=seed, row_ids=[row_number])` samples the same."""
    mode: str
    """Generation mode, as `generation_mode` names it."""

    @property
    def samples(self) -> int:
        return self.config.num_return_sequences

    @property
    def max_length(self) -> int:
        """Columns of the longest sequence."""
        return len(self.start) + self.max_new_tokens


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
        one = len(self.output_ids) == 1
        texts = [None] * len(self.output_ids) if self.texts is None else list(self.texts)
        return {
            "id": self.id,
            "text": texts[0] if one else texts,
            "output_ids": self.output_ids[0] if one else list(self.output_ids),
            "finish_reason": self.finish_reasons[0] if one else list(self.finish_reasons),
        }


@dataclasses.dataclass(frozen=True)
class RawRow:
    """A row before it is read."""

    index: int
    """Number of the row in the job, from 0; its samples depend on it if it has no seed."""
    id: str | int
    """Default of its `id`."""
    raw: Any
    """A mapping, a prompt or token ids; or the error of the line that it should be on."""


def failed(index: int, row_id: str | int, error: BaseException) -> BatchOutput:
    """The output of a row with an error."""
    return BatchOutput(index, row_id, error=str(error), error_kind=type(error).__name__)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings that rows with the same generation fields share."""

    config: GenerationConfig
    eos: tuple[int, ...]
    mode: str


class RowReader:
    """Reads rows: mappings, prompts or token ids.

    Args:
        fields: generation fields of all rows; a row's own win over them.
        seed: of the rows that name none.
        default_new_tokens: of rows for which nobody states a length; None: as `generate`.
        chat: a row's `prompt` is what a user says, in the model's chat template.
        system: system message of that chat.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Any,
        fields: Mapping[str, Any],
        seed: int,
        default_new_tokens: int | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._fields, self._seed = dict(fields), checked_seed(seed)
        self._default, self._chat, self._system = default_new_tokens, chat, system
        self._settings: dict[str, _Settings] = {}
        self._lengthened: dict[tuple[GenerationConfig, int], GenerationConfig] = {}

    def read(self, row: RawRow, name: str | int) -> Row:
        """Reads and checks a row.

        Raises:
            JaxLLMError: the row is wrong.
        """
        raw = row.raw
        if isinstance(raw, JaxLLMError):
            raise raw
        if isinstance(raw, str):
            raw = {"prompt": raw}
        elif not isinstance(raw, Mapping):
            raw = {"input_ids": raw}
        for field in raw:
            if not isinstance(field, str):
                raise InputError(f"a row's fields have names, but one is {field!r:.60}")
        own = {name: value for name, value in raw.items() if name not in OWN}
        settings = self._read_settings(own)
        config = settings.config
        ids = self._ids(raw)
        if self._model.is_encoder_decoder:
            start = decoder_prompt(self._model, None, None, 1, config).ids[0]
        else:
            start = ids
        config = self._with_length(config, len(start))
        columns = PaddedBatch(start[None], np.ones((1, len(start)), bool))
        config, max_length = checked_lengths(self._model, config, columns)
        if config.num_return_sequences > MAX_SEQUENCES:
            raise InputError(
                f"num_return_sequences: {config.num_return_sequences} is more than a row may have, "
                f"{MAX_SEQUENCES}; give the prompt in several rows"
            )
        seed = raw.get("seed")
        return Row(
            index=row.index,
            id=name,
            ids=ids,
            start=start,
            config=config,
            eos=settings.eos,
            max_new_tokens=max_length - len(start),
            seed=self._seed if seed is None else checked_seed(seed),
            row_number=row.index if seed is None else 0,
            mode=settings.mode,
        )

    def _with_length(self, config: GenerationConfig, start: int) -> GenerationConfig:
        if self._default is None or {"max_length", "max_new_tokens"} & config.to_dict().keys():
            return config
        limit, context = self._default, self._model.config.context_length
        if not self._model.is_encoder_decoder and context is not None:
            limit = max(1, min(limit, context - start))
        known = self._lengthened.get((config, limit))
        if known is None:  # many rows share their settings, which then are one object
            known = self._lengthened[config, limit] = config.replace(max_new_tokens=limit)
        return known

    def _read_settings(self, own: Mapping[str, Any]) -> _Settings:
        try:
            name = json.dumps(own, sort_keys=True)
        except (TypeError, ValueError):  # values that JSON lacks, such as arrays: not cached
            return self._checked_settings(own)
        found = self._settings.get(name)
        if found is None:
            found = self._settings[name] = self._checked_settings(own)
        return found

    def _checked_settings(self, own: Mapping[str, Any]) -> _Settings:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            config, eos = merged_config(self._model, None, {**self._fields, **own})
        # An unused field is an error only if the row itself sets it. The warning starts with the
        # field's name.
        for warning in caught:
            text = str(warning.message)
            if any(text.startswith(f"`{name}`") for name in own):
                raise InputError(text)
        for name, value in config.to_dict().items():
            if value and (name.startswith("output_") or name == "token_healing"):
                raise UnsupportedError(f"{name}: not in a batch of rows; use jaxllm.generate")
        if config.stop_strings is not None:
            if self._tokenizer is None:
                raise InputError("stop_strings: needs a tokenizer, which this model does not have")
            StopStringCriteria(self._tokenizer, list(config.stop_strings))
        checked_pad(self._model, config, eos)
        return _Settings(config, eos, generation_mode(config))

    def _ids(self, raw: Mapping[str, Any]) -> Int[np.ndarray, " T"]:
        given = [name for name in INPUTS if raw.get(name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise InputError(
                f"a row has exactly one of prompt, messages and input_ids; found {found}"
            )
        name, value = given[0], raw[given[0]]
        if name == "input_ids":
            return checked_ids("input_ids", _listed(value)[None], self._model.config.vocab_size)[0]
        if self._tokenizer is None:
            raise InputError(f"{name}: this model has no tokenizer; give input_ids")
        if name == "prompt":
            if not isinstance(value, str):
                raise InputError(f"prompt: expected a string, found {value!r:.60}")
            ids = self._asked(value) if self._chat else self._tokenizer([value]).input_ids
        else:
            if not isinstance(value, list) or not value:
                raise InputError(f"messages: expected a list of messages, found {value!r:.60}")
            ids = [self._tokenizer.apply_chat_template(value)]
        return checked_ids(name, np.asarray(ids), self._model.config.vocab_size)[0]

    def _asked(self, text: str) -> list[list[int]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, {"role": "user", "content": text}]
        return [self._tokenizer.apply_chat_template(messages)]


def _listed(ids: Any) -> Shaped[np.ndarray, " T"]:
    """A list that should be token ids, as an array."""
    found = np.zeros(0)
    if isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str):
        with contextlib.suppress(ValueError):  # ragged nested lists
            found = np.asarray(ids)
    if found.ndim != 1 or found.size == 0:
        raise InputError(f"input_ids: expected a list of token ids, found {ids!r:.60}")
    return found


def row_id(raw: Any, default: str | int) -> str | int:
    """The `id` of a row, or the default.

    Raises:
        InputError: the id is neither a string nor an integer.
    """
    found = raw.get("id") if isinstance(raw, Mapping) else None
    if found is None:
        return default
    if not isinstance(found, str) and not is_integer(found):
        raise InputError(f"id: expected a string or an integer, found {found!r:.60}")
    return found


def checked_seed(seed: Any) -> int:
    if not is_integer(seed) or not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, found {seed!r}")
    return int(seed)
