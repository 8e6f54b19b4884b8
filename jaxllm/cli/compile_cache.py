"""Enables JAX's persistent compilation cache, so that a command's second start compiles nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jax


def default_folder() -> Path:
    """``$JAXLLM_CACHE_DIR``, or else ``jaxllm/xla`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("JAXLLM_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxllm" / "xla"


def enable(folder: Path) -> str | None:
    """Turns on JAX's persistent compilation cache, for all programs.

    A folder that the user set (``JAX_COMPILATION_CACHE_DIR``) is kept.

    Returns:
        None, or a line that explains why there is no cache; an unwritable folder is no error.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        try:
            # Compiled programs are code: no other user may write there.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, RuntimeError) as failure:
            reason = getattr(failure, "strerror", None) or failure
            return f"{folder} cannot be written ({reason}): compiled programs are not kept"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None
