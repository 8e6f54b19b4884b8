"""Tokenizers of Llama and T5, based on a sentencepiece model, and the base of the tokenizers that
find added tokens in Python, as transformers' slow tokenizers do.

The reference is transformers 4.57's slow ``LlamaTokenizer`` and ``T5Tokenizer``. With ``legacy``,
text after a special token is treated as the start of a text and gets a prefix space; otherwise it
is encoded unchanged (transformers pull request 24565).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import ClassVar, Self

from jaxllm.common.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers.added_tokens import (
    AddedToken,
    Parts,
    TokenFinder,
    place_added_tokens,
    split_added_tokens,
)
from jaxllm.tokenizers.batch import PaddingSide
from jaxllm.tokenizers.sentencepiece_model import (
    SPACE,
    WITHOUT_DUMMY_PREFIX,
    DecodeRules,
    SentencePieceModel,
    SymbolsToText,
)
from jaxllm.tokenizers.settings import (
    DECIDING_OPTIONS,
    LLAMA_TOKENS,
    SENTENCEPIECE_OPTIONS,
    T5_TOKENS,
    NamedTokens,
    TokenizerFiles,
    TokenizerSettings,
    added_tokens_of_json,
    config_json,
    named_tokens,
)
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.tokenizer import Tokenizer


class SlowTokenizer(Tokenizer):
    """Splits texts at added tokens; subclasses split the texts between them into pieces.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        padding_side: default if the settings have none.
        pieces: the vocabulary without added tokens, by id.
        known: added tokens by id, from the settings and from the class.
        source: name of the file, for messages.

    Attributes:
        default_tokens: named tokens of transformers' class, used where no file names others.
        options: fields of tokenizer_config.json that act on this class and not on all.
    """

    default_tokens: ClassVar[NamedTokens]
    options: ClassVar[Collection[str]] = ()
    _unknown_id: int
    _rules: DecodeRules
    """How the sentencepiece model's pieces are decoded."""

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        padding_side: PaddingSide,
        *,
        pieces: Sequence[str],
        known: Mapping[int, AddedToken],
        source: str,
    ) -> None:
        super().__init__(settings, files, padding_side)
        self._pieces, self._source = pieces, source
        piece_ids = {piece: index for index, piece in enumerate(pieces)}
        self._added = place_added_tokens(
            piece_ids, known, (*settings.named.values(), *settings.extra), source
        )
        self._tokens = {token.content: token for token in self._added.values()}
        self._added_ids = {token.content: index for index, token in self._added.items()}
        self._ids_by_token = {**piece_ids, **self._added_ids}
        beyond = max(self._added, default=-1) + 1 - len(pieces)
        self._tokens_by_id = tokens = [*pieces, *[None] * beyond]
        for index, token in self._added.items():
            tokens[index] = token.content
        # True if an added token is a piece too, with another id.
        self._has_remapped_pieces = any(
            piece_ids.get(token, index) != index for token, index in self._added_ids.items()
        )
        named = {token.content for token in settings.named.values()}
        self.special_tokens = {
            text: token for text, token in self._tokens.items() if token.special or text in named
        }
        self.special_ids = frozenset(self._added_ids[text] for text in self.special_tokens)
        self._any_added = TokenFinder(self._tokens)
        self._plain_added = TokenFinder(self._tokens.keys() - self.special_tokens.keys())

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        """The settings of a class with sentencepiece models, with tokens that it has by default."""
        settings = settings.with_defaults(**cls.default_tokens)
        if settings.options.get("sp_model_kwargs"):
            raise UnsupportedError(
                "tokenizer_config.json: sp_model_kwargs: sampling is not supported"
            )
        return settings

    @abstractmethod
    def _tokenize(self, text: str) -> list[str]:
        """Splits a text without added tokens into pieces."""

    def _encode_items(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts without added tokens."""
        ids, unknown = self._ids_by_token, self._unknown_id
        return [[ids.get(token, unknown) for token in self._tokenize(text)] for text in texts]

    def _ids(self, rows: Sequence[Parts], finder: TokenFinder) -> list[list[int]]:
        """The ids of the added tokens and pieces of texts."""
        items = [self._items(parts, finder) for parts in rows]
        texts = [each for row in items for each in row if isinstance(each, str)]
        pieces = iter(self._encode_items(texts) if texts else ())
        result = []
        for row in items:
            ids: list[int] = []
            for each in row:
                is_added = isinstance(each, AddedToken)
                ids += [self._added_ids[each.content]] if is_added else next(pieces)
            result.append(ids)
        return result

    @abstractmethod
    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        """The same tokenizer with other settings and files."""

    def _token_to_id(self, token: str) -> int | None:
        return self._ids_by_token.get(token)

    def _rebuild(self, settings: TokenizerSettings) -> None:
        settings = replace(settings, added={**self._added, **settings.added})
        self._become(self._remade(settings, with_added_tokens(self._files, settings)))
        # Without T5's sentinels, if the list was replaced.
        self.settings = replace(self.settings, extra=settings.extra)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ids([[text] for text in texts], self._any_added)

    def _encode_parts(self, parts: Parts) -> list[int]:
        return self._ids([parts], self._plain_added)[0]

    def _text_tokens(self, text: str) -> list[str]:
        return self._split([text], self._any_added)

    def _items(self, parts: Parts, finder: TokenFinder) -> list[str | AddedToken]:
        """Splits a text into added tokens and the texts between them."""
        return split_added_tokens(parts, self._tokens, finder)

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return [SymbolsToText(self._rules, skip_special_tokens)]

    def _stage_tokens(self) -> Sequence[str | None]:
        symbol = self._rules.symbol
        return [None if token is None else symbol(token) for token in self._tokens_by_id]

    def _split(self, parts: Parts, finder: TokenFinder) -> list[str]:
        """Splits a text into added tokens and pieces."""
        tokens: list[str] = []
        for item in self._items(parts, finder):
            tokens += [item.content] if isinstance(item, AddedToken) else self._tokenize(item)
        return tokens


class SentencePieceTokenizer(SlowTokenizer):
    """Base class: handles the prefix space, and the conversion of pieces to ids and text.

    Args:
        model: a serialised sentencepiece model.
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        source: name of the model's file, for messages; ``model_file`` by default.

    Attributes:
        model_file: name of the model's file in a folder.
        default_side: padding side, used where no file names one.
    """

    model_file: ClassVar[str]
    default_side: ClassVar[PaddingSide]
    options = ("add_prefix_space", "legacy")
    # Attributes of `DecodeRules`; None: as the settings say.
    space_before_chunk: ClassVar[str | None] = None
    strip_text: ClassVar[bool] = False

    def __init__(
        self,
        model: bytes,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str | None = None,
    ) -> None:
        source = source or self.model_file
        settings = self._complete(settings)
        if settings.flag("do_lower_case", False):
            raise UnsupportedError("tokenizer_config.json: do_lower_case is not supported")
        self.legacy = settings.flag("legacy", True)
        self.add_prefix_space = settings.flag("add_prefix_space", True)
        if not self.legacy and not settings.flag("from_slow", False):
            model += WITHOUT_DUMMY_PREFIX
        self._model = SentencePieceModel(model, source)
        self.vocab_size = len(self._model.pieces)
        super().__init__(
            *(settings, files, self.default_side),
            pieces=self._model.pieces,
            known=self._known_added(settings),
            source=source,
        )
        unk = settings.named.get("unk_token")
        self._unk_text = self._model.unk_piece if unk is None else unk.content
        self._unk_length = len(self._model.encode(self._unk_text))
        self._unknown_id = self._model.unk_id
        self._prefix, self._suffix = self._around_texts()

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has the file ``model_file``."""
        files.refuse_options(cls.options, f"a {cls.__name__}")
        source = str(files.folder / cls.model_file)
        settings = with_tokens_of_json(files, settings)
        tokenizer = cls(files.contents[cls.model_file], settings, files.contents, source=source)
        if files.options.keys() & DECIDING_OPTIONS and "tokenizer.json" in files:
            # It would decide when the saved folder is loaded, so the other files get its tokens.
            added = replace(tokenizer.settings, added=tokenizer._added)
            tokenizer._files = with_added_tokens(files.contents, added)
            del tokenizer._files["tokenizer.json"]
        return tokenizer

    def _known_added(self, settings: TokenizerSettings) -> dict[int, AddedToken]:
        """Added tokens by id, from the settings and from the class."""
        return dict(settings.added)

    @abstractmethod
    def _around_texts(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text."""

    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        return type(self)(self._files[self.model_file], settings, files, source=self._source)

    def _prefixed(self, parts: Parts) -> list[str | AddedToken]:
        """Adds the prefix space once, at the start of the text (non-legacy)."""
        if self.legacy or not any(part != "" for part in parts):
            return list(parts)
        texts = [p.replace(SPACE, " ") if isinstance(p, str) else p for p in parts]
        if not self.add_prefix_space:
            return texts
        first = texts[0]
        return [SPACE + first, *texts[1:]] if isinstance(first, str) else [SPACE, *texts]

    def _items(self, parts: Parts, finder: TokenFinder) -> list[str | AddedToken]:
        items = super()._items(self._prefixed(parts), finder)
        if self.legacy or len(items) < 2 or not isinstance(items[0], str):
            return items
        # The prefix space before a special token is no token of its own.
        second = items[1]
        is_special = isinstance(second, AddedToken) and second.content in self.special_tokens
        is_space = is_special and items[0].strip(f"{SPACE} ") == ""
        return items[1:] if is_space and self._tokenize(items[0]) == [SPACE] else items

    def _encode_items(self, texts: Sequence[str]) -> list[list[int]]:
        if self._has_remapped_pieces:
            return super()._encode_items(texts)
        # The model splits all texts at once.
        changed = [self._model_text(text) for text in texts]
        encoded = self._model.encode_ids([text for text, _ in changed])
        drops = (drop for _, drop in changed)
        return [p[n:] if len(p) >= n else p for p, n in zip(encoded, drops, strict=True)]

    def _tokenize(self, text: str) -> list[str]:
        text, drop = self._model_text(text)
        tokens = self._model.encode(text)
        return tokens[drop:] if len(tokens) >= drop else tokens

    def _model_text(self, text: str) -> tuple[str, int]:
        """The text that the model splits, and the number of its first pieces to drop.

        Without its dummy prefix sentencepiece strips the leading space of a text. To keep the
        space, an unknown token is prepended and its pieces are removed again.
        """
        if self.legacy or not text.startswith((SPACE, " ")):
            return text, 0
        return self._unk_text + text, self._unk_length

    @cached_property
    def _rules(self) -> DecodeRules:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.settings.flag("keep_inner_spaces", False):
            added = frozenset(self._added_ids)
            return DecodeRules(model=self._model, special=added, keeps_inner_spaces=True)
        extra = set(self.additional_special_tokens)
        beyond = {token for token in extra if self._added_ids[token] >= self.vocab_size}
        plain = self._added_ids.keys() - extra - set(self.special_tokens_map.values())
        return DecodeRules(
            model=self._model,
            special=frozenset(self.special_tokens),
            separate=frozenset(plain | beyond),
            # With ``legacy`` the model adds the prefix space, and its own rules remove it.
            add_prefix_space=self.add_prefix_space and not self.legacy,
            space_before_chunk=self.space_before_chunk or ("inner" if self.legacy else "never"),
            space_after_first_special=self.add_prefix_space and self.space_before_chunk is None,
            strip_text=self.strip_text and not self._model.has_spaces_at_ends,
        )


class LlamaTokenizer(SentencePieceTokenizer):
    """LLaMA's tokenizer: BOS before a text, ``BOS a BOS b`` for a pair, byte fallback.

    Options (tokenizer_config.json): ``add_bos_token`` (true), ``add_eos_token`` (false), ``legacy``
    (true), ``add_prefix_space`` (true), ``keep_inner_spaces`` (false): as in llama.cpp, decoding
    removes the prefix space of the whole text alone, not of each text after an added token.
    """

    model_file = "tokenizer.model"
    default_tokens = LLAMA_TOKENS
    default_side = "left"
    options = SENTENCEPIECE_OPTIONS

    def _around_texts(self) -> tuple[list[int], list[int]]:
        return self._marker("bos", default=True), self._marker("eos", default=False)

    def _marker(self, name: str, default: bool) -> list[int]:
        if not self.settings.flag(f"add_{name}_token", default):
            return []
        index = getattr(self, f"{name}_token_id")
        if index is None:
            raise TokenizerError(f"tokenizer_config.json: add_{name}_token, but no {name}_token")
        return [index]

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        result = self._prefix + ids + self._suffix
        return result if pair is None else result + self._prefix + pair + self._suffix


class GemmaTokenizer(LlamaTokenizer):
    """Gemma's tokenizer: BOS before a text; the marks of turns are special tokens.

    The model alone encodes and decodes each text between added tokens.
    """

    default_tokens = named_tokens(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>")
    options = ("add_bos_token", "add_eos_token")

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        return super()._complete(replace(settings, options={**settings.options, "legacy": True}))

    def _known_added(self, settings: TokenizerSettings) -> dict[int, AddedToken]:
        marks = ("<start_of_turn>", "<end_of_turn>")
        ids = [(i, piece) for i, piece in enumerate(self._model.pieces) if piece in marks]
        return {index: AddedToken(piece) for index, piece in ids} | {**settings.added}

    @cached_property
    def _rules(self) -> DecodeRules:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecodeRules(model=self._model, special=frozenset(self._added_ids))


class T5Tokenizer(SentencePieceTokenizer):
    """T5's tokenizer: ``</s>`` after a text, ``<extra_id_n>`` sentinels as the last ids.

    Options (tokenizer_config.json): ``extra_ids`` (100), ``legacy`` (true), ``add_prefix_space``
    (true). Sentinel n has the id ``len(tokenizer) - 1 - n`` and strips the white space around it.
    """

    model_file = "spiece.model"
    default_tokens = T5_TOKENS
    default_side = "right"
    space_before_chunk = "always"
    strip_text = True

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        settings = super()._complete(settings)
        count = extra_ids(settings)
        if listed_sentinels(settings, count):
            return settings
        sentinels = [AddedToken(f"<extra_id_{n}>", lstrip=True, rstrip=True) for n in range(count)]
        return replace(settings, extra=(*settings.extra, *sentinels))

    def _known_added(self, settings: TokenizerSettings) -> dict[int, AddedToken]:
        sentinels = sum("<extra_id_" in token.content for token in settings.extra)
        last = self.vocab_size - 1 + extra_ids(settings)
        return {
            **{
                last - n: AddedToken(f"<extra_id_{n}>", lstrip=True, rstrip=True)
                for n in range(sentinels)
            },
            **settings.added,
        }

    def _around_texts(self) -> tuple[list[int], list[int]]:
        if self.eos_token_id is None:
            raise TokenizerError("tokenizer_config.json: T5 needs an eos_token")
        return [], [self.eos_token_id]

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        return with_eos(ids, pair, self.eos_token_id)


def extra_ids(settings: TokenizerSettings, default: int = 100) -> int:
    """The number of sentinels, ``extra_ids`` of tokenizer_config.json."""
    count = settings.options.get("extra_ids", default)
    if type(count) is not int or not 0 <= count <= 2**16:
        raise TokenizerError(f"tokenizer_config.json: extra_ids is {count!r}, not a count")
    return count


def listed_sentinels(settings: TokenizerSettings, count: int) -> int:
    """The number of sentinels in the list of extra special tokens: none, or `count`."""
    listed = sum("<extra_id_" in token.content for token in settings.extra)
    if listed and count > 0 and listed != count:
        raise TokenizerError(
            f"tokenizer_config.json: extra_ids is {count}, but additional_special_tokens lists"
            f" {listed} sentinels"
        )
    return listed


def with_tokens_of_json(files: TokenizerFiles, settings: TokenizerSettings) -> TokenizerSettings:
    """The settings with the added tokens that tokenizer.json alone lists.

    The other files decide where both have a token or an id.
    """
    if "tokenizer.json" not in files:
        return settings
    known = {token.content for token in settings.added.values()}
    more = {
        index: token
        for index, token in added_tokens_of_json(files).items()
        if index not in settings.added and token.content not in known
    }
    return replace(settings, added={**settings.added, **more})


def with_added_tokens(files: Mapping[str, bytes], settings: TokenizerSettings) -> dict[str, bytes]:
    """A tokenizer's files with the added tokens of the settings in tokenizer_config.json.

    Once it lists them, no other file's are read; so it gets the named tokens too.
    """
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    added = sorted(settings.added.items())
    config["added_tokens_decoder"] = {str(index): asdict(token) for index, token in added}
    config |= {name: token.content for name, token in settings.named.items()}
    return {**files, "tokenizer_config.json": config_json(config)}


def with_eos(ids: list[int], pair: list[int] | None, eos: int | None) -> list[int]:
    """Adds T5's EOS after one or two sequences that do not end with it."""

    def ended(ids: list[int]) -> list[int]:
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    return ended(ids) if pair is None else ended(ids) + ended(pair)
