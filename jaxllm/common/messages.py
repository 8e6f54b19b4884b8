"""Parts of error messages: values and names from files, shortened."""

from __future__ import annotations

from collections.abc import Sequence

MAX_CHARACTERS = 120
MAX_NAMES = 10


def quoted(value: object) -> str:
    """A value from a file, a string in quotes, shortened to about 120 characters.

    >>> quoted("lm_head.weight"), quoted([1, 2])
    ("'lm_head.weight'", '[1, 2]')
    """
    if isinstance(value, str):
        return repr(shortened(value))
    return shortened(str(value))


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
