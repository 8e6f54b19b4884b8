"""Finds contradictions between the tokenizer files of a folder, for ``jaxllm verify``.

A folder often states the same thing twice: a sentencepiece model beside a tokenizer.json, flags of
added tokens in two files. `load_tokenizer` follows one of them, without a comparison at each start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.errors import UnsupportedError, quoted
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.loading import read_tokenizer
from jaxllm.tokenizers.sentencepiece_tokenizers import SlowTokenizer
from jaxllm.tokenizers.settings import (
    NAMED_TOKENS,
    TokenizerFiles,
    added_tokens_of_json,
    read_settings,
)

_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TEXTS = (
    "The capital of France is Paris.",
    " a  b\n\n\tc ",
    "naïve café, Ωmega, 東京, か\u3099, \ufb01ne, 1,234.5",
    "def f(n):\n    return n - 1\n",
)
_SHOWN = 4
Statements = Mapping[str, Any]
"""A file's statements about tokens, names of tokens or texts, by their subject."""


def contradictions(folder: str | PathLike[str]) -> list[str]:
    """Sentences about what the tokenizer files of a folder state differently; none: an empty list.

    Each names the files, what they state, and the one that `load_tokenizer` follows.
    """
    files = TokenizerFiles(Path(folder))
    files.add_class()
    found: list[str] = []
    for (first, second), decides in (*_of_settings(files), *_of_vocabularies(files)):
        (name, own), (other_name, others) = first, second
        differing = [each for each in own if each in others and own[each] != others[each]]
        for each in differing[:_SHOWN]:
            found.append(
                f"{name} and {other_name}: {quoted(each)} is {quoted(own[each])} and "
                f"{quoted(others[each])}; {decides} decides"
            )
        if (more := len(differing) - _SHOWN) > 0:
            found.append(f"{name} and {other_name}: {more} other contradictions")
    return found


Pair = tuple[tuple[tuple[str, Statements], tuple[str, Statements]], str]
"""What two files state, each with its name, and the name of the one that decides."""


def _of_settings(files: TokenizerFiles) -> Iterator[Pair]:
    """Flags of added tokens, named tokens and chat templates."""
    name, other = "tokenizer_config.json", "special_tokens_map.json"
    config, named = files.json_object(name), files.json_object(other)
    if "added_tokens_decoder" in config:
        own = _described(read_settings(files).added)
        yield ((name, own), ("tokenizer.json", _described(added_tokens_of_json(files)))), name
    tables = ({key: _text(x[key]) for key in NAMED_TOKENS if x.get(key)} for x in (config, named))
    first, second = tables
    yield ((name, first), (other, second)), name if "added_tokens_decoder" in config else other
    if "chat_template.jinja" in files and isinstance(config.get("chat_template"), str):
        text = {"chat_template": files.text("chat_template.jinja")}
        template = {"chat_template": config["chat_template"]}
        yield ((name, template), ("chat_template.jinja", text)), "chat_template.jinja"


def _text(token: object) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _described(added: Mapping[int, AddedToken]) -> dict[str, str]:
    return {
        token.content: ", ".join(
            [f"id {i}", *(key for key, on in vars(token).items() if on is True)]
        )
        for i, token in added.items()
    }


def _of_vocabularies(files: TokenizerFiles) -> Iterator[Pair]:
    """Ids of tokens, and the tokens of some texts, by tokenizer.json and a sentencepiece model."""
    model = next((name for name in _MODELS if name in files), None)
    if model is None or "tokenizer.json" not in files:
        return
    own = read_tokenizer(files, read_settings(files))
    try:
        read = [_read_without(files, name) for name in (model, "tokenizer.json")]
    except UnsupportedError:  # the folder's class reads one of them alone, so nothing is compared
        return
    special = next((token for token in read[0].special_tokens if token != read[0].unk_token), "")
    texts = (*_TEXTS, f"The{special}The {special} [a]")
    first, second = ({**x.get_vocab(), **{t: x.tokenize(t) for t in texts}} for x in read)
    decides = model if isinstance(own, SlowTokenizer) else "tokenizer.json"
    yield (("tokenizer.json", first), (model, second)), decides


def _read_without(files: TokenizerFiles, name: str) -> Any:
    """The tokenizer of a folder's files without one of them."""
    alone = copy.copy(files)
    alone.contents = {key: content for key, content in files.contents.items() if key != name}
    return read_tokenizer(alone, read_settings(alone))
