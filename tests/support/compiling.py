"""XLA options of the tests: fast compiling, except of programs whose text or memory is tested."""

from __future__ import annotations

import os
from typing import Any

FAST = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    # One LLVM module: more let cores compile side by side, which small ones do not repay.
    " --xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true"
)
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
    "xla_llvm_disable_expensive_passes": False,
}
"""XLA's defaults for the same."""


def compiled_as_users(lowered: Any) -> Any:
    """A lowered program, compiled with the options that users have."""
    fast = FAST in os.environ.get("XLA_FLAGS", "")
    return lowered.compile(compiler_options=AS_USERS if fast else None)


def program_count(jitted: Any) -> int:
    """Programs that a jitted function holds: one for each signature it was called with.

    JAX has no public name for this number.
    """
    return jitted._cache_size()
