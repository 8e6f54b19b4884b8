"""Platform tuning: operations whose plain form is slow on some backend.

Each function computes the same result on every backend. Code written for one of them is marked
``PERF(cpu)``, ``PERF(tpu)`` or ``PERF(gpu)``. Tuning belongs here, as a branch, not in the layers.
"""

from jaxllm.nn.platform.attention import attend_cache
from jaxllm.nn.platform.decoding import (
    argmax_of_rows,
    in_blocks,
    largest_scores,
    split_heads,
    steps_between_checks,
    writes_one_slot,
)
from jaxllm.nn.platform.products import plus_bias, times_transposed
from jaxllm.nn.platform.quantized_products import (
    as_int8,
    dequantized_blocks,
    times_blocks_transposed,
    times_int4_transposed,
    times_int8_transposed,
)
from jaxllm.nn.platform.random_bits import random_bits
from jaxllm.nn.platform.training import (
    after_gradient,
    entry_of_rows,
    random_uint16,
)

__all__ = [
    "after_gradient",
    "argmax_of_rows",
    "as_int8",
    "attend_cache",
    "dequantized_blocks",
    "entry_of_rows",
    "in_blocks",
    "largest_scores",
    "plus_bias",
    "random_bits",
    "random_uint16",
    "split_heads",
    "steps_between_checks",
    "times_blocks_transposed",
    "times_int4_transposed",
    "times_int8_transposed",
    "times_transposed",
    "writes_one_slot",
]
