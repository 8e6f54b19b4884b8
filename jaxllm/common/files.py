"""Files: the paths that people give, text, strict JSON, atomic writes and locks of folders.

Python's ``json`` accepts duplicate keys (the last one wins), ``NaN``, ``Infinity`` and numbers that
overflow to infinity, and lone surrogates that cannot be encoded as UTF-8. A checkpoint with any of
these is damaged or malicious, so `read_json` rejects it and names the file.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import socket
import stat
from collections.abc import Generator
from os import PathLike
from pathlib import Path
from typing import Any

import filelock

from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    JaxLLMError,
    MissingFileError,
    RunError,
    naming_file,
)

_GIT_LFS = b"version https://git-lfs.github.com/spec/"
# The target of a link in a Hugging Face cache, copied as text: "../../blobs/<hash>".
_CACHE_LINK = re.compile(rb"(\.\.[/\\]){1,4}blobs[/\\][0-9a-f]{40,64}\s*")
_MAX_PLACEHOLDER_BYTES = 1024
MAX_VALUES = 2**22
"""Most brackets, colons and commas: a few bytes of JSON can become a hundred in Python."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
LOCK_FILE = "writer.lock"


def expanded(path: str | PathLike[str]) -> Path:
    """A path with ``~`` expanded; that of an unknown user stays, as in a shell.

    >>> expanded("~no_such_user/model")
    PosixPath('~no_such_user/model')
    """
    return Path(os.path.expanduser(path))


def check_is_file(path: Path) -> None:
    """Checks that a regular file, or a link to one, has this name.

    Raises:
        MissingFileError: nothing has this name, or what `is_there` refuses.
    """
    if not is_there(path, MissingFileError):
        raise MissingFileError(f"{path}: no such file")


def is_there(path: Path, error: type[JaxLLMError]) -> bool:
    """True for a regular file or a link to one, False if nothing has this name.

    A file that is there but cannot be read is not taken for absent.

    Raises:
        error: a link to a file that is missing, as in a cache of the Hub of which a part was
            deleted; a folder, pipe or device; or the path cannot be looked up.
    """
    with naming_file(path, error, "read"):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            if not path.is_symlink():
                return False
            raise error(
                f"{path}: is a link to {path.readlink()}, which is missing; fetch it again, or "
                "remove the link"
            ) from None
    if not stat.S_ISREG(mode):
        raise error(f"{path}: is no regular file; remove it, or put a file there")
    return True


def read_text(path: Path, *, max_bytes: int, error: type[JaxLLMError]) -> str:
    """The text of a UTF-8 file, or of a pipe.

    Raises:
        error: it cannot be read, is not UTF-8, or has more than `max_bytes`.
    """
    with naming_file(path, error, "read"), path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise error(f"{path}: more than {max_bytes} bytes, and no more are read; shorten it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{path}: not UTF-8 (byte {failure.start}); save it as UTF-8") from None


def names_file(text: str) -> bool:
    """True if a text is the name of a file, not a template (or schema, or grammar) itself."""
    if not text or text.lstrip().startswith("{") or "\n" in text:
        return False
    try:
        return Path(text).exists()
    except OSError:  # a text that is too long for a name
        return False


def check_not_placeholder(path: Path, data: bytes, error: type[JaxLLMError]) -> None:
    """Raises `error` if a file's content is a git-lfs pointer or the text of a cache's link."""
    if len(data) > _MAX_PLACEHOLDER_BYTES:
        return
    if data.startswith(_GIT_LFS):
        raise error(
            f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its "
            "repository, or download the file"
        )
    if _CACHE_LINK.fullmatch(data):
        raise error(
            f"{path}: the text of a link into a Hugging Face cache, not the file itself; copy the "
            "cache with its links followed (cp -rL), or download the model again"
        )


def read_json(
    path: str | PathLike[str],
    *,
    max_bytes: int,
    max_depth: int = 64,
    error: type[JaxLLMError] = ConfigError,
) -> Any:
    """Reads one JSON file; rejects content that two JSON parsers could read differently.

    Args:
        path: the file.
        max_bytes: largest file size that is read.
        max_depth: deepest nesting of lists and objects; ``{}`` has depth 1.
        error: error class for a malformed file.

    Raises:
        MissingFileError: there is no such file.
        error: the file is too large, not UTF-8, not JSON, too deep, or has duplicate keys,
            a number that is not finite, an unpaired surrogate, or more than `MAX_VALUES` values.
    """
    path = Path(path)
    check_is_file(path)
    with naming_file(path, error, "read"):
        size = path.stat().st_size
        if size > max_bytes:
            raise error(f"{path}: {size} bytes, but at most {max_bytes} are read")
        data = path.read_bytes()
    check_not_placeholder(path, data, error)
    return parse_json(data, source=str(path), max_depth=max_depth, error=error)


def parse_json(
    data: bytes,
    *,
    source: str,
    max_depth: int = 64,
    error: type[JaxLLMError] = ConfigError,
) -> Any:
    """Parses JSON bytes as `read_json` does; ``source`` names them in errors.

    >>> parse_json(b'{"a": [1, 2.5]}', source="example")
    {'a': [1, 2.5]}
    >>> parse_json(b'{"a": 1, "a": 2}', source="example")
    Traceback (most recent call last):
    jaxllm.common.errors.ConfigError: example: the key 'a' appears twice in one object
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise error(f"{source}: the key {twice!r} appears twice in one object")
        return result

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise error(f"{source}: the number {text[:40]} is not finite")
        return number

    if len(data) > MAX_VALUES and sum(map(data.count, (b"[", b"{", b":", b","))) > MAX_VALUES:
        raise error(f"{source}: more than {MAX_VALUES} brackets, colons and commas")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=finite,
            parse_constant=finite,
        )
    except UnicodeDecodeError as failure:
        raise error(f"{source}: not UTF-8 (byte {failure.start})") from failure
    except RecursionError as failure:
        raise error(f"{source}: nested deeper than {max_depth} levels") from failure
    except json.JSONDecodeError as failure:
        raise error(f"{source}: not JSON: {failure}") from failure
    except JaxLLMError:
        raise
    except ValueError as failure:  # an integer of more digits than Python converts
        raise error(f"{source}: {failure}") from failure

    _check_depth(value, source, max_depth, error)
    if _SURROGATE_ESCAPE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as failure:
            raise error(f"{source}: a string holds an unpaired surrogate") from failure
    return value


def _check_depth(value: object, source: str, max_depth: int, error: type[JaxLLMError]) -> None:
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise error(f"{source}: nested deeper than {max_depth} levels")
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Gives a temporary path to write to, and renames it to `path` on success, after fsync.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:  # frees the space of a partial file, which a full disk needs
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file of a checkpoint atomically, with sorted keys.

    Raises:
        CheckpointError: the file cannot be written; `path` is unchanged.
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with naming_file(path, CheckpointError, "written"):
        write_whole(path, text.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Creates the folder of a checkpoint, and those above it, unless it exists.

    Raises:
        CheckpointError: it cannot be created.
    """
    with naming_file(path, CheckpointError, "created"):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk (POSIX only: Windows cannot open a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class RunLock:
    """Exclusive lock on a folder, held until `release` or until the process ends in any way.

    The lock file stays and names its last holder. What counts is the lock on it (flock), which ends
    with the process and is not inherited by a forked child. Creates the folder if needed.

    Raises:
        RunError: the folder is locked by another process or this one, or cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        if "\0" in str(folder):
            raise RunError(f"{str(folder)!r}: a null byte in the name of a folder")
        # A lock file without flock would outlive a killed process.
        self._lock = filelock.FileLock(
            self.path, timeout=0, thread_local=False, fallback_to_soft=False
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            with contextlib.suppress(PermissionError):  # on Windows nobody opens a locked file
                self.path.write_text(_holder())
        except filelock.Timeout:
            holder = ""
            with contextlib.suppress(PermissionError):
                holder = self.path.read_text(errors="replace")[:200].strip()
            raise RunError(
                f"{folder}: {holder or 'another process'} is writing here; wait for its end, or "
                "use another folder"
            ) from None
        except OSError as failure:
            self.release()
            raise RunError(
                f"{folder}: cannot be written to and locked ({failure.strerror}); use a folder on "
                "a file system with locks"
            ) from failure

    def release(self) -> None:
        """Frees the folder; a second call does nothing."""
        self._lock.release()


def _holder() -> str:
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}\n"


def check_new_folder(folder: Path) -> None:
    """Raises RunError if there is something of this name other than an empty folder."""
    with naming_file(folder, RunError, "written"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder}: exists already; name a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """Yields a temporary folder beside `folder`, which gets its name at the end.

    Raises:
        RunError: it cannot be written, or `folder` is not empty.
    """
    folder = Path(os.path.realpath(folder))  # unlike resolve(), also of a link to itself
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        with naming_file(partial, RunError, "written"):
            partial.mkdir(parents=True)
        yield partial
        with naming_file(folder, RunError, "written"):
            partial.replace(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
