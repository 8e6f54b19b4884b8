"""Builds tokenizers from the untrusted metadata of a GGUF file.

The keys are llama.cpp's (gguf-py's ``constants.py``). Three types of vocabulary are supported:
"gpt2" (byte-level BPE with merges), "llama" (sentencepiece BPE with scores) and "t5" (Unigram). The
latter two are converted back to sentencepiece models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.common.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.sentencepiece_model import BPE, UNIGRAM, PieceType, write_model
from jaxllm.tokenizers.sentencepiece_tokenizers import (
    LlamaTokenizer,
    T5Tokenizer,
    with_added_tokens,
)
from jaxllm.tokenizers.settings import TokenizerSettings, new_config
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json import (
    BYTE_LEVEL,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    FastTokenizer,
    split_before_bytes,
)

MAX_TOKENS = 2**20
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_PLACEHOLDER = re.compile(r"\[PAD\d+\]")

_GPT2 = [{**BYTE_LEVEL, "use_regex": True}]
# Split digits one by one before splitting words.
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_LLAMA3 = split_before_bytes(LLAMA3_PATTERN)
_QWEN2 = split_before_bytes(QWEN2_PATTERN)
# tokenizer.ggml.pre -> pre-tokenizers of a byte-level vocabulary, as in llama.cpp's
# llama-vocab.cpp. "default", which llama.cpp warns about, is GPT-2's in transformers.
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "command-r": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: Sequence[int]  # PieceType of each token

    def ids_of(self, piece_type: PieceType) -> list[int]:
        return [i for i, each in enumerate(self.types) if each == piece_type]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from the ``tokenizer.*`` keys of a GGUF file.

    ``tokenizer.save`` writes files that transformers loads.

    Args:
        metadata: keys and values of the file; arrays are lists or numpy arrays.
    """
    model = _value(metadata, "tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if model not in builders:
        raise UnsupportedError(
            f"GGUF: tokenizer.ggml.model is {model!r}; supported are {sorted(builders)}"
        )
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise TokenizerError(f"GGUF: tokenizer.ggml.tokens has {len(tokens)} entries")
    types = [PieceType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "tokenizer.ggml.token_type", int, len(tokens))
        if not set(types) <= set(PieceType):
            raise TokenizerError("GGUF: tokenizer.ggml.token_type holds types other than 1 to 6")
    return builders[model](metadata, _Vocabulary(tokens, types))


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    pre = _value(metadata, "tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF: tokenizer.ggml.pre is {pre!r}; supported are {sorted(_PRE_TOKENIZERS)}"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise TokenizerError("GGUF: tokenizer.ggml.tokens holds a token twice")
    added = [
        {"id": index, **asdict(AddedToken(token, special=piece_type == PieceType.CONTROL))}
        for index, (token, piece_type) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if piece_type in (PieceType.CONTROL, PieceType.USER_DEFINED) and token
    ]
    spec = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": _array(metadata, "tokenizer.ggml.merges", str),
            "ignore_merges": pre in _LLAMA3_NAMES,
        },
    }
    settings = _settings(metadata, vocabulary, add_bos=pre in _LLAMA3_NAMES, add_eos=False)
    return FastTokenizer(spec, settings, source="GGUF: tokenizer.ggml")


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    add_space = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    # Legacy: as in llama.cpp, text after a special token gets a prefix space.
    options = {"legacy": True, "add_prefix_space": add_space}
    settings = _settings(metadata, vocabulary, add_bos=True, add_eos=False, **options)
    spaces = {"add_dummy_prefix": add_space, "remove_extra_whitespaces": False}
    return _with_model(LlamaTokenizer, metadata, vocabulary, settings, model_type=BPE, **spaces)


def _unigram(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    tokens, types = vocabulary.tokens, vocabulary.types
    # The converter pads the vocabulary to the size of the embedding. T5's first hundred padding
    # tokens are its sentinels, which the sentencepiece model does not have.
    size = len(tokens)
    while size and _PLACEHOLDER.fullmatch(tokens[size - 1]):
        size -= 1
    sentinels = min(100, len(tokens) - size)
    vocabulary = _Vocabulary(tokens[:size], types[:size])
    charsmap = bytes(_array(metadata, "tokenizer.ggml.precompiled_charsmap", int, default=[]))
    options = {"legacy": True, "extra_ids": sentinels}
    settings = _settings(metadata, vocabulary, add_bos=False, add_eos=True, **options)
    if not settings.flag("add_eos_token", True) or settings.flag("add_bos_token", False):
        raise UnsupportedError(
            "GGUF: a T5 tokenizer without EOS after a text, or with BOS before it"
        )
    spaces = {
        "add_dummy_prefix": "tokenizer.ggml.add_space_prefix",
        "remove_extra_whitespaces": "tokenizer.ggml.remove_extra_whitespaces",
    }
    fields: Any = {name: _value(metadata, key, bool, True) for name, key in spaces.items()}
    fields |= {"model_type": UNIGRAM, "charsmap": charsmap}
    return _with_model(T5Tokenizer, metadata, vocabulary, settings, **fields)


def _with_model(
    kind: type[LlamaTokenizer | T5Tokenizer],
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    settings: TokenizerSettings,
    **fields: Any,
) -> Tokenizer:
    """A tokenizer with a sentencepiece model that is made of the vocabulary.

    Args:
        fields: arguments of `write_model`.
    """
    unknown = vocabulary.ids_of(PieceType.UNKNOWN)
    if len(unknown) != 1:
        raise TokenizerError(
            f"GGUF: tokenizer.ggml.token_type marks {len(unknown)} tokens as unknown, not one"
        )
    byte_fallback = PieceType.BYTE in vocabulary.types
    pieces = _pieces(metadata, vocabulary)
    model = write_model(pieces, unk_id=unknown[0], byte_fallback=byte_fallback, **fields)
    files = {kind.model_file: model, **new_config(kind.__name__, settings)}
    files = with_added_tokens(files, settings)
    return kind(model, settings, files, source="GGUF: tokenizer.ggml")


def _pieces(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, float, int]]:
    scores = _array(metadata, "tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise TokenizerError(
            f"GGUF: tokenizer.ggml.scores has {len(scores)} entries for"
            f" {len(vocabulary.tokens)} tokens"
        )
    if not all(math.isfinite(score) and abs(score) < 1e30 for score in scores):
        raise TokenizerError("GGUF: tokenizer.ggml.scores holds numbers that are not finite")
    return list(zip(vocabulary.tokens, scores, vocabulary.types, strict=False))


def _settings(
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    *,
    add_bos: bool,
    add_eos: bool,
    **options: Any,
) -> TokenizerSettings:
    tokens = vocabulary.tokens
    named = {}
    for name, key in _NAMED.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in metadata:
            index = _value(metadata, key, int)
            if not 0 <= index < len(tokens):
                raise TokenizerError(f"GGUF: {key} is {index}, but there are {len(tokens)} tokens")
            if tokens[index]:
                named[f"{name}_token"] = AddedToken(tokens[index])
    add_bos = _value(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos)
    add_eos = _value(metadata, "tokenizer.ggml.add_eos_token", bool, add_eos)
    options |= {
        "add_bos_token": add_bos and "bos_token" in named,
        "add_eos_token": add_eos and "eos_token" in named,
        # Unlike a missing key, null prevents a default token.
        **{f"{name}_token": None for name in _NAMED if f"{name}_token" not in named},
    }
    templates = {}
    for key in metadata:
        if key == "tokenizer.chat_template":
            templates["default"] = _value(metadata, key, str)
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = _value(metadata, key, str)
    return TokenizerSettings(
        named=named,
        added={i: AddedToken(tokens[i]) for i in vocabulary.ids_of(PieceType.CONTROL) if tokens[i]},
        chat_templates=templates,
        options=options,
    )


def _value(metadata: Mapping[str, Any], key: str, value_type: type, default: object = None) -> Any:
    value = metadata.get(key, default)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None:
        raise TokenizerError(f"GGUF: the key {key} is missing")
    if type(value) is not value_type:
        raise TokenizerError(f"GGUF: {key} is {str(value)[:80]!r}, not {value_type.__name__}")
    if value_type is str:
        _check_unicode(value, key)
    return value


def _array(
    metadata: Mapping[str, Any],
    key: str,
    value_type: type,
    length: int | None = None,
    default: list[Any] | None = None,
) -> list[Any]:
    values = metadata.get(key, default)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise TokenizerError(f"GGUF: {key} is missing or no array")
    if length is not None and len(values) != length:
        raise TokenizerError(f"GGUF: {key} has {len(values)} entries for {length} tokens")
    wrong = next((v for v in values if type(v) is not value_type), None)
    if wrong is not None:
        raise TokenizerError(f"GGUF: {key} holds {str(wrong)[:80]!r}, not {value_type.__name__}")
    if value_type is str:
        _check_unicode("".join(values), key)
    return list(values)


def _check_unicode(text: str, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise TokenizerError(f"GGUF: {key} holds an unpaired surrogate") from failure
