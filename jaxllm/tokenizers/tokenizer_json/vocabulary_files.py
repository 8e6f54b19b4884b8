"""Byte-level BPE from vocab.json and merges.txt: GPT-2, RoBERTa (CodeT5) and Qwen2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.files import TokenizerFiles
from jaxllm.tokenizers.settings import (
    GPT2_TOKENS,
    QWEN2_TOKENS,
    ROBERTA_TOKENS,
    TokenizerSettings,
)
from jaxllm.tokenizers.tokenizer_json.check import check_tokenizer_json
from jaxllm.tokenizers.tokenizer_json.tokenizer import (
    BYTE_LEVEL,
    FastTokenizer,
    all_added_tokens,
)


class GPT2Tokenizer(FastTokenizer):
    """Byte-level BPE from vocab.json and merges.txt, with the ids of transformers' class."""

    default_tokens: ClassVar[Mapping[str, str]] = GPT2_TOKENS

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder with vocab.json and merges.txt, with the class's default tokens."""
        files.refuse_options(("add_prefix_space",), f"a {cls.__name__}")
        source = str(files.folder / "vocab.json")
        model = {
            "type": "BPE",
            "vocab": files.json_object("vocab.json"),
            "merges": read_merges(files.text("merges.txt")),
        }
        decoder = {**BYTE_LEVEL, "use_regex": True}
        spec: dict[str, Any] = {"added_tokens": [], "model": model, "decoder": decoder}
        settings = settings.with_defaults(**cls.default_tokens)
        spec |= cls._steps(
            {**BYTE_LEVEL, "add_prefix_space": settings.flag("add_prefix_space", False)}
        )
        added = all_added_tokens(check_tokenizer_json(spec, source), settings, source)
        ids = {entry["content"]: entry["id"] for entry in added}
        post_processor = cls._post_processor(ids, settings, source)
        spec |= {"added_tokens": added, "post_processor": post_processor}
        return cls(spec, settings, files.contents, source=source)

    @staticmethod
    def _steps(byte_level: dict[str, Any]) -> dict[str, Any]:
        """Normalizer and pre-tokenizer, with the settings of the step that makes bytes."""
        return {"pre_tokenizer": {**byte_level, "use_regex": True}}

    @staticmethod
    def _post_processor(
        ids: Mapping[str, int], settings: TokenizerSettings, source: str
    ) -> dict[str, Any] | None:
        """Special tokens around a text: none."""
        return None


class RobertaTokenizer(GPT2Tokenizer):
    """GPT-2's splits, ``<s>`` before and ``</s>`` after a text; that of CodeT5."""

    default_tokens = ROBERTA_TOKENS

    @staticmethod
    def _post_processor(
        ids: Mapping[str, int], settings: TokenizerSettings, source: str
    ) -> dict[str, Any] | None:
        around: dict[str, Any] = {"trim_offsets": True, "add_prefix_space": False}
        for name in ("cls", "sep"):
            token = settings.named.get(f"{name}_token")
            if token is None:
                raise TokenizerError(
                    f"{source}: a RobertaTokenizer puts {name}_token around texts, and"
                    " tokenizer_config.json has null for it; name a token"
                )
            around[name] = [token.content, ids[token.content]]
        return {"type": "RobertaProcessing", **around}


class Qwen2Tokenizer(GPT2Tokenizer):
    """Composed characters (NFC), Qwen2's splits, no BOS."""

    default_tokens = QWEN2_TOKENS

    @staticmethod
    def _steps(byte_level: dict[str, Any]) -> dict[str, Any]:
        steps = split_before_bytes(QWEN2_PATTERN, byte_level)
        return {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        }


CLASSES = {each.__name__: each for each in (GPT2Tokenizer, RobertaTokenizer, Qwen2Tokenizer)}
"""Classes that are read from vocab.json and merges.txt, by their names in transformers."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_TAIL
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_TAIL


def split_before_bytes(
    pattern: str, byte_level: Mapping[str, Any] = BYTE_LEVEL
) -> list[dict[str, Any]]:
    """Steps of a pre-tokenizer that splits by a regular expression, then makes bytes."""
    split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [{"type": "Split", **split}, {**byte_level, "use_regex": False}]


def read_merges(text: str) -> list[str]:
    """Reads the merges of a merges.txt, without its version line and empty lines."""
    lines = re.split(r"\r?\n", text)
    if lines[0].startswith("#version"):
        lines = lines[1:]
    return [line for line in lines if line]
