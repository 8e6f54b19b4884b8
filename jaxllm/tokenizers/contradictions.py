"""Finds contradictions between the tokenizer files of a folder, for ``jaxllm verify``.

A folder often states the same thing twice: a sentencepiece model beside a tokenizer.json, flags of
added tokens in two files. `load_tokenizer` follows one of them, without a comparison at each start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from jaxllm.common.errors import JaxLLMError, listed, quoted
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.loading import read_tokenizer
from jaxllm.tokenizers.sentencepiece_tokenizers import SlowTokenizer
from jaxllm.tokenizers.settings import (
    NAMED_TOKENS,
    TokenizerFiles,
    added_tokens_of_json,
    read_settings,
)
from jaxllm.tokenizers.tokenizer import Tokenizer

_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TEXTS = (
    "The capital of France is Paris.",
    " a  b\n\n\tc ",
    "naïve café, Ωmega, 東京, か\u3099, \ufb01ne, 1,234.5",
    "def f(n):\n    return n - 1\n",
)
_SHOWN = 3


def contradictions(folder: str | PathLike[str]) -> list[str]:
    """Sentences about what the tokenizer files of a folder state differently; none: an empty list.

    Each names the files, what they state, and the one that `load_tokenizer` follows.
    """
    files = TokenizerFiles(Path(folder))
    files.add_class()
    return [*_of_flags(files), *_of_named_tokens(files), *_of_templates(files), *_of_ids(files)]


def _of_flags(files: TokenizerFiles) -> Iterator[str]:
    """Added tokens that tokenizer.json and tokenizer_config.json describe differently."""
    if "added_tokens_decoder" not in files.json_object("tokenizer_config.json"):
        return
    theirs = {token.content: (i, token) for i, token in added_tokens_of_json(files).items()}
    for index, token in read_settings(files).added.items():
        other, described = theirs.get(token.content, (index, token))
        if (index, token) != (other, described):
            yield (
                f"tokenizer_config.json and tokenizer.json: {quoted(token.content)} has "
                f"{_described(index, token)} and {_described(other, described)}; "
                "tokenizer_config.json decides about flags"
            )


def _described(index: int, token: AddedToken) -> str:
    flags = [name for name, value in vars(token).items() if value is True]
    return f"the id {index} with {listed(flags) or 'no flags'}"


def _of_named_tokens(files: TokenizerFiles) -> Iterator[str]:
    """Named tokens that special_tokens_map.json and tokenizer_config.json name differently."""
    config = files.json_object("tokenizer_config.json")
    named = files.json_object("special_tokens_map.json")
    decides = "tokenizer_config" if "added_tokens_decoder" in config else "special_tokens_map"
    for name in NAMED_TOKENS:
        texts = [_text(table[name]) for table in (config, named) if table.get(name) is not None]
        if len(set(texts)) > 1:
            yield (
                f"tokenizer_config.json and special_tokens_map.json: {name} is {quoted(texts[0])} "
                f"and {quoted(texts[1])}; {decides}.json decides"
            )


def _text(token: object) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _of_templates(files: TokenizerFiles) -> Iterator[str]:
    template = files.json_object("tokenizer_config.json").get("chat_template")
    if "chat_template.jinja" not in files or not isinstance(template, str):
        return
    if template != files.text("chat_template.jinja"):
        yield (
            "tokenizer_config.json and chat_template.jinja: they have different chat templates; "
            "chat_template.jinja decides"
        )


def _of_ids(files: TokenizerFiles) -> Iterator[str]:
    """Tokens and texts to which tokenizer.json and a sentencepiece model give different ids."""
    model = next((name for name in _MODELS if name in files), None)
    if model is None or "tokenizer.json" not in files:
        return
    readers: dict[str, Tokenizer] = {}
    for name, left_out in (("tokenizer.json", model), (model, "tokenizer.json")):
        alone = copy.copy(files)
        alone.contents = {key: x for key, x in files.contents.items() if key != left_out}
        try:
            tokenizer = read_tokenizer(alone, read_settings(alone))
        except JaxLLMError as error:
            yield f"{name}: cannot be read without {left_out} ({error})"
            return
        assert tokenizer is not None
        readers[name] = tokenizer
    own = read_tokenizer(files, read_settings(files))
    decides = model if isinstance(own, SlowTokenizer) else "tokenizer.json"
    first, second = readers.values()
    where, ending = f"{' and '.join(readers)}: ", f"; {decides} decides"
    ids, others = first.get_vocab(), second.get_vocab()
    differing = [token for token in ids if others.get(token, ids[token]) != ids[token]]
    if differing:
        some = [f"{quoted(t)} has the ids {ids[t]} and {others[t]}" for t in differing[:_SHOWN]]
        yield f"{where}{len(differing)} tokens have different ids: {'; '.join(some)}{ending}"
    missing = [token for token in ids if token not in others]
    missing += [token for token in others if token not in ids]
    if missing:
        some = listed([quoted(token) for token in missing[:_SHOWN]])
        yield f"{where}{len(missing)} tokens are in one of them alone: {some}{ending}"
    special = next((token for token in first.special_tokens if token != first.unk_token), "")
    for text in (*_TEXTS, f"The{special}The {special} [a]"):
        tokens = [each.tokenize(text) for each in (first, second)]
        if tokens[0] != tokens[1]:
            yield f"{where}{quoted(text)} is {quoted(tokens[0])} and {quoted(tokens[1])}{ending}"
