"""Tokenizers whose ids are the bytes of UTF-8; they need no vocabulary file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.sentencepiece_tokenizers import (
    SlowTokenizer,
    extra_ids,
    listed_sentinels,
    with_eos,
)
from jaxllm.tokenizers.settings import (
    T5_TOKENS,
    NamedTokens,
    TokenizerFiles,
    TokenizerSettings,
)
from jaxllm.tokenizers.stream_decoder import Stage, Utf8, byte_to_unicode
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json import BYTE_LEVEL, FastTokenizer

END, PAD = "<|endoftext|>", "<|pad|>"
_FIRST = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_SENTINELS = 125


def byte_tokenizer() -> FastTokenizer:
    """Makes a byte tokenizer, with ids 0 to 255 for bytes.

    Id 256 is ``<|endoftext|>`` (BOS and EOS), 257 is ``<|pad|>``. It is GPT-2's byte-level BPE
    without merges; its saved tokenizer.json loads in jaxllm and transformers.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169]), len(tokenizer)
    ([110, 195, 169], 'né', 258)
    """
    spec = {
        "added_tokens": [],
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": False},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {character: byte for byte, character in byte_to_unicode().items()},
            "merges": [],
        },
    }
    end = AddedToken(END)
    named = {"bos_token": end, "eos_token": end, "pad_token": AddedToken(PAD)}
    return FastTokenizer(spec, TokenizerSettings(named=named))


def ids_are_bytes(tokenizer: Tokenizer) -> bool:
    """True if a tokenizer's ids 0 to 255 are the bytes 0 to 255."""
    return tokenizer.token_bytes()[:256] == tuple(bytes([byte]) for byte in range(256))


class ByT5Tokenizer(SlowTokenizer):
    """Bytes as ids 3 to 258, then sentinels; ``</s>`` after a text.

    The option ``extra_ids`` (tokenizer_config.json) is the number of sentinels (125). ``<pad>``,
    ``</s>`` and ``<unk>`` strip the white space around them where no file states their flags.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        source: name of the settings' file, for messages.
    """

    default_tokens: ClassVar[NamedTokens] = {
        name: AddedToken(token, lstrip=True, rstrip=True) for name, token in T5_TOKENS.items()
    }

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str = "tokenizer_config.json",
    ) -> None:
        settings = settings.with_defaults(**self.default_tokens)
        if not listed_sentinels(settings, count := extra_ids(settings, _SENTINELS)):
            sentinels = [f"<extra_id_{number}>" for number in range(count)]
            settings = settings.with_extra(sentinels, first=True)
        first = dict(enumerate(self._first_tokens(settings)))
        super().__init__(
            *(settings, files, "right"),
            pieces=[*map(str, first.values()), *map(chr, range(256))],
            known={**first, **settings.added},
            source=source,
        )
        if self.eos_token_id is None or any(len(token) == 1 for token in self._tokens):
            raise TokenizerError(f"{source}: ByT5 needs an eos_token, and no one-character tokens")
        self.vocab_size = 256
        self._unknown_id = -1  # no text has an unknown byte

    @staticmethod
    def _first_tokens(settings: TokenizerSettings) -> Iterator[AddedToken]:
        """The tokens before the bytes: padding, end, unknown, by whatever texts they are named."""
        named = {token.content: token for token in settings.named.values()}
        for name, text in _FIRST.items():
            token = settings.named.get(name, AddedToken(text))
            is_other = token.content != text and token.content in _FIRST.values()
            yield named.get(text, AddedToken(text)) if is_other else token

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> ByT5Tokenizer:
        """Loads a folder with tokenizer_config.json."""
        files.refuse_options((), "a ByT5Tokenizer")
        return cls(settings, files.contents, source=str(files.folder / "tokenizer_config.json"))

    @classmethod
    def ids_version(cls, files: Collection[str]) -> int:
        return 2

    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> ByT5Tokenizer:
        return ByT5Tokenizer(settings, files)

    def _id_or_unknown(self, token: str) -> int | None:
        return self.token_to_id(token)  # as in transformers: no text has an unknown byte

    def _tokenize(self, text: str) -> list[str]:
        return list(text.encode("utf-8").decode("latin-1"))

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        return with_eos(ids, pair, self.eos_token_id)

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return [Utf8(_bytes_of, "ignore")]

    def _stage_tokens(self) -> Sequence[str | None]:
        return self._tokens_by_id


def _bytes_of(token: str) -> bytes:
    """The byte of a token of one character; the text of an added token in UTF-8."""
    return token.encode("latin-1" if len(token) == 1 else "utf-8")
