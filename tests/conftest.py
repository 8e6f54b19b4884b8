"""Fixtures and settings of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import zlib

# Before jax is imported: on a machine with a GPU the tests still compare float32 on the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs of XLA's own code; tests/nn/test_cpu_kernels.py uses the kernels.
os.environ.setdefault("JAXLLM_CPU_KERNELS", "0")

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import compiling
import pytest
import shape_checks

shape_checks.decorate_shaped_only()

from jaxllm.checkpoint import smollm2  # noqa: E402
from jaxllm.common.errors import MissingFileError  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as-shipped",
        action="store_true",
        help="compile as users do: XLA's default optimization, and the CPU kernels if installed",
    )
    parser.addoption(
        "--callers-settings",
        type=int,
        metavar="PERCENT",
        help="run this part of the tests, chosen by their names, under strict settings of JAX and "
        "on the second of two devices, as a caller may set them",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Tests start more than a hundred processes; each would compile the package's modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Tracing makes many objects that live on: looking through them for cycles takes 5% of the time.
    gc.set_threshold(100_000, 20, 100)
    # A run in the background ignores SIGINT, and so would the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.as_shipped:
        os.environ["JAXLLM_CPU_KERNELS"] = "1"
    else:
        compile_fast()
    if config.option.callers_settings is not None:
        use_callers_settings(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks for `make test-ci` the cases of a parametrized test that its markers `by_default` and
    `in_ci` leave out of the default run. Both name cases by their ids."""
    share = config.option.callers_settings
    if share is not None:
        items[:] = [x for x in items if zlib.crc32(x.nodeid.encode()) % 100 < share]
    missing: dict[str, set[str]] = {}
    for item in items:
        for marker in item.iter_markers():
            if marker.name not in ("by_default", "in_ci"):
                continue
            function, _, case = item.nodeid.partition("[")
            case = case.removesuffix("]")
            missing.setdefault(function, set(marker.args)).discard(case)
            if (case in marker.args) == (marker.name == "in_ci"):
                item.add_marker(pytest.mark.ci)
    unknown = {function: cases for function, cases in missing.items() if cases}
    if share is None and unknown and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"by_default, in_ci: no such cases: {unknown}")


def compile_fast() -> None:
    """XLA spends most of the tests' time on compiling small programs, which takes it a third as
    long without optimizing the machine code. With `--as-shipped`, tests compile as users do.

    An XLA that does not know a flag ends the process, so others than these are left alone.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if version("jaxlib").startswith("0.10.") and compiling.FAST not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {compiling.FAST}"


def use_callers_settings(config: pytest.Config) -> None:
    """Settings of this thread for the whole run, as a caller's `with` makes them.

    Arrays that jaxllm places on the first device are an error where a program reads them: the
    transfer between two devices is not allowed.
    """
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    )
    import jax

    settings = contextlib.ExitStack()
    settings.enter_context(jax.numpy_rank_promotion("raise"))
    settings.enter_context(jax.transfer_guard_device_to_device("disallow"))
    settings.enter_context(jax.default_device(jax.devices()[1]))
    config.add_cleanup(settings.close)


@pytest.fixture(scope="session", autouse=True)
def keep_programs(pytestconfig: pytest.Config) -> None:
    """Compiling takes most of the time, so programs stay in .pytest_cache from run to run, in one
    folder for all workers."""
    import jax

    folder = pytestconfig.cache.mkdir("jax")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches are for GPUs; with them the folder's path is a part of every key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


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


@pytest.fixture(autouse=True)
def forget_programs_of_a_slow_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slow tests compile hundreds of programs each, too many for all of a module together."""
    yield
    if request.node.get_closest_marker("slow"):
        import jax

        jax.clear_caches()


@pytest.fixture
def highest_precision() -> Iterator[None]:
    """Full float32 in matrix products, for comparisons with the reference on any device."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield
