"""Encodes and decodes single texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypedDict, Unpack

from jaxllm.common.arguments import checked_iterable, checks_flags
from jaxllm.common.errors import InputError, UnsupportedError, warn
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.batch import (
    ListEncoding,
    PaddingSide,
    Span,
    Truncation,
    check_truncation,
    truncate,
)
from jaxllm.tokenizers.stream_decoder import CleanUp, Stage, StreamDecoder, TokenTable, id_list
from jaxllm.tokenizers.vocabulary import MAX_TEXT_BYTES, NO_MAX_LENGTH, Vocabulary, check_text


class TextOptions(TypedDict, total=False):
    """Options of an encoding without padding."""

    add_special_tokens: bool
    truncation: Truncation
    max_length: int | None
    split_special_tokens: bool | None
    max_bytes: int


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

    def _encode(self, text: str, **options: Unpack[TextOptions]) -> list[int]:
        """Encodes a text to ids without padding."""
        rows: Any = self._encode_rows([text], [None], **options)
        return rows.input_ids[0]

    @checks_flags
    def _encode_rows(
        self,
        texts: Sequence[str],
        pairs: Sequence[str | None],
        *,
        with_spans: bool = False,
        with_mask: bool = False,
        add_special_tokens: bool = True,
        truncation: Truncation = False,
        max_length: int | None = None,
        split_special_tokens: bool | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> ListEncoding:
        """Encodes texts, each perhaps with a second one, to ids without padding.

        Args:
            with_spans: give each token's start and end in its text, (0, 0) for those that were
                added.
            with_mask: say which tokens were added.
        """
        if split_special_tokens is None:
            split_special_tokens = self.settings.flag("split_special_tokens", False)
        every = [*texts, *(pair for pair in pairs if pair is not None)]
        for text in every:
            check_text(text, max_bytes)
        spans: list[list[Span]] = [[] for _ in every]
        if with_spans:
            both = [self._encode_spans(text, split_special_tokens) for text in every]
            encoded, spans = [ids for ids, _ in both], [spans for _, spans in both]
        elif split_special_tokens:
            encoded = [self._encode_parts([text]) for text in every]
        else:
            encoded = self._encode_texts(every)
        rows, row_spans, masks = [], [], []
        second = len(texts)
        for first, pair in enumerate(pairs):
            ids, pair_ids, own_spans = encoded[first], None, spans[first]
            if pair is not None:
                pair_ids, own_spans = encoded[second], own_spans + spans[second]
                second += 1
            options = (add_special_tokens, truncation, max_length)
            if not (with_spans or with_mask):
                rows.append(self._assemble(ids, pair_ids, *options))
                continue
            places = self._assemble(*_placeholders(ids, pair_ids), *options)
            own = ids + (pair_ids or [])
            rows.append([own[-1 - i] if i < 0 else i for i in places])
            masks.append([int(i >= 0) for i in places])
            if with_spans:
                row_spans.append([own_spans[-1 - i] if i < 0 else (0, 0) for i in places])
        return ListEncoding(
            rows,
            offset_mapping=row_spans if with_spans else None,
            special_tokens_mask=masks if with_mask else None,
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
        ids = self._add_special_tokens(*_placeholders(*tokens))
        return [everything[-1 - i] if i < 0 else str(self.id_to_token(i)) for i in ids]

    def encode_beginning(self, text: str, *, max_bytes: int = MAX_TEXT_BYTES) -> list[int]:
        """Encodes a text that will be continued. The tokenizer's special tokens before a text (BOS)
        are added; its special tokens after a text (EOS) are left out.

        Raises:
            UnsupportedError: the tokenizer's template of special tokens has no place for a text.
        """
        own = self._encode(text, add_special_tokens=False, max_bytes=max_bytes)
        places = self._add_special_tokens([-1], None)
        if -1 not in places:
            raise UnsupportedError(
                "the tokenizer's template of special tokens leaves the text out, so no text can "
                "be continued; correct the post_processor of tokenizer.json"
            )
        return places[: places.index(-1)] + own

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
        """
        text = self._decode(id_list(ids), skip_special_tokens)
        return CleanUp.clean(text) if self._cleans(clean_up_tokenization_spaces) else text

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes ids without any clean-up of spaces."""
        stages = self._decode_stages(skip_special_tokens)
        stream = StreamDecoder(self._token_tables[skip_special_tokens], stages)
        return stream.put_checked(ids) + stream.end()

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
        return StreamDecoder(self._token_tables[skip_special_tokens], [*stages, *clean_up])

    @cached_property
    def _token_tables(self) -> tuple[TokenTable, TokenTable]:
        """What the stages get for each id, with special tokens and without."""
        tokens = self._stage_tokens()
        kept = [None if i in self.special_ids else token for i, token in enumerate(tokens)]
        return TokenTable(tokens), TokenTable(kept)

    def _stage_tokens(self) -> Sequence[str | None]:
        """The string for each id with which the stages of `_decode_stages` begin."""
        return self._tokens_by_id

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

        tokens = self._stage_tokens()
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


def _placeholders(
    first: Sequence[object], second: Sequence[object] | None = None
) -> tuple[list[int], list[int] | None]:
    """Numbers below zero for the tokens of one or two texts: -1 - n for token n of both."""
    numbers = [-1 - number for number in range(len(first) + len(second or ()))]
    return numbers[: len(first)], None if second is None else numbers[len(first) :]
