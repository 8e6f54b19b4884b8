"""Long prompts in chunks, and prompts after a kept prefix, beside other requests."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import tiny
from batch_tools import differences
from small_tokenizers import small_tokenizer

from jaxllm.batch import slots
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import UnsupportedError
from jaxllm.nn.platform import decoding
from jaxllm.serve import AsyncEngine, admission
from jaxllm.serve.admission import Prefix, PrefixStore

CHUNK = 16
OPTIONS: dict[str, Any] = {"slots": 4, "context": 128, "prefill_chunk_size": CHUNK}


def model_of(family: str, **changes: Any) -> Any:
    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return tiny.make(family, **{positions: 128}, **changes)


def rows_with_a_system_prompt() -> list[dict[str, Any]]:
    """Prompts of 1 to 120 tokens, most of which begin with the same 70."""
    rng = np.random.default_rng(0)
    system = rng.integers(3, 50, 70)
    rows: list[dict[str, Any]] = []
    for i, length in enumerate([9, 30, 45, 1, 20, 3]):
        prompt = np.concatenate([[] if i == 3 else system, rng.integers(3, 50, length)])
        row = {"input_ids": prompt.astype(int).tolist(), "max_new_tokens": 6, "id": i}
        if i % 2:
            row |= {"do_sample": True, "seed": i, "num_return_sequences": 2, "temperature": 2.0}
        rows.append(row | {"repetition_penalty": 1.3})
    return rows


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "rotated"),
    [
        ("llama", False),
        pytest.param("mistral", False, marks=pytest.mark.slow),  # with a sliding window
        pytest.param("mistral", True, marks=pytest.mark.slow),  # slots as on a TPU
        pytest.param("gpt2", False, marks=pytest.mark.slow),
    ],
)
def test_answers_equal_generate_alone_and_the_programs_stay_the_same(
    family: str, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rotated:
        monkeypatch.setattr(slots, "writes_one_slot", lambda platform: True)
    monkeypatch.setitem(decoding.NARROW_CHUNK_SIZE, "cpu", CHUNK)
    options = {**OPTIONS, "prefill_chunk_size": 2 * CHUNK}
    layer = {"gpt2": {"n_layer": 1}, "mistral": {"sliding_window": 20}}
    model = model_of(family, **layer.get(family, {"num_hidden_layers": 1}))
    rows = rows_with_a_system_prompt()

    async def main() -> list[Any]:
        async with AsyncEngine(model, **options, kept_prefixes=2) as engine:
            clock = CompileClock()
            outputs = list(await asyncio.gather(*map(engine.generate, rows)))
            clock.close()
            assert clock.programs == 0
            called = set(engine.counts.program_calls)
            assert called <= set(engine.programs.names)
            assert len([name for name in called if name.startswith("prefill")]) == 2
            # The second prompt has the prefix kept; its second sample has all whole chunks.
            assert engine.prefix_counts.hits == 5
            assert engine.prefix_counts.tokens == 96 + 64 + 64 + 64 + 64
            return outputs

    assert differences(model, rows, asyncio.run(main()))[0] == []


def test_chunks_after_a_prefix_of_a_longer_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two prompts share a prefix, and the third continues from it in chunks."""
    monkeypatch.setattr(admission, "MIN_PREFIX", 16)
    monkeypatch.setitem(decoding.NARROW_CHUNK_SIZE, "cpu", CHUNK)
    vocab = len(small_tokenizer("llama.model"))  # that of the servers of other modules
    model = tiny.make("llama", num_hidden_layers=1, vocab_size=vocab)
    rng = np.random.default_rng(0)
    shared, *others = (rng.integers(3, 50, n).tolist() for n in (20, 20, 24, 27))
    rows = [{"input_ids": [*shared, *rest], "max_new_tokens": 12} for rest in others]
    options = {"slots": 32, "context": 64, "prefill_chunk_size": 2 * CHUNK, "kept_prefixes": 1}

    async def main() -> list[Any]:
        async with AsyncEngine(model, **options, warm_up=False) as engine:
            outputs = [await engine.generate(row) for row in rows]
            assert engine.prefix_counts.tokens == CHUNK
            assert engine.counts.program_calls["prefill 1 x 32 of 2 x 64"] == 2
            assert engine.counts.program_calls["prefill 2 x 16 of 2 x 64"] == 1 + 1 + 2
            return [dataclasses.replace(output, index=i) for i, output in enumerate(outputs)]

    assert differences(model, rows, asyncio.run(main()))[0] == []


@pytest.mark.ci
def test_running_requests_decode_between_the_chunks_of_a_long_prompt() -> None:
    model = model_of("llama", num_hidden_layers=1)
    engine = AsyncEngine(model, **OPTIONS, kept_prefixes=2)
    run, counts = engine._run, engine.counts
    long = np.random.default_rng(1).integers(3, 50, 100).tolist()
    short = {"input_ids": [5, 6], "max_new_tokens": 100, "eos_token_id": None}

    def submit(name: str, row: dict[str, Any]) -> None:
        run.add(dataclasses.replace(task, request=name) for task in engine._reader.read(0, row))

    def step() -> tuple[int, int, list[str]]:
        """Columns of prompts and decode steps of one step, and the requests with new tokens."""
        columns, steps = counts.prefill_columns, counts.decode_steps
        names = [task.request for task, _ in run.step()]
        return counts.prefill_columns - columns, counts.decode_steps - steps, names

    submit("running", short)
    assert step() == (16, 0, ["running"])
    submit("cancelled", {"input_ids": long, "max_new_tokens": 4})
    assert step() == (0, 2, ["running"])  # half the steps, since a prompt waits
    assert step() == (CHUNK, 2, ["running"])
    run.cancel([("cancelled", 0)])
    submit("long", {"input_ids": long, "max_new_tokens": 4})
    submit("next", short)
    assert [step() for _ in range(6)] == [(CHUNK, 2, ["running"])] * 6
    assert step() == (16, 0, ["long"])  # the rest, and the first token
    assert step() == (0, 2, ["running", "long"])  # a slot is free, and a request waits
    assert step() == (16, 0, ["next"])


def test_running_requests_wait_for_no_more_than_the_columns_of_one_chunk() -> None:
    """Also where the narrow chunks of short prompts come before the wide one of a long prompt."""
    vocab = len(small_tokenizer("llama.model"))  # that of the servers of other modules
    model = tiny.make("llama", num_hidden_layers=1, vocab_size=vocab)
    options: dict[str, Any] = {"slots": 4, "context": 64, "prefill_chunk_size": 64}
    engine = AsyncEngine(model, **options, kept_prefixes=0, warm_up=False)
    run, counts, columns = engine._run, engine.counts, [0]
    for length in (5, 50, 5):
        run.add(engine._reader.read(0, {"input_ids": [5] * length, "max_new_tokens": 8}))
    while run.busy:
        run.step()
        columns.append(counts.prefill_columns)
    assert [new for new in np.diff(columns) if new] == [32, 64, 32]


def test_the_last_prefixes_that_recur_are_kept() -> None:
    store, cache = PrefixStore(2), model_of("llama", num_hidden_layers=1).init_cache(1, 16)
    tokens = np.arange(200)
    assert store.longest(tokens) == (None, 0)
    assert store.length_to_keep(tokens) == 0
    store.note(tokens)
    assert store.length_to_keep(np.array([*range(80), 5, 6])) == 80
    first, second, third = (Prefix(tokens[:n] + n, cache) for n in (70, 80, 90))
    store.keep(first)
    assert store.length_to_keep(first.tokens) == 0
    store.keep(second)
    for n in (71, 72, 73):  # prompts of several samples
        store.keep_repeated(Prefix(-tokens[:n], cache))
    assert store.longest(-tokens)[1] == 73
    assert store.longest(np.array([*(tokens[:60] + 70), 0])) == (first, 60)
    assert store.longest(first.tokens) == (first, 69)  # the last token is run again
    store.use(first)
    store.keep(third)
    assert store.longest(second.tokens) == (None, 0)
    assert store.longest(first.tokens) == (first, 69)


def test_models_without_chunks_refuse_the_options() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    for model, reason in [
        (tiny.cached("t5"), "an encoder-decoder"),
        (tiny.make("llama", rope_scaling=dynamic), "RoPE that depends on the length"),
    ]:
        for option in ("prefill_chunk_size", "kept_prefixes"):
            options: dict[str, Any] = {option: 16}
            with pytest.raises(UnsupportedError, match=f"{option} cannot be .* with {reason}"):
                AsyncEngine(model, slots=4, context=64, **options)


@pytest.mark.ci
def test_samples_of_one_prompt_do_not_drive_out_a_shared_prefix() -> None:
    model = model_of("llama", num_hidden_layers=1)
    rng = np.random.default_rng(2)
    system = rng.integers(3, 50, 70).tolist()

    def row(start: list[int], samples: int) -> dict[str, Any]:
        prompt = [*start, *rng.integers(3, 50, 100 - len(start)).tolist()]
        fields = {"do_sample": True, "seed": 1, "num_return_sequences": samples}
        return {"input_ids": prompt, "max_new_tokens": 2, **fields}

    async def main() -> None:
        async with AsyncEngine(model, **OPTIONS, kept_prefixes=1) as engine:
            for start, samples, tokens in [
                (system, 1, 0),
                (system, 1, 0),  # now the prefix recurs, and is kept
                (system, 1, 64),
                ([], 3, 2 * 96),
                ([], 3, 2 * 96),
                (system, 2, 2 * 64),  # still kept
            ]:
                before = engine.prefix_counts.tokens
                await engine.generate(row(start, samples))
                assert engine.prefix_counts.tokens - before == tokens

    asyncio.run(main())
