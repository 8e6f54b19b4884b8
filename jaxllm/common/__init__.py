"""What all packages use: errors, files, strict JSON, checks of arguments, progress."""

import sys
from typing import Any


def public(name: str) -> Any:
    """The public object ``jaxllm.<name>``, for methods that are shorthands for public functions.

    ``model.generate(...)`` is ``jaxllm.generate(model, ...)``, which stands above the models in the
    order of imports. So a method looks the function up when it is called, by its public name:
    importing a model imports no generation.

    >>> import jaxllm
    >>> public("GenerationConfig") is jaxllm.GenerationConfig
    True
    """
    return getattr(sys.modules["jaxllm"], name)
