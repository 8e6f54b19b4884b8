"""Replaces secrets in the config and command line that a run records.

A module of its own, so that what counts as a secret is read in one place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

HIDDEN = "(not recorded)"

# Names whose values are secrets; `token` only if it is not a vocabulary token.
_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|secret([_-]?key)?|private[_-]?key|access[_-]?key|password|passwd|"
    r"passphrase|credentials?|authorization|cookie)$"
    r"|^token$|(^|[_-])(hf|hub|api|auth|access|bearer|refresh|session|wandb|github|gitlab|"
    r"huggingface)[_-]?token$",
    re.IGNORECASE,
)
# Values that look like secrets in any field: keys of known services, passwords in addresses.
_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
_ASSIGNED = re.compile(r"^(?P<option>-{0,2}(?P<name>[A-Za-z][\w.-]*)=)(?P<value>.*)$", re.DOTALL)


def is_secret(name: str) -> bool:
    """True if a field name (the last part of a dotted one) denotes a secret.

    >>> is_secret("hub.hf-token"), is_secret("eos_token"), is_secret("max_tokens")
    (True, False, False)
    """
    return bool(_NAME.search(name.rsplit(".", 1)[-1]))


def without_secrets(value: Any, name: str = "") -> Any:
    """Copies a value to plain dicts, lists, strings and numbers, with secrets replaced.

    Dataclasses become dicts; paths and other objects become strings.

    >>> without_secrets({"api_key": "k", "hub": {"url": "https://me:pw@host/x"}, "lr": 0.1})
    {'api_key': '(not recorded)', 'hub': {'url': 'https://(not recorded)@host/x'}, 'lr': 0.1}
    """
    if value is not None and is_secret(name):
        return HIDDEN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item, str(key)) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return without_secrets(fields)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [without_secrets(item) for item in items]
    text = str(value) if isinstance(value, str | PurePath) else repr(value)
    return _VALUE.sub(HIDDEN, text)


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Replaces the values of secret options in a command line.

    >>> arguments_without_secrets(["train.py", "--hf-token", "abc", "--hub.api_key=abc", "a.yaml"])
    ['train.py', '--hf-token', '(not recorded)', '--hub.api_key=(not recorded)', 'a.yaml']
    """
    result: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next:
            result.append(HIDDEN)
            hide_next = False
            continue
        assigned = _ASSIGNED.match(argument)
        if assigned and is_secret(assigned["name"]):
            result.append(assigned["option"] + HIDDEN)
            continue
        hide_next = argument.startswith("-") and is_secret(argument.lstrip("-"))
        result.append(_VALUE.sub(HIDDEN, argument))
    return result
