"""Reads the generation settings of a GGUF file: end tokens, and defaults for sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.common.errors import CheckpointError, quoted
from jaxllm.tokenizers.gguf_vocab import END_TEXTS, FILL_END_TEXTS

_NO_TOKEN = 2**32 - 1  # -1, written without a sign
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens

_SAMPLING = "general.sampling."
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_OFF = {"mirostat": 0, "xtc_probability": 0, "penalty_last_n": -1}
"""Fields of samplers that jaxllm lacks, with the value that changes nothing."""


def token_id(metadata: Mapping[str, Any], name: str, size: int, source: str) -> int | None:
    """Id of a special token, such as "eos", in a vocabulary of `size` tokens; None: there is none.

    Raises:
        CheckpointError: the field is no such id.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or (type(value) is int and value in (-1, _NO_TOKEN)):
        return None
    if type(value) is not int or not 0 <= value < size:
        raise CheckpointError(f"{source}: {key} is {quoted(value)}, not an id below {size}")
    return value


def generation_settings(metadata: Mapping[str, Any], size: int, source: str) -> dict[str, Any]:
    """Fields of the generation config of a file whose vocabulary has `size` tokens."""
    ends = _end_tokens(metadata, size, source)
    eos = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    return eos | _sampling_settings(metadata, source)


def _end_tokens(metadata: Mapping[str, Any], size: int, source: str) -> list[int]:
    """Ids of the tokens at which llama.cpp ends a text, the file's own end token first.

    A file has no list of end tokens, unless ollama wrote it. llama.cpp finds them by their texts,
    for which only tokens count here whose type is control or user-defined.
    """
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ids = [i for name in names if (i := token_id(metadata, name, size, source)) is not None]
    key = "tokenizer.ggml.eos_token_ids"
    more = metadata.get(key, np.zeros(0, np.int32))
    is_ids = isinstance(more, np.ndarray) and more.dtype.kind in "iu"
    if not is_ids or not all(-1 <= i < size for i in more.tolist()):
        raise CheckpointError(f"{source}: {key} is {quoted(more)}, not ids below {size}")
    tokens, types = (metadata.get(f"tokenizer.ggml.{x}") for x in ("tokens", "token_type"))
    found: dict[str, int] = {}
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        special = np.flatnonzero(np.isin(types[:size], (_CONTROL, _USER_DEFINED))).tolist()
        known = END_TEXTS | FILL_END_TEXTS
        found = {tokens[i]: i for i in special if i < len(tokens) and tokens[i] in known}
    if {"<|call|>", "<|calls|>"} & found.keys() and {"<|return|>", "<|flush|>"} & found.keys():
        found.pop("<|end|>", None)  # the end of a message, after which more follow
    if "<|tool_response>" in found:
        found.pop("</s>", None)
    # A pad token stays no end, so that generate() masks it.
    pad = token_id(metadata, "padding", size, source)
    texts = [i for text, i in found.items() if i != pad or text in END_TEXTS]
    return list(dict.fromkeys([*ids, *(int(i) for i in more if i >= 0), *texts]))


def _sampling_settings(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Defaults for sampling: the parameters that a file recommends."""
    settings: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = metadata.get(_SAMPLING + name)
        if value is None:
            continue
        types, expected = ((int,), "an integer") if name == "top_k" else ((int, float), "a number")
        is_number = type(value) in types and math.isfinite(value) and abs(value) < 2**31
        if not is_number or (name == "penalty_repeat" and value <= 0):
            raise CheckpointError(f"{source}: {_SAMPLING}{name} is {quoted(value)}, not {expected}")
        if type(value) is float:
            value = float(str(np.float32(value)))  # 0.6, not 0.6000000238418579
        if name == "temp" and value <= 0:  # greedy, which is the default
            continue
        settings[field] = max(value, 0) if name == "top_k" else value  # -1 is off too
    return settings


def unused_sampling(metadata: Mapping[str, Any]) -> list[str]:
    """Keys of recommended sampling parameters that have no counterpart in jaxllm."""
    return [
        key
        for key, value in metadata.items()
        if key.startswith(_SAMPLING)
        and (name := key.removeprefix(_SAMPLING)) not in _FIELDS
        and not (type(value) in (int, float) and value == _OFF.get(name))
    ]
