"""Late lookup of the package's public names, for methods that are shorthands for them.

``model.generate(...)`` is ``jaxllm.generate(model, ...)``, which stands above the models in the
order of imports. So a method looks the function up when it is called, by its public name:
``jaxllm/__init__.py``, which runs before any module of the package, says how. Nothing below
depends on what is looked up, and importing a model imports no generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_lookups: list[Callable[[str], Any]] = []


def set_lookup(lookup: Callable[[str], Any]) -> None:
    """Sets the function that returns the object of a public name."""
    _lookups[:] = [lookup]


def public(name: str) -> Any:
    """The public object ``jaxllm.<name>``.

    >>> import jaxllm
    >>> public("GenerationConfig") is jaxllm.GenerationConfig
    True
    """
    return _lookups[0](name)
