"""Error classes of jaxllm, warnings, and parts of messages.

A message names the file or field, what was found, and what to do. Every class also derives from
the built-in that a caller would expect to catch (``ValueError``, ``FileNotFoundError``, ...), so
callers need not import them. `jaxllm.errors` exports them. Command lines print the message on one
line and exit with code 2.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from jaxllm.common.spelling import closest

MAX_MESSAGE = 500
"""Longest message in characters; a longer one, such as one that names a long path, is cut."""
INNER_PACKAGES = ("jaxllm", "jax", "jaxtyping", "flax", "functools", "contextlib")
"""Packages whose frames may lie between a caller and a warning."""
MAX_CHARACTERS = 120
MAX_NAMES = 10


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


class WorkerStoppedError(JaxLLMError, RuntimeError):
    """A process that works for a server ended before it began a request; the server has another."""


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


def quoted(value: object) -> str:
    """A value from a file or a caller, a string in quotes, shortened to about 120 characters.

    >>> quoted("lm_head.weight"), quoted([1, 2])
    ("'lm_head.weight'", '[1, 2]')
    """
    if isinstance(value, str):
        return repr(shortened(value))
    try:
        return shortened(str(value))
    except ValueError:  # Python writes at most 4,300 digits
        return f"({type(value).__name__}, with an integer of thousands of digits)"


def shortened(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text on one line, cut to `limit` characters with an ellipsis."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Sequence[str]) -> str:
    """Up to ten names, as far as 120 characters hold them, and the number of the others.

    >>> listed([f"layer{i}" for i in range(12)])
    'layer0, layer1, layer2, layer3, layer4, layer5, layer6, layer7, layer8, layer9 and 2 more'
    """
    shown = list(names[:MAX_NAMES])
    while len(shown) > 1 and len(", ".join(shown)) > MAX_CHARACTERS:
        shown.pop()
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def counted(tokens: int) -> str:
    """A number of tokens in words.

    >>> counted(1), counted(2)
    ('1 token', '2 tokens')
    """
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def nearest(name: str, names: Sequence[str]) -> str:
    """The hint of a message on an unknown name.

    >>> nearest("contxt", ["id", "context"])
    "the nearest is 'context'; there are id, context"
    """
    close = closest(name, names)
    hint = f"the nearest is {close!r}; " if close else ""
    return f"{hint}there are {listed(names)}"


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warns with the file and the line of the caller of jaxllm."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in INNER_PACKAGES:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
