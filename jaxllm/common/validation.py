"""Checks plain values (from YAML, JSON, a command line) against the types of a dataclass.

pydantic checks strictly: the only conversions are integer to float and list to tuple. An error
becomes one line that names the field, as in the dataclasses' own checks. It describes the expected
type in words; `Annotated[T, "words"]` sets them. Recipes and the rows of a batch use this.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxllm.common.errors import ConfigError, JaxLLMError, quoted, shortened
from jaxllm.common.spelling import closest

if TYPE_CHECKING:  # slow; the functions below import it
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
NAMES = {
    type(None): "null",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


@functools.cache
def adapter(cls: type[T]) -> TypeAdapter[T]:
    """Returns the cached validator of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def from_plain(cls: type[T], raw: object) -> T:
    """Makes a dataclass from plain JSON values.

    Raises:
        ConfigError: a field is unknown (the nearest one is named), missing or of the wrong type,
            or its value is rejected. The message has the dotted name of the first such field.

    >>> from jaxllm.training.optimizers import OptimizerConfig
    >>> from_plain(OptimizerConfig, {"learning_rat": 1.0})
    Traceback (most recent call last):
        ...
    jaxllm.common.errors.ConfigError: learning_rat: unknown; is it learning_rate?
    """
    from pydantic import ValidationError

    try:
        content = json.dumps(raw)
    except TypeError as error:
        raise ConfigError(f"expected values that JSON has ({error})") from None
    try:
        return adapter(cls).validate_json(content, strict=True, extra="forbid")
    except ValidationError as error:
        raise ConfigError(_message(cls, raw, error.errors(include_url=False))) from None


def to_plain(value: object) -> Any:
    """Converts a dataclass to JSON values; the inverse of `from_plain`."""
    return adapter(type(value)).dump_python(value, mode="json", warnings=False)


def check_types(value: object, error: type[JaxLLMError] = ConfigError) -> None:
    """Checks the field types of a dataclass that Python code may also construct.

    Raises:
        error: a field has a value of the wrong type.
    """
    for name, hint in _hints(type(value)).items():
        content = getattr(value, name)
        if _is_plainly(content, hint):
            continue  # what most fields hold needs no pydantic
        from pydantic import ValidationError

        try:
            adapter(hint).validate_python(content, strict=True)
        except ValidationError:
            raise error(f"{name}: expected {_spelled(hint)}, found {quoted(content)}") from None


def _is_plainly(content: object, hint: Any) -> bool:
    """True if a type admits a value by the value's class alone; False says nothing.

    >>> _is_plainly([1], list[Any] | None), _is_plainly(True, int)
    (True, False)
    """
    if typing.get_origin(hint) is typing.Annotated:
        return _is_plainly(content, typing.get_args(hint)[0])
    if len(options := _options(hint)) > 1:
        return any(_is_plainly(content, option) for option in options)
    is_of_any = set(typing.get_args(hint)) == {Any} and typing.get_origin(hint) is type(content)
    return hint is Any or hint is type(content) or is_of_any


def admits_null(cls: type, name: str) -> bool:
    """True if the field of a dataclass under a dotted name may be null; True for unknown names.

    >>> from jaxllm.training.run.recipe import Recipe
    >>> admits_null(Recipe, "lora"), admits_null(Recipe, "optimizer.name")
    (True, False)
    """
    hint: Any = cls
    for part in name.split("."):
        fields = _fields(hint)
        if part not in fields:
            return True
        hint = fields[part]
    return type(None) in _options(hint)


def _message(cls: Any, raw: Any, errors: Sequence[ErrorDetails]) -> str:
    """Message of the first error; a misspelt field before the missing field that it causes."""
    unknown = [error for error in errors if error["type"] == "unexpected_keyword_argument"]
    error = (unknown or errors)[0]
    where, hint, content = "", cls, raw
    for part in error["loc"]:
        fields, item = _fields(hint), _item(hint)
        if isinstance(part, str) and part in fields and isinstance(content, Mapping):
            if part not in content:
                return f"{_dotted(where, part)}: missing"
            where, hint, content = _dotted(where, part), fields[part], content[part]
        elif isinstance(part, int) and item is not None:
            where, hint, content = f"{where}[{part}]", item, content[part]
        elif unknown:
            near = closest(str(part), fields)
            known = f"is it {_dotted(where, near)}?" if near else f"known: {', '.join(fields)}"
            return f"{_dotted(where, part)}: unknown; {known}"
    if error["type"] == "value_error":
        return _dotted(where, error["ctx"]["error"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if not where and not isinstance(content, Mapping):
        return f"expected fields, found {quoted(content)}"
    if not where:
        return error["msg"]
    fields = _fields(hint) if isinstance(content, str) else {}
    name = next((f"{where}.{name}" for name in ("path", "name") if name in fields), None)
    instead = f"; write {name} (in a command --{name} {shortened(str(content))})" if name else ""
    return f"{where}: expected {_spelled(hint)}, found {quoted(content)}{instead}"


def _dotted(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _options(hint: object) -> tuple[Any, ...]:
    """Members of a union type, or the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _fields(hint: object) -> dict[str, Any]:
    """Field types of the dataclass that a type is or allows; empty if none."""
    classes = (option for option in _options(hint) if dataclasses.is_dataclass(option))
    return next(map(_hints, classes), {})


def _item(hint: object) -> Any:
    """Item type of a list; None if the type is not just a list."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def _spelled(hint: object) -> str:
    """Describes a type in words.

    >>> _spelled(tuple[str, ...] | Literal["a", "b"] | None)
    "a list of strings or 'a', 'b' or null"
    """
    options, origin, args = _options(hint), typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return args[1]
    if len(options) > 1:
        return " or ".join(map(_spelled, options))
    if origin is Literal:
        return ", ".join(map(repr, args))
    if origin is tuple:
        return f"a list of {_spelled(args[0]).split(maxsplit=1)[1]}s"
    return NAMES.get(hint, "fields")
