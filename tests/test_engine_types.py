"""The types between a caller and the decode loop.

Each class of the engine that is built between a public call and the first program is one more thing
to know for a reader who follows a row. A new one needs a reason, and a place in these lists.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import tiny

import jaxllm
from jaxllm.batch import slot_pool
from jaxllm.serve import AsyncEngine

FIELDS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7}
CALL = {"CallArguments", "PaddedBatch", "Request", "PreparedCall"}
PROGRAM = {"ProcessorInputs", "Sample", "DecodeSettings", "PrefillInputs"}
ROW = {"RawRow", "RowInput", "PaddedBatch", "CallArguments", "Request", "BatchRow", "Task"}
SLOTS = {"Sizes", "PromptRows", "Slots", "SampleState"}
CHUNKS = {"StagedPrompt", "PromptColumns"}  # prompts read in chunks
JOB = {
    "BatchCounts",
    "Group",
    "Prediction",
    "RowWindow",
    "Pool",
    "TaskRun",
    "SlotPool",
    "StagedRows",
}


class ReachedError(Exception):
    """The first program would run now."""


def refuse(*_: Any, **__: Any) -> None:
    """Stands for the first program, and ends the record of its thread."""
    sys.setprofile(None)
    raise ReachedError


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Names of the engine's classes of which an object is built, in all threads that start now.

    Left out are settings, the processors of single fields, and what is built of the shapes of a
    program while that is traced.
    """
    names: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name != "__init__" or "self" not in frame.f_locals:
            return
        cls = type(frame.f_locals["self"])
        package = cls.__module__.split(".")[1:3]
        if package[:1] not in (["generation"], ["batch"], ["serve"]) or issubclass(cls, Exception):
            return
        is_field = package[1:] == ["settings"] or cls.__name__.endswith(("Processor", "Warper"))
        if not is_field and not is_traced(frame):
            names.add(cls.__name__)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield names
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def is_traced(frame: FrameType | None) -> bool:
    """True if JAX traces a program, or rebuilds its arguments, further up the stack."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(("pjit.py", "partial_eval.py")):
            return True
        frame = frame.f_back
    return False


def test_of_a_call(monkeypatch):
    monkeypatch.setattr(sys.modules["jaxllm.generation.generate"], "prefill_program", refuse)
    with recorded() as names, pytest.raises(ReachedError):
        jaxllm.generate(tiny.cached("llama"), [[5, 6, 7]], key=1, **FIELDS)
    assert names == CALL | PROGRAM


def test_of_a_row_of_a_job(monkeypatch):
    monkeypatch.setattr(slot_pool, "prefill_chunk", refuse)
    generator = jaxllm.BatchGenerator(tiny.cached("llama"), slots=2, **FIELDS)
    with recorded() as names, pytest.raises(ReachedError):
        generator.generate([[5, 6, 7]])
    assert names == ROW | PROGRAM | SLOTS | CHUNKS | JOB


def test_of_a_request(monkeypatch):
    async def answer() -> set[str]:
        with recorded() as names:
            engine = AsyncEngine(tiny.cached("llama"), slots=2, context=64, warm_up=False)
            await engine.start()
            monkeypatch.setattr(slot_pool, "start_rows", refuse)
            names.clear()  # the slots are there before the first request
            with pytest.raises(jaxllm.JaxLLMError):
                await engine.generate({"input_ids": [5, 6, 7], **FIELDS})
            return set(names)

    assert asyncio.run(answer()) == (
        ROW | PROGRAM - {"Sample"} | CHUNKS | {"GenerationStream", "StreamedSample", "PromptRows"}
    )
