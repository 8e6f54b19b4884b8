"""Checks a tokenizer.json before the Rust library parses it.

On hostile files that library panics, aborts the process (a padding length of 2**40) or hangs. So
every component is compared with the table below, which lists what the tokenizers of known models
are made of, and the vocabulary is checked to be one: ids 0..V-1, each once, and merges inside it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers.regex_check import check_regex
from jaxllm.tokenizers.settings import parse_added_token

MAX_VOCABULARY = 2**24
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
_BYTE_LEVEL = {"add_prefix_space": bool, "trim_offsets": bool, "use_regex": bool}
_METASPACE = {
    "replacement": "character",
    "prepend_scheme": ("first", "always", "never"),
    "add_prefix_space": bool,
    "split": bool,
}
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
# Component -> its fields and their types. A tuple lists the allowed values, a string names one of
# the checks below; every field may be left out unless _REQUIRED says otherwise.
_COMPONENTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "normalizer": {
        "Sequence": {"normalizers": "list"},
        "Prepend": {"prepend": "text"},
        "Replace": {"pattern": "pattern", "content": str},
        "NFC": {},
        "NFD": {},
        "NFKC": {},
        "NFKD": {},
        "Lowercase": {},
        "Strip": {"strip_left": bool, "strip_right": bool},
        "StripAccents": {},
        "Precompiled": {"precompiled_charsmap": "charsmap"},
    },
    "pre_tokenizer": {
        "Sequence": {"pretokenizers": "list"},
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Split": {"pattern": "pattern", "behavior": _BEHAVIORS, "invert": bool},
        "Digits": {"individual_digits": bool},
        "Punctuation": {"behavior": _BEHAVIORS},
        "Whitespace": {},
        "WhitespaceSplit": {},
    },
    "post_processor": {
        "Sequence": {"processors": "list"},
        "ByteLevel": _BYTE_LEVEL,
        "TemplateProcessing": {"single": "template", "pair": "template", "special_tokens": dict},
    },
    "decoder": {
        "Sequence": {"decoders": "list"},
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Replace": {"pattern": "string_pattern", "content": str},
        "ByteFallback": {},
        "Fuse": {},
        "Strip": {"content": "character", "start": "count", "stop": "count"},
    },
}
_REQUIRED = {
    "Prepend": {"prepend"},
    "Replace": {"pattern", "content"},
    "Precompiled": {"precompiled_charsmap"},
    "Metaspace": {"replacement"},
    "Split": {"pattern", "behavior"},
    "TemplateProcessing": {"single", "pair", "special_tokens"},
    "Strip": set(),
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


def check_tokenizer_json(spec: Any, source: str) -> dict[str, Any]:
    """The same tokenizer, without padding and truncation, which are the caller's business.

    Args:
        spec: What ``json.loads`` made of the file.
        source: Name of the file, for messages.

    Raises:
        TokenizerError: The file contradicts itself, or is no tokenizer.json.
        UnsupportedError: A component that none of the supported tokenizers has.
    """
    if not isinstance(spec, dict):
        raise TokenizerError(f"{source}: holds {type(spec).__name__}, not an object")
    unknown = set(spec) - _TOP_LEVEL
    if unknown:
        raise TokenizerError(f"{source}: unknown fields {sorted(unknown)}")
    model = _object(spec.get("model"), f"{source}: model")
    vocabulary = _check_model(model, f"{source}: model")
    added = spec.get("added_tokens")
    _check_added_tokens([] if added is None else added, vocabulary, f"{source}: added_tokens")
    for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if spec.get(kind) is not None:
            _check_component(kind, spec[kind], f"{source}: {kind}", vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added or [],
        **{k: spec.get(k) for k in ("normalizer", "pre_tokenizer", "post_processor", "decoder")},
        "model": model,
    }


def _check_model(model: dict[str, Any], source: str) -> dict[str, int]:
    """The vocabulary, from token to id."""
    # Files of before 2020 name no type; the library guesses it from the fields, and so do we.
    kind = model.get("type", "BPE" if "merges" in model else "Unigram")
    if kind not in _MODEL_FIELDS:
        raise UnsupportedError(f"{source}: type is {kind!r}; supported are {sorted(_MODEL_FIELDS)}")
    model["type"] = kind
    unknown = set(model) - _MODEL_FIELDS[kind]
    if unknown:
        raise TokenizerError(f"{source}: unknown fields {sorted(unknown)}")
    for name in ("fuse_unk", "byte_fallback", "ignore_merges"):
        if name in model:
            if model[name] is None:
                del model[name]
            elif not isinstance(model[name], bool):
                raise TokenizerError(f"{source}: {name} is {model[name]!r}, not true or false")
    return _check_bpe(model, source) if kind == "BPE" else _check_unigram(model, source)


def _check_bpe(model: dict[str, Any], source: str) -> dict[str, int]:
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedError(f"{source}: {name} is {model[name]!r}; it must be null")
    vocabulary = _object(model.get("vocab"), f"{source}: vocab")
    _check_ids(list(vocabulary.values()), f"{source}: vocab")
    unknown = model.get("unk_token")
    if unknown not in (None, "") and not (isinstance(unknown, str) and unknown in vocabulary):
        raise TokenizerError(f"{source}: unk_token is {unknown!r}, which is not in the vocabulary")
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{source}: merges is {type(merges).__name__}, not a list")
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(p) is str for p in pair)):
            raise TokenizerError(f"{source}: merges[{number}] is {merge!r}, not a pair of tokens")
        left, right = pair
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise TokenizerError(
                f"{source}: merges[{number}] is {merge!r}: its parts or its result are not in"
                " the vocabulary"
            )
    return vocabulary


def _check_unigram(model: dict[str, Any], source: str) -> dict[str, int]:
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not pieces:
        raise TokenizerError(f"{source}: vocab is not a list of pieces with scores")
    vocabulary: dict[str, int] = {}
    for number, entry in enumerate(pieces):
        piece, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(piece, str) or not isinstance(score, int | float):
            raise TokenizerError(f"{source}: vocab[{number}] is {entry!r}, not [piece, score]")
        if not math.isfinite(score) or abs(score) > 1e30:
            raise TokenizerError(f"{source}: vocab[{number}] has the score {score!r}")
        if not piece or piece in vocabulary:
            raise TokenizerError(f"{source}: vocab[{number}] is {piece!r}, empty or a repetition")
        vocabulary[piece] = number
    unk_id = model.get("unk_id")
    if unk_id is not None and not (_is_count(unk_id) and unk_id < len(pieces)):
        raise TokenizerError(f"{source}: unk_id is {unk_id!r}, but there are {len(pieces)} pieces")
    return vocabulary


def _check_added_tokens(added: Any, vocabulary: Mapping[str, int], source: str) -> None:
    if not isinstance(added, list):
        raise TokenizerError(f"{source}: {type(added).__name__}, not a list")
    ids = dict(vocabulary)
    contents = set()
    for number, value in enumerate(added):
        where = f"{source}[{number}]"
        token = parse_added_token(_object(value, where), where, special=False)
        index = value.get("id")
        if not _is_count(index) or ids.get(token.content, index) != index:
            raise TokenizerError(f"{where}: {token.content!r} has the id {index!r}")
        if token.content in contents:
            raise TokenizerError(f"{where}: {token.content!r} is added twice")
        contents.add(token.content)
        ids[token.content] = index
    _check_ids(list(ids.values()), source, dense=True)


def _check_ids(ids: list[Any], source: str, *, dense: bool = False) -> None:
    if len(ids) > MAX_VOCABULARY:
        raise TokenizerError(f"{source}: {len(ids)} tokens, but at most {MAX_VOCABULARY} are taken")
    for index in ids:
        if not _is_count(index):
            raise TokenizerError(f"{source}: {index!r} is no id")
    if len(set(ids)) != len(ids):
        seen: set[int] = set()
        twice = next(index for index in ids if index in seen or seen.add(index))
        raise TokenizerError(f"{source}: two tokens have the id {twice}")
    if dense and ids and max(ids) != len(ids) - 1:
        missing = next(index for index in range(len(ids)) if index not in set(ids))
        raise TokenizerError(
            f"{source}: no token has the id {missing}, though ids go up to {max(ids)}"
        )


def _check_component(kind: str, value: Any, source: str, vocabulary: Mapping[str, int]) -> None:
    component = _object(value, source)
    name = component.get("type")
    if not isinstance(name, str) or name not in _COMPONENTS[kind]:
        raise UnsupportedError(
            f"{source}: type is {name!r}; supported are {sorted(_COMPONENTS[kind])}"
        )
    fields = _COMPONENTS[kind][name]
    where = f"{source}: {name}"
    # Files of before 2023 spell Metaspace's replacement a second time.
    unknown = set(component) - {"type", *fields} - ({"str_rep"} if name == "Metaspace" else set())
    if unknown:
        raise TokenizerError(f"{where} has the unknown fields {sorted(unknown)}")
    missing = _REQUIRED.get(name, set(fields)) - set(component)
    if missing:
        raise TokenizerError(f"{where} lacks the fields {sorted(missing)}")
    if name == "Metaspace" and component.get("str_rep") not in (None, component["replacement"]):
        raise TokenizerError(f"{where}: str_rep and replacement differ")
    for field, rule in fields.items():
        if field not in component:
            continue
        if rule == "list":
            _check_list(kind, component[field], f"{where}.{field}", vocabulary)
        else:
            _check_field(rule, component[field], f"{where}.{field}")
    if name == "TemplateProcessing":
        _check_template_tokens(component, where, vocabulary)


def _check_list(kind: str, value: Any, source: str, vocabulary: Mapping[str, int]) -> None:
    if not isinstance(value, list) or len(value) > 64:
        raise TokenizerError(f"{source}: not a list of at most 64 components")
    for number, item in enumerate(value):
        if isinstance(item, dict) and item.get("type") == "Sequence":
            raise UnsupportedError(f"{source}[{number}]: a Sequence inside a Sequence")
        _check_component(kind, item, f"{source}[{number}]", vocabulary)


def _check_field(rule: Any, value: Any, source: str) -> None:
    if isinstance(rule, tuple):
        valid = value in rule
    elif isinstance(rule, type):
        valid = isinstance(value, rule)
    elif rule == "character":
        valid = isinstance(value, str) and len(value) == 1
    elif rule == "text":
        valid = isinstance(value, str) and 0 < len(value) <= 64
    elif rule == "count":
        valid = _is_count(value)
    elif rule == "template":
        valid = isinstance(value, list) and len(value) <= 64
    elif rule == "charsmap":
        valid = _is_charsmap(value)
    else:
        return _check_pattern(value, source, regex_allowed=rule == "pattern")
    if not valid:
        raise TokenizerError(f"{source} is {str(value)[:80]!r}, which is not allowed there")


def _check_pattern(value: Any, source: str, *, regex_allowed: bool) -> None:
    pattern = _object(value, source)
    (kind, text), *others = pattern.items() or [(None, None)]
    if others or kind not in ("String", "Regex") or not isinstance(text, str) or not text:
        raise TokenizerError(f'{source}: neither {{"String": ...}} nor {{"Regex": ...}}')
    if kind == "Regex":
        if not regex_allowed:
            raise UnsupportedError(f"{source}: a regular expression in a decoder")
        check_regex(text, source)


def _is_charsmap(value: Any) -> bool:
    """sentencepiece's table of normalisations: a trie, its size in bytes before it, and strings."""
    try:
        blob = base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return False
    size = int.from_bytes(blob[:4], "little")
    return len(blob) > 4 and size % 4 == 0 and 0 < size <= len(blob) - 4


def _check_template_tokens(
    component: dict[str, Any], source: str, vocabulary: Mapping[str, int]
) -> None:
    tokens = component["special_tokens"]
    for name, entry in tokens.items():
        where = f"{source}: special_tokens[{name!r}]"
        entry = _object(entry, where)
        ids, texts = entry.get("ids"), entry.get("tokens")
        if set(entry) != {"id", "ids", "tokens"} or entry["id"] != name:
            raise TokenizerError(f"{where}: not an entry named {name!r} with ids and tokens")
        if not (isinstance(ids, list) and isinstance(texts, list) and len(ids) == len(texts) <= 64):
            raise TokenizerError(f"{where}: ids and tokens are not lists of one length")
        if not all(map(_is_count, ids)) or not all(isinstance(text, str) for text in texts):
            raise TokenizerError(f"{where}: ids {ids!r} and tokens {texts!r}")
    for field, sequences in (("single", {"A"}), ("pair", {"A", "B"})):
        for number, piece in enumerate(component[field]):
            where = f"{source}.{field}[{number}]"
            (kind, value), *others = _object(piece, where).items() or [(None, None)]
            allowed = {"Sequence": sequences, "SpecialToken": set(tokens)}.get(str(kind), set())
            value = _object(value, where)
            name, type_id = value.get("id"), value.get("type_id")
            if others or not isinstance(name, str) or name not in allowed:
                raise TokenizerError(f"{where}: {piece!r} names no sequence or special token")
            if not _is_count(type_id) or set(value) != {"id", "type_id"}:
                raise TokenizerError(f"{where}: type_id is {type_id!r}")


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {type(value).__name__}, not an object")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
