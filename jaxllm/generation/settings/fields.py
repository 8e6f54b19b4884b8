"""Declares generation settings: `setting()` holds all metadata of one field.

The fields of :class:`~jaxllm.generation.settings.config.GenerationConfig` are declared with it. The
metadata drives validation, errors for values that are not implemented, warnings for fields without
effect, command-line options, and the table in docs/generation.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from jaxllm.checkpoint.hub import resolve
from jaxllm.common.arguments import checked_path
from jaxllm.common.config_keys import describe_keys, unknown_keys, with_all_end_tokens
from jaxllm.common.errors import ConfigError, InputError, JaxLLMError, quoted
from jaxllm.common.files import make_folder, read_json, write_json
from jaxllm.common.spelling import closest
from jaxllm.generation.inputs.arguments import GENERATE_ARGUMENTS
from jaxllm.generation.inputs.values import checked_by, is_number, is_traced

FILE_NAME = "generation_config.json"
_MAX_FILE_BYTES = 1 << 20

# fmt: off
INERT_GENERATION_KEYS = frozenset({
    "architectures", "model_type", "prefix",
    # Chats of custom code, which other models' files have.
    "assistant_token_id", "bot_token_id", "chat_format", "max_window_size", "user_token_id",
})
# fmt: on
"""Keys of generation_config.json that have no effect. `common.config_keys` lists further keys."""
OFF_GENERATION_KEYS = frozenset({"ignore_eos", "skip_special_tokens", "trust_remote_code"})
"""Keys of generation_config.json that have no effect while they are false, 0 or empty."""

SPECIAL_TOKENS = frozenset({"pad_token_id", "bos_token_id", "eos_token_id"})
"""Fields that are unset by -1 in a file, as by null."""

SEEDS = {
    "seed": "; generate() takes key=, a number or jax.random.key(number)",
    "key": "; generate_texts() and BatchGenerator() take seed=, a number",
}
"""Hints at the argument that decides the random numbers, which differs between the two calls."""


@dataclass(frozen=True)
class Condition:
    """Settings without which a field has no effect, where they are more than one other field.

    Attributes:
        text: description, for warnings and the documentation.
        holds: ``(config, assistant_model) -> bool``.
        met_by_sampling: True if ``do_sample`` alone meets it.
    """

    text: str
    holds: Callable[[Any, Any], bool]
    met_by_sampling: bool = False


@dataclass(eq=False)
class Field:
    """One field of a generation config: a descriptor that reads the value of an instance.

    Attributes:
        default: value if the field is not set.
        check: returns the value as stored (lists as tuples), or raises BadValueError.
        doc: description, for the documentation and the command line.
        neutral: value with which the field changes nothing. None in a call stands for it unless
            None is the default, and leaves the field unset if there is no such value. Rows of a
            batch with and without a registered processor share a program if its field has one.
        needs: name of the field, or condition, without which the field has no effect
            (``check_consistent``).
        supported: values that are implemented; None: all.
        execution: True if the field chooses how results are computed, but not the results: a value
            from a file that is not implemented has no effect.
        static: True if the value determines the program or is read on the host; never a tracer.
        slots: True if rows in which the field has an effect can run in slots (continuous batching)
            and in a server; other rows run in static batches.
        provider: module that registers what the field enables; imported by a call that sets it.
        record: True if the field asks for a record of each step, which only a whole call can.
        token_ids: True if the integers in a value are token ids, which must be in the vocabulary.
        library_only: True if commands have no use for the field; their help does not list it.
        metadata: True if the field only describes the origin of a file and has no effect.
        name: the field's name.
    """

    default: Any
    check: Callable[[Any], Any]
    doc: str
    neutral: Any = None
    needs: str | Condition | None = None
    supported: tuple[Any, ...] | None = None
    execution: bool = False
    static: bool = False
    slots: bool = True
    provider: str | None = None
    record: bool = False
    token_ids: bool = False
    library_only: bool = False
    metadata: bool = False
    name: str = ""

    @property
    def only_sampling(self) -> bool:
        """True if the field has no effect on greedy search."""
        if isinstance(self.needs, Condition):
            return self.needs.met_by_sampling
        return self.needs == "do_sample"

    @property
    def needs_text(self) -> str:
        """``needs`` for warnings and the documentation; empty if the field needs nothing."""
        return self.needs.text if isinstance(self.needs, Condition) else self.needs or ""

    def has_effect(self, value: object) -> bool:
        """True if a value is neither neutral nor the default."""
        if self.metadata:
            return False
        return is_traced(value) or value not in (self.neutral, self.default)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: type) -> Any:
        return self if config is None else config._values.get(self.name, self.default)


def setting(*, default: object, converter: Callable[[Any], Any], doc: str, **facts: Any) -> Any:
    """Declares a field in a class body: returns a :class:`Field`, typed as Any.

    ``converter`` becomes ``Field.check``. It has this name because type checkers read the accepted
    argument type from it (``dataclass_transform``, as proposed in PEP 712).
    """
    return Field(default, converter, doc, **facts)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
class Settings:
    """Base class of GenerationConfig: creation, copying and comparison.

    Type checkers see a keyword argument for each field that a subclass declares.

    Attributes:
        fields: declared fields, by name.
        explicit: names of the fields set in code, not read from a file.
    """

    fields: ClassVar[dict[str, Field]]
    explicit: frozenset[str]
    _values: dict[str, Any]

    def __init_subclass__(cls) -> None:
        cls.fields = {name: field for name, field in vars(cls).items() if isinstance(field, Field)}

    def __init__(self, **fields: Any) -> None:
        values = {}
        for name, value in fields.items():
            field = self._field(name, "generate()", InputError)
            if value is None and field.default is not None:
                value = field.neutral
            if value is not None or field.default is None:
                values[name] = checked_value(field, value, "generate()", InputError)
        self._store(values, frozenset(values))

    def _store(self, values: dict[str, Any], explicit: frozenset[str]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "explicit", explicit)

    @classmethod
    def _make(cls, values: dict[str, Any], explicit: frozenset[str]) -> Self:
        config = object.__new__(cls)
        config._store(values, explicit)
        return config

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], where: str = "generation_config.json") -> Self:
        """Creates settings from the contents of a file.

        null means unset, and so do an empty list, object or string, and -1 as a special token.
        ``explicit`` stays empty. Numbers of sampling fields are checked when something is sampled
        (`resolve.check_for_use`): many files hold ``"temperature": 0.0``. Unknown keys are
        ignored or raise by the policy of `common.config_keys`.

        Raises:
            ConfigError: ``fields`` is no mapping, or a field is unknown or invalid; the message
                starts with ``where``.
        """
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where}: must hold an object, but holds {type(fields).__name__}")
        fields = with_all_end_tokens(fields)
        unknown = unknown_keys(fields, {*cls.fields, *INERT_GENERATION_KEYS}, OFF_GENERATION_KEYS)
        for name in unknown.keys() & GENERATE_ARGUMENTS:
            cls._field(name, where, ConfigError)
        if unknown:
            close = cls._nearest(next(iter(unknown))) if len(unknown) == 1 else ""
            raise ConfigError(
                f"{where}: unknown generation field{'s' * (len(unknown) > 1)} "
                f"{describe_keys(unknown)}: remove from the file, or set to null{close}"
            )
        values = {}
        for name, value in fields.items():
            field = cls.fields.get(name)
            is_empty = isinstance(value, str | list | dict) and not value
            is_unset = is_empty or (name in SPECIAL_TOKENS and (value == -1) is True)
            if field is None or value is None or is_unset:
                continue
            try:
                values[name] = checked_value(field, value, where, ConfigError)
            except ConfigError:
                if not (field.only_sampling and is_number(value)):
                    raise
                values[name] = value
        return cls._make(values, frozenset())

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Reads a ``generation_config.json``, as :meth:`from_dict`.

        Raises:
            MissingFileError: the file does not exist.
            ConfigError: the file is not a strict JSON object of known fields.
        """
        return cls.from_dict(read_json(path, max_bytes=_MAX_FILE_BYTES), where=str(path))

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        config_file_name: str = FILE_NAME,
        *,
        revision: str | None = None,
        **fields: Any,
    ) -> Self:
        """Reads the settings of a Hugging Face folder or Hub id; ``fields`` replace some of them.

        Raises:
            MissingFileError, ConfigError: as :meth:`from_file`.
            InputError: one of ``fields`` is unknown or invalid.
        """
        folder = resolve(path_or_hub_id, revision, weights=False)
        return cls.from_file(folder / config_file_name).replace(**fields)

    def save_pretrained(
        self, save_directory: str | PathLike[str], config_file_name: str = FILE_NAME
    ) -> None:
        """Writes the settings to a folder, which is created if needed; the other direction.

        Raises:
            InputError: JSON cannot hold the value of a field.
            CheckpointError: the file cannot be written.
        """
        values, folder = self.to_json(), checked_path(save_directory, "save_directory")
        make_folder(folder)
        write_json(folder / config_file_name, values)

    def replace(self, **fields: Any) -> Self:
        """Returns a copy with the given fields replaced; they are added to ``explicit``."""
        return self.merge(type(self)(**fields))

    def merge(self, other: Self) -> Self:
        """Returns a copy in which all fields set in ``other``, in code or file, take its values.

        Raises:
            InputError: ``other`` is not of this class.
        """
        if not isinstance(other, type(self)):
            expected = type(self).__name__
            raise InputError(f"merge: expected a {expected}, found {quoted(other)}")
        explicit = (self.explicit - other._values.keys()) | other.explicit
        return self._make({**self._values, **other._values}, explicit)

    def without(self, names: Iterable[str]) -> Self:
        """Returns a copy in which some fields are unset."""
        values = {name: value for name, value in self._values.items() if name not in set(names)}
        return self._make(values, self.explicit & values.keys())

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that were set in code or read, as stored (lists as tuples)."""
        return dict(self._values)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as generation_config.json holds them.

        Raises:
            InputError: JSON cannot hold the value of a field.
        """
        values = {
            name: value.to_dict() if hasattr(value, "to_dict") else value
            for name, value in self._values.items()
        }
        for name, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise InputError(
                    f"`{name}`={quoted(value)} cannot be written to generation_config.json: "
                    "remove it from model.generation_config and set it in each call"
                ) from None
        return values

    def __setattr__(self, name: str, value: object) -> None:
        owner = type(self).__name__
        raise AttributeError(f"{owner} is immutable: use config.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._values == other._values

    def __hash__(self) -> int:
        return hash(_hashable(self._values))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, (self._values, self.explicit)

    if not TYPE_CHECKING:  # type checkers would accept every name as a field

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}{self._nearest(name)}"
            )

    @classmethod
    def _field(cls, name: str, where: str, error: type[JaxLLMError]) -> Field:
        if name in cls.fields:
            return cls.fields[name]
        if name in GENERATE_ARGUMENTS:
            raise error(f"{where}: `{name}` is an argument of generate(), not a generation field")
        raise error(f"{where}: unknown generation field `{name}`{cls._nearest(name)}")

    @classmethod
    def _nearest(cls, name: str) -> str:
        if name in SEEDS:
            return SEEDS[name]
        close = closest(str(name), cls.fields)
        return f"; did you mean `{close}`?" if close else ""


def checked_value(field: Field, value: object, where: str, error: type[JaxLLMError]) -> Any:
    """Checks a field's value; returns it as stored, or raises ``error`` with ``where``."""
    if value is None:
        return None
    hint = "; for greedy decoding set do_sample=False" if field.name == "temperature" else ""
    return checked_by(where, field.name, field.check, value, error, hint)


def _hashable(value: object) -> Any:
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value
