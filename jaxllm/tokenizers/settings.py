"""Reads the files of a tokenizer's folder, and the settings in them.

Settings are special tokens, flags and chat templates. Their files are ``tokenizer_config.json``,
``special_tokens_map.json``, ``added_tokens.json`` and ``chat_template.jinja`` with
``additional_chat_templates``; precedence is as in transformers 4.57's
``PreTrainedTokenizerBase._from_pretrained``. The options of a call override them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.common.errors import (
    MissingFileError,
    TokenizerError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.common.files import check_not_placeholder, is_there, parse_json
from jaxllm.tokenizers.added_tokens import (
    AddedToken,
    parse_added_token,
    tokens_by_id,
    tokens_of_list,
)

MAX_FILE_BYTES = 32 * 2**20
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FILE_NAMES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt"),
    *("sentencepiece.bpe.model", "source.spm", "target.spm", "tekken.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)
OPTIONS = (
    *("padding_side", "truncation_side", "model_max_length", "chat_template"),
    *("split_special_tokens", "additional_special_tokens", "extra_special_tokens"),
    *("clean_up_tokenization_spaces", *NAMED_TOKENS),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "src_lang", "tgt_lang"),
)
"""Fields of tokenizer_config.json that a call of `load_tokenizer` may override."""
DECIDING_OPTIONS = frozenset({"add_prefix_space", "legacy"})
"""Options that make Llama's tokenizer.model decide although the folder has a tokenizer.json."""
SENTENCEPIECE_OPTIONS = DECIDING_OPTIONS | {"add_bos_token", "add_eos_token"}
LANGUAGES = ("src_lang", "tgt_lang")
CLASS_OPTIONS = SENTENCEPIECE_OPTIONS | {*LANGUAGES}
"""Options that act on some classes of tokenizers alone."""
CLASS_OF_MODEL = {
    "bart": "BartTokenizer",
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt"), "GPT2Tokenizer"),
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
"""transformers' classes of byte-level tokenizers by model type, for files that name no class."""
_END_OF_SENTENCE = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
DEFAULTS_OF_MODEL: Mapping[str, Mapping[str, Any]] = {
    "opt": {**_END_OF_SENTENCE, "pad_token": "<pad>", "add_bos_token": True},
}
"""Settings of a model's own tokenizer that differ from those of its class, for folders that have
vocab.json and merges.txt alone. transformers has the class's, with a token that OPT has not."""
OWN_CLASS_OF_MODEL = {
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "pegasus": "PegasusTokenizer",
    "xglm": "XGLMTokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "t5gemma"), "GemmaTokenizer"),
}
"""The same of model types whose sentencepiece files no other class reads."""
SENTENCEPIECE_MODELS = {
    *("llama", "mistral", "mixtral", "t5", "mt5", "umt5", "longt5", "switch_transformers"),
    *CLASS_OF_MODEL,
}
"""Model types whose sentencepiece file is Llama's or T5's, or is a choice of the owner's."""
TOKEN_IDS = "token ids"
"""The part of a job's or run's settings that has `Tokenizer.ids_version`, if it is not 1."""
OTHER_IDS = (
    "an earlier version of jaxllm began it, which gave this tokenizer's texts other ids (see "
    "CHANGELOG.md); finish it with that version, or begin another one"
)
# Of limited length, since a long line would take long to fail.
RANK_LINE = re.compile(rb"([A-Za-z0-9+/]{1,2000}={0,2}) ([0-9]{1,9})\r?")
"""A line of tiktoken's format: a token in base64 and its rank. A sentencepiece model has none."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""transformers 5's folder of the chat templates beside the default one, NAME.jinja."""


NamedTokens = Mapping[str, str | AddedToken]
"""Named tokens of a class by name, such as ``bos_token``; a text alone has no flags."""


def named_tokens(**texts: str) -> dict[str, str]:
    """Texts of named tokens.

    >>> named_tokens(eos="</s>", pad="<pad>")
    {'eos_token': '</s>', 'pad_token': '<pad>'}
    """
    return {f"{name}_token": text for name, text in texts.items()}


# Default tokens of transformers' classes.
LLAMA_TOKENS = named_tokens(bos="<s>", eos="</s>", unk="<unk>")
_END = "<|endoftext|>"
GPT2_TOKENS = named_tokens(bos=_END, eos=_END, unk=_END)
QWEN2_TOKENS = named_tokens(eos=_END, unk=_END, pad=_END)
M2M100_TOKENS = LLAMA_TOKENS | named_tokens(sep="</s>", pad="<pad>")
FAIRSEQ_TOKENS = M2M100_TOKENS | named_tokens(cls="<s>")
ROBERTA_TOKENS: NamedTokens = {
    **FAIRSEQ_TOKENS,
    "mask_token": AddedToken("<mask>", lstrip=True),
}
GEMMA_TOKENS = named_tokens(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>")
COHERE_TOKENS = {
    **named_tokens(bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", unk="<UNK>"),
    **named_tokens(pad="<PAD>", cls="<CLS>", sep="<SEP>", mask="<MASK_TOKEN>"),
}
T5_TOKENS = named_tokens(eos="</s>", unk="<unk>", pad="<pad>")
PEGASUS_TOKENS = T5_TOKENS | named_tokens(mask="<mask_2>")


@dataclass(frozen=True)
class TokenizerSettings:
    """Special tokens, flags and chat templates of a tokenizer.

    ``named`` maps ``bos_token``, ``eos_token``, ... to tokens; ``unflagged`` has the names of
    tokens that the files give as texts without flags; ``extra`` lists further special tokens;
    ``added`` maps ids to tokens; ``options`` is the content of tokenizer_config.json.
    """

    tokenizer_class: str | None = None
    named: Mapping[str, AddedToken] = field(default_factory=dict)
    extra: tuple[AddedToken, ...] = ()
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unflagged: frozenset[str] = frozenset()

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean option; ``default`` if it is missing or null."""
        value = self.options.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(
                f"tokenizer_config.json: {name} is {quoted(value)}, not true or false"
            )
        return value

    def with_defaults(self, **named: str | AddedToken) -> TokenizerSettings:
        """Sets the named tokens that no file mentions; a token that is null in a file stays unset.

        A token that the files give as a text without flags gets the flags of the default token.
        """
        defaults = {
            name: AddedToken(token) if isinstance(token, str) else token
            for name, token in named.items()
        }
        tokens = {name: token for name, token in defaults.items() if name not in self.options}
        tokens |= self.named
        for name in self.unflagged & defaults.keys() & tokens.keys():
            tokens[name] = replace(defaults[name], content=tokens[name].content)
        return replace(self, named={name: tokens[name] for name in NAMED_TOKENS if name in tokens})

    def with_extra(self, tokens: Sequence[str], *, first: bool = False) -> TokenizerSettings:
        """Adds special tokens to those of `extra`, after them or before them, each once."""
        if first:
            own, others = tuple(map(AddedToken, tokens)), self.extra
        else:
            own, others = self.extra, tuple(map(AddedToken, tokens))
        present = {token.content for token in own}
        return replace(self, extra=(*own, *(t for t in others if t.content not in present)))


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
        changes = {"tokenizer_config.json": options}
        if "special_tokens_map.json" in self:
            changes["special_tokens_map.json"] = named
        for name, fields in changes.items():
            self.contents[name] = config_json({**self.json_object(name), **fields})
        if "chat_template" in options:
            drop_template_files(self.contents)

    def add_class(self) -> None:
        """Sets the class that only config.json says, where transformers looks for it too.

        It is saved, because config.json is no file of the tokenizer.
        """
        options = self.json_object("tokenizer_config.json")
        if options.get("tokenizer_class") is not None:
            return
        config = self.model_config()
        name = config.get("tokenizer_class")
        model_type = config.get("model_type")
        if name is None:
            name = OWN_CLASS_OF_MODEL.get(str(model_type))
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
            own = {} if "tokenizer.json" in self else DEFAULTS_OF_MODEL.get(str(model_type), {})
            config = {**own, **options, "tokenizer_class": name}
            self.contents["tokenizer_config.json"] = config_json(config)

    def model_config(self) -> dict[str, Any]:
        """The content of config.json, which is no file of the tokenizer; empty without one."""
        if not is_there(self.folder / "config.json", TokenizerError):
            return {}
        return self._parsed("config.json", self._read(self.folder / "config.json"))

    @property
    def rank_file(self) -> str | None:
        """Name of the tokenizer.model if it is in tiktoken's format, as Llama 3's is."""
        line = self.contents.get("tokenizer.model", b"")[:4096].partition(b"\n")[0]
        return "tokenizer.model" if RANK_LINE.fullmatch(line) else None

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


def read_settings(files: TokenizerFiles) -> TokenizerSettings:
    """Reads all tokenizer files except the vocabulary."""
    options = files.json_object("tokenizer_config.json")
    source = str(files.folder / "tokenizer_config.json")
    named_values = {name: options.get(name) for name in NAMED_TOKENS}
    extra_values = [
        *_tokens_of(options, "additional_special_tokens", source),
        *_tokens_of(options, "extra_special_tokens", source),
    ]
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in options:
        added = _read_added_tokens_decoder(options["added_tokens_decoder"], source)
    else:
        map_source = str(files.folder / "special_tokens_map.json")
        special_map = files.json_object("special_tokens_map.json")
        named_values |= {name: special_map[name] for name in NAMED_TOKENS if name in special_map}
        extra_values += _tokens_of(special_map, "additional_special_tokens", map_source)

    named = {
        name: parse_added_token(value, f"{source}: {name}")
        for name, value in named_values.items()
        if value is not None and value != ""
    }
    extra = tuple(
        dict.fromkeys(parse_added_token(v, f"{source}: extra_special_tokens") for v in extra_values)
    )
    if "added_tokens_decoder" not in options:
        specials = {token.content for token in (*named.values(), *extra)}
        added = _read_added_tokens_file(files, specials)

    by_content = {token.content: token for token in added.values()}
    unflagged = {
        name
        for name, token in named.items()
        if isinstance(named_values[name], str) and token.content not in by_content
    }
    named = {name: by_content.get(token.content, token) for name, token in named.items()}
    tokenizer_class = options.get("tokenizer_class")
    if tokenizer_class is not None and not isinstance(tokenizer_class, str):
        raise TokenizerError(
            f"{source}: tokenizer_class is {quoted(tokenizer_class)}, not a string"
        )
    return TokenizerSettings(
        tokenizer_class=tokenizer_class,
        named=named,
        extra=extra,
        added=added,
        chat_templates=_read_chat_templates(files, options, source),
        options=options,
        unflagged=frozenset(unflagged),
    )


def added_tokens_of_json(files: TokenizerFiles) -> dict[int, AddedToken]:
    """Reads the ``added_tokens`` of tokenizer.json, by id."""
    entries = files.json_object("tokenizer.json").get("added_tokens") or []
    return tokens_of_list(entries, f"{files.folder / 'tokenizer.json'}: added_tokens")


def _tokens_of(options: dict[str, Any], name: str, source: str) -> list[Any]:
    """Reads the tokens of a list, or of an object (some ``extra_special_tokens`` are one)."""
    value = options.get(name)
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    if not isinstance(value, list):
        raise TokenizerError(f"{source}: {name} is {quoted(value)}, not a list of tokens")
    return value


def _read_added_tokens_decoder(table: object, source: str) -> dict[int, AddedToken]:
    source = f"{source}: added_tokens_decoder"
    if not isinstance(table, dict):
        raise TokenizerError(f"{source} is not an object")
    wrong = [key for key in table if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise TokenizerError(f"{source} has the key {quoted(wrong[0])}, not an id")
    return tokens_by_id(((int(k), value, f"{source}[{k}]") for k, value in table.items()), source)


def _read_added_tokens_file(files: TokenizerFiles, specials: set[str]) -> dict[int, AddedToken]:
    source = str(files.folder / "added_tokens.json")

    def entry(text: str) -> dict[str, Any]:
        return {"content": text, "special": text in specials, "normalized": text not in specials}

    table = files.json_object("added_tokens.json")
    if "" in table:
        raise TokenizerError(f"{source}: an empty token has the id {quoted(table[''])}")
    return tokens_by_id(((index, entry(text), source) for text, index in table.items()), source)


def _read_chat_templates(
    files: TokenizerFiles, options: dict[str, Any], source: str
) -> dict[str, str]:
    named = [name for name in files.contents if name.startswith(f"{TEMPLATES_FOLDER}/")]
    templates = {Path(name).stem: files.text(name) for name in named}
    if "chat_template.jinja" in files:
        templates["default"] = files.text("chat_template.jinja")
    if templates:
        return templates
    value = options.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        template = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(
                f"{source}: chat_template is neither a string nor a list of"
                ' {"name": ..., "template": ...}'
            )
        templates[name] = template
    return templates


def template_option(templates: Mapping[str, str]) -> object:
    """Chat templates as in tokenizer_config.json: one as a string, several as a list.

    >>> template_option({"default": "a"}), template_option({"rag": "b"}), template_option({})
    ('a', [{'name': 'rag', 'template': 'b'}], None)
    """
    if templates.keys() <= {"default"}:
        return templates.get("default")
    return [{"name": name, "template": text} for name, text in templates.items()]


def config_json(config: Mapping[str, Any]) -> bytes:
    """The content of a JSON file with settings."""
    return json.dumps(config, default=asdict, ensure_ascii=False, indent=2).encode()


def new_config(tokenizer_class: str, settings: TokenizerSettings) -> dict[str, bytes]:
    """A tokenizer_config.json with the settings, for transformers 4.57 and 5."""
    config: dict[str, Any] = {
        "tokenizer_class": tokenizer_class,
        "clean_up_tokenization_spaces": False,
        # Without this field transformers 4 passes token types, which these models reject.
        "model_input_names": ["input_ids", "attention_mask"],
        **settings.options,
        **{name: token.content for name, token in settings.named.items()},
    }
    if settings.chat_templates:
        config["chat_template"] = template_option(settings.chat_templates)
    return {"tokenizer_config.json": config_json(config)}
