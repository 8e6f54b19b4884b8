"""Generation settings, under the names that they have in transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from jaxllm.common.errors import ConfigError, InputError, JaxLLMError
from jaxllm.common.strict_json import read_json
from jaxllm.generation.settings.field_checks import BadValueError
from jaxllm.generation.settings.fields import FIELDS, UNSET

_MAX_FILE_BYTES = 1 << 20
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_GENERATE_ARGUMENTS = (
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
    *("assistant_model", "tokenizer", "synced_gpus"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
)


class GenerationConfig:
    """Settings of one kind of generation: immutable, checked, equal and hashed by value.

    Attributes are the fields of :data:`jaxllm.generation.settings.fields.FIELDS`; one that nobody
    gave has its default. Numbers may be JAX tracers, whose values are not checked.

    None given in code switches a field off (``top_k=None``, ``eos_token_id=None``), or leaves it
    unset where off means nothing (``max_length=None``). In a file, null always means unset.

    Attributes:
        given: Names of the fields given in code, as opposed to read from a file.

    >>> base = GenerationConfig.from_dict({"temperature": 0.6, "eos_token_id": 2})
    >>> config = base.merge(GenerationConfig(do_sample=True, top_p=0.9))
    >>> config.temperature, config.top_p, config.top_k, sorted(config.given)
    (0.6, 0.9, 50, ['do_sample', 'top_p'])
    """

    given: frozenset[str]
    _values: dict[str, Any]

    def __init__(self, **fields: Any) -> None:
        values = {}
        for name, value in fields.items():
            field = _field(name, "generate()", InputError)
            if value is None:
                value = field.off
            if value is not UNSET:
                values[name] = _checked(name, value, "generate()", InputError)
        self._store(values, frozenset(values))

    def _store(self, values: dict[str, Any], given: frozenset[str]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "given", given)

    @classmethod
    def _make(cls, values: dict[str, Any], given: frozenset[str]) -> GenerationConfig:
        config = object.__new__(cls)
        config._store(values, given)
        return config

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], where: str = "generation_config.json"
    ) -> GenerationConfig:
        """The settings that a file holds.

        null means unset, and so does -1 as a special token. Nothing read here is in ``given``.

        Raises:
            ConfigError: It is not a map, a field is unknown, or holds something impossible; the
                message starts with ``where``.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where}: must hold an object, but holds {type(fields).__name__}")
        values = {}
        for name, value in fields.items():
            _field(name, where, ConfigError)
            unset = value is None or (name in _SPECIAL_TOKENS and value == -1)
            if not unset:
                values[name] = _checked(name, value, where, ConfigError)
        return cls._make(values, frozenset())

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> GenerationConfig:
        """:meth:`from_dict` on a ``generation_config.json``.

        Raises:
            MissingFileError: There is no such file.
            ConfigError: It is not a strict JSON object of known fields.
        """
        return cls.from_dict(read_json(path, max_bytes=_MAX_FILE_BYTES), where=str(path))

    def replace(self, **fields: Any) -> GenerationConfig:
        """A copy with other values for some fields, which then count as given."""
        return self.merge(GenerationConfig(**fields))

    def merge(self, other: GenerationConfig) -> GenerationConfig:
        """A copy in which every field that ``other`` holds, from code or file, has its value."""
        given = (self.given - other._values.keys()) | other.given
        return self._make({**self._values, **other._values}, given)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given or read, in their stored form (lists as tuples)."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(f"GenerationConfig has no field {name!r}{_nearest(name)}")
        return self._values.get(name, FIELDS[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"GenerationConfig is immutable: use config.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("GenerationConfig is immutable")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *FIELDS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationConfig) and self._values == other._values

    def __hash__(self) -> int:
        return hash(_hashable(self._values))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"GenerationConfig({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return GenerationConfig._make, (self._values, self.given)


def _field(name: str, where: str, error: type[JaxLLMError]) -> Any:
    if name in FIELDS:
        return FIELDS[name]
    if name in _GENERATE_ARGUMENTS:
        raise error(f"{where}: `{name}` is an argument of generate(), not a generation field")
    raise error(f"{where}: unknown generation field `{name}`{_nearest(name)}")


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(str(name), FIELDS, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _checked(name: str, value: Any, where: str, error: type[JaxLLMError]) -> Any:
    if value is None:
        return None
    try:
        return FIELDS[name].check(value)
    except BadValueError as bad:
        hint = "; for greedy decoding set do_sample=False" if name == "temperature" else ""
        raise error(f"{where}: `{name}` must be {bad}, but is {value!r}{hint}") from None


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value
