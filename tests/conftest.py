"""What all tests share."""

from __future__ import annotations

import os

# Before jax is imported: on a machine with a GPU the tests still compare float32 on the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.checkpoint.bundled import smollm2
from jaxllm.errors import MissingFileError

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model's file. Its absence is a failure: a test that skips shows nothing."""
    try:
        return smollm2()
    except MissingFileError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Programs of one module are of no use to the next, and a process may map 65,530 pieces of
    memory by default, of which each program takes a few dozen."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture
def highest_precision() -> Iterator[None]:
    """Full float32 in matrix products, for comparisons with the reference on any device."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `kept_programs` keeps compiled programs; a child finds them as its JAXLLM_CACHE_DIR."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def kept_programs(program_folder: Path) -> Iterator[Path]:
    """Runs of one recipe compile once, in whatever module and process they are."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    wanted = {
        "jax_compilation_cache_dir": str(program_folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for values in (wanted, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is wanted:
            yield program_folder
