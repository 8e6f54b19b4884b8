"""Reads the files of a tokenizer's folder, and overrides fields of tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxllm.common.errors import (
    MissingFileError,
    TokenizerError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.common.files import check_not_placeholder, is_there
from jaxllm.common.strict_json import parse_json

MAX_FILE_BYTES = 32 * 2**20
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
OPTIONS = (
    *("padding_side", "truncation_side", "model_max_length", "chat_template"),
    *("split_special_tokens", "additional_special_tokens", "extra_special_tokens"),
    *("clean_up_tokenization_spaces", *NAMED_TOKENS),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"),
)
"""Fields of tokenizer_config.json that a call of `load_tokenizer` may override."""
CLASS_OPTIONS = frozenset({"add_bos_token", "add_eos_token", "add_prefix_space", "legacy"})
"""Those of them that act on some classes of tokenizers alone."""
CLASS_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}
"""transformers' classes of byte-level tokenizers by model type, for files that name no class."""
SENTENCEPIECE_MODELS = frozenset(
    {
        *("llama", "mistral", "mixtral", "t5", "mt5", "umt5", "longt5", "switch_transformers"),
        *CLASS_OF_MODEL,
    }
)
"""Model types whose sentencepiece file is Llama's or T5's, or is a choice of the owner's."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""transformers 5's folder of the chat templates beside the default one, NAME.jinja."""


def additional_templates(folder: Path) -> list[Path]:
    """Files of the chat templates beside the default one."""
    return sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))


def drop_template_files(contents: dict[str, bytes]) -> None:
    """Removes the files that take precedence over tokenizer_config.json's chat template."""
    for name in [name for name in contents if name.endswith(".jinja")]:
        del contents[name]


class TokenizerFiles:
    """Tokenizer files of a folder, kept byte for byte for ``save``."""

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        if not folder.is_dir():
            raise MissingFileError(f"{folder}: no such folder")
        self.folder = folder
        self.options = dict(options or {})
        unknown = (options or {}).keys() - OPTIONS
        if unknown:
            raise UnsupportedError(
                f"{', '.join(sorted(unknown))}: a tokenizer's options are {', '.join(OPTIONS)};"
                " change others in tokenizer_config.json"
            )
        self.contents = {
            name: self._read(folder / name)
            for name in FILE_NAMES
            if is_there(folder / name, TokenizerError)
        }
        for path in additional_templates(folder):
            is_there(path, TokenizerError)  # an error for a device or a pipe, which has no end
            self.contents[f"{TEMPLATES_FOLDER}/{path.name}"] = self._read(path)
        if options:
            self._override(options)

    def _override(self, options: Mapping[str, Any]) -> None:
        """Replaces fields of tokenizer_config.json, and of the files that take precedence."""
        named = {name: value for name, value in options.items() if name in NAMED_TOKENS}
        for name, fields in (
            ("tokenizer_config.json", options),
            ("special_tokens_map.json", named),
        ):
            if name in self or name == "tokenizer_config.json":
                content = {**self.json_object(name), **fields}
                text = json.dumps(content, default=asdict, ensure_ascii=False, indent=2)
                self.contents[name] = text.encode()
        if "chat_template" in options:
            drop_template_files(self.contents)

    def add_class(self) -> None:
        """Sets the class that only config.json says, where transformers looks for it too.

        It is saved, because config.json is no file of the tokenizer.
        """
        options = self.json_object("tokenizer_config.json")
        if options.get("tokenizer_class") is not None:
            return
        if not is_there(self.folder / "config.json", TokenizerError):
            return
        config = self._parsed("config.json", self._read(self.folder / "config.json"))
        name = config.get("tokenizer_class")
        model_type = config.get("model_type")
        if name is None and not {"tokenizer.model", "spiece.model"} & self.contents.keys():
            name = CLASS_OF_MODEL.get(str(model_type))
        elif name is None and model_type and str(model_type) not in SENTENCEPIECE_MODELS:
            raise UnsupportedError(
                f"{self.folder / 'config.json'}: the tokenizer of a {quoted(model_type)} model may "
                "have other ids than this sentencepiece file; name its tokenizer_class in "
                "tokenizer_config.json (T5Tokenizer, LlamaTokenizer)"
            )
        if name is not None and not isinstance(name, str):
            raise TokenizerError(
                f"{self.folder / 'config.json'}: tokenizer_class is {quoted(name)}, not a string"
            )
        if name is not None:
            text = json.dumps({**options, "tokenizer_class": name}, ensure_ascii=False, indent=2)
            self.contents["tokenizer_config.json"] = text.encode()

    def refuse_options(self, taken: Collection[str], kind: str) -> None:
        """Raises for options of a call that act on other classes than this one.

        Args:
            taken: those of `CLASS_OPTIONS` that act.
            kind: name of the class, for the message.
        """
        given = {name for name, value in self.options.items() if value is not None}
        if idle := sorted((given & CLASS_OPTIONS) - set(taken)):
            raise UnsupportedError(
                f"{', '.join(idle)}: without effect on {kind} in {self.folder}, whose files decide;"
                " leave it out"
            )

    @staticmethod
    def _read(path: Path) -> bytes:
        with naming_file(path, TokenizerError, "read"):
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise TokenizerError(
                    f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} are read of this file"
                )
            data = path.read_bytes()
        check_not_placeholder(path, data, TokenizerError)
        return data

    def __contains__(self, name: str) -> bool:
        return name in self.contents

    def json_object(self, name: str) -> dict[str, Any]:
        """Reads the file ``name`` as a JSON object; empty if it is missing."""
        return self._parsed(name, self.contents[name]) if name in self.contents else {}

    def _parsed(self, name: str, content: bytes) -> dict[str, Any]:
        source = str(self.folder / name)
        value = parse_json(content, source=source, error=TokenizerError)
        if not isinstance(value, dict):
            raise TokenizerError(f"{source}: holds {type(value).__name__}, not an object")
        return value

    def text(self, name: str) -> str:
        try:
            return self.contents[name].decode("utf-8")
        except UnicodeDecodeError as failure:
            raise TokenizerError(f"{self.folder / name}: not UTF-8") from failure
