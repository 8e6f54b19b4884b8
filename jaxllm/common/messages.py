"""Warnings, and parts of error messages: values and names from files, shortened."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence

INNER_PACKAGES = ("jaxllm", "jax", "jaxtyping", "flax", "functools", "contextlib")
"""Packages whose frames may lie between a caller and a warning."""
MAX_CHARACTERS = 120
MAX_NAMES = 10


def quoted(value: object) -> str:
    """A value from a file or a caller, a string in quotes, shortened to about 120 characters.

    Python refuses to write integers of more than 4,300 digits.

    >>> quoted("lm_head.weight"), quoted([1, 2]), quoted(10**5000)
    ("'lm_head.weight'", '[1, 2]', 'an integer of 5001 digits')
    """
    if isinstance(value, str):
        return repr(shortened(value))
    try:
        return shortened(str(value))
    except ValueError:
        if isinstance(value, int):
            return f"an integer of {int(math.log10(abs(value))) + 1} digits"
        return f"a {type(value).__name__} that holds an integer of thousands of digits"


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


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warns with the file and the line of the caller of jaxllm."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in INNER_PACKAGES:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
