"""Requests that run while the other programs are compiled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import tiny
from batch_tools import differences
from serving_tools import eventually, running_server

from jaxllm.common.compiling import CompileClock
from jaxllm.serve import AsyncEngine
from jaxllm.serve.async_engine import EngineStoppedError
from jaxllm.serve.programs import Programs

OPTIONS: dict[str, Any] = {"slots": 4, "context": 64, "warm_up": "background"}


class Gate:
    """Lets the programs of the background be compiled when the test says so.

    Attributes:
        started: the programs whose compiling has begun, in order.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.opened, self.started = threading.Event(), list[str]()
        programs = engine.programs
        self.names = programs.names[engine.needed_programs :]
        for name in self.names:
            programs._missing[name] = self._gated(name, programs._missing[name])

    def _gated(self, name: str, compile_program: Callable[[], object]) -> Callable[[], None]:
        def gated() -> None:
            self.started.append(name)
            assert self.opened.wait(60)
            compile_program()

        return gated


def run(use: Callable[[AsyncEngine, Gate], Awaitable[None]], model: Any, **options: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(model, **OPTIONS, **options)
        gate = Gate(engine)
        try:
            async with engine:
                await use(engine, gate)
        finally:
            gate.opened.set()

    asyncio.run(main())


async def until_compiled(engine: AsyncEngine) -> None:
    while engine.programs.is_compiling:
        await asyncio.sleep(0.01)
    assert engine.programs.compiled == len(engine.programs.names)


def test_the_program_that_a_request_asks_for_is_compiled_next() -> None:
    """Until then the request runs in a wider one, with the same result."""
    model = tiny.make("t5")
    row = {"input_ids": [*range(3, 23)], "max_new_tokens": 6}
    small, asked = (f"prefill 1 x {width} into 4 x 64 (encoder 64)" for width in (16, 32))

    async def use(engine: AsyncEngine, gate: Gate) -> None:
        assert engine.programs.compiled == engine.needed_programs == 2
        outputs = [await engine.generate(row)]
        assert asked not in engine.counts.program_calls
        assert gate.started == [small]
        gate.opened.set()
        await until_compiled(engine)
        assert gate.started[:2] == [small, asked]
        assert sorted(gate.started) == sorted(gate.names)
        clock = CompileClock()
        outputs.append(await engine.generate(row))
        clock.close()
        assert clock.programs == 0
        assert engine.counts.program_calls[asked] == 1
        assert outputs[0].output_ids == outputs[1].output_ids
        assert differences(model, [row], outputs[:1])[0] == []

    run(use, model)


@pytest.mark.ci
def test_prompts_in_chunks_run_before_their_prefixes_are_kept() -> None:
    model = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=128)
    rng = np.random.default_rng(0)
    prompts = [[*range(3, 43), *rng.integers(3, 50, n).tolist()] for n in (5, 9, 13)]
    options = {"input_ids": prompts[0], "max_new_tokens": 8, "do_sample": True, "seed": 1}
    rows = [{**options, "input_ids": prompt, "num_return_sequences": 2} for prompt in prompts]

    async def use(engine: AsyncEngine, gate: Gate) -> None:
        outputs = list(await asyncio.gather(*map(engine.generate, rows)))
        assert set(engine.counts.program_calls) <= set(engine.programs.names)
        assert engine.programs.compiled == engine.needed_programs
        assert engine.prefix_counts.hits == 0
        gate.opened.set()
        await until_compiled(engine)
        assert differences(model, rows, outputs)[0] == []

    run(use, model, prefill_chunk_size=16)


def test_a_program_that_cannot_be_compiled_ends_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny.make("llama", num_hidden_layers=1)

    async def main() -> None:
        engine = AsyncEngine(model, **OPTIONS)
        gate = Gate(engine)

        def fail() -> None:
            assert gate.opened.wait(60)
            raise MemoryError("no memory for it")

        engine.programs._missing[gate.names[0]] = fail
        await engine.start()
        assert (await engine.generate({"input_ids": [5], "max_new_tokens": 2})).error is None
        gate.opened.set()
        while engine.failure is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineStoppedError, match="no memory for it"):
            engine.submit({"input_ids": [5]})
        assert isinstance(engine.failure, MemoryError)
        await engine.close()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["a program cannot be compiled"]


def test_a_prompt_that_cannot_be_prepared_ends_its_request_too() -> None:
    async def main() -> None:
        engine = AsyncEngine(tiny.make("t5"), **{**OPTIONS, "warm_up": False})
        pool: Any = engine._run._pool
        pool.prepare = lambda _: 1 / 0
        async with engine:
            answer = engine.generate({"input_ids": [5], "max_new_tokens": 2})
            with pytest.raises(EngineStoppedError, match="division by zero"):
                await asyncio.wait_for(answer, 30)

    asyncio.run(main())


def test_the_background_has_the_settings_of_the_thread_that_made_the_engine() -> None:
    with jax.default_matmul_precision("highest"):
        programs = Programs()
    precisions: list[str | None] = []
    config: Any = jax.config
    programs.add({"a": lambda: precisions.append(config.jax_default_matmul_precision)})
    programs.compile_in_background()
    eventually(lambda: not programs.is_compiling)
    assert precisions == ["highest"]


def test_a_closed_engine_compiles_nothing_more() -> None:
    async def use(engine: AsyncEngine, gate: Gate) -> None:
        eventually(lambda: len(gate.started) == 1)
        await engine.close()
        gate.opened.set()
        while engine.programs.is_compiling:
            await asyncio.sleep(0.01)
        assert len(gate.started) == 1
        assert engine.programs.compiled == engine.needed_programs + 1

    run(use, tiny.make("llama", num_hidden_layers=1))


def test_a_process_whose_main_thread_ends_compiles_nothing_more() -> None:
    code = """
import threading
from jaxllm.serve.programs import Programs

started, programs = threading.Event(), Programs()

def compile_program():
    print("compiled", flush=True)
    started.set()
    threading.main_thread().join()

programs.add({str(number): compile_program for number in range(3)})
programs.compile_in_background()
started.wait()
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stdout) == (3, b"compiled\n")


def test_the_smallest_width_that_is_compiled() -> None:
    compiled: list[str] = []
    programs = Programs()
    programs.add(
        {str(width): lambda width=width: compiled.append(str(width)) for width in (8, 4, 2)}
    )
    programs.compile(1)
    assert (compiled, programs.first(str, 2), programs.has("4")) == (["8"], 8, False)
    programs.compile(2)
    assert (compiled, programs.first(str, 2), programs.compiled) == (["8", "2"], 2, 2)
    programs.compile()
    assert (compiled, programs.first(str, 4)) == (["8", "2", "4"], 4)
    assert programs.has("a program that is compiled when it is called")


@pytest.mark.ci
def test_32_clients_while_programs_are_compiled() -> None:
    with (
        running_server(**{**OPTIONS, "kept_prefixes": 4}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        ThreadPoolExecutor(32) as threads,
    ):

        def ask(number: int) -> int:
            text = ["a", "abc " * 5, "hello " * 8][number % 3] + "b" * (number % 7)
            if number % 4 == 3:
                answer = client.post("/v1/embeddings", json={"input": text})
            else:
                body = {"prompt": text, "max_tokens": 8, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 8
            return answer.status_code

        programs = server.engine.programs
        first = [*threads.map(ask, range(32))]
        while programs.is_compiling:
            first += threads.map(ask, range(32))
        assert set(first) == {200}
        metrics = client.get("/metrics").text
        assert f"jaxllm_compiled_programs {float(len(programs.names))}" in metrics
        assert f"jaxllm_programs {float(len(programs.names))}" in metrics
