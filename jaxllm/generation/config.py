"""Generation settings, under the names that they have in transformers."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

from jaxtyping import Array, Int

from jaxllm.errors import ConfigError, InputError, JaxLLMError, UnsupportedError
from jaxllm.generation.fields import FIELDS, UNSET, BadValueError
from jaxllm.generation.values import is_traced
from jaxllm.json_file import read_json

_MAX_FILE_BYTES = 1 << 20
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_GENERATE_ARGUMENTS = (
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer"),
    *("assistant_model", "tokenizer", "synced_gpus"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
)


class GenerationConfig:
    """Settings of one kind of generation: immutable, checked, equal and hashed by value.

    Attributes are the fields of :data:`jaxllm.generation.fields.FIELDS`; one that nobody gave has
    its default. Numbers may be JAX tracers, whose values are not checked.

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


def generation_mode(config: GenerationConfig, assistant_model: Any = None) -> str:
    """The name of the strategy that the settings ask for, by the rule of transformers.

    >>> generation_mode(GenerationConfig(num_beams=4))
    'beam_search'
    """
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained_beam_search"
    if config.num_beams > 1:
        if config.num_beam_groups > 1:
            return "group_beam_search"
        return "beam_sample" if config.do_sample else "beam_search"
    if not config.do_sample and _contrasts(config):
        top_k = config.top_k
        if is_traced(top_k) or top_k > 1:
            return "contrastive_search"
    drafts = (assistant_model, config.prompt_lookup_num_tokens, config.assistant_early_exit)
    if any(draft is not None for draft in drafts):
        return "assisted_generation"
    if config.dola_layers is not None:
        return "dola_generation"
    return "sample" if config.do_sample else "greedy_search"


def _contrasts(config: GenerationConfig) -> bool:
    alpha = config.penalty_alpha
    return is_traced(alpha) or bool(alpha)


def check_supported(config: GenerationConfig) -> None:
    """Raises for every field that asks for something that jaxllm does not do yet.

    Raises:
        UnsupportedError: Names the field, its value, and the values that are possible.
    """
    for name, value in config.to_dict().items():
        field = FIELDS[name]
        if field.only is not None and (is_traced(value) or value not in field.only):
            possible = " or ".join(repr(allowed) for allowed in field.only)
            raise UnsupportedError(
                f"`{name}`={value!r} ({field.note}) is not supported: it must be {possible}"
            )


def check_consistent(config: GenerationConfig, assistant_model: Any = None) -> None:
    """Finds settings that contradict each other, and warns of those without effect.

    As in transformers, a field is warned about only if it was given in code: a checkpoint's file
    may hold a temperature and be used greedily.

    Raises:
        InputError: Several results from greedy search, more results than beams, or a token that is
            both forced and suppressed.
    """
    results, beams = config.num_return_sequences, config.num_beams
    if results > 1 and beams == 1 and not config.do_sample:
        raise InputError(
            f"`num_return_sequences`={results}: greedy search finds one result; set do_sample=True "
            "or num_beams"
        )
    groups = config.num_beam_groups
    if groups > 1 and (beams == 1 or beams % groups):
        raise InputError(f"`num_beam_groups`: {groups} groups do not divide num_beams, {beams}")
    if 1 < beams < results:
        raise InputError(
            f"`num_return_sequences`={results} must be at most `num_beams`={beams}, "
            "since each beam gives one result"
        )
    suppressed = set(config.suppress_tokens or ())
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = _ids(getattr(config, name))
        if forced and suppressed.issuperset(forced):
            raise InputError(
                f"`{name}`={getattr(config, name)!r} is also in `suppress_tokens`, "
                "which leaves no token to choose"
            )

    mode = generation_mode(config)
    active = {
        "do_sample": config.do_sample,
        "do_sample or penalty_alpha": config.do_sample or _contrasts(config),
        "top_k > 1 and greedy search": mode == "contrastive_search",
        "greedy search or sampling": mode in ("dola_generation", "assisted_generation"),
        "num_beams": beams > 1,
        "num_beam_groups": config.num_beam_groups > 1,
        "an assistant": assistant_model is not None or config.assistant_early_exit is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_tokenizer": False,
    }
    for name in sorted(config.given):
        field, value = FIELDS[name], getattr(config, name)
        unchanged = not is_traced(value) and value in (field.neutral, field.default)
        if field.needs and not active[field.needs] and not unchanged:
            warnings.warn(
                f"`{name}`={value!r} has no effect without `{field.needs}`",
                UserWarning,
                stacklevel=2,
            )


class Lengths(NamedTuple):
    """Lengths of a row, prompt included."""

    max_length: int | Int[Array, ""]
    min_length: int | Int[Array, ""]


def resolve_lengths(
    config: GenerationConfig, prompt_len: int, max_positions: int | None = None
) -> Lengths:
    """Total lengths for a prompt of ``prompt_len`` tokens (padding included), as transformers does.

    ``max_new_tokens`` wins over ``max_length``. With neither, 20 new tokens, but no more than
    ``max_positions`` in all; lengths that were asked for are not cut. ``min_new_tokens`` wins over
    ``min_length``.

    Raises:
        InputError: No room for a new token, or the minimum is above the maximum.

    >>> resolve_lengths(GenerationConfig(max_new_tokens=5, min_new_tokens=2), prompt_len=10)
    Lengths(max_length=15, min_length=12)
    """
    stated = config.to_dict()
    if config.max_new_tokens is not None:
        if "max_length" in config.given:
            warnings.warn(
                "`max_length` has no effect beside `max_new_tokens`", UserWarning, stacklevel=2
            )
        max_length = prompt_len + config.max_new_tokens
    elif "max_length" in stated:
        max_length = config.max_length
    else:
        max_length = prompt_len + config.max_length
        max_length = max_length if max_positions is None else min(max_length, max_positions)
    if config.min_new_tokens is not None:
        min_length = prompt_len + config.min_new_tokens
    else:
        min_length = config.min_length

    if not is_traced(max_length):
        if prompt_len >= max_length:
            raise InputError(
                f"the prompt has {prompt_len} tokens, but `max_length` is {max_length}: "
                "nothing can be generated; raise it, or set `max_new_tokens`"
            )
        name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
        # A minimum that only the checkpoint's file states does not forbid a short call.
        if name in config.given and not is_traced(min_length) and min_length > max_length:
            raise InputError(
                f"`{name}` asks for at least {min_length} tokens in all, but the maximum is "
                f"{max_length}: lower it, or raise `max_new_tokens`"
            )
    return Lengths(max_length, min_length)


def resolve_eos(config: GenerationConfig, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The end-of-sequence tokens: those of the settings, else ``default`` (the model's).

    ``eos_token_id=None`` given in code means none at all.
    """
    if "eos_token_id" in config.to_dict():
        return _ids(config.eos_token_id)
    return default


def resolve_pad(config: GenerationConfig, eos: tuple[int, ...]) -> int | None:
    """The padding token: that of the settings, else the first end token, else None."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    return eos[0] if eos else None


def _ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
