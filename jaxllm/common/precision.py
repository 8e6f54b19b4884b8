"""Precision of matrix products: float32 stays float32 on a TPU and a GPU.

By default XLA multiplies float32 matrices in one pass of bfloat16 on a TPU, and in TF32 on a GPU,
with an error of some percent of a logit's standard deviation. The models ask for exact products,
unless the caller has set `jax.default_matmul_precision`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

PRECISIONS = ("default", "high", "highest")
"""Names of JAX's precisions: the platform's fastest; three passes of bfloat16, or TF32; float32."""


def precision_of(*factors: jax.Array) -> jax.lax.Precision | None:
    """Precision of a product of these arrays: the highest in float32, else the platform's default.

    >>> x, y = jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)
    >>> precision_of(x, x).name, precision_of(x, y).name, precision_of(y, y)
    ('HIGHEST', 'HIGHEST', None)
    >>> with jax.default_matmul_precision("bfloat16"):
    ...     print(precision_of(x, x))
    None
    """
    if chosen_precision() is not None:
        return None
    return jax.lax.Precision.HIGHEST if jnp.result_type(*factors) == jnp.float32 else None


def chosen_precision() -> str | None:
    """The precision that the caller has set; None: none."""
    return getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  (pyright lacks it)


def exact_products(*factors: jax.Array) -> AbstractContextManager[Any]:
    """Context manager in which functions of JAX multiply at `precision_of` these arrays."""
    precision = precision_of(*factors)
    return nullcontext() if precision is None else jax.default_matmul_precision("highest")


def float32_einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays with float32 sums, at `precision_of` them."""
    return jnp.einsum(
        subscripts, x, y, precision=precision_of(x, y), preferred_element_type=jnp.float32
    )


@contextmanager
def matmul_precision(name: str | None) -> Generator[None]:
    """Sets the precision of products in all threads of the process; None: no change.

    `jax.default_matmul_precision` is for one thread.
    """
    before = chosen_precision()
    try:
        if name is not None:
            jax.config.update("jax_default_matmul_precision", name)
        yield
    finally:
        if name is not None:
            jax.config.update("jax_default_matmul_precision", before)
