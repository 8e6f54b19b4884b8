"""Loads an untrusted sentencepiece model; errors are raised as TokenizerError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sentencepiece

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.sentencepiece.proto import read_normalizer_flags

T = TypeVar("T")


class SentencePieceModel:
    """A sentencepiece model: holds its pieces, and splits text into them.

    Attributes:
        pieces: all pieces, by id.
        unk_piece: the unknown piece.
        unk_text: decoded text of the unknown piece.
        control: control pieces, such as ``<s>``.
        bytes: byte pieces.
        flags: options of the normaliser for spaces.

    Raises:
        TokenizerError: the bytes are not a usable model.
    """

    def __init__(self, model: bytes, source: str) -> None:
        self._source = source
        self.flags = read_normalizer_flags(model, source)
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        self._guard(lambda: processor.LoadFromSerializedProto(model))
        ids = range(processor.get_piece_size())
        if processor.unk_id() not in ids:
            raise TokenizerError(f"{source}: the model has no unknown piece")
        self.pieces: list[str] = self._guard(lambda: [processor.id_to_piece(i) for i in ids])
        self.vocabulary = frozenset(self.pieces)
        self.unk_piece = self.pieces[processor.unk_id()]
        self.unk_text: str = self._guard(lambda: processor.decode_pieces([self.unk_piece]))
        self.control = frozenset(self.pieces[i] for i in ids if processor.is_control(i))
        self.bytes = frozenset(self.pieces[i] for i in ids if processor.is_byte(i))

    def encode(self, text: str) -> list[str]:
        """Splits text into pieces; a run of unknown characters is a piece without an id."""
        return self._guard(lambda: self._processor.encode(text, out_type=str))

    def piece_to_id(self, piece: str) -> int:
        """The id of a piece; the unknown piece's id for any other string."""
        return self._processor.piece_to_id(piece)

    def fixed_text(self, piece: str) -> str | None:
        """The text of a control, unknown or foreign piece (whose ``▁`` is not a space), or None."""
        if piece in self.control:
            return ""
        if piece == self.unk_piece:
            return self.unk_text
        return None if piece in self.vocabulary else piece

    def _guard(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (RuntimeError, OSError, ValueError, TypeError) as failure:  # including invalid UTF-8
            raise TokenizerError(
                f"{self._source}: not a sentencepiece model ({failure})"
            ) from failure
