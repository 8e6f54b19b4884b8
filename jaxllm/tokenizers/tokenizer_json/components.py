"""Checks the components of a tokenizer.json: normalizer, pre-tokenizer, post-processor, decoder.

Components that are not in the table are rejected: the library accepts them, but their behaviour on
malicious files has not been reviewed. The rest of the file, its vocabulary, is checked in
``check.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.common.errors import TokenizerError, UnsupportedError, quoted
from jaxllm.tokenizers.tokenizer_json.charsmap import is_charsmap

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


def check_component(section: str, value: object, source: str, size: int) -> None:
    """Checks a component; raises unless it is allowed.

    Args:
        section: "normalizer", "pre_tokenizer", "post_processor" or "decoder".
        value: JSON of the component.
        source: file and field, for messages.
        size: number of ids, the limit for ids in a post-processor.
    """
    component = as_object(value, source)
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
        check_component(section, item, f"{source}[{number}]", size)


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
        valid = is_count(value)
    elif rule == "token":
        token, index = value if isinstance(value, list) and len(value) == 2 else (None, -1)
        valid = isinstance(token, str) and is_count(index) and index < size
    elif rule == "template":
        valid = isinstance(value, list) and len(value) <= 64
    elif rule == "charsmap":
        valid = is_charsmap(value)
    else:
        return _check_pattern(value, source, regex_allowed=rule == "pattern")
    if not valid:
        raise TokenizerError(f"{source} is {quoted(str(value))}, which is not allowed there")


def _check_pattern(value: object, source: str, *, regex_allowed: bool) -> None:
    pattern = as_object(value, source)
    (pattern_type, text), *others = pattern.items() or [(None, None)]
    if others or pattern_type not in ("String", "Regex") or not isinstance(text, str) or not text:
        raise TokenizerError(f'{source}: neither {{"String": ...}} nor {{"Regex": ...}}')
    if pattern_type == "Regex" and not regex_allowed:
        raise UnsupportedError(f"{source}: a regular expression in a decoder")


def _check_template_tokens(component: dict[str, Any], source: str, size: int) -> None:
    tokens = component["special_tokens"]
    for name, entry in tokens.items():
        where = f"{source}: special_tokens[{quoted(name)}]"
        entry = as_object(entry, where)
        ids, texts = entry.get("ids"), entry.get("tokens")
        if set(entry) != {"id", "ids", "tokens"} or entry["id"] != name:
            raise TokenizerError(f"{where}: not an entry named {quoted(name)} with ids and tokens")
        if not (isinstance(ids, list) and isinstance(texts, list) and len(ids) == len(texts) <= 64):
            raise TokenizerError(f"{where}: ids and tokens are not lists of one length")
        if not all(is_count(i) and i < size for i in ids) or not all(
            isinstance(text, str) for text in texts
        ):
            raise TokenizerError(f"{where}: ids {quoted(ids)} and tokens {quoted(texts)}")
    for field, sequences in (("single", {"A"}), ("pair", {"A", "B"})):
        named = [piece["Sequence"].get("id") for piece in component[field] if _is_sequence(piece)]
        if len(set(map(str, named))) != len(named):
            raise UnsupportedError(f"{source}.{field}: a sequence more than once")
        for number, piece in enumerate(component[field]):
            where = f"{source}.{field}[{number}]"
            (piece_type, value), *others = as_object(piece, where).items() or [(None, None)]
            allowed = {"Sequence": sequences, "SpecialToken": set(tokens)}.get(
                str(piece_type), set()
            )
            value = as_object(value, where)
            name, type_id = value.get("id"), value.get("type_id")
            if others or not isinstance(name, str) or name not in allowed:
                raise TokenizerError(f"{where}: {quoted(piece)} names no sequence or special token")
            if not is_count(type_id) or set(value) != {"id", "type_id"}:
                raise TokenizerError(f"{where}: type_id is {quoted(type_id)}")


def _is_sequence(piece: object) -> bool:
    return isinstance(piece, dict) and isinstance(piece.get("Sequence"), dict)


def as_object(value: object, source: str) -> dict[str, Any]:
    """Returns ``value``; raises TokenizerError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {type(value).__name__}, not an object")
    return value


def is_count(value: object) -> bool:
    """True for an int in the range of ids, lengths and types."""
    return type(value) is int and 0 <= value < 2**31
