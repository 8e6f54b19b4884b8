"""Tokenizers of Llama and T5, based on a sentencepiece model.

The reference is transformers 4.57's slow ``LlamaTokenizer`` and ``T5Tokenizer``. With ``legacy``,
text after a special token is treated as the start of a text and gets a prefix space; otherwise it
is encoded unchanged (transformers pull request 24565).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Self, cast

from jaxllm.common.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers.added_tokens import (
    TokenFinder,
    place_added_tokens,
    split_added_tokens,
    with_added_tokens,
    with_eos,
)
from jaxllm.tokenizers.batch import PaddingSide
from jaxllm.tokenizers.files import CLASS_OPTIONS, TokenizerFiles
from jaxllm.tokenizers.sentencepiece.decoding import SPACE, DecodeRules, PiecesToText
from jaxllm.tokenizers.sentencepiece.model import WITHOUT_DUMMY_PREFIX, SentencePieceModel
from jaxllm.tokenizers.settings import (
    LLAMA_TOKENS,
    T5_TOKENS,
    AddedToken,
    TokenizerSettings,
    added_tokens_of_json,
)
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """Base class: handles added tokens, the prefix space, and the conversion of pieces to ids.

    Args:
        model: a serialised sentencepiece model.
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        source: name of the model's file, for messages; ``model_file`` by default.

    Attributes:
        model_file: name of the model's file in a folder.
        default_tokens: named tokens of transformers' class, used where no file names others.
        default_side: padding side, used where no file names one.
        options: fields of tokenizer_config.json that act on this class and not on all.

    Raises:
        TokenizerError: the model is malformed, or the settings contradict it.
    """

    model_file: ClassVar[str]
    default_tokens: ClassVar[Mapping[str, str]]
    default_side: ClassVar[PaddingSide]
    options: ClassVar[frozenset[str]] = frozenset({"add_prefix_space", "legacy"})

    def __init__(
        self,
        model: bytes,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str | None = None,
    ) -> None:
        source = source or self.model_file
        settings = settings.with_defaults(**self.default_tokens)
        super().__init__(settings, files, self.default_side)
        _refuse_options(settings)
        self.legacy = settings.flag("legacy", True)
        self.add_prefix_space = settings.flag("add_prefix_space", True)
        if not self.legacy and not settings.flag("from_slow", False):
            model += WITHOUT_DUMMY_PREFIX
        self._source = source
        self._model = SentencePieceModel(model, source)
        self.vocab_size = len(self._model.pieces)
        self._added = place_added_tokens(self._model.pieces, self._known_added(), settings, source)
        self._tokens = {token.content: token for token in self._added.values()}
        self._added_ids = {token.content: i for i, token in self._added.items()}
        named = {t.content for t in (*settings.named.values(), *settings.extra)}
        self._special = {
            token.content: token
            for token in self._added.values()
            if token.special or token.content in named
        }
        self.special_ids = frozenset(self._added_ids[text] for text in self._special)
        self._any_added = TokenFinder(self._added_ids)
        self._plain_added = TokenFinder(set(self._added_ids) - set(self._special))
        unk = settings.named.get("unk_token")
        self._unk_text = self._model.unk_piece if unk is None else unk.content
        self._unk_length = len(self._model.encode(self._unk_text))

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has the file ``model_file``."""
        files.refuse_options(cls.options, f"a {cls.__name__}")
        source = str(files.folder / cls.model_file)
        # tokenizer.json lists the added tokens if no other file does.
        if "added_tokens_decoder" not in settings.options and "tokenizer.json" in files:
            settings = replace(settings, added={**settings.added, **added_tokens_of_json(files)})
        return cls(files.contents[cls.model_file], settings, files.contents, source=source)

    def _known_added(self) -> dict[int, AddedToken]:
        """Added tokens by id, from the settings and from the class."""
        return dict(self.settings.added)

    def __len__(self) -> int:
        return max(self.vocab_size, max(self._added, default=-1) + 1)

    def _token_to_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        return self._model.piece_to_id(token) if token in self._model.vocabulary else None

    def _id_to_token(self, index: int) -> str | None:
        if index in self._added:
            return self._added[index].content
        return self._model.pieces[index] if 0 <= index < self.vocab_size else None

    @property
    def special_tokens(self) -> Mapping[str, AddedToken]:
        return self._special

    def _rebuild(self, settings: TokenizerSettings) -> None:
        model, source = self._files[self.model_file], self._source
        settings = replace(settings, added={**self._added, **settings.added})
        files = with_added_tokens(self._files, settings)
        extra = settings.extra  # without T5's sentinels, if the list was replaced
        self._become(type(self)(model, settings, files, source=source))
        self.settings = replace(self.settings, extra=extra)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ids([[text] for text in texts], self._any_added)

    def _text_tokens(self, text: str) -> list[str]:
        return self._split([text], self._any_added)

    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        return self._ids([parts], self._plain_added)[0]

    def _prefixed(self, parts: Sequence[str | AddedToken]) -> list[str | AddedToken]:
        """Adds the prefix space once, at the start of the text (non-legacy)."""
        if self.legacy or not any(part != "" for part in parts):
            return list(parts)
        texts = [p.replace(SPACE, " ") if isinstance(p, str) else p for p in parts]
        if not self.add_prefix_space:
            return texts
        first = texts[0]
        return [SPACE + first, *texts[1:]] if isinstance(first, str) else [SPACE, *texts]

    def _items(
        self, parts: Sequence[str | AddedToken], finder: TokenFinder
    ) -> list[str | AddedToken]:
        """Splits a text into added tokens and the texts between them."""
        items = split_added_tokens(self._prefixed(parts), self._tokens, finder)
        if self.legacy or len(items) < 2 or not isinstance(items[0], str):
            return items
        # The prefix space before a special token is no token of its own.
        second = items[1]
        is_special = isinstance(second, AddedToken) and second.content in self._special
        is_space = is_special and items[0].strip(f"{SPACE} ") == ""
        return items[1:] if is_space and self._tokenize(items[0]) == [SPACE] else items

    def _split(self, parts: Sequence[str | AddedToken], finder: TokenFinder) -> list[str]:
        """Splits a text into added tokens and pieces."""
        tokens: list[str] = []
        for item in self._items(parts, finder):
            tokens += [item.content] if isinstance(item, AddedToken) else self._tokenize(item)
        return tokens

    def _id(self, token: str) -> int:
        """The id of an added token or a piece."""
        index = self._added_ids.get(token)
        return self._model.piece_to_id(token) if index is None else index

    @cached_property
    def _has_remapped_pieces(self) -> bool:
        """True if an added token is a piece of the model too, with another id."""
        common = self._model.vocabulary & self._added_ids.keys()
        return any(self._model.piece_to_id(piece) != self._added_ids[piece] for piece in common)

    def _ids(
        self, rows: Sequence[Sequence[str | AddedToken]], finder: TokenFinder
    ) -> list[list[int]]:
        """The ids of the added tokens and pieces of texts. The model splits all texts at once."""
        if self._has_remapped_pieces:
            return [list(map(self._id, self._split(parts, finder))) for parts in rows]
        items = [self._items(parts, finder) for parts in rows]
        texts = [self._model_text(each) for row in items for each in row if isinstance(each, str)]
        encoded = self._model.encode_ids([text for text, _ in texts]) if texts else []
        drops = (drop for _, drop in texts)
        pieces = (p[n:] if len(p) >= n else p for p, n in zip(encoded, drops, strict=True))
        result = []
        for row in items:
            ids: list[int] = []
            for each in row:
                is_added = isinstance(each, AddedToken)
                ids += [self._added_ids[each.content]] if is_added else next(pieces)
            result.append(ids)
        return result

    def _tokenize(self, text: str) -> list[str]:
        """Splits text without added tokens into pieces."""
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

    def _decode_rules(self) -> DecodeRules:
        flags = self._model.flags
        named = set(self.special_tokens_map.values())
        extra = set(self.additional_special_tokens)
        other = set(self._added_ids) - named - extra
        beyond = {t for t in extra if self._added_ids[t] >= self.vocab_size}
        ascii_bytes = {f"<0x{i:02X}>": chr(i) for i in range(128)}
        pieces = self._model.vocabulary - self._model.control - self._model.bytes
        texts = {piece: piece.replace(SPACE, " ") for piece in pieces}
        texts[self._model.unk_piece] = self._model.unk_text
        texts |= {piece: ascii_bytes[piece] for piece in self._model.bytes & ascii_bytes.keys()}
        return DecodeRules(
            texts={t: text for t, text in texts.items() if t not in self._added_ids},
            fixed_text=self._model.fixed_text,
            is_byte=self._model.bytes.__contains__,
            strip_chunk_start=flags.add_dummy_prefix or flags.remove_extra_whitespaces,
            strip_all_chunk_starts=flags.remove_extra_whitespaces,
            special=frozenset(self._special),
            separate=frozenset(other | beyond),
            add_prefix_space=self.add_prefix_space,
            space_before_chunk="inner" if self.legacy else "never",
            space_after_first_special=self.add_prefix_space,
            strip_text=False,
        )

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        texts, tokens = self._text_table, self._token_table(skip_special_tokens)
        stage, pieces = PiecesToText(self._rules, skip_special_tokens), []
        unusual = {i for i in set(ids) if i >= len(texts) or texts[i] is None}
        stops = [n for n, i in enumerate(ids) if i in unusual] if unusual else []
        number = 0
        for stop in (*stops, len(ids)):
            while number < stop and not stage.is_inside_text:
                pieces += stage.put([str(tokens[ids[number]])])
                number += 1
            if number < stop:  # each token is decoded by itself
                text = "".join(map(cast(list[str], texts).__getitem__, ids[number:stop]))
                pieces.append(stage.put_text(text, stop - number))
            if stop < len(ids):
                token = tokens[ids[stop]] if ids[stop] < len(tokens) else None
                pieces += [] if token is None else stage.put([token])
            number = stop + 1
        return "".join([*pieces, *stage.end()])

    @cached_property
    def _text_table(self) -> list[str | None]:
        """`DecodeRules.texts` by id."""
        return [self._rules.texts.get(token or "") for token in self._token_table(False)]

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return [PiecesToText(self._rules, skip_special_tokens)]

    @cached_property
    def _rules(self) -> DecodeRules:
        return self._decode_rules()


class LlamaTokenizer(SentencePieceTokenizer):
    """LLaMA's tokenizer: BOS before a text, ``BOS a BOS b`` for a pair, byte fallback.

    Options (tokenizer_config.json): ``add_bos_token`` (true), ``add_eos_token`` (false), ``legacy``
    (true), ``add_prefix_space`` (true).
    """

    model_file = "tokenizer.model"
    default_tokens = LLAMA_TOKENS
    default_side = "left"
    options = CLASS_OPTIONS

    def __init__(
        self,
        model: bytes,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str | None = None,
    ) -> None:
        super().__init__(model, settings, files, source=source)
        self._prefix = self._marker("bos", default=True)
        self._suffix = self._marker("eos", default=False)

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


class T5Tokenizer(SentencePieceTokenizer):
    """T5's tokenizer: ``</s>`` after a text, ``<extra_id_n>`` sentinels as the last ids.

    Options (tokenizer_config.json): ``extra_ids`` (100), ``legacy`` (true), ``add_prefix_space``
    (true). Sentinel n has the id ``len(tokenizer) - 1 - n`` and strips the white space around it.
    """

    model_file = "spiece.model"
    default_tokens = T5_TOKENS
    default_side = "right"

    def __init__(
        self,
        model: bytes,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str | None = None,
    ) -> None:
        super().__init__(model, _with_sentinels(settings), files, source=source)
        if self.eos_token_id is None:
            raise TokenizerError("tokenizer_config.json: T5 needs an eos_token")

    def _known_added(self) -> dict[int, AddedToken]:
        sentinels = sum("<extra_id_" in token.content for token in self.settings.extra)
        last = self.vocab_size - 1 + _extra_ids(self.settings)
        return {
            **{
                last - n: AddedToken(f"<extra_id_{n}>", lstrip=True, rstrip=True)
                for n in range(sentinels)
            },
            **self.settings.added,
        }

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        return with_eos(ids, pair, self.eos_token_id)

    def _decode_rules(self) -> DecodeRules:
        return replace(
            super()._decode_rules(),
            space_before_chunk="always",
            space_after_first_special=False,
            strip_text=True,
        )


def _refuse_options(settings: TokenizerSettings) -> None:
    if settings.options.get("sp_model_kwargs"):
        raise UnsupportedError("tokenizer_config.json: sp_model_kwargs: sampling is not supported")
    if settings.flag("do_lower_case", False):
        raise UnsupportedError("tokenizer_config.json: do_lower_case is not supported")


def _extra_ids(settings: TokenizerSettings) -> int:
    count = settings.options.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= 2**16:
        raise TokenizerError(f"tokenizer_config.json: extra_ids is {count!r}, not a count")
    return count


def _with_sentinels(settings: TokenizerSettings) -> TokenizerSettings:
    count = _extra_ids(settings)
    listed = [token for token in settings.extra if "<extra_id_" in token.content]
    if listed and count > 0 and len(listed) != count:
        raise TokenizerError(
            f"tokenizer_config.json: extra_ids is {count}, but additional_special_tokens lists"
            f" {len(listed)} sentinels"
        )
    if listed:
        return settings
    sentinels = [AddedToken(f"<extra_id_{n}>", lstrip=True, rstrip=True) for n in range(count)]
    return replace(settings, extra=(*settings.extra, *sentinels))
