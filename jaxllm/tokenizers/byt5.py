"""ByT5's tokenizer: the bytes of UTF-8, after three special tokens. It needs no vocabulary file."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.added_tokens import (
    TokenFinder,
    place_added_tokens,
    split_added_tokens,
    with_added_tokens,
    with_eos,
)
from jaxllm.tokenizers.files import TokenizerFiles
from jaxllm.tokenizers.settings import T5_TOKENS, AddedToken, TokenizerSettings
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.tokenizer import Tokenizer

_FIRST = ("<pad>", "</s>", "<unk>")
_SENTINELS = 125


class ByT5Tokenizer(Tokenizer):
    """Bytes as ids 3 to 258, then sentinels; ``</s>`` after a text, as in transformers 5.23.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        source: name of the settings' file, for messages.

    Raises:
        TokenizerError: the settings contradict each other.
    """

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        *,
        source: str = "tokenizer_config.json",
    ) -> None:
        settings = settings.with_defaults(**T5_TOKENS)
        if not settings.extra:
            sentinels = (AddedToken(f"<extra_id_{number}>") for number in range(_SENTINELS))
            settings = replace(settings, extra=tuple(sentinels))
        super().__init__(settings, files, "right")
        self._bytes = [chr(byte) for byte in range(256)]
        first = {
            index: AddedToken(token, lstrip=True, rstrip=True) for index, token in enumerate(_FIRST)
        }
        known = {**first, **settings.added}
        self._added = place_added_tokens([*_FIRST, *self._bytes], known, settings, source)
        self._tokens = {token.content: token for token in self._added.values()}
        self._added_ids = {token.content: index for index, token in self._added.items()}
        if self.eos_token_id is None or any(len(token) == 1 for token in self._tokens):
            raise TokenizerError(f"{source}: ByT5 needs an eos_token, and no one-character tokens")
        named = {token.content for token in (*settings.named.values(), *settings.extra)}
        self._special = {
            text: token for text, token in self._tokens.items() if token.special or text in named
        }
        self.special_ids = frozenset(self._added_ids[text] for text in self._special)
        self.vocab_size = len(self._bytes)
        self._any_added = TokenFinder(self._tokens)
        self._plain_added = TokenFinder(self._tokens.keys() - self._special.keys())

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> ByT5Tokenizer:
        """Loads a folder with tokenizer_config.json."""
        files.refuse_options((), "a ByT5Tokenizer")
        return cls(settings, files.contents, source=str(files.folder / "tokenizer_config.json"))

    def __len__(self) -> int:
        return max(len(_FIRST) + len(self._bytes), max(self._added) + 1)

    def _token_to_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        return ord(token) + len(_FIRST) if token in self._bytes else None

    def _id_or_unknown(self, token: str) -> int | None:
        return self.token_to_id(token)  # as in transformers: no text has an unknown byte

    def _id_to_token(self, index: int) -> str | None:
        if index in self._added:
            return self._added[index].content
        byte = index - len(_FIRST)
        return self._bytes[byte] if 0 <= byte < len(self._bytes) else None

    @property
    def special_tokens(self) -> Mapping[str, AddedToken]:
        return self._special

    def _rebuild(self, settings: TokenizerSettings) -> None:
        settings = replace(settings, added={**self._added, **settings.added})
        files = with_added_tokens(self._files, settings)
        self._become(ByT5Tokenizer(settings, files))

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(self._split([text], self._any_added)) for text in texts]

    def _text_tokens(self, text: str) -> list[str]:
        return self._split([text], self._any_added)

    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        return self._ids(self._split(parts, self._plain_added))

    def _split(self, parts: Sequence[str | AddedToken], finder: TokenFinder) -> list[str]:
        tokens: list[str] = []
        for item in split_added_tokens(parts, self._tokens, finder):
            if isinstance(item, AddedToken):
                tokens.append(item.content)
            else:
                tokens += [chr(byte) for byte in item.encode("utf-8")]
        return tokens

    def _ids(self, tokens: list[str]) -> list[int]:
        added, offset = self._added_ids, len(_FIRST)
        return [added[t] if t in added else ord(t) + offset for t in tokens]

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        return with_eos(ids, pair, self.eos_token_id)

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return [_Bytes()]


class _Bytes(Stage):
    """Joins byte tokens, which have one character each, and added tokens; drops invalid UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")

    def put(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(self.token_text(token)) for token in tokens]

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]

    def token_text(self, token: str) -> bytes:
        return token.encode("latin-1" if len(token) == 1 else "utf-8")
