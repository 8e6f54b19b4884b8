"""Checks a tokenizer.json before the Rust library parses it.

On malicious files that library panics, aborts the process (a padding length of 2**40) or hangs. So
every component must be in a table of known ones, the vocabulary must have each of the ids 0..V-1
once, and merges must be within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.common.errors import TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.limits import MAX_TOKEN_BYTES
from jaxllm.tokenizers.settings import parse_added_token
from jaxllm.tokenizers.tokenizer_json.components import as_object, check_component, is_count

# Memory while it is loaded: about 700 bytes for a token or a merge, 250 for a prefix of a piece.
MAX_VOCABULARY = 2**19
MAX_BPE_ENTRIES = 11 * 2**16
"""Tokens and merges of a BPE model; 408,000 in Llama 3's."""
MAX_PREFIXES = 5 * 2**18
"""Different prefixes of the pieces of a Unigram model, in bytes; about three for a piece."""
# Unigram compares each position of a text with pieces up to the longest; sentencepiece's have 64.
MAX_PIECE_BYTES = 128
_TOP_LEVEL = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}
_MODEL_FIELDS = {
    "BPE": {
        "type",
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
        "vocab",
        "merges",
    },
    "Unigram": {"type", "unk_id", "vocab", "byte_fallback"},
}


def check_tokenizer_json(spec: object, source: str) -> dict[str, Any]:
    """Checks a tokenizer.json; returns it without padding and truncation, which callers control.

    Args:
        spec: the parsed JSON.
        source: name of the file, for messages.

    Raises:
        TokenizerError: the file is inconsistent, or is not a tokenizer.json.
        UnsupportedError: a component that no supported tokenizer has.
    """
    if not isinstance(spec, dict):
        raise TokenizerError(f"{source}: holds {type(spec).__name__}, not an object")
    unknown = set(spec) - _TOP_LEVEL
    if unknown:
        raise TokenizerError(f"{source}: unknown fields {quoted(sorted(unknown))}")
    model = as_object(spec.get("model"), f"{source}: model")
    vocabulary = _check_model(model, f"{source}: model")
    added = spec.get("added_tokens")
    added = [] if added is None else added
    size = _check_added_tokens(added, vocabulary, f"{source}: added_tokens")
    for section in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if spec.get(section) is not None:
            check_component(section, spec[section], f"{source}: {section}", size)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **{k: spec.get(k) for k in ("normalizer", "pre_tokenizer", "post_processor", "decoder")},
        "model": model,
    }


def _check_model(model: dict[str, Any], source: str) -> dict[str, int]:
    """Checks the model; returns its vocabulary (ids by token)."""
    # Files from before 2020 have no type; as in the library, the fields decide.
    model_type = model.get("type", "BPE" if "merges" in model else "Unigram")
    if not isinstance(model_type, str) or model_type not in _MODEL_FIELDS:
        raise UnsupportedError(
            f"{source}: type is {quoted(model_type)}; supported are {sorted(_MODEL_FIELDS)}"
        )
    model["type"] = model_type
    unknown = set(model) - _MODEL_FIELDS[model_type]
    if unknown:
        raise TokenizerError(f"{source}: unknown fields {quoted(sorted(unknown))}")
    for name in ("fuse_unk", "byte_fallback", "ignore_merges"):
        if name in model:
            if model[name] is None:
                del model[name]
            elif not isinstance(model[name], bool):
                raise TokenizerError(
                    f"{source}: {name} is {quoted(model[name])}, not true or false"
                )
    if model_type == "BPE":
        vocabulary, longest = _check_bpe(model, source), MAX_TOKEN_BYTES
    else:
        vocabulary, longest = _check_unigram(model, source), MAX_PIECE_BYTES
    _check_lengths(vocabulary, longest, f"{source}: vocab")
    if model_type == "Unigram" and _count_prefixes(vocabulary) > MAX_PREFIXES:
        raise TokenizerError(
            f"{source}: vocab: the pieces have more than {MAX_PREFIXES} different beginnings"
        )
    return vocabulary


def _check_bpe(model: dict[str, Any], source: str) -> dict[str, int]:
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedError(f"{source}: {name} is {quoted(model[name])}; it must be null")
    vocabulary = as_object(model.get("vocab"), f"{source}: vocab")
    _check_ids(list(vocabulary.values()), f"{source}: vocab")
    unknown = model.get("unk_token")
    if unknown not in (None, "") and not (isinstance(unknown, str) and unknown in vocabulary):
        raise TokenizerError(
            f"{source}: unk_token is {quoted(unknown)}, which is not in the vocabulary"
        )
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{source}: merges is {type(merges).__name__}, not a list")
    if len(vocabulary) + len(merges) > MAX_BPE_ENTRIES:
        raise TokenizerError(
            f"{source}: {len(vocabulary)} tokens and {len(merges)} merges, but at most "
            f"{MAX_BPE_ENTRIES} together are taken"
        )
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        # Spelled out: all() over two parts takes three times as long, for 300,000 merges.
        if not (type(pair) is list and len(pair) == 2 and type(pair[0]) is type(pair[1]) is str):
            raise TokenizerError(
                f"{source}: merges[{number}] is {quoted(merge)}, not a pair of tokens"
            )
        left, right = pair
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise TokenizerError(
                f"{source}: merges[{number}] is {quoted(merge)}: its parts or its result are not in"
                " the vocabulary"
            )
    return vocabulary


def _check_unigram(model: dict[str, Any], source: str) -> dict[str, int]:
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not pieces:
        raise TokenizerError(f"{source}: vocab is not a list of pieces with scores")
    if len(pieces) > MAX_VOCABULARY:
        raise TokenizerError(
            f"{source}: {len(pieces)} tokens, but at most {MAX_VOCABULARY} are taken"
        )
    vocabulary: dict[str, int] = {}
    for number, entry in enumerate(pieces):
        piece, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(piece, str) or not isinstance(score, int | float):
            raise TokenizerError(
                f"{source}: vocab[{number}] is {quoted(entry)}, not [piece, score]"
            )
        if not abs(score) <= 1e30:  # NaN, and integers beyond a float's range, too
            raise TokenizerError(f"{source}: vocab[{number}] has the score {quoted(score)}")
        if not piece or piece in vocabulary:
            raise TokenizerError(
                f"{source}: vocab[{number}] is {quoted(piece)}, empty or a repetition"
            )
        vocabulary[piece] = number
    unk_id = model.get("unk_id")
    if unk_id is not None and not (is_count(unk_id) and unk_id < len(pieces)):
        raise TokenizerError(
            f"{source}: unk_id is {quoted(unk_id)}, but there are {len(pieces)} pieces"
        )
    return vocabulary


def _check_added_tokens(added: object, vocabulary: Mapping[str, int], source: str) -> int:
    """Checks added tokens; returns the number of ids, including the vocabulary's."""
    if not isinstance(added, list):
        raise TokenizerError(f"{source}: {type(added).__name__}, not a list")
    ids = dict(vocabulary)
    contents = set()
    for number, value in enumerate(added):
        where = f"{source}[{number}]"
        token = parse_added_token(as_object(value, where), where, special=False)
        index = value.get("id")
        if not is_count(index) or ids.get(token.content, index) != index:
            raise TokenizerError(f"{where}: {quoted(token.content)} has the id {quoted(index)}")
        if token.content in contents:
            raise TokenizerError(f"{where}: {quoted(token.content)} is added twice")
        contents.add(token.content)
        ids[token.content] = index
    _check_ids(list(ids.values()), source, dense=True)
    return len(ids)


def _check_lengths(tokens: Iterable[str], longest: int, source: str) -> None:
    for token in tokens:
        # A character has at most four bytes.
        if len(token) * 4 > longest and len(token.encode("utf-8", "surrogatepass")) > longest:
            raise TokenizerError(
                f"{source}: the token {token[:20]!r}... has more than {longest} bytes"
            )


def _count_prefixes(tokens: Iterable[str]) -> int:
    """Number of different prefixes, in bytes: the nodes of the library's trie.

    >>> _count_prefixes(["ab", "abc", "b"])
    4
    """
    total, previous = 0, b""
    for token in sorted(token.encode("utf-8", "surrogatepass") for token in tokens):
        pairs = enumerate(zip(token, previous, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(token), len(previous)))
        total += len(token) - shared
        previous = token
    return total


def _check_ids(ids: list[Any], source: str, *, dense: bool = False) -> None:
    if len(ids) > MAX_VOCABULARY:
        raise TokenizerError(f"{source}: {len(ids)} tokens, but at most {MAX_VOCABULARY} are taken")
    # In three passes of C: is_count for each id takes five times as long.
    if not set(map(type, ids)) <= {int} or (ids and not is_count(min(ids) | max(ids))):
        wrong = next(index for index in ids if not is_count(index))
        raise TokenizerError(f"{source}: {quoted(wrong)} is not an id")
    if len(set(ids)) != len(ids):
        seen: set[int] = set()
        twice = next(index for index in ids if index in seen or seen.add(index))
        raise TokenizerError(f"{source}: two tokens have the id {twice}")
    if dense and ids and max(ids) != len(ids) - 1:
        present = set(ids)
        missing = next(index for index in range(len(ids)) if index not in present)
        raise TokenizerError(
            f"{source}: no token has the id {missing}, though ids go up to {max(ids)}"
        )
