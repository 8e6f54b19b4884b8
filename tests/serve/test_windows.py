"""Windows of decode steps: on an accelerator one is dispatched before the last one is read."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.generation import grammar as grammars
from jaxllm.nn.platform import decoding
from jaxllm.serve import AsyncEngine, async_engine, live_run
from jaxllm.serve.async_engine import EngineStoppedError

TOKENIZER = small_tokenizer("llama.model")
MODEL = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))
OPTIONS: dict[str, Any] = {"slots": 4, "context": 64, "kept_prefixes": 0, "warm_up": False}


@pytest.fixture(autouse=True)
def dispatches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator."""
    monkeypatch.setattr(live_run, "dispatches_ahead", lambda platform: True)


def row(number: int, max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    fields |= {"do_sample": True, "seed": number, "eos_token_id": None}
    return {"input_ids": [5 + number, 6], "max_new_tokens": max_new_tokens, **fields}


def alone(number: int, count: int) -> list[int]:
    """The tokens of `generate` for such a row."""
    fields = row(number, count)
    prompt, seed = fields.pop("input_ids"), fields.pop("seed")
    out = jaxllm.generate(MODEL, [prompt], key=seed, **fields)
    return np.asarray(out.sequences)[0, 2:].tolist()


class Steps:
    """The steps of an engine, without its thread.

    Attributes:
        tokens: the new tokens of each request.
        ends: how each request ended.
        log: "dispatch" and "read" of windows, in order.
    """

    def __init__(self) -> None:
        self.engine = AsyncEngine(MODEL, TOKENIZER, **OPTIONS)
        self.run = self.engine._run
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ends: dict[str, str | None] = {}
        self.log: list[str] = []
        pool: Any = self.run._pool
        pool.decode = self._logged("dispatch", pool.decode)
        pool.read = self._logged("read", pool.read)

    def _logged(self, name: str, call: Any) -> Any:
        def logged(*arguments: Any) -> Any:
            self.log.append(name)
            return call(*arguments)

        return logged

    def submit(self, name: str, row: dict[str, Any], grammar: Any = None) -> None:
        self.tokens[name], self.logprobs[name] = [], []
        for task in self.engine._reader.read(0, row, logprobs=True, grammar=grammar):
            self.run.add([dataclasses.replace(task, request=name)])

    def cancel(self, name: str) -> None:
        # A request is an object: the string that was submitted, and not one that is equal.
        self.run.cancel([(request, 0) for request in self.tokens if request == name])
        self.ends[name] = "cancelled"

    def step(self) -> None:
        for task, chunk in self.run.step():
            assert task.request not in self.ends  # nothing is reported after the end
            self.tokens[task.request] += chunk.tokens
            self.logprobs[task.request] += [each.logprob for each in chunk.logprobs or ()]
            if chunk.is_last:
                self.ends[task.request] = chunk.finish_reason

    def finish(self) -> None:
        while self.run.busy:
            self.step()


def test_a_window_is_dispatched_before_the_last_one_is_read() -> None:
    steps = Steps()
    steps.submit("a", row(1, 21))
    steps.finish()
    assert steps.tokens["a"] == alone(1, 21)
    # The first token, five windows, and one that was dispatched before the end was read.
    assert steps.log == ["dispatch", *["dispatch", "read"] * 6, "read"]
    assert steps.engine.counts.decode_steps == 20
    assert steps.engine.counts.busy_slot_steps == 20


def test_a_window_is_read_at_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "dispatches_ahead", decoding.dispatches_ahead)
    steps = Steps()
    steps.submit("a", row(1, 21))
    steps.finish()
    assert steps.log == ["dispatch", "read"] * 6


def test_prompts_that_wait_are_read_after_half_the_steps() -> None:
    """The prompts of four requests come in chunks, one after the other."""
    steps = Steps()
    for number, name in enumerate("abcd"):
        steps.submit(name, row(number, 30))
    while steps.run.waiting:
        steps.step()
    assert steps.engine.counts.decode_steps <= 2 * 3
    steps.finish()
    assert steps.tokens == {name: alone(number, 30) for number, name in enumerate("abcd")}


def test_a_window_waits_for_the_tokens_that_the_masks_of_a_grammar_follow_from() -> None:
    steps = Steps()
    steps.submit("a", row(1, 40))
    for _ in range(3):
        steps.step()
    steps.log.clear()
    steps.submit("digits", row(2, 8), grammars.regex("[0-9]{40}", TOKENIZER))
    while "digits" not in steps.ends:
        steps.step()
    # The window in flight and the first token are read before the first masks are written.
    assert steps.log == ["dispatch", "read", "read", *["dispatch", "read"] * 7]
    steps.finish()
    assert steps.log[-3:] == ["dispatch", "read", "read"]
    assert steps.tokens["a"] == alone(1, 40)
    assert set(TOKENIZER.decode(steps.tokens["digits"])) <= set("0123456789 ")


@pytest.mark.parametrize("few", [None, 2])
def test_a_slot_that_is_taken_over_has_no_token_of_the_request_before(
    few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end by a stop string or are cancelled while the next window is in flight."""
    monkeypatch.setattr(async_engine, "few_slots", lambda slots, platform: few)
    expected = {name: alone(number, 40) for number, name in enumerate("abcdefgh")}
    texts = TOKENIZER.token_bytes()
    end = next(
        i
        for i, token in enumerate(expected["a"])
        if 8 < i < 34
        and i % 4 != 0  # in the middle of a window
        and texts[token].isascii()
        and texts[token] not in b"".join(texts[each] for each in expected["a"][:i])
    )
    stop = texts[expected["a"][end]].decode()
    steps = Steps()
    steps.submit("a", row(0, 40, stop_strings=[stop]))
    for number, name in enumerate("bcdefgh", start=1):
        steps.submit(name, row(number, 40))
    while len(steps.tokens["d"]) < 5:
        steps.step()
    steps.cancel("d")
    assert len(steps.run._windows) == 1
    while len(steps.tokens["e"]) < 9:
        steps.step()
    steps.cancel("e")
    steps.finish()
    assert [steps.ends[name] for name in "abcdefgh"] == [
        *("stop", "length", "length", "cancelled", "cancelled", "length", "length", "length")
    ]
    for name, tokens in expected.items():
        assert steps.tokens[name] == tokens[: len(steps.tokens[name])]
        assert steps.ends[name] != "length" or len(steps.tokens[name]) == 40
        score = jaxllm.score(MODEL, [[5 + "abcdefgh".index(name), 6]], [steps.tokens[name]])
        np.testing.assert_allclose(
            steps.logprobs[name], score.token_log_probs[0][: len(steps.logprobs[name])], atol=1e-4
        )
    assert len(steps.tokens["a"]) == end + 1


@pytest.mark.parametrize("few", [None, 2])
def test_a_cancelled_request_stops_with_the_next_window(
    few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "few_slots", lambda slots, platform: few)
    steps = Steps()
    counts = steps.engine.counts

    def busy_slots() -> float:
        before = counts.busy_slot_steps, counts.decode_steps
        steps.step()
        return (counts.busy_slot_steps - before[0]) / (counts.decode_steps - before[1])

    for number, name in enumerate("abcd"):
        steps.submit(name, row(number, 60))
    while len(steps.tokens["d"]) < 5:
        steps.step()
    assert busy_slots() == 4
    steps.cancel("c")
    steps.cancel("d")
    assert busy_slots() == 4  # the window in flight
    assert busy_slots() == 2
    steps.submit("e", row(5, 20))
    steps.submit("f", row(6, 20))
    steps.finish()
    for number, name in [(0, "a"), (1, "b"), (5, "e"), (6, "f")]:
        assert steps.tokens[name] == alone(number, len(steps.tokens[name]))
    assert [len(steps.tokens[name]) for name in "abef"] == [60, 60, 20, 20]
    # No step of a slot is for a request that had ended, but for those of the window in flight.
    assert counts.busy_slot_steps - sum(map(len, steps.tokens.values())) < 2 * 4


def test_a_failure_that_is_read_ends_each_request_once() -> None:
    async def main() -> None:
        engine = AsyncEngine(MODEL, TOKENIZER, **OPTIONS)
        pool: Any = engine._run._pool
        read = pool.read

        def failing(window: Any) -> Any:
            if engine.counts.decode_steps >= 12:
                raise jax.errors.JaxRuntimeError("INTERNAL: the device has failed")
            return read(window)

        pool.read = failing
        async with engine:
            streams = [engine.submit(row(number, 40 if number else 5)) for number in range(6)]
            chunks = [chunk async for chunk in streams[0]]
            assert chunks[-1].finish_reason == "length"
            for stream in streams[1:]:
                with pytest.raises(EngineStoppedError, match="the device has failed"):
                    _ = [chunk async for chunk in stream]
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
        assert engine.running == engine.waiting == 0

    asyncio.run(main())
