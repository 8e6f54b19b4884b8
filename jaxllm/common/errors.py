"""Error classes of jaxllm. Messages name the file or field, what was found, and what to do.

Every class also derives from the built-in that a caller would expect to catch
(``ValueError``, ``FileNotFoundError``, ...), so callers need not import them.
`jaxllm.errors` exports them.
Command lines print the message on one line and exit with code 2.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

MAX_MESSAGE = 500
"""Longest message in characters; a longer one, such as one that names a long path, is cut."""


class JaxLLMError(Exception):
    """Base class of all errors that jaxllm raises."""

    def __str__(self) -> str:
        message = super().__str__()
        if len(message) <= MAX_MESSAGE:
            return message
        return f"{message[:300]} ... {message[-(MAX_MESSAGE - 305) :]}"


class ConfigError(JaxLLMError, ValueError):
    """A config.json or generation_config.json holds invalid or contradictory values."""


class UnsupportedError(JaxLLMError, ValueError):
    """A known option, architecture or combination that jaxllm does not implement."""


class CheckpointError(JaxLLMError, ValueError):
    """A weight file is malformed, incomplete, or does not fit the model its config implies."""


class TokenizerError(JaxLLMError, ValueError):
    """A tokenizer file is malformed, or a text cannot be encoded."""


class TemplateError(TokenizerError):
    """A chat template is unsafe, too expensive, or fails on the given messages."""


class InputError(JaxLLMError, ValueError):
    """An invalid argument of a call: token ids, masks, lengths, generation fields."""


class NonFiniteError(JaxLLMError, FloatingPointError):
    """Weights or logits hold NaN or infinity."""


class MissingFileError(JaxLLMError, FileNotFoundError):
    """A file or folder that the call needs does not exist."""


class DataError(JaxLLMError, ValueError):
    """A file or row of training data is malformed or does not match its format."""


class RunError(JaxLLMError, RuntimeError):
    """A run cannot start or resume: its folder is in use, or holds another run."""


class MissingExtraError(JaxLLMError, ImportError):
    """An optional package that a call needs is not installed; the message names its extra."""


@contextmanager
def naming_file(
    path: Path, error: type[JaxLLMError], action: Literal["read", "written", "created"]
) -> Generator[None]:
    """Turns an OSError within the block into `error`, with the file, the action and the reason.

    So does a null byte in the path, which is a ValueError.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r}: cannot be {action} (a null byte in its name)")
    try:
        yield
    except JaxLLMError:  # MissingFileError is an OSError too
        raise
    except OSError as failure:
        raise error(f"{path}: cannot be {action} ({failure.strerror or failure})") from failure
