"""Tokenizers of Marian and M2M100: sentencepiece models split texts, vocab.json has the ids.

The reference is transformers 5.23's ``MarianTokenizer`` and ``M2M100Tokenizer``, of which the first
does not normalise punctuation, although old versions did.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Self

from jaxllm.common.errors import TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.languages import M2M100_CODES, WithLanguages
from jaxllm.tokenizers.sentencepiece_decoding import DecodeRules, SymbolsToText
from jaxllm.tokenizers.sentencepiece_model import SentencePieceModel
from jaxllm.tokenizers.settings import AddedToken, TokenizerFiles, TokenizerSettings
from jaxllm.tokenizers.slow_tokenizer import SlowTokenizer
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.token_finder import TokenFinder


class VocabularyTokenizer(SlowTokenizer):
    """Base class: pieces of a sentencepiece model, with the ids of vocab.json.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes; those of `model_files` are among them.
        pieces: the tokens of vocab.json, by id.
        source: path of vocab.json, for messages.

    Attributes:
        model_files: names of the sentencepiece models: of sources, and of targets if they differ.
        default_tokens: named tokens of transformers' class, used where no file names others.
        space_after_special: text after a special token that is not skipped.
    """

    model_files: ClassVar[tuple[str, ...]]
    default_tokens: ClassVar[Mapping[str, str]]
    space_after_special: ClassVar[str] = ""

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        pieces: Sequence[str],
        source: str,
    ) -> None:
        settings = self._completed(settings.with_defaults(**self.default_tokens))
        if settings.options.get("sp_model_kwargs"):
            raise UnsupportedError(
                "tokenizer_config.json: sp_model_kwargs: sampling is not supported"
            )
        super().__init__(
            settings, files, "right", pieces=pieces, known=settings.added, source=source
        )
        self.vocab_size = len(pieces)
        self._models = [SentencePieceModel(files[name], name) for name in self.model_files]
        self._splitter = self._models[0]
        unknown = self.unk_token_id
        if unknown is None:
            raise TokenizerError(f"{source}: needs an unk_token, which tokenizer_config.json names")
        if self.unk_token not in self._pieces:
            raise TokenizerError(f"{source}: lacks the unk_token, {quoted(self.unk_token)}")
        self._unknown = unknown

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has vocab.json and the files of `model_files`."""
        files.refuse_options(cls._options(), f"a {cls.__name__}")
        source = str(files.folder / "vocab.json")
        missing = [name for name in cls.model_files if name not in files]
        if missing:
            raise TokenizerError(f"{files.folder}: a {cls.__name__} needs {', '.join(missing)}")
        return cls(settings, files.contents, read_vocabulary(files), source)

    @classmethod
    def _options(cls) -> tuple[str, ...]:
        """Those of `CLASS_OPTIONS` that act on the class."""
        return ()

    def _completed(self, settings: TokenizerSettings) -> TokenizerSettings:
        """The settings, with tokens that the class has without being told."""
        return settings

    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        return type(self)(settings, files, self._pieces, self._source)

    def _ids(
        self, rows: Sequence[Sequence[str | AddedToken]], finder: TokenFinder
    ) -> list[list[int]]:
        ids, unknown = self._ids_by_token, self._unknown
        return [[ids.get(token, unknown) for token in self._split(parts, finder)] for parts in rows]

    def _tokenize(self, text: str) -> list[str]:
        return self._splitter.encode(text)

    @abstractmethod
    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]: ...

    @cached_property
    def _rules(self) -> DecodeRules:
        return DecodeRules(
            model=self._models[0],
            special=frozenset(self.all_special_tokens),
            separate=frozenset(),
            add_prefix_space=False,
            space_before_chunk="never",
            space_after_first_special=False,
            strip_text=True,
            after_special=self.space_after_special,
            unknown_has_spaces=len(self._models) > 1,
        )

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return [SymbolsToText(self._rules, skip_special_tokens)]

    def _stage_token(self, index: int) -> str | None:
        token = self._id_to_token(index)
        return None if token is None else self._rules.symbol(token)


class MarianTokenizer(VocabularyTokenizer):
    """Marian's tokenizer: ``</s>`` after a text; targets are split by a model of their own.

    A text for a model with several target languages begins with the language: ``>>fra<< Hello``.
    """

    model_files = ("source.spm", "target.spm")
    default_tokens: ClassVar[Mapping[str, str]] = {
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    space_after_special = " "

    def _completed(self, settings: TokenizerSettings) -> TokenizerSettings:
        if settings.flag("separate_vocabs", False):
            raise UnsupportedError(
                "tokenizer_config.json: separate_vocabs: source and target with different "
                "vocabularies are not implemented"
            )
        length = {"model_max_length": 512, **settings.options}
        return replace(settings, options=length)

    def for_targets(self) -> Self:
        copied = copy.copy(self)
        copied._splitter = self._models[1]
        return copied

    @contextmanager
    def as_target_tokenizer(self) -> Generator[None]:
        """Context in which texts are encoded as targets, as old scripts do; see ``text_target``."""
        self._splitter = self._models[1]
        try:
            yield
        finally:
            self._splitter = self._models[0]

    def _tokenize(self, text: str) -> list[str]:
        end = text.find("<<") + 2 if text.startswith(">>") else 1
        code, text = ([text[:end]], text[end:]) if end > 1 else ([], text)
        return [*code, *super()._tokenize(text)]

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        return [*ids, *(pair or []), *end]


class M2M100Tokenizer(WithLanguages, VocabularyTokenizer):
    """M2M100's tokenizer: ``__en__ text </s>``.

    Options (tokenizer_config.json): ``src_lang`` ("en"), ``tgt_lang``, ``language_codes`` ("m2m100"
    or "wmt21").
    """

    model_files = ("sentencepiece.bpe.model",)
    default_tokens: ClassVar[Mapping[str, str]] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
    }
    default_language = "en"

    @classmethod
    def _options(cls) -> tuple[str, ...]:
        return ("src_lang", "tgt_lang")

    def _completed(self, settings: TokenizerSettings) -> TokenizerSettings:
        name = settings.options.get("language_codes", "m2m100")
        if not isinstance(name, str) or name not in M2M100_CODES:
            raise UnsupportedError(
                "tokenizer_config.json: language_codes: expected one of "
                f"{', '.join(M2M100_CODES)}, found {quoted(name)}"
            )
        self._codes = {code: f"__{code}__" for code in M2M100_CODES[name]}
        listed = {token.content for token in settings.extra}
        missing = [AddedToken(t) for t in self._codes.values() if t not in listed]
        return replace(settings, extra=(*settings.extra, *missing))

    @property
    def lang_code_to_id(self) -> dict[str, int]:
        return {code: self._added_ids[token] for code, token in self._codes.items()}


def read_vocabulary(files: TokenizerFiles) -> list[str]:
    """The tokens of vocab.json by id, which are numbers from 0 on without gaps."""
    table = files.json_object("vocab.json")
    tokens: list[str | None] = [None] * len(table)
    for token, index in table.items():
        if type(index) is not int or not 0 <= index < len(tokens) or tokens[index] is not None:
            raise TokenizerError(
                f"{files.folder / 'vocab.json'}: {quoted(token)} has the id {quoted(index)}; "
                f"{len(tokens)} tokens have the ids 0 to {len(tokens) - 1}, each once"
            )
        tokens[index] = token
    return [token for token in tokens if token is not None]
