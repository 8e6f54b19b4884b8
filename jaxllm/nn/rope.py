"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv:2104.09864): six types of config.json.

Frequencies are computed on the host in float32, or traced where they depend on the length. Angles,
cosines and sines are float32 too, since bfloat16 cannot represent large positions exactly. Pairs
are half-split, as in Hugging Face's Llama weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.errors import ConfigError, UnsupportedError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
    "llama3": (),
}
# Some versions of transformers write these for every type, even where they have no effect.
_COMMON = ("rope_type", "rope_theta", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE settings of one model. Static: models with equal settings share compiled programs.

    `max_positions` is the length above which dynamic scaling sets in; `original_positions` is the
    context length before extension (yarn, longrope, llama3).
    """

    head_dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    max_positions: int = 2048
    original_positions: int = 2048
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def angles(
        self, positions: Int[Array, "B T"], horizon: Int[Array, "*B"]
    ) -> tuple[Float[Array, "B T 1 H"], Float[Array, "B T 1 H"]]:
        """Cosines and sines for `rotate`; `horizon` is 1 + the largest position so far, of the
        batch or of each row."""
        frequencies = self.frequencies(jnp.reshape(horizon, (-1, 1, 1, 1)))
        angle = positions[..., None, None].astype(jnp.float32) * frequencies
        angle = jnp.concatenate([angle, angle], axis=-1)
        scale = self.attention_scaling
        return jnp.cos(angle) * scale, jnp.sin(angle) * scale

    def frequencies(self, horizon: Int[Array, " ..."]) -> Float[Array, "... F"]:
        """Radians per position. Traced only for types that depend on length (dynamic, longrope)."""
        match self.rope_type:
            case "dynamic":
                return self._dynamic(horizon)
            case "longrope":
                short, long = (
                    1.0 / (np.asarray(f, np.float32) * self._powers())
                    for f in (self.short_factor, self.long_factor)
                )
                return jnp.where(horizon > self.original_positions, long, short)
            case "linear":
                return jnp.asarray(1.0 / self._powers() / np.float32(self.factor))
            case "llama3":
                return jnp.asarray(self._llama3())
            case "yarn":
                return jnp.asarray(self._yarn())
            case _:
                return jnp.asarray(1.0 / self._powers())

    @property
    def attention_scaling(self) -> float:
        """Factor of cos and sin (yarn, longrope); scores are scaled by its square."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            if self.factor <= 1.0:
                return 1.0
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_positions))
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def _powers(self) -> np.ndarray:
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        return np.float32(self.theta) ** exponent

    def _dynamic(self, horizon: Int[Array, " ..."]) -> Float[Array, "... F"]:
        """Dynamic NTK-aware scaling: the base grows once a sequence exceeds `max_positions`."""
        length = jnp.maximum(horizon, self.max_positions).astype(jnp.float32)
        growth = self.factor * length / self.max_positions - (self.factor - 1)
        base = self.theta * growth ** (self.head_dim / (self.head_dim - 2))
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        return 1.0 / base**exponent

    def _llama3(self) -> np.ndarray:
        """Llama 3 scaling: low frequencies over `factor`, high ones kept, others interpolated."""
        plain = 1.0 / self._powers()
        wavelength = 2 * np.pi / plain
        longest = self.original_positions / self.low_freq_factor
        shortest = self.original_positions / self.high_freq_factor
        smooth = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * plain / self.factor + smooth * plain
        scaled = np.where(wavelength > longest, plain / self.factor, between)
        return np.where(wavelength < shortest, plain, scaled).astype(np.float32)

    def _yarn(self) -> np.ndarray:
        """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolates low frequencies only."""

        def dimension(rotations: float) -> float:
            turns = self.original_positions / (rotations * 2 * math.pi)
            return self.head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(self.head_dim // 2, dtype=np.float32) - low) / (high - low)
        ramp = np.clip(ramp, 0, 1)
        plain = 1.0 / self._powers()
        return (plain / self.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """Applies RoPE: rotates each pair (x[i], x[i + H/2]) by its angle, in float32."""
    half = x.shape[-1] // 2
    y = x.astype(jnp.float32)
    turned = jnp.concatenate([-y[..., half:], y[..., :half]], axis=-1)
    return (y * cos + turned * sin).astype(x.dtype)


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
    field, given = _parameters(config)
    rope_type = given.get("rope_type")
    rope_type = "default" if rope_type is None else rope_type
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            f"{field}.rope_type: unknown type {rope_type!r}; known: {', '.join(ROPE_TYPES)}"
        )
    allowed = {*_COMMON, *_NEEDED[rope_type], *_OPTIONAL[rope_type]}
    for key, value in given.items():
        if value is not None and key not in allowed:
            raise UnsupportedError(f"{field}.{key}: not a parameter of rope type {rope_type!r}")
    for key in _NEEDED[rope_type]:
        if given.get(key) is None:
            raise ConfigError(f"{field}.{key}: missing; rope type {rope_type!r} needs it")

    def number(key: str, default: float, *, low: float = 0.0) -> float:
        value = given.get(key)
        return default if value is None else _number(f"{field}.{key}", value, low=low)

    def factors(key: str) -> tuple[float, ...]:
        value = given.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or len(value) != head_dim // 2:
            found = f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
            raise ConfigError(
                f"{field}.{key}: expected {head_dim // 2} numbers (head_dim / 2), found {found}"
            )
        return tuple(_number(f"{field}.{key}", v) for v in value)

    original = given.get("original_max_position_embeddings")
    original = max_positions if original is None else original
    if isinstance(original, bool) or not isinstance(original, int) or not 1 <= original < 2**31:
        raise ConfigError(
            f"{field}.original_max_position_embeddings: expected an integer >= 1, found "
            f"{original!r}"
        )
    low_freq = number("low_freq_factor", 1.0)
    high_freq = number("high_freq_factor", 4.0)
    if rope_type == "llama3" and not low_freq < high_freq:
        raise ConfigError(
            f"{field}.low_freq_factor: {low_freq} must be below high_freq_factor, {high_freq}"
        )
    if head_dim % 2 or (rope_type == "dynamic" and head_dim < 4):
        raise ConfigError(f"head_dim: rotary embeddings need an even number, found {head_dim}")
    truncate = given.get("truncate")
    if truncate is not None and not isinstance(truncate, bool):
        raise ConfigError(f"{field}.truncate: expected true or false, found {truncate!r}")
    return Rope(
        head_dim=head_dim,
        theta=number("rope_theta", 10000.0, low=1.0),
        rope_type=rope_type,
        max_positions=max_positions,
        original_positions=original,
        factor=number("factor", max_positions / original),
        attention_factor=number("attention_factor", 0.0) or None,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale", 0.0, low=-1.0) or None,
        mscale_all_dim=number("mscale_all_dim", 0.0, low=-1.0) or None,
        truncate=truncate is not False,
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        short_factor=factors("short_factor"),
        long_factor=factors("long_factor"),
    )


def _parameters(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name of the config field with the RoPE settings, and all settings merged into one dict.

    They are read from `rope_parameters`, `rope_scaling` and the top level. Contradictions are
    errors, since versions of transformers differ in which place takes precedence.
    """
    merged: dict[str, Any] = {}

    def add(where: str, key: str, value: Any) -> None:
        key = "rope_type" if key == "type" else key
        if value is None:
            return
        if merged.setdefault(key, value) != value:
            raise ConfigError(f"{where}: {value!r} contradicts another {key}, {merged[key]!r}")

    present = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    for name in present:
        given = config[name]
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: expected an object, found {given!r}")
        for key, value in given.items():
            add(f"{name}.{key}", key, value)
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        add(key, key, config.get(key))
    part = merged.pop("partial_rotary_factor", 1)
    if part != 1:
        raise UnsupportedError(
            f"partial_rotary_factor: found {part!r}; all dimensions of a head are rotated here"
        )
    return present[0] if present else "rope_scaling", merged


def _number(where: str, value: Any, *, low: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < 1e30:
        raise ConfigError(f"{where}: expected a number > {low:g}, found {value!r}")
    return float(value)
