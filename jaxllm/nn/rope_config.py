"""RoPE settings of config.json: read from any version of transformers, written for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.common.config_keys import describe_keys, unknown_keys
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted, shortened
from jaxllm.nn.rope import Rope

YARN_PARAMETERS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Parameters that each RoPE type needs."""
OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": YARN_PARAMETERS,
    "longrope": ("factor", "attention_factor"),
}
EXTENDED = ("llama3", "longrope", "yarn")
"""Types that extend a context, and use its original length."""
ROPE_TYPES = tuple(REQUIRED)
# Some versions of transformers write these for every type, even where they have no effect.
COMMON = ("rope_type", "rope_theta", "original_max_position_embeddings")


def rope_from_config(config: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Rope:
    """Reads RoPE settings: transformers v4 (`rope_theta`, `rope_scaling`), v5 (`rope_parameters`).

    An unknown parameter is an error: a model run without its scaling gives fluent nonsense.

    Raises:
        ConfigError: a value is missing, ill-typed, out of range or contradictory.
        UnsupportedError: an unknown RoPE type or parameter.

    >>> raw = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    >>> rope = rope_from_config(raw, head_dim=64, max_positions=4096)
    >>> rope.rope_type, rope.theta, rope.factor
    ('linear', 500000.0, 2.0)
    """
    parameters = _read_parameters(config)
    rope_type = parameters.rope_type()
    original = parameters.positions("original_max_position_embeddings", max_positions)
    low_freq = parameters.number("low_freq_factor", 1.0)
    high_freq = parameters.number("high_freq_factor", 4.0)
    if rope_type == "llama3" and not low_freq < high_freq:
        raise ConfigError(
            f"{parameters.field}.low_freq_factor: {low_freq} must be below high_freq_factor, "
            f"{high_freq}"
        )
    if head_dim % 2 or (rope_type == "dynamic" and head_dim < 4):
        raise ConfigError(f"head_dim: rotary embeddings need an even number, found {head_dim}")
    return Rope(
        head_dim=head_dim,
        theta=parameters.number("rope_theta", 10000.0, low=1.0),
        rope_type=rope_type,
        max_positions=max_positions,
        original_positions=original,
        factor=parameters.number("factor", max_positions / original),
        attention_factor=parameters.number("attention_factor", 0.0) or None,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        mscale=parameters.number("mscale", 0.0, low=-1.0) or None,
        mscale_all_dim=parameters.number("mscale_all_dim", 0.0, low=-1.0) or None,
        truncate=parameters.flag("truncate", default=True),
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        short_factor=parameters.factors("short_factor", head_dim // 2),
        long_factor=parameters.factors("long_factor", head_dim // 2),
    )


def rope_to_config(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json that transformers 4 and 5 both read.

    >>> rope_to_config(Rope(head_dim=64, rope_type="linear", factor=2.0))
    {'rope_theta': 10000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    if rope.rope_type == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.rope_type}
    for key in (*OPTIONAL.get(rope.rope_type, ()), *REQUIRED[rope.rope_type]):
        value = getattr(rope, key)
        if value is not None:
            scaling[key] = list(value) if isinstance(value, tuple) else value
    if rope.rope_type in EXTENDED:
        scaling["original_max_position_embeddings"] = rope.original_positions
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def without_unused(rope: Rope) -> Rope:
    """The same RoPE, with default values of the settings that its type does not use."""
    kind = rope.rope_type
    names = {"head_dim", "theta", "rope_type", *REQUIRED[kind], *OPTIONAL.get(kind, ())}
    if kind in EXTENDED:
        names.add("original_positions")
    elif kind == "dynamic":
        names.add("max_positions")
    return Rope(**{name: getattr(rope, name) for name in names})


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """RoPE parameters of a config.json, with typed access that names the field in errors."""

    field: str
    values: Mapping[str, Any]

    def rope_type(self) -> str:
        """The RoPE type, whose required parameters are present and which knows all others."""
        rope_type = self.values.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"{self.field}.rope_type: unknown type {quoted(rope_type)}; known: "
                f"{', '.join(ROPE_TYPES)}"
            )
        known = {*COMMON, *REQUIRED[rope_type], *OPTIONAL.get(rope_type, ())}
        if rope_type == "default" and self.values.get("factor") == 1:
            known.add("factor")  # no scaling, however it is spelled
        if rope_type == "yarn":
            known.add("finetuned")  # says how the model was trained
        unknown = {f"{self.field}.{k}": v for k, v in unknown_keys(self.values, known).items()}
        if unknown:
            raise UnsupportedError(
                f"{describe_keys(unknown)}: not a parameter of rope type {rope_type!r}"
            )
        for key in REQUIRED[rope_type]:
            if key not in self.values:
                raise ConfigError(f"{self.field}.{key}: missing; rope type {rope_type!r} needs it")
        return rope_type

    def number(self, key: str, default: float, *, low: float = 0.0) -> float:
        """A number above `low`."""
        value = self.values.get(key)
        return default if value is None else _number(f"{self.field}.{key}", value, low=low)

    def positions(self, key: str, default: int) -> int:
        """A number of positions, which other tools may write as a float."""
        value = self.values.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ConfigError(
                f"{self.field}.{key}: expected an integer >= 1, found {quoted(value)}"
            )
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.field}.{key}: expected true or false, found {quoted(value)}")
        return value

    def factors(self, key: str, count: int) -> tuple[float, ...]:
        """`count` positive numbers; empty if the config has none."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or len(value) != count:
            found = f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
            raise ConfigError(
                f"{self.field}.{key}: expected {count} numbers (head_dim / 2), found {found}"
            )
        return tuple(_number(f"{self.field}.{key}", v) for v in value)


def _read_parameters(config: Mapping[str, Any]) -> _Parameters:
    """All RoPE parameters that are not null, merged from the places that may hold them.

    They are read from `rope_parameters`, `rope_scaling` and the top level. Contradictions are
    errors, since versions of transformers differ in which place takes precedence.
    """
    merged: dict[str, Any] = {}

    def add(where: str, key: str, value: object) -> None:
        key = "rope_type" if key == "type" else key
        if value is None:
            return
        if merged.setdefault(key, value) != value:
            raise ConfigError(
                f"{shortened(where)}: {quoted(value)} contradicts another {shortened(key)}, "
                f"{quoted(merged[key])}"
            )

    fields = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    for name in fields:
        if not isinstance(config[name], Mapping):
            raise ConfigError(f"{name}: expected an object, found {quoted(config[name])}")
        for key, value in config[name].items():
            add(f"{name}.{key}", key, value)
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        add(key, key, config.get(key))
    part = merged.pop("partial_rotary_factor", 1)
    if part != 1:
        raise UnsupportedError(
            f"partial_rotary_factor: found {quoted(part)}; all dimensions of a head are rotated "
            "here"
        )
    return _Parameters(fields[0] if fields else "rope_scaling", merged)


def _number(where: str, value: object, *, low: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < 1e30:
        raise ConfigError(f"{where}: expected a number > {low:g}, found {quoted(value)}")
    return float(value)
