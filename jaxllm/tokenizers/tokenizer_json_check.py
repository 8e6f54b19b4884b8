"""Checks a tokenizer.json before the Rust library parses it.

On malicious files that library panics, aborts the process (a padding length of 2**40) or hangs. So
the vocabulary must have each of the ids 0..V-1 once, merges must be within it, and every component
(normalizer, pre-tokenizer, post-processor, decoder) must be in a table of known ones: the library
accepts others, but their behaviour on malicious files has not been reviewed.

A file of a kilobyte can turn a short prompt into gigabytes, for example with eight normalizers that
replace "a" by ten of them. So it is computed how much longer the file makes a text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.added_tokens import tokens_of_list

MAX_TOKEN_BYTES = 1024
MAX_NORMALIZER_GROWTH = 1024
MAX_NORMALIZED_BYTES = 2**20
MAX_DECODER_GROWTH = 8
# Bytes of UTF-8 that a normalizer can make of one byte, over all of Unicode.
_UNICODE_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2}
TWO_SPACES = " {2,}"
"""Regular expression of T5's normalizer, which matches no empty string."""
# Memory while it is loaded: about 700 bytes for a token or a merge, 250 for a prefix of a piece.
MAX_VOCABULARY = 2**19
MAX_BPE_ENTRIES = 11 * 2**16
"""Tokens and merges of a BPE model; 408,000 in Llama 3's."""
MAX_PREFIXES = 5 * 2**18
"""Different prefixes of the pieces of a Unigram model, in bytes; about three for a piece."""
# Unigram compares each position of a text with pieces up to the longest; sentencepiece's have 64.
MAX_PIECE_BYTES = 128
_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TOP_LEVEL = {"version", "truncation", "padding", "added_tokens", "model", *_SECTIONS}
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_FLAGS = ("fuse_unk", "byte_fallback", "ignore_merges")
_MODEL_FIELDS = {
    "BPE": {"type", "dropout", "unk_token", "vocab", "merges", *_AFFIXES, *_FLAGS},
    "Unigram": {"type", "unk_id", "vocab", "byte_fallback"},
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
# the checks below. Only fields in _OPTIONAL may be missing.
_COMPONENTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "normalizer": {
        "Sequence": {"normalizers": "list"},
        "Prepend": {"prepend": "text"},
        "Replace": {"pattern": "pattern", "content": str},
        "NFC": {},
        "NFD": {},
        "NFKC": {},
        "NFKD": {},
        "Nmt": {},
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
        "RobertaProcessing": {
            "sep": "token",
            "cls": "token",
            "trim_offsets": bool,
            "add_prefix_space": bool,
        },
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
_OPTIONAL = {
    "ByteLevel": {"use_regex"},
    "Metaspace": {"prepend_scheme", "add_prefix_space", "split"},
}
_IS_VALUE = 1 << 31


def check_tokenizer_json(spec: object, source: str) -> dict[str, Any]:
    """Checks a tokenizer.json; returns it without padding and truncation, which callers control.

    Args:
        spec: the parsed JSON.
        source: name of the file, for messages.
    """
    if not isinstance(spec, dict):
        raise TokenizerError(f"{source}: holds {type(spec).__name__}, not an object")
    unknown = set(spec) - _TOP_LEVEL
    if unknown:
        raise TokenizerError(f"{source}: unknown fields {quoted(sorted(unknown))}")
    model = _as_object(spec.get("model"), f"{source}: model")
    vocabulary = _check_model(model, f"{source}: model")
    added = spec.get("added_tokens")
    added = [] if added is None else added
    size = _check_added_tokens(added, vocabulary, f"{source}: added_tokens")
    for section in _SECTIONS:
        if spec.get(section) is not None:
            _check_component(section, spec[section], f"{source}: {section}", size)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **{section: spec.get(section) for section in _SECTIONS},
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
    for name in _FLAGS:
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
    for name in ("dropout", *_AFFIXES):
        if model.get(name):
            raise UnsupportedError(f"{source}: {name} is {quoted(model[name])}; it must be null")
    vocabulary = _as_object(model.get("vocab"), f"{source}: vocab")
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
    if unk_id is not None and not (_is_count(unk_id) and unk_id < len(pieces)):
        raise TokenizerError(
            f"{source}: unk_id is {quoted(unk_id)}, but there are {len(pieces)} pieces"
        )
    return vocabulary


def _check_added_tokens(added: Any, vocabulary: Mapping[str, int], source: str) -> int:
    """Checks added tokens; returns the number of ids, including the vocabulary's."""
    tokens_of_list(added, source)
    ids = dict(vocabulary)
    for number, entry in enumerate(added):
        content, index = entry["content"], entry["id"]
        expected = ids.setdefault(content, index)
        if index != expected:
            raise TokenizerError(
                f"{source}[{number}]: {quoted(content)} has the id {index}, but {expected} in the"
                " model's vocabulary"
            )
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
    # In three passes of C: _is_count for each id takes five times as long.
    if not set(map(type, ids)) <= {int} or (ids and not _is_count(min(ids) | max(ids))):
        wrong = next(index for index in ids if not _is_count(index))
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


def _check_component(section: str, value: object, source: str, size: int) -> None:
    """Checks a component; raises unless it is allowed.

    Args:
        section: "normalizer", "pre_tokenizer", "post_processor" or "decoder".
        value: JSON of the component.
        source: file and field, for messages.
        size: number of ids, the limit for ids in a post-processor.
    """
    component = _as_object(value, source)
    name = component.get("type")
    if not isinstance(name, str) or name not in _COMPONENTS[section]:
        raise UnsupportedError(
            f"{source}: type is {quoted(name)}; supported are {sorted(_COMPONENTS[section])}"
        )
    fields = _COMPONENTS[section][name]
    where = f"{source}: {name}"
    # Files from before 2023 repeat Metaspace's replacement.
    unknown = set(component) - {"type", *fields} - ({"str_rep"} if name == "Metaspace" else set())
    if unknown:
        raise TokenizerError(f"{where} has the unknown fields {quoted(sorted(unknown))}")
    missing = set(fields) - _OPTIONAL.get(name, set()) - set(component)
    if missing:
        raise TokenizerError(f"{where} lacks the fields {quoted(sorted(missing))}")
    if name == "Metaspace" and component.get("str_rep") not in (None, component["replacement"]):
        raise TokenizerError(f"{where}: str_rep and replacement differ")
    for field, rule in fields.items():
        if field not in component:
            continue
        if rule == "list":
            _check_list(section, component[field], f"{where}.{field}", size)
        else:
            _check_field(rule, component[field], f"{where}.{field}", size)
    if name == "TemplateProcessing":
        _check_template_tokens(component, where, size)


def _check_list(section: str, value: object, source: str, size: int) -> None:
    # Each step of a pre-tokenizer may split a long text into hundreds of thousands of parts.
    limit = 16 if section == "pre_tokenizer" else 64
    if not isinstance(value, list) or len(value) > limit:
        raise TokenizerError(f"{source}: not a list of at most {limit} components")
    for number, item in enumerate(value):
        if isinstance(item, dict) and item.get("type") == "Sequence":
            raise UnsupportedError(f"{source}[{number}]: a Sequence inside a Sequence")
        _check_component(section, item, f"{source}[{number}]", size)


def _check_field(rule: object, value: object, source: str, size: int) -> None:
    if isinstance(rule, tuple):
        valid = value in rule
    elif isinstance(rule, type):
        valid = isinstance(value, rule)
    elif rule == "character":
        valid = isinstance(value, str) and len(value) == 1
    elif rule == "text":
        valid = isinstance(value, str) and 0 < len(value) <= 4
    elif rule == "count":
        valid = _is_count(value)
    elif rule == "token":
        token, index = value if isinstance(value, list) and len(value) == 2 else (None, -1)
        valid = isinstance(token, str) and _is_count(index) and index < size
    elif rule == "template":
        valid = isinstance(value, list) and len(value) <= 64
    elif rule == "charsmap":
        valid = _is_charsmap(value)
    else:
        return _check_pattern(value, source, regex_allowed=rule == "pattern")
    if not valid:
        raise TokenizerError(f"{source} is {quoted(str(value))}, which is not allowed there")


def _check_pattern(value: object, source: str, *, regex_allowed: bool) -> None:
    pattern = _as_object(value, source)
    (pattern_type, text), *others = pattern.items() or [(None, None)]
    if others or pattern_type not in ("String", "Regex") or not isinstance(text, str) or not text:
        raise TokenizerError(f'{source}: neither {{"String": ...}} nor {{"Regex": ...}}')
    if pattern_type == "Regex" and not regex_allowed:
        raise UnsupportedError(f"{source}: a regular expression in a decoder")


def _check_template_tokens(component: dict[str, Any], source: str, size: int) -> None:
    tokens = component["special_tokens"]
    for name, entry in tokens.items():
        where = f"{source}: special_tokens[{quoted(name)}]"
        entry = _as_object(entry, where)
        ids, texts = entry.get("ids"), entry.get("tokens")
        if set(entry) != {"id", "ids", "tokens"} or entry["id"] != name:
            raise TokenizerError(f"{where}: not an entry named {quoted(name)} with ids and tokens")
        if not (isinstance(ids, list) and isinstance(texts, list) and len(ids) == len(texts) <= 64):
            raise TokenizerError(f"{where}: ids and tokens are not lists of one length")
        if not all(_is_count(i) and i < size for i in ids) or not all(
            isinstance(text, str) for text in texts
        ):
            raise TokenizerError(f"{where}: ids {quoted(ids)} and tokens {quoted(texts)}")
    for field, sequences in (("single", {"A"}), ("pair", {"A", "B"})):
        sequences_of = (
            p.get("Sequence") if isinstance(p, dict) else None for p in component[field]
        )
        named = [each.get("id") for each in sequences_of if isinstance(each, dict)]
        if len(set(map(str, named))) != len(named):
            raise UnsupportedError(f"{source}.{field}: a sequence more than once")
        for number, piece in enumerate(component[field]):
            where = f"{source}.{field}[{number}]"
            (piece_type, value), *others = _as_object(piece, where).items() or [(None, None)]
            allowed = {"Sequence": sequences, "SpecialToken": set(tokens)}.get(
                str(piece_type), set()
            )
            value = _as_object(value, where)
            name, type_id = value.get("id"), value.get("type_id")
            if others or not isinstance(name, str) or name not in allowed:
                raise TokenizerError(f"{where}: {quoted(piece)} names no sequence or special token")
            if not _is_count(type_id) or set(value) != {"id", "type_id"}:
                raise TokenizerError(f"{where}: type_id is {quoted(type_id)}")


def _is_charsmap(value: object) -> bool:
    """True for base64 of a sentencepiece normalization table whose trie stays within its array.

    The table is the size of a trie in 4 bytes, the trie (a double array of darts-clone, in units of
    4 bytes), and replacements in UTF-8 that end in a zero byte. The library panics at a trie that
    leads out of the array, and its panics print to stderr.
    """
    if not isinstance(value, str):
        return False
    try:
        table = base64.b64decode(value, validate=True)
        size = int.from_bytes(table[:4], "little")
        table[4 + size :].decode("utf-8")
    except (binascii.Error, ValueError):
        return False
    if not (size % 4 == 0 and 0 < size <= len(table) - 4):
        return False
    units = np.frombuffer(table, "<u4", size // 4, offset=4)
    return _stays_inside(units, np.frombuffer(table, np.uint8, offset=4 + size))


def _stays_inside(units: np.ndarray, replacements: np.ndarray) -> bool:
    """True if children of all nodes are units, and values are starts of characters or the end."""
    nodes = np.flatnonzero(units < _IS_VALUE)
    nodes = np.union1d(nodes, [0])  # the root is read as a node whatever it is
    node = units[nodes].astype(np.int64)
    offsets = (node >> 10) << ((node & 512) >> 6)
    children = nodes ^ offsets  # of which each byte of a text chooses one of 256
    if (children | 255).max() >= len(units):
        return False
    values = units[children[(node & 256) != 0]].astype(np.int64) & (_IS_VALUE - 1)
    inner = values[values < len(replacements)]
    is_continuation = (replacements[inner] & 0xC0) == 0x80
    return bool((values <= len(replacements)).all() and not is_continuation.any())


def _as_object(value: object, source: str) -> dict[str, Any]:
    """Returns ``value``; raises TokenizerError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {type(value).__name__}, not an object")
    return value


def _is_count(value: object) -> bool:
    """True for an int in the range of ids, lengths and types."""
    return type(value) is int and 0 <= value < 2**31


def check_growth(spec: Mapping[str, Any], source: str) -> int:
    """Bounds the growth of texts in a checked tokenizer.json.

    Returns:
        The largest number of bytes that the normalizer can make of one byte.
    """
    growth = _growth(spec["normalizer"])
    for section, factor, limit in (
        ("normalizer", growth, MAX_NORMALIZER_GROWTH),
        ("decoder", _growth(spec["decoder"]), MAX_DECODER_GROWTH),
    ):
        if factor > limit:
            raise UnsupportedError(
                f"{source}: {section}: it can make a text more than {limit} times longer, which no"
                " known tokenizer does"
            )
    # Each may double the text, or more; Prepend adds to each part between two added tokens.
    for section, name in (
        ("pre_tokenizer", "ByteLevel"),
        ("pre_tokenizer", "Metaspace"),
        ("normalizer", "Prepend"),
    ):
        if sum(step["type"] == name for step in _steps(spec[section])) > 1:
            raise UnsupportedError(f"{source}: {section}: {name} more than once")
    # The library normalizes added tokens while it loads the file.
    added = sum(_size(token["content"]) for token in spec["added_tokens"] if token["normalized"])
    if added * growth > MAX_NORMALIZED_BYTES:
        raise UnsupportedError(
            f"{source}: added_tokens: {added} bytes, which the normalizer can make {growth} times"
            f" longer; at most {MAX_NORMALIZED_BYTES} bytes are taken"
        )
    return growth


def charsmap_growth(charsmap: bytes) -> int:
    """The longest replacement, in bytes, of a sentencepiece normalization table.

    The table is the size of a trie in 4 bytes, the trie, and replacements that end in a zero byte.
    """
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *map(len, replacements))


def _steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a component, which may be a Sequence; the names of its list differ."""
    if component is None:
        return []
    lists = (component.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    return next((steps for steps in lists if steps is not None), [component])


def _growth(component: Mapping[str, Any] | None) -> int:
    growth = 1
    for step in _steps(component):
        growth *= _step_growth(step)
    return growth


def _step_growth(step: Mapping[str, Any]) -> int:
    """Bytes that a normalizer or decoder can make of one byte, rounded up."""
    match step["type"]:
        case "Replace":
            size = _size(step["content"])
            [(pattern_type, pattern)] = step["pattern"].items()
            if pattern_type == "String":
                return max(1, -(-size // _size(pattern)))
            # A regular expression may match the empty string before each byte.
            return max(1, -(-size // 2)) if pattern == TWO_SPACES else 1 + size
        case "Prepend":
            return 1 + _size(step["prepend"])
        case "Precompiled":
            return charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
        case name:
            return _UNICODE_GROWTH.get(name, 1)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_normalized_size(
    normalize: Callable[[str], str], text: str, growth: int, source: str
) -> None:
    """Raises if a text is too long after normalization.

    If the bound ``growth`` does not rule that out, the text is normalized in parts to see it.
    """
    size = _size(text)
    limit = MAX_NORMALIZED_BYTES + 2 * size
    if size * growth <= limit:
        return
    step = MAX_NORMALIZED_BYTES // growth
    total = 0
    for start in range(0, len(text), step):
        total += _size(normalize(text[start : start + step]))
        if total > limit:
            raise InputError(
                f"{source}: its normalizer makes this text of {size} bytes longer than {limit}"
                " bytes: give a shorter text"
            )
