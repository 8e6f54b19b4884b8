"""Runtime check of the shapes and dtypes that jaxtyping annotations state.

pyproject.toml hooks jaxllm with ``--jaxtyping-packages=jaxllm,shape_checks.check``: jaxtyping
decorates its functions and dataclasses while they are imported, with :func:`check` as the type
checker. ``--jaxtyping-packages=`` checks nothing.
:func:`decorate_shaped_only`, which conftest.py calls before jaxllm is imported, leaves functions
and dataclasses without a shape as they are.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, get_args, get_origin

import beartype
import jax
import jaxtyping
import numpy as np

ENTRY_POINT = re.compile(
    r"jaxllm\.models\..*__call__"
    r"|jaxllm\.(generation|contrib)\..*\.(generate|stream|score|compute_transition_scores|heal_tokens|EncoderTokens\.of"
    r"|LogitsProcessor\.__call__|WatermarkDetector\.__call__)"
)
"""Functions that accept whatever becomes such an array, and say themselves what does not; tests
give them what does not."""


def decorate_shaped_only() -> None:
    """Has jaxtyping decorate only what an annotation gives a shape: its wrapper takes longer than
    most of the functions that it would wrap."""
    decorate = jaxtyping.jaxtyped

    def jaxtyped(target: Any = None, *, typechecker: Any) -> Any:
        if target is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        function = target.__init__ if inspect.isclass(target) else target
        if inspect.isfunction(function) and not _names_a_shape(function):
            return target
        return decorate(target, typechecker=typechecker)

    jaxtyping.jaxtyped = jaxtyped


def _names_a_shape(function: Callable[..., Any]) -> bool:
    """Whether a name in the annotations, which are strings still, stands for a shaped array."""
    names = set(re.findall(r"\w+", " ".join(map(str, function.__annotations__.values()))))
    values = [function.__globals__.get(name) for name in names]
    return any(
        _is_shaped(value) or (inspect.isclass(value) and issubclass(value, jaxtyping.AbstractDtype))
        for value in values
    )


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with beartype's check of its shaped arguments or of its result: jaxtyping asks
    for a function that checks the arguments, whose result is Any, and for another for the result.

    Other annotations are pyright's to check. NumPy arrays pass where jax arrays are declared,
    since JAX's functions take both.
    """
    shaped = {name for name, hint in function.__annotations__.items() if _is_shaped(hint)}
    if "return" in shaped:
        shaped = {"return"}
    if ENTRY_POINT.fullmatch(f"{function.__module__}.{function.__qualname__}"):
        shaped &= {"return"}
    if not shaped:
        return function
    function.__annotations__.update(
        {name: Any for name in function.__annotations__ if name not in shaped}
    )
    checked = beartype.beartype(function)
    return _unless_jax_calls(checked) if function.__name__ == "__init__" else checked


def _is_shaped(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        if hint.array_type is jax.Array:
            hint.array_type = (jax.Array, np.ndarray, np.generic)
        return True
    if get_origin(hint) is Callable:  # whose arguments and results nothing checks
        return False
    shaped = [_is_shaped(part) for part in get_args(hint)]  # every part, also after the first True
    return any(shaped)


def _unless_jax_calls(checked: Callable[..., Any]) -> Callable[..., Any]:
    """``checked`` for what jaxllm constructs. JAX constructs pytree dataclasses, too, from whatever
    its transforms put in place of the arrays: shardings, axis numbers, stacked arrays."""

    @functools.wraps(checked)
    def init(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith("jaxtyping."):
            frame = frame.f_back
        caller = frame.f_globals["__name__"].partition(".")[0]
        values = [*args, *kwargs.values()]
        if caller not in ("jaxllm", "dataclasses") or any(
            isinstance(value, jax.ShapeDtypeStruct) for value in values
        ):
            return None
        return checked(*args, **kwargs)

    return init
