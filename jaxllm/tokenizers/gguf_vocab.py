"""Builds tokenizers from the untrusted metadata of a GGUF file.

The keys are llama.cpp's (gguf-py's ``constants.py``). Three types of vocabulary are supported:
"gpt2" (byte-level BPE with merges), "llama" (sentencepiece BPE with scores) and "t5" (Unigram). The
latter two are converted back to sentencepiece models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxllm.common.errors import TokenizerError, UnsupportedError, warn
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
    CONTRACTIONS,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    SPACES,
    FastTokenizer,
    split_before_bytes,
)

MAX_TOKENS = 2**20
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NO_TOKEN = 2**32 - 1  # -1, written without a sign
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
"""llama.cpp's ids of named tokens, by `tokenizer.ggml.model`, for files without the keys."""
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")
_BUILT_IN = re.compile(r"mistral-v\d+(-tekken)?")
"""Names that the converter writes in place of a chat template."""
_PLACEHOLDER = re.compile(r"\[PAD\d+\]")
_LOST_SCORE = -1000.0
"""The score that the gguf package gives each token of a folder without a sentencepiece model."""

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED = f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+%s|{_BEFORE}[{_UPPER}]+[{_LOWER}]*%s"
"""Words that begin with capital letters, each with what may follow."""
TEKKEN_PATTERN = _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
_GPT4O_PATTERN = (
    _CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + SPACES
)
_SEED_CODER_PATTERN = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES
)
_QWEN35_PATTERN = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES
)
_DEEPSEEK3_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + SPACES
)
_CASED_LETTERS = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7fa"
    "\uab30-\uab68\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001dfff]]+"
)
"""DeepSeek's list of letters with case, which lacks the later ones of Unicode."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WIDE_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM_PATTERN = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_GPT2 = [{**BYTE_LEVEL, "use_regex": True}]
# Split digits one by one before splitting words.
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_LLAMA3 = split_before_bytes(LLAMA3_PATTERN)
_QWEN2 = split_before_bytes(QWEN2_PATTERN)
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?{_CASED_LETTERS}", rf"\s?{_WIDE_PUNCTUATION}", r"\s+$", _CJK)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_PATTERN)
_PRE_TOKENIZERS = {
    # Files without a name, about which llama.cpp warns, are read as GPT-2's, as in transformers.
    **dict.fromkeys(
        ("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2
    ),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("command-r", "smollm", "starcoder", "refact", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("jina-v5-nano", "chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    "minicpm5": split_before_bytes(r"\p{N}{1,3}", LLAMA3_PATTERN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "ufakzeka": split_before_bytes(QWEN2_PATTERN.removeprefix(f"{CONTRACTIONS}|")),
    "laguna": split_before_bytes("[^\n]+|\n+", QWEN2_PATTERN),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2),
    "tekken": split_before_bytes(TEKKEN_PATTERN),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), split_before_bytes(_GPT4O_PATTERN)
    ),
    "seed-coder": split_before_bytes(_SEED_CODER_PATTERN),
    "qwen35": split_before_bytes(_QWEN35_PATTERN),
    "deepseek-llm": split_before_bytes(*_DEEPSEEK_LLM, r"\p{N}+"),
    "deepseek-coder": split_before_bytes(*_DEEPSEEK_CODER),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), split_before_bytes(*_DEEPSEEK3)
    ),
    "falcon": split_before_bytes(r"[\p{P}$+<=>^~|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), split_before_bytes(_BLOOM_PATTERN)),
    "viking": split_before_bytes(_BLOOM_PATTERN, r"\p{N}"),
}
"""Pre-tokenizers of a byte-level vocabulary by `tokenizer.ggml.pre`, as in llama.cpp's
llama-vocab.cpp. Where it approximates a published tokenizer.json, they are the published ones."""
_LLAMA3_NAMES = {
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}
"""Pre-tokenizers with BOS before a text by default, where a word that is a token stays whole."""
_WHOLE_WORDS = _LLAMA3_NAMES | {"minicpm5", "glm4", "glm5"}
"""Pre-tokenizers where a word that is a token stays whole, whatever the merges are."""
# fmt: off
END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})
FILL_END_TEXTS = frozenset({
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})
"""Texts of the tokens at which llama.cpp ends a text; these are of fill-in-the-middle."""
_CONTROL_TEXTS = END_TEXTS | FILL_END_TEXTS | {
    *(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end")),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
    *(f"{mark}<{name}>" for mark in ("", "\u2581") for name in ("PRE", "SUF", "MID")),
    *(f"<|code_{name}|>" for name in ("prefix", "suffix", "middle")),
    *(f"<fim{mark}{name}>" for mark in "-_" for name in ("prefix", "suffix", "middle")),
    *(f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")),
}
# fmt: on
"""Texts of the tokens that llama.cpp takes as control tokens, whatever type a file gives them."""


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: Sequence[int]  # PieceType of each token

    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens at which texts are split, by id: user-defined tokens, and the special tokens."""
        kinds = (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.UNKNOWN)
        return {
            index: AddedToken(token, special=kind != PieceType.USER_DEFINED)
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds
        }


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
    # llama.cpp's names of empty tokens.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    types = [
        _known_type(token, kind) if token in _CONTROL_TEXTS else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    return builders[model](metadata, _Vocabulary(tokens, types))


def _known_type(token: str, kind: int) -> int:
    """The type of a token of `_CONTROL_TEXTS`, which is llama.cpp's where the file's is ordinary.

    An ordinary token ``</s>`` stays one: Qwen2 has learned such a token, from the texts of others.
    """
    is_ordinary = kind == PieceType.USER_DEFINED or (kind == PieceType.NORMAL and token != "</s>")
    return PieceType.CONTROL if is_ordinary else kind


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    pre = _value(metadata, "tokenizer.ggml.pre", str, "default")
    if pre == "default":
        warn(
            "GGUF: tokenizer.ggml.pre does not say how texts are split into words; GPT-2's rules "
            "are taken, and ids may differ from the model's own: convert the model again"
        )
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF: tokenizer.ggml.pre is {pre!r}; supported are {sorted(_PRE_TOKENIZERS)}"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise TokenizerError("GGUF: tokenizer.ggml.tokens holds a token twice")
    added = vocabulary.added_tokens()
    spec = {
        "added_tokens": [{"id": index, **asdict(token)} for index, token in added.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": _array(metadata, "tokenizer.ggml.merges", str),
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }
    settings = _settings(metadata, vocabulary, add_bos=pre in _LLAMA3_NAMES, add_eos=False)
    return FastTokenizer(spec, settings, source="GGUF: tokenizer.ggml")


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    add_space = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    # As in llama.cpp, text after an added token gets a prefix space, which decoding keeps.
    options = {"legacy": True, "add_prefix_space": add_space, "keep_inner_spaces": True}
    settings = _settings(metadata, vocabulary, add_bos=True, add_eos=False, **options)
    scores = _array(metadata, "tokenizer.ggml.scores", float)
    normal = {s for s, kind in zip(scores, vocabulary.types, strict=False) if kind == 1}
    if normal == {_LOST_SCORE} and len(vocabulary.tokens) > 1:
        warn(
            "GGUF: tokenizer.ggml.scores: all tokens have the score -1000, since the file was made "
            "from a folder without tokenizer.model; the order of merges is lost, and texts get "
            "other ids than in training: load the Hugging Face folder, or convert it again with "
            "its tokenizer.model"
        )
    spaces = {"add_dummy_prefix": add_space, "remove_extra_whitespaces": False}
    return _with_model(LlamaTokenizer, metadata, vocabulary, settings, model_type=BPE, **spaces)


def _unigram(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    tokens, types = vocabulary.tokens, vocabulary.types
    # The converter pads the vocabulary to the size of the embedding. T5's first hundred padding
    # tokens are its sentinels, which the sentencepiece model does not have; mT5's has them.
    size = len(tokens)
    while size and _PLACEHOLDER.fullmatch(tokens[size - 1]):
        size -= 1
    has_sentinels = not {"<extra_id_0>", "▁<extra_id_0>"}.isdisjoint(tokens)
    sentinels = 0 if has_sentinels else min(100, len(tokens) - size)
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
    unknown = _named_ids(metadata, vocabulary).get("unk")
    if unknown is None:
        raise TokenizerError("GGUF: no tokenizer.ggml.unknown_token_id, and no token has its place")
    byte_fallback = PieceType.BYTE in vocabulary.types
    pieces = _pieces(metadata, vocabulary, unknown)
    model = write_model(pieces, unk_id=unknown, byte_fallback=byte_fallback, **fields)
    files = {kind.model_file: model, **new_config(kind.__name__, settings)}
    files = with_added_tokens(files, settings)
    return kind(model, settings, files, source="GGUF: tokenizer.ggml")


def _pieces(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, unknown: int
) -> list[tuple[str, float, int]]:
    scores = _array(metadata, "tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise TokenizerError(
            f"GGUF: tokenizer.ggml.scores has {len(scores)} entries for"
            f" {len(vocabulary.tokens)} tokens"
        )
    if not all(math.isfinite(score) and abs(score) < 1e30 for score in scores):
        raise TokenizerError("GGUF: tokenizer.ggml.scores holds numbers that are not finite")
    # Texts are split at added tokens first, and old files call padding "unknown".
    unused = (PieceType.USER_DEFINED, PieceType.UNKNOWN)
    types = [PieceType.UNUSED if kind in unused else kind for kind in vocabulary.types]
    types[unknown] = PieceType.UNKNOWN
    return list(zip(vocabulary.tokens, scores, types, strict=False))


def _named_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, int]:
    """Ids of the named tokens that a file has, by their short names."""
    ids: dict[str, int] = {}
    tokens = vocabulary.tokens
    defaults = dict(_DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model", ""), {}))
    # The converter calls an unknown token that is special "control".
    unknown = [i for i, kind in enumerate(vocabulary.types) if kind == PieceType.UNKNOWN]
    if "unk" in defaults and (len(unknown) == 1 or "<unk>" in tokens):
        defaults["unk"] = unknown[0] if len(unknown) == 1 else tokens.index("<unk>")
    for name, key in _NAMED.items():
        key = f"tokenizer.ggml.{key}_token_id"
        index = _value(metadata, key, int, defaults.get(name, _NO_TOKEN))
        if index == _NO_TOKEN or (key not in metadata and index >= len(tokens)):
            continue
        if not 0 <= index < len(tokens):
            raise TokenizerError(f"GGUF: {key} is {index}, but there are {len(tokens)} tokens")
        ids[name] = index
    return ids


def _settings(
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    *,
    add_bos: bool,
    add_eos: bool,
    **options: Any,
) -> TokenizerSettings:
    tokens = vocabulary.tokens
    added = vocabulary.added_tokens()
    model_name = str(metadata.get("general.name", "")).lower()
    if "phi-3" in model_name or "phi3" in model_name:
        # llama.cpp knows by this name alone that tokens take the white space after them.
        added = {
            index: replace(token, rstrip=token.content not in _WITHOUT_RSTRIP)
            for index, token in added.items()
        }
    named = {
        f"{name}_token": added.get(index, AddedToken(tokens[index]))
        for name, index in _named_ids(metadata, vocabulary).items()
    }
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
        if key != "tokenizer.chat_template" and not key.startswith("tokenizer.chat_template."):
            continue
        name = key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"
        template = _value(metadata, key, str)
        if _BUILT_IN.fullmatch(template):
            warn(
                f"GGUF: {key} is {template!r}, the name of a template inside llama.cpp that jaxllm "
                "does not have; set tokenizer.chat_template to the model's own template"
            )
        else:
            templates[name] = template
    return TokenizerSettings(
        named=named,
        added=added,
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
