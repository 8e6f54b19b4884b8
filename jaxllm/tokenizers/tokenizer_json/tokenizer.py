"""Tokenizers from a tokenizer.json: byte-level BPE (GPT-2, Llama 3, SmolLM2) and Unigram.

The tokenizers library splits text into tokens, after the file has been checked. The file's
``post_processor``, which adds special tokens, and its ``decoder`` are implemented in jaxllm.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeVar

import tokenizers

from jaxllm.common.errors import JaxLLMError, TokenizerError
from jaxllm.common.strict_json import parse_json
from jaxllm.tokenizers.batch import PaddingSide, Span
from jaxllm.tokenizers.files import NAMED_TOKENS, TokenizerFiles
from jaxllm.tokenizers.limits import (
    check_growth,
    check_normalized_size,
)
from jaxllm.tokenizers.settings import (
    GPT2_TOKENS,
    LLAMA_TOKENS,
    MAX_ADDED_TOKENS,
    QWEN2_TOKENS,
    T5_TOKENS,
    AddedToken,
    TokenizerSettings,
    parse_added_token,
    template_option,
)
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json.check import check_tokenizer_json
from jaxllm.tokenizers.tokenizer_json.decoder import decoder_stages
from jaxllm.tokenizers.tokenizer_json.post_processor import choose_post_processor, read_template

T = TypeVar("T")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


TEXTS_AT_ONCE = 1024
"""Texts of one call of the library, which holds details of all of them at once."""


class FastTokenizer(Tokenizer):
    """A tokenizer from a tokenizer.json, with the ids of transformers 5.23's ``TokenizersBackend``.

    Args:
        spec: the object in tokenizer.json.
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes. None: from ``spec`` and ``settings``.
        source: name of the file, for messages.
        padding_side: default if the settings have none.

    Raises:
        TokenizerError: ``spec`` or the settings are malformed.
        UnsupportedError: ``spec`` has a component that no supported model has.
    """

    def __init__(
        self,
        spec: object,
        settings: TokenizerSettings,
        files: Mapping[str, bytes] | None = None,
        *,
        source: str = "tokenizer.json",
        padding_side: PaddingSide = "right",
    ) -> None:
        super().__init__(settings, files or {}, padding_side)
        spec = check_tokenizer_json(spec, source)
        spec["added_tokens"] = all_added_tokens(spec, settings, source)
        spec["post_processor"] = choose_post_processor(spec, settings)
        decoder_stages(spec["decoder"])  # raises for unsupported decoders
        self._growth = check_growth(spec, source)
        self._source = source
        self._backend = _build(spec, source)
        self._normalizer = self._backend.normalizer
        self._decoder = spec["decoder"]
        self._template = read_template(spec["post_processor"])
        self._is_bpe = spec["model"]["type"] == "BPE"
        self._added = {
            entry["id"]: parse_added_token(entry, source) for entry in spec["added_tokens"]
        }
        self._special = {token.content: token for token in self._added.values() if token.special}
        self.vocab_size = len(spec["model"]["vocab"])
        vocabulary = self.get_vocab()
        self._tokens = list(vocabulary)
        for entry in spec["added_tokens"]:
            if entry["normalized"]:  # decoded as the normalizer made it: "▁Hello"
                self._tokens[entry["id"]] = str(self._backend.id_to_token(entry["id"]))
        self.special_ids = frozenset(vocabulary[content] for content in self._special)
        if files is None:
            self._files = _written_files(self._backend, settings)

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> FastTokenizer:
        """Loads a folder with tokenizer.json, with the defaults of its ``tokenizer_class``.

        As in transformers 4.57, ``add_bos_token`` and ``add_eos_token`` apply to Llama's class,
        which has BOS by default, and ``add_prefix_space`` to GPT-2's. For other classes, and for a
        Llama's file without either, as transformers 5 writes it, tokenizer.json decides.
        """
        source = str(files.folder / "tokenizer.json")
        spec = parse_json(files.contents["tokenizer.json"], source=source, error=TokenizerError)
        side: PaddingSide = "right"
        options = dict(settings.options)
        flags = {name: options.pop(name, None) for name in ("add_bos_token", "add_eos_token")}
        class_name = (settings.tokenizer_class or "").removesuffix("Fast")
        acting = {
            "LlamaTokenizer": ("add_bos_token", "add_eos_token"),
            "GPT2Tokenizer": ("add_prefix_space",),
        }
        files.refuse_options(acting.get(class_name, ()), "a tokenizer.json of this class")
        match class_name:
            case "LlamaTokenizer":
                settings = settings.with_defaults(**LLAMA_TOKENS)
                if any(flag is not None for flag in flags.values()):
                    options |= flags
                    if options["add_bos_token"] is None:
                        options["add_bos_token"] = True
                side = "left"
            case "GPT2Tokenizer":
                settings = settings.with_defaults(**GPT2_TOKENS)
                _set_prefix_space(spec, settings.flag("add_prefix_space", False))
            case "T5Tokenizer":
                settings = settings.with_defaults(**T5_TOKENS)
            case "Qwen2Tokenizer":
                settings = settings.with_defaults(**QWEN2_TOKENS)
            case _:
                pass
        settings = replace(settings, options=options)
        return cls(spec, settings, files.contents, source=source, padding_side=side)

    def __len__(self) -> int:
        return len(self._tokens)

    def _token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _id_to_token(self, index: int) -> str | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(self._backend.get_vocab(True).items(), key=itemgetter(1)))

    @property
    def special_tokens(self) -> Mapping[str, AddedToken]:
        return self._special

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:
            return [self._run(self._backend, texts[0]).ids]

        def check_and_encode() -> list[list[int]]:
            for text in texts:
                self._check_size(text)
            encode = self._backend.encode_batch_fast  # without offsets, in the library's threads
            rows = []
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                some = list(texts[start : start + TEXTS_AT_ONCE])
                rows += [each.ids for each in encode(some, add_special_tokens=False)]
            return rows

        return _convert_errors(check_and_encode, self._source)

    def _text_tokens(self, text: str) -> list[str]:
        return self._run(self._backend, text).tokens

    def _encode_spans(self, text: str, split_special_tokens: bool) -> tuple[list[int], list[Span]]:
        backend = self._backend_for_parts[0] if split_special_tokens else self._backend
        encoding = self._run(backend, text)
        return encoding.ids, encoding.offsets

    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        backend, names = self._backend_for_parts
        text = "".join(p if isinstance(p, str) else names[p.content] for p in parts)
        return self._run(backend, text).ids

    def _run(self, backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        def check_and_encode() -> tokenizers.Encoding:
            self._check_size(text)
            return backend.encode(text, add_special_tokens=False)

        return _convert_errors(check_and_encode, self._source)

    def _check_size(self, text: str) -> None:
        if self._normalizer is not None:
            normalize = self._normalizer.normalize_str
            check_normalized_size(normalize, text, self._growth, self._source)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        def decode() -> str:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

        return _convert_errors(decode, self._source)

    @cached_property
    def _backend_for_parts(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """Copy with the same ids, whose special tokens have names that cannot occur in text.

        The model's vocabulary is renamed as well: otherwise Unigram would find ``</s>`` in it.
        """
        spec = json.loads(self._backend.to_str())
        nonce = secrets.token_hex(16)
        names = {
            content: f"\ufdd0{nonce}:{number}\ufdd1" for number, content in enumerate(self._special)
        }
        for entry in spec["added_tokens"]:
            if entry["content"] in names:
                entry |= {"content": names[entry["content"]], "normalized": False}
        spec["post_processor"] = None
        model = spec["model"]
        if model["type"] == "BPE":
            model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
            model["merges"] = [
                pair
                for pair in model["merges"]
                if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}
            ]
            if model["unk_token"] in names:
                model["unk_token"] = names[model["unk_token"]]
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return _build(spec, self._source), names

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        single, double = self._template
        parts = {"A": ids, "B": pair or []}
        result = []
        for item in single if pair is None else double:
            result += parts[item] if isinstance(item, str) else item
        return result

    def _rebuild(self, settings: TokenizerSettings) -> None:
        spec = json.loads(self._backend.to_str())
        self._become(FastTokenizer(spec, settings, source=self._source))

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return decoder_stages(self._decoder)

    @property
    def _cleans_up(self) -> bool:
        """As in transformers 5: not for BPE, where the clean-up would remove real spaces."""
        return not self._is_bpe


def _set_prefix_space(spec: object, value: bool) -> None:
    """Sets ``add_prefix_space`` of a byte-level pre-tokenizer that stands alone."""
    splitter = spec.get("pre_tokenizer") if isinstance(spec, dict) else None
    if isinstance(splitter, dict) and splitter.get("type") == "ByteLevel":
        splitter["add_prefix_space"] = value


def _convert_errors(action: Callable[[], T], source: str) -> T:
    """Calls the Rust library and converts its errors; its panics are not ``Exception``s."""
    try:
        return action()
    except JaxLLMError:
        raise
    except Exception as failure:
        raise TokenizerError(f"{source}: {failure}") from failure
    except BaseException as failure:
        if type(failure).__name__ == "PanicException":
            raise TokenizerError(f"{source}: the tokenizers library failed: {failure}") from failure
        raise


def _build(spec: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    text = json.dumps(spec, ensure_ascii=False)
    backend = _convert_errors(lambda: tokenizers.Tokenizer.from_str(text), source)
    for entry in spec["added_tokens"]:
        index = backend.token_to_id(entry["content"])
        if index != entry["id"]:
            raise TokenizerError(
                f"{source}: the added token {entry['content']!r} has the id {entry['id']}, but it"
                f" follows from its place in the file that it is {index}"
            )
    return backend


def all_added_tokens(
    spec: Mapping[str, Any], settings: TokenizerSettings, source: str
) -> list[dict[str, Any]]:
    """Merges the added tokens of tokenizer.json and of the settings as in transformers."""
    vocab = spec["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {p: i for i, (p, _) in enumerate(vocab)}
    entries: dict[str, dict[str, Any]] = {}

    def add(token: AddedToken, index: int | None = None) -> None:
        known = ids.setdefault(token.content, len(ids))
        if index not in (None, known):
            raise TokenizerError(
                f"tokenizer_config.json: the added token {token.content!r} has the id {index},"
                f" but in {source} it has the id {known}"
            )
        entries[token.content] = {"id": known, **asdict(token)}

    for entry in sorted(spec["added_tokens"], key=lambda entry: entry["id"]):
        ids[entry["content"]] = entry["id"]
        add(parse_added_token(entry, source, special=False))
    for index, token in settings.added.items():
        add(token, index)
    for token in (*settings.named.values(), *settings.extra):
        present = entries.get(token.content)
        if present is None:
            add(replace(token, special=True))
        else:
            present["special"] = True
    if len(entries) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"{source}: {len(entries)} added tokens, at most {MAX_ADDED_TOKENS}")
    return sorted(entries.values(), key=lambda entry: entry["id"])


def _written_files(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> dict[str, bytes]:
    """Contents of tokenizer.json and tokenizer_config.json, for transformers 4.57 and 5."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **settings.options,
        **{name: t.content for name in NAMED_TOKENS if (t := settings.named.get(name))},
    }
    if settings.chat_templates:
        config["chat_template"] = template_option(settings.chat_templates)
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
