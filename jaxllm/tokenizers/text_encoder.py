"""Encodes and decodes single texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict, Unpack

from jaxllm.common.arguments import checked_iterable, checks_flags
from jaxllm.common.errors import InputError, UnsupportedError, warn
from jaxllm.tokenizers.batch import (
    PaddingSide,
    Span,
    Truncation,
    check_truncation,
    truncate,
)
from jaxllm.tokenizers.settings import AddedToken
from jaxllm.tokenizers.stream_decoder import CleanUp, Stage, StreamDecoder, id_list
from jaxllm.tokenizers.vocabulary import NO_MAX_LENGTH, Vocabulary

MAX_TEXT_BYTES = 1_000_000


class TextOptions(TypedDict, total=False):
    """Options of an encoding without padding."""

    add_special_tokens: bool
    truncation: Truncation
    max_length: int | None
    split_special_tokens: bool | None
    max_bytes: int


@dataclass(frozen=True)
class EncodedText:
    """A text, or a pair of texts, as tokens without padding."""

    ids: list[int]
    special_tokens_mask: list[int]
    """1 for tokens that were added to the texts, 0 for their own."""
    spans: list[Span] | None
    """Start and end of each token in its text, (0, 0) for those that were added."""


class TextEncoder(Vocabulary):
    """Encodes a text to ids, and decodes ids to a text, at once or as they come.

    Attributes:
        truncation_side: side at which ``truncation`` cuts a text off: "left" or "right".
    """

    truncation_side: PaddingSide

    @abstractmethod
    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, parsing special tokens in them; adds none."""

    @abstractmethod
    def _text_tokens(self, text: str) -> list[str]:
        """Splits a text into tokens; unknown characters are tokens as they are."""

    @abstractmethod
    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        """Encodes a text whose special tokens are already split off; adds none.

        If ``_encode_texts`` would parse the same special tokens, the ids are the same.
        """

    @abstractmethod
    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        """Adds BOS, EOS and similar tokens to one or two lists of ids."""

    @abstractmethod
    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        """Makes new stages that decode tokens to text, before any clean-up of spaces."""

    @property
    def _cleans_up(self) -> bool:
        """Whether `clean_up_tokenization_spaces` acts on this tokenizer's texts."""
        return True

    def _encode(
        self, text: str, text_pair: str | None = None, **options: Unpack[TextOptions]
    ) -> list[int]:
        """Encodes a text, or a pair of texts, to ids without padding."""
        return self._encode_rows([text], [text_pair], **options)[0]

    @checks_flags
    def _encode_rows(
        self,
        texts: Sequence[str],
        pairs: Sequence[str | None],
        *,
        add_special_tokens: bool = True,
        truncation: Truncation = False,
        max_length: int | None = None,
        split_special_tokens: bool | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> list[list[int]]:
        """Encodes texts, each perhaps with a second one, to ids without padding."""
        if split_special_tokens is None:
            split_special_tokens = self.settings.flag("split_special_tokens", False)
        every = [*texts, *(pair for pair in pairs if pair is not None)]
        for text in every:
            check_text(text, max_bytes)
        if split_special_tokens:
            encoded = [self._encode_parts([text]) for text in every]
        else:
            encoded = self._encode_texts(every)
        second = iter(encoded[len(texts) :])
        return [
            self._assemble(
                ids,
                None if pair is None else next(second),
                *(add_special_tokens, truncation, max_length),
            )
            for ids, pair in zip(encoded[: len(texts)], pairs, strict=True)
        ]

    @checks_flags
    def encode_with_offsets(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation = False,
        max_length: int | None = None,
        split_special_tokens: bool | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> tuple[list[int], list[Span]]:
        """Encodes as ``encode``, and returns ids and the span of characters of each.

        A span is (start, end) in its own text; (0, 0) for tokens that were added. Nothing is
        padded, and ``max_length`` acts with ``truncation`` only.

        Raises:
            UnsupportedError: the tokenizer has no offsets (sentencepiece, ByT5).
        """
        encoded = self._encode_details(
            *(text, text_pair),
            with_spans=True,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
            max_length=max_length,
            split_special_tokens=split_special_tokens,
            max_bytes=max_bytes,
        )
        assert encoded.spans is not None
        return encoded.ids, encoded.spans

    @checks_flags
    def _encode_details(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        with_spans: bool,
        add_special_tokens: bool = True,
        truncation: Truncation = False,
        max_length: int | None = None,
        split_special_tokens: bool | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> EncodedText:
        """Encodes as ``_encode``, and says which tokens were added, and each token's span."""
        if split_special_tokens is None:
            split_special_tokens = self.settings.flag("split_special_tokens", False)
        ids: list[int] = []
        spans: list[Span] = []
        counts = []
        for each in [text] if text_pair is None else [text, text_pair]:
            check_text(each, max_bytes)
            if with_spans:
                its_ids, its_spans = self._encode_spans(each, split_special_tokens)
                spans += its_spans
            elif split_special_tokens:
                its_ids = self._encode_parts([each])
            else:
                [its_ids] = self._encode_texts([each])
            ids += its_ids
            counts.append(len(its_ids))
        first, pair = _placeholders(*counts)
        places = self._assemble(first, pair, add_special_tokens, truncation, max_length)
        return EncodedText(
            ids=[ids[-1 - i] if i < 0 else i for i in places],
            special_tokens_mask=[int(i >= 0) for i in places],
            spans=[spans[-1 - i] if i < 0 else (0, 0) for i in places] if with_spans else None,
        )

    def _encode_spans(self, text: str, split_special_tokens: bool) -> tuple[list[int], list[Span]]:
        raise UnsupportedError(
            f"return_offsets_mapping: a {type(self).__name__} has no offsets, as in transformers;"
            " a tokenizer.json gives them"
        )

    def _assemble(
        self,
        ids: list[int],
        pair: list[int] | None,
        add_special_tokens: bool,
        truncation: Truncation,
        max_length: int | None,
    ) -> list[int]:
        """Truncates one or two lists of ids, and adds special tokens."""
        limit = self._truncation_length(truncation, max_length)
        if limit is not None:
            if add_special_tokens:
                limit -= self.num_special_tokens_to_add(pair is not None)
            ids, pair = truncate(ids, pair, limit, truncation, self.truncation_side)
        if add_special_tokens:
            return self._add_special_tokens(ids, pair)
        return ids + (pair or [])

    @checks_flags
    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of special tokens that encoding adds to a text, or to a pair of texts."""
        return len(self._add_special_tokens([], [] if pair else None))

    @checks_flags
    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False
    ) -> list[str]:
        """Splits a text into tokens, which for unknown characters are not in the vocabulary."""
        texts = [text] if pair is None else [text, pair]
        for each in texts:
            check_text(each, MAX_TEXT_BYTES)
        tokens = [self._text_tokens(each) for each in texts]
        everything = [token for each in tokens for token in each]
        if not add_special_tokens:
            return everything
        ids = self._add_special_tokens(*_placeholders(*map(len, tokens)))
        return [everything[-1 - i] if i < 0 else str(self.id_to_token(i)) for i in ids]

    def encode_beginning(self, text: str, *, max_bytes: int = MAX_TEXT_BYTES) -> list[int]:
        """Encodes a text that will be continued. The tokenizer's special tokens before a text (BOS)
        are added; its special tokens after a text (EOS) are left out.

        Raises:
            UnsupportedError: the tokenizer's template of special tokens has no place for a text.
        """
        own = self._encode(text, add_special_tokens=False, max_bytes=max_bytes)
        (placeholder,), _ = _placeholders(1)
        places = self._add_special_tokens([placeholder], None)
        if placeholder not in places:
            raise UnsupportedError(
                "the tokenizer's template of special tokens leaves the text out, so no text can "
                "be continued; correct the post_processor of tokenizer.json"
            )
        return places[: places.index(placeholder)] + own

    def encode_user(self, text: str, *, max_bytes: int = MAX_TEXT_BYTES) -> list[int]:
        """Encodes untrusted text: special tokens in it are plain text; adds none."""
        return self._encode(
            text, add_special_tokens=False, split_special_tokens=True, max_bytes=max_bytes
        )

    @checks_flags
    def decode(
        self,
        ids: int | Iterable[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Decodes ids. Ids beyond the vocabulary (of a padded embedding) are skipped.

        Args:
            clean_up_tokenization_spaces: remove spaces before punctuation. None: the tokenizer's
                own setting. As in transformers 5 it has no effect on a BPE of a tokenizer.json,
                whose spaces are the text's own.

        Raises:
            InputError: not an id, or not a list or one-dimensional array of ids; or not a bool.
        """
        text = self._decode(id_list(ids), skip_special_tokens)
        return CleanUp.clean(text) if self._cleans(clean_up_tokenization_spaces) else text

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes ids without any clean-up of spaces."""
        stream = StreamDecoder(
            self._token_table(skip_special_tokens), self._decode_stages(skip_special_tokens)
        )
        return stream.put(ids) + stream.end()

    def _cleans(self, clean_up_tokenization_spaces: bool | None) -> bool:
        """Whether spaces are cleaned up, by a call's argument or the tokenizer's setting."""
        cleans = clean_up_tokenization_spaces
        if cleans is None:
            cleans = self.settings.flag("clean_up_tokenization_spaces", False)
        return cleans and self._cleans_up

    @checks_flags
    def batch_decode(
        self,
        rows: Iterable[Iterable[int]],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Decodes several lists of ids, or the rows of a two-dimensional array; see `decode`."""
        options = (skip_special_tokens, clean_up_tokenization_spaces)
        rows = checked_iterable(rows, "rows", "a list of lists of ids")
        return [self.decode(row, *options) for row in rows]

    @checks_flags
    def stream_decoder(
        self, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> StreamDecoder:
        """Makes an incremental decoder for generated ids; see :class:`StreamDecoder`.

        Arguments are those of `decode`.
        """
        stages = self._decode_stages(skip_special_tokens)
        clean_up = [CleanUp()] if self._cleans(clean_up_tokenization_spaces) else []
        return StreamDecoder(self._token_table(skip_special_tokens), [*stages, *clean_up])

    def _token_table(self, skip_special_tokens: bool) -> list[str | None]:
        """The token of each id; None for ids that are skipped or have none."""
        return self._token_tables[skip_special_tokens]

    @cached_property
    def _token_tables(self) -> tuple[list[str | None], list[str | None]]:
        tokens = [self._id_to_token(index) for index in range(len(self))]
        skipped = self.special_ids
        return tokens, [None if i in skipped else token for i, token in enumerate(tokens)]

    def token_bytes(self) -> tuple[bytes | None, ...]:
        """UTF-8 bytes of each id inside a text; None for an id without a token.

        A byte-level or byte token may be part of a character. A special token is its own text.
        Spaces that ``decode`` removes or adds between tokens are ignored, as in transformers.
        """
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> tuple[bytes | None, ...]:
        stages = self._decode_stages(skip_special_tokens=False)

        def encode_token(token: str) -> bytes:
            for stage in stages:
                text = stage.token_text(token)
                if isinstance(text, bytes):
                    return text
                token = text
            return token.encode("utf-8")

        tokens = map(self.id_to_token, range(len(self)))
        return tuple(None if token is None else encode_token(token) for token in tokens)

    def _truncation_length(self, truncation: Truncation, max_length: int | None) -> int | None:
        """The longest length that ``truncation`` leaves; None: any, as in transformers."""
        if not check_truncation(truncation):
            return None
        if max_length is None and self.model_max_length == NO_MAX_LENGTH:
            warn(
                "truncation without max_length: the tokenizer has no model_max_length, so nothing"
                " is truncated"
            )
            return None
        return self._max_length(max_length, "truncation")

    def _max_length(self, max_length: int | None, use: str) -> int:
        """``max_length``, or else the tokenizer's own."""
        if max_length is None and self.model_max_length == NO_MAX_LENGTH:
            raise InputError(f"{use} needs max_length: the tokenizer has no model_max_length")
        length = self.model_max_length if max_length is None else max_length
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InputError(f"max_length is {max_length!r}: expected an int")
        return length


def _placeholders(first: int, second: int | None = None) -> tuple[list[int], list[int] | None]:
    """Numbers below zero for the tokens of one or two texts: -1 - n for token n of both."""
    numbers = [-1 - number for number in range(first + (second or 0))]
    return numbers[:first], None if second is None else numbers[first:]


def check_text(text: object, max_bytes: int) -> None:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        raise InputError(f"max_bytes is {max_bytes!r}: expected an int")
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as failure:
        raise InputError(
            f"the text holds an unpaired surrogate at character {failure.start}"
        ) from failure
    if size > max_bytes:
        raise InputError(
            f"the text has {size} bytes, but at most {max_bytes} are taken: pass max_bytes"
            " to allow more"
        )
