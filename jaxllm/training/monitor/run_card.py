"""Writes OUTPUT/run_card.json: config, data, versions and devices of a run.

Environment variables, host and user names are not recorded; secrets in the config and on the
command line are replaced.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

from jaxllm.common.errors import RunError, naming_file
from jaxllm.common.files import read_json, write_whole
from jaxllm.parallel.environment import devices, versions

_MAX_CARD_BYTES = 1 << 26
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


@dataclasses.dataclass(frozen=True)
class DataFile:
    """Path, hash and size of a data file or folder."""

    path: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run: the first one, or a resume."""

    time: str
    """Time in UTC, ISO 8601."""
    command: list[str]
    resumed_at: int | None
    """Step at which it resumed; None: a new run."""
    versions: dict[str, str]
    devices: dict[str, Any]
    git: dict[str, Any] | None
    """Commit of the working directory's repository, and True if files differ from it."""


@dataclasses.dataclass(frozen=True)
class RunCard:
    """Config, data and parameter counts of a run, and all its starts."""

    config: dict[str, Any]
    data: dict[str, DataFile]
    parameters: dict[str, int]
    """`total` and `trainable`."""
    starts: list[Start]


def make_run_card(
    *,
    config: Any,
    data: Mapping[str, DataFile] | None = None,
    total_parameters: int,
    trainable_parameters: int,
    resumed_at: int | None = None,
    command: Sequence[str] | None = None,
) -> RunCard:
    """Makes the card of a run that starts now.

    Args:
        config: a dataclass or a dict.
        data: files by their role ("train", "eval").
        total_parameters: parameters of the model, adapters included.
        trainable_parameters: parameters that are trained.
        resumed_at: step of the checkpoint from which it resumes.
        command: the process's own command line by default.
    """
    return RunCard(
        config=without_secrets(config),
        data=dict(data or {}),
        parameters={"total": total_parameters, "trainable": trainable_parameters},
        starts=[
            Start(
                time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                command=arguments_without_secrets(sys.argv if command is None else command),
                resumed_at=resumed_at,
                versions=versions(),
                devices=devices(),
                git=git_commit(Path.cwd()),
            )
        ],
    )


def write_run_card(folder: str | PathLike[str], card: RunCard) -> RunCard:
    """Writes the file atomically; returns the card written.

    The card of a resumed run lists the earlier starts first.

    Raises:
        RunError: the existing card cannot be read, or the new one cannot be written.
    """
    path = Path(folder) / "run_card.json"
    with naming_file(path, RunError, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if card.starts[0].resumed_at is not None and path.exists():
        earlier = read_json(path, max_bytes=_MAX_CARD_BYTES, error=RunError)
        try:
            starts = [Start(**start) for start in earlier["starts"]]
        except (KeyError, TypeError) as failure:
            raise RunError(f"{path}: not a run card ({failure}); move the file away") from None
        card = dataclasses.replace(card, starts=[*starts, *card.starts])
    text = json.dumps(dataclasses.asdict(card), indent=2, allow_nan=False)
    with naming_file(path, RunError, "written"):
        write_whole(path, f"{text}\n".encode())
    return card


def start_rows(start: Start) -> list[tuple[str, str]]:
    """Devices, versions and commit of a start, for a table."""
    git = "none"
    if start.git is not None:
        git = start.git["commit"] + (" and uncommitted changes" if start.git["dirty"] else "")
    hardware = start.devices
    devices = f"{hardware['count']} x {hardware['kind']} ({hardware['platform']})"
    if hardware["processes"] > 1:
        devices += f", {hardware['processes']} processes"
    return [("devices", devices), ("git commit", git), *start.versions.items()]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names.

    >>> flat({"model": {"path": "x"}, "steps": 3})
    {'model.path': 'x', 'steps': 3}
    """
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Reads the commit of a folder's repository; None without git, repository or commit."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit.strip(),
        "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    # fsmonitor in a repository's settings can run a program; disable it.
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def is_secret(name: str) -> bool:
    """True if a field name (the last part of a dotted one) denotes a secret.

    >>> is_secret("hub.hf-token"), is_secret("eos_token"), is_secret("max_tokens")
    (True, False, False)
    """
    return bool(_NAME.search(name.rsplit(".", 1)[-1]))


def without_secrets(value: Any, name: str = "") -> Any:
    """Copies a value to plain dicts, lists, strings and numbers, with secrets replaced.

    Dataclasses become dicts; paths, other objects and non-finite numbers become strings.

    >>> without_secrets({"api_key": "k", "hub": {"url": "https://me:pw@host/x"}, "lr": 0.1})
    {'api_key': '(not recorded)', 'hub': {'url': 'https://(not recorded)@host/x'}, 'lr': 0.1}
    """
    if value is not None and is_secret(name):
        return HIDDEN
    if value is None or isinstance(value, bool | int | float):
        is_finite = not isinstance(value, float) or math.isfinite(value)
        return value if is_finite else str(value)
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
