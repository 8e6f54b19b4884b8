"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv:2104.09864): six types of config.json.

Frequencies are computed on the host in float32, or traced where they depend on the length. Angles,
cosines and sines are float32 too, since bfloat16 cannot represent large positions exactly. Pairs
are half-split, as in Hugging Face's Llama weights.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.parallel.mesh import heads_are_sharded

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

    def angles(
        self, positions: Int[Array, "B T"], rope_length: Int[Array, "#B #T"]
    ) -> tuple[Float[Array, "B T 1 H"], Float[Array, "B T 1 H"]]:
        """Cosines and sines for `rotate`. `rope_length` is 1 + the largest position so far: of the
        batch, of each row, or of the document of each position."""
        frequencies = self.frequencies(rope_length[..., None, None])
        frequencies = jnp.concatenate([frequencies, frequencies], axis=-1)
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
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        return np.float32(self.theta) ** exponent

    def _dynamic(self, rope_length: Int[Array, " ..."]) -> Float[Array, "... F"]:
        """Dynamic NTK-aware scaling: the base grows once a sequence exceeds `max_positions`."""
        length = jnp.maximum(rope_length, self.max_positions).astype(jnp.float32)
        growth = self.factor * length / self.max_positions - (self.factor - 1)
        base = self.theta * growth ** (self.head_dim / (self.head_dim - 2))
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        return 1.0 / base**exponent

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
            return self.head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(self.head_dim // 2, dtype=np.float32) - low) / (high - low)
        ramp = np.clip(ramp, 0, 1)
        unscaled = 1.0 / self._powers()
        return (unscaled / self.factor * ramp + unscaled * (1 - ramp)).astype(np.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """Applies RoPE: rotates each pair (x[i], x[i + H/2]) by its angle, in float32."""
    # PERF(tpu): slices and negations of heads are small copies, a sixth of a decode step of
    # SmolLM2; docs/decisions/tpu-decode-step.md. A matrix for larger heads would cost more than the
    # copies do.
    if x.shape[1] > 1 or math.prod(x.shape[2:]) > MAX_PRODUCT_WIDTH or heads_are_sharded():
        return rotate_halves(x, cos, sin)
    return jax.lax.platform_dependent(x, cos, sin, tpu=rotate_by_product, default=rotate_halves)


def rotate_halves(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """`rotate` by slices of the last axis."""
    half = x.shape[-1] // 2
    y = x.astype(jnp.float32)
    rotated_half = jnp.concatenate([-y[..., half:], y[..., :half]], axis=-1)
    return (y * cos + rotated_half * sin).astype(x.dtype)


def rotate_by_product(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """`rotate` with one product, for all heads, by a matrix of 0 and ±1."""
    B, T, N, H = x.shape
    exchange = np.kron([[0, 1], [-1, 0]], np.eye(H // 2))
    same_and_exchanged = np.stack([np.eye(N * H), np.kron(np.eye(N), exchange)], axis=1)
    matrix = jnp.asarray(same_and_exchanged, x.dtype)  # [N*H, 2, N*H]
    # Every sum of the product has one term, so it is exact if the products are.
    exact = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    # x is used once, so that XLA computes it, the projection's product, within this product.
    both = jnp.einsum(
        "bi,ipj->bpj",
        x.reshape(B * T, N * H),
        matrix,
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    cos, sin = (jnp.tile(z.reshape(-1, 1, H), (1, 1, N)) for z in (cos, sin))
    # A choice, not a stack: XLA would write that by parts into memory of its own.
    factors = jnp.where(np.array([[True], [False]]), cos, sin)
    return jnp.sum(both * factors, axis=1).astype(x.dtype).reshape(x.shape)
