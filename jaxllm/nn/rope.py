"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv:2104.09864): six types of config.json,
read from the files of any version of transformers.

Frequencies are computed on the host in float32, or traced where they depend on the length. Angles,
cosines and sines are float32 too, since bfloat16 cannot represent large positions exactly. Pairs
are half-split, as in Hugging Face's Llama weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.config_keys import describe_keys, unknown_keys
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted, shortened
from jaxllm.common.precision import float32_einsum
from jaxllm.nn.platform.products import apply_to_rows
from jaxllm.parallel.sharding import heads_are_sharded

MAX_PRODUCT_WIDTH = 1024
"""Most elements of a position's queries, or keys, that `rotate_by_product` takes."""


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
    partial_rotary_factor: float = 1.0
    """Part of a head's features, the first ones, that are rotated."""

    @property
    def rotated(self) -> int:
        """Number of features of a head that are rotated, R."""
        return int(self.head_dim * self.partial_rotary_factor)

    def angles(
        self, positions: Int[Array, "B T"], rope_length: Int[Array, "#B #T"]
    ) -> tuple[Float[Array, "B T 1 R"], Float[Array, "B T 1 R"]]:
        """Cosines and sines for `rotate`. `rope_length` is 1 + the largest position so far: of the
        batch, of each row, or of the document of each position."""
        frequencies = self.frequencies(rope_length[..., None, None])
        frequencies = jnp.concatenate([frequencies, frequencies], axis=-1)
        frequencies = frequencies.reshape(*[1] * (4 - frequencies.ndim), *frequencies.shape)
        angle = positions[..., None, None].astype(jnp.float32) * frequencies
        scale = self.attention_scaling
        return jnp.cos(angle) * scale, jnp.sin(angle) * scale

    @property
    def uses_length(self) -> bool:
        """True if the frequencies depend on the length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")

    def frequencies(self, rope_length: Int[Array, " ..."]) -> Float[Array, "... F"]:
        """Radians per position. Traced only for types that depend on length (dynamic, longrope)."""
        match self.rope_type:
            case "dynamic":
                return self._dynamic(rope_length)
            case "longrope":
                short, long = (
                    1.0 / (np.asarray(f, np.float32) * self._powers())
                    for f in (self.short_factor, self.long_factor)
                )
                return jnp.where(rope_length > self.original_positions, long, short)
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
        exponent = np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        return np.float32(self.theta) ** exponent

    def _dynamic(self, rope_length: Int[Array, " ..."]) -> Float[Array, "... F"]:
        """Dynamic NTK-aware scaling: the base grows once a sequence exceeds `max_positions`."""
        length = jnp.maximum(rope_length, self.max_positions).astype(jnp.float32)
        growth = self.factor * length / self.max_positions - (self.factor - 1)
        base = self.theta * growth ** (self.rotated / (self.rotated - 2))
        exponent = np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        return 1.0 / base ** np.expand_dims(exponent, tuple(range(base.ndim - 1)))

    def _llama3(self) -> np.ndarray:
        """Llama 3 scaling: low frequencies over `factor`, high ones kept, others interpolated."""
        unscaled = 1.0 / self._powers()
        wavelength = 2 * np.pi / unscaled
        longest = self.original_positions / self.low_freq_factor
        shortest = self.original_positions / self.high_freq_factor
        smooth = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * unscaled / self.factor + smooth * unscaled
        scaled = np.where(wavelength > longest, unscaled / self.factor, between)
        return np.where(wavelength < shortest, unscaled, scaled).astype(np.float32)

    def _yarn(self) -> np.ndarray:
        """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolates low frequencies only."""

        def dimension(rotations: float) -> float:
            turns = self.original_positions / (rotations * 2 * math.pi)
            return self.rotated * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotated - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(self.rotated // 2, dtype=np.float32) - low) / (high - low)
        ramp = np.clip(ramp, 0, 1)
        unscaled = 1.0 / self._powers()
        return (unscaled / self.factor * ramp + unscaled * (1 - ramp)).astype(np.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 R"], sin: Float[Array, "B T 1 R"]
) -> Float[Array, "B T N H"]:
    """Applies RoPE to the first R features: rotates each pair (x[i], x[i + R/2]) by its angle, in
    float32."""
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        first, rest = x[..., :rotated], x[..., rotated:]
        return jnp.concatenate([rotate(first, cos, sin), rest], axis=-1)
    # PERF(tpu): slices and negations of heads are copies, a sixth of a decode step of SmolLM2 and
    # of its prefill; docs/decisions/tpu-decode-step.md. In a decode step the matrix for all heads
    # of a larger model would take longer than one for each head.
    on_tpu = rotate_each_head
    if x.shape[1] == 1 and math.prod(x.shape[2:]) <= MAX_PRODUCT_WIDTH and not heads_are_sharded():
        on_tpu = rotate_by_product
    return jax.lax.platform_dependent(x, cos, sin, tpu=on_tpu, default=rotate_halves)


def rotate_halves(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """`rotate` by slices of the last axis."""
    half = x.shape[-1] // 2
    y = x.astype(jnp.float32)
    rotated_half = jnp.concatenate([-y[..., half:], y[..., :half]], axis=-1)
    return (y * cos + rotated_half * sin).astype(x.dtype)


def exchange_matrix(size: int) -> np.ndarray:
    """The matrix M of 0 and ±1 with ``x @ M = concatenate([-x[size/2:], x[:size/2]])``.

    Every sum of the product has one term, so it is exact if products of single numbers are.
    """
    return np.kron([[0, 1], [-1, 0]], np.eye(size // 2))


def rotate_each_head(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """`rotate` with a product of each head by a matrix of 0 and ±1."""
    matrix = jnp.asarray(exchange_matrix(x.shape[-1]), x.dtype)
    rotated_half = float32_einsum("btnh,hi->btni", x, matrix)
    return (x.astype(jnp.float32) * cos + rotated_half * sin).astype(x.dtype)


def rotate_by_product(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """`rotate` with one product, for all heads, by a matrix of 0 and ±1."""
    B, T, N, H = x.shape
    exchange = np.kron(np.eye(N), exchange_matrix(H))
    same_and_exchanged = np.stack([np.eye(N * H), exchange], axis=1)
    matrix = jnp.asarray(same_and_exchanged, x.dtype)  # [N*H, 2, N*H]
    # x is used once, so that XLA computes it, the projection's product, within this product.
    product = functools.partial(float32_einsum, "bi,ipj->bpj")
    both = apply_to_rows(product, x.reshape(B * T, N * H), matrix)
    cos, sin = (jnp.tile(z.reshape(-1, 1, H), (1, 1, N)) for z in (cos, sin))
    # A choice, not a stack: XLA would write that by parts into memory of its own.
    factors = jnp.where(np.array([[True], [False]]), cos, sin)
    return jnp.sum(both * factors, axis=1).astype(x.dtype).reshape(x.shape)


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
COMMON = (
    *("rope_type", "rope_theta", "original_max_position_embeddings"),
    "partial_rotary_factor",
)


def rope_from_config(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    max_positions: int,
    default_theta: float = 10000.0,
) -> Rope:
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
    part = parameters.number("partial_rotary_factor", 1.0)
    rotated = int(head_dim * part)
    if part != 1 and (part > 1 or rotated % 2 or not rotated):
        raise ConfigError(
            f"partial_rotary_factor: expected an even part of a head, {head_dim}, found {part}"
        )
    if rotated % 2 or (rope_type == "dynamic" and rotated < 4):
        raise ConfigError(f"head_dim: rotary embeddings need an even number, found {head_dim}")
    return Rope(
        head_dim=head_dim,
        theta=parameters.number("rope_theta", default_theta, low=1.0),
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
        short_factor=parameters.factors("short_factor", rotated // 2),
        long_factor=parameters.factors("long_factor", rotated // 2),
        partial_rotary_factor=part,
    )


def rope_to_config(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json that transformers 4 and 5 both read.

    >>> rope_to_config(Rope(head_dim=64, rope_type="linear", factor=2.0))
    {'rope_theta': 10000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    theta: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1:
        theta["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.rope_type == "default":
        return theta | {"rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.rope_type}
    for key in (*OPTIONAL.get(rope.rope_type, ()), *REQUIRED[rope.rope_type]):
        value = getattr(rope, key)
        if value is not None:
            scaling[key] = list(value) if isinstance(value, tuple) else value
    if rope.rope_type in EXTENDED:
        scaling["original_max_position_embeddings"] = rope.original_positions
    return theta | {"rope_scaling": scaling}


def without_unused(rope: Rope) -> Rope:
    """The same RoPE, with default values of the settings that its type does not use."""
    kind = rope.rope_type
    names = {"head_dim", "theta", "rope_type", "partial_rotary_factor"}
    names |= {*REQUIRED[kind], *OPTIONAL.get(kind, ())}
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
                f"{self.field}.{key}: expected {count} numbers (half of the features of a head "
                f"that are rotated), found {found}"
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

    places = ("rope_parameters", "rope_scaling")
    fields = [name for name in places if config.get(name) not in (None, {})]
    for name in fields:
        if not isinstance(config[name], Mapping):
            raise ConfigError(f"{name}: expected an object, found {quoted(config[name])}")
        for key, value in config[name].items():
            add(f"{name}.{key}", key, value)
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        add(key, key, config.get(key))
    return _Parameters(fields[0] if fields else "rope_scaling", merged)


def _number(where: str, value: object, *, low: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < 1e30:
        raise ConfigError(f"{where}: expected a number > {low:g}, found {quoted(value)}")
    return float(value)
