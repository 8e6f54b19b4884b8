"""Paths that people give, and optional files of a folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxllm.common.errors import JaxLLMError, MissingFileError, naming_file


def expanded(path: str | os.PathLike[str]) -> Path:
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
