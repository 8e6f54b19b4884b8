"""Dataclasses that are also mappings, from the names of their fields to the values."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import fields
from typing import Any


class FieldMapping(Mapping[str, Any]):
    """Base of a dataclass that is also a mapping of its fields, without those that are None.

    Make the dataclass with ``eq=False``, so that it is compared like any mapping.
    """

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in self._names() else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> KeysView[str]:
        return dict.fromkeys(self).keys()

    def _names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self))  # pyright: ignore[reportArgumentType]


class ArrayMapping(FieldMapping):
    """A `FieldMapping` of arrays, compared and hashed by identity.

    Comparing arrays gives no truth value.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
