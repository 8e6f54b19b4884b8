"""`AsyncEngine`: requests that come as they come are answered as `generate` alone answers them."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import tiny
from batch_tools import differences, uneven_rows
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.common.compiling import CompileClock
from jaxllm.serve import AsyncEngine, QueueFullError, async_engine
from jaxllm.serve.async_engine import EngineStoppedError
from jaxllm.serve.http.api_types import SamplingFields
from jaxllm.serve.http.state import ServerState

TOKENIZER = small_tokenizer("llama.model")
MODEL = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))


def run(use: Callable[[AsyncEngine], Awaitable[Any]], model: Any = MODEL, **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncEngine(
            model, **{"slots": 4, "context": 64, "kept_prefixes": 0, **options}
        ) as engine:
            return await use(engine)

    return asyncio.run(main())


def mixed_rows(count: int, vocab: int) -> list[dict[str, Any]]:
    """Rows of different lengths and settings."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 10, "min_p": 0.01}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    settings: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "num_return_sequences": 2, **sampling},
        {"logit_bias": {"11": 5}, "min_new_tokens": 4, "no_repeat_ngram_size": 3, **penalties},
    ]
    rows = uneven_rows(count, prompts=16, new=11, seed=3, vocab=vocab)
    for i, row in enumerate(rows):
        row |= {"seed": i, **settings[i % len(settings)]}
        row["max_new_tokens"] += 5
    return rows


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("llama"))
def test_every_answer_equals_generate_alone_and_traffic_compiles_nothing(family):
    model = MODEL if family == "llama" else tiny.make(family)
    rows = mixed_rows(12, vocab=50)

    async def use(engine: AsyncEngine) -> list[Any]:
        clock = CompileClock()

        async def client(row: dict[str, Any], delay: float) -> Any:
            await asyncio.sleep(delay)
            return await engine.generate(row)

        rng = random.Random(0)
        outputs = await asyncio.gather(*(client(row, rng.random() / 4) for row in rows))
        clock.close()
        assert clock.programs == 0
        assert set(engine.counts.program_calls) <= set(engine.programs.names)
        assert engine.running == engine.waiting == 0
        return sorted(outputs, key=lambda output: rows.index(_row_of(output, rows)))

    outputs = run(use, model=model)
    outputs = [output.__class__(**{**vars(output), "index": i}) for i, output in enumerate(outputs)]
    assert differences(model, rows, outputs)[0] == []


def _row_of(output: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if row["id"] == output.id)


def test_chunks_are_the_tokens_with_the_models_own_log_probabilities():
    row = {"input_ids": [5, 6, 7], "max_new_tokens": 11, "do_sample": True, "temperature": 3.0}

    async def use(engine: AsyncEngine) -> list[Any]:
        async with engine.submit({**row, "seed": 4}, logprobs=True) as stream:
            assert stream.prompt_tokens == 3
            return [chunk async for chunk in stream]

    chunks = run(use)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [len(chunk.tokens) for chunk in chunks] == [1, 4, 4, 2]
    assert chunks[-1].finish_reason == "length"
    out = jaxllm.generate(MODEL, **{**row, "input_ids": [[5, 6, 7]]}, key=4)
    assert tokens == np.asarray(out.sequences)[0, 3:].tolist()
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    score = jaxllm.score(MODEL, [[5, 6, 7]], [tokens])
    np.testing.assert_allclose([p.logprob for p in logprobs], score.token_log_probs[0], atol=1e-4)
    assert all(len(p.top) == 20 and p.top[0][1] >= p.logprob - 1e-6 for p in logprobs)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert dict(logprob.top).get(token, logprob.logprob) == pytest.approx(logprob.logprob)


@pytest.mark.ci
def test_stop_strings_and_grammars_beside_other_requests():
    ids = TOKENIZER.encode("Hello")
    greedy = jaxllm.generate(MODEL, [ids], max_new_tokens=24, eos_token_id=None)
    new = [TOKENIZER.token_bytes()[token] for token in np.asarray(greedy.sequences)[0, len(ids) :]]
    text = next(
        t for i, t in enumerate(new) if i > 8 and t.isascii() and t not in b"".join(new[:i])
    )
    stop = {"input_ids": ids, "max_new_tokens": 24, "eos_token_id": None}
    stop["stop_strings"] = ["no such", text.decode()]
    sampled = {"do_sample": True, "max_new_tokens": 24, "temperature": 2.0}
    pattern = functools.partial(jaxllm.generation.grammar.regex, " ?[0-9]{3}[a-f]{2}", TOKENIZER)

    async def use(engine: AsyncEngine) -> list[Any]:
        return await asyncio.gather(
            engine.generate(stop),
            engine.generate({"input_ids": ids, **sampled, "seed": 7}, grammar=pattern()),
            engine.generate({"input_ids": ids, **sampled, "seed": 8}),
            engine.generate({"input_ids": ids, **sampled, "seed": 9}, grammar=pattern()),
        )

    stopped, *others = run(use, tokenizer=TOKENIZER)
    out = jaxllm.generate(MODEL, **{**stop, "input_ids": [ids]}, tokenizer=TOKENIZER)
    assert stopped.output_ids[0] == np.asarray(out.sequences)[0, len(ids) :].tolist()
    assert stopped.finish_reasons == ("stop",)
    assert len(stopped.output_ids[0]) < 24
    for output, seed, processors in zip(
        others, (7, 8, 9), ([pattern()], [], [pattern()]), strict=True
    ):
        out = jaxllm.generate(MODEL, [ids], key=seed, logits_processor=processors, **sampled)
        expected = np.asarray(out.sequences)[0, len(ids) :].tolist()
        assert output.output_ids[0] == expected[: len(output.output_ids[0])]
        assert set(expected[len(output.output_ids[0]) :]) <= {MODEL.config.eos_token_ids[0]}
    assert len(others[0].texts[0].strip()) == 5


# The default tests have slots of one size, as the servers of other modules, and compile what they
# use only.
def test_few_busy_slots_are_decoded_without_the_others(monkeypatch):
    monkeypatch.setattr(async_engine, "few_slots", lambda slots, platform: slots // 2)
    row = {"input_ids": [5, 6], "max_new_tokens": 40, "eos_token_id": None}
    sampled = {"do_sample": True, "max_new_tokens": 24, "temperature": 2.0, "seed": 7}
    request = {"input_ids": [5, 6, 7], **sampled}
    pattern = functools.partial(jaxllm.generation.grammar.regex, " ?[0-9]{30}", TOKENIZER)

    async def use(engine: AsyncEngine) -> list[list[int]]:
        alone = (await engine.generate(request, grammar=pattern())).output_ids[0]
        prefill = {"prefill 1 x 32 of 1 x 64", "first tokens of 1 into 4 x 64"}
        assert set(engine.counts.program_calls) == prefill | {"decode 2 x 64"}
        with_grammar = engine.submit(request, grammar=pattern())
        tokens = list((await anext(with_grammar)).tokens)  # in the first slot, alone
        streams = [engine.submit(row) for _ in range(5)]
        for stream in streams[:2]:
            await anext(stream)
            stream.cancel()
        others = [[token async for chunk in s for token in chunk.tokens] for s in streams[2:]]
        others.append((await engine.generate(row)).output_ids[0])  # alone again
        tokens += [token async for chunk in with_grammar for token in chunk.tokens]
        assert tokens == alone
        calls = engine.counts.program_calls
        assert calls["decode 2 x 64"] > len(alone) + 5
        assert calls["decode 4 x 64"] > 5
        return others

    others = run(use, tokenizer=TOKENIZER, warm_up=False)
    out = jaxllm.generate(MODEL, **{**row, "input_ids": [row["input_ids"]]})
    assert others == [np.asarray(out.sequences)[0, 2:].tolist()] * 4


def test_a_stop_string_cuts_tokens_and_their_log_probabilities():
    """In the middle of a chunk, wherever it ends."""
    row = {"input_ids": TOKENIZER.encode("Hello"), "max_new_tokens": 16, "eos_token_id": None}
    row |= {"do_sample": True, "seed": 3}
    text_of = TOKENIZER.token_bytes()

    async def use(engine: AsyncEngine) -> list[tuple[list[int], list[Any]]]:
        async def parts(request: dict[str, Any]) -> tuple[list[int], list[Any]]:
            async with engine.submit(request, logprobs=True) as stream:
                chunks = [chunk async for chunk in stream]
            tokens = [token for chunk in chunks for token in chunk.tokens]
            return tokens, [logprob for chunk in chunks for logprob in chunk.logprobs]

        whole = await parts(row)
        texts = [text_of[token] for token in whole[0]]
        stops = [
            text.decode()
            for i, text in enumerate(texts)
            if text.isascii() and text not in b"".join(texts[:i]) and 1 <= i < 13
        ]
        assert len(stops) > 4
        cut = await asyncio.gather(*(parts({**row, "stop_strings": [stop]}) for stop in stops))
        return [whole, *cut]

    (tokens, logprobs), *cut = run(use, tokenizer=TOKENIZER, warm_up=False)
    assert len({len(part) % 4 for part, _ in cut}) == 4
    for part, part_logprobs in cut:
        assert part == tokens[: len(part)]
        expected = [each.logprob for each in logprobs[: len(part)]]
        np.testing.assert_allclose([each.logprob for each in part_logprobs], expected, atol=1e-4)


def test_a_grammar_that_fails_ends_its_own_request_alone():
    endless = {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}
    grammar = jaxllm.generation.grammar.json_schema(endless, TOKENIZER)
    row = {"input_ids": [5, 6], "max_new_tokens": 40, "eos_token_id": None}

    async def use(engine: AsyncEngine) -> list[Any]:
        requests = [engine.generate(row), engine.generate(row, grammar=grammar)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        return [*results, await engine.generate(row)]

    first, failed, second = run(use, tokenizer=TOKENIZER, warm_up=False)
    assert isinstance(failed, jaxllm.errors.InputError)
    assert "Too many items" in str(failed)
    assert first.output_ids == second.output_ids


def test_samples_share_the_mask_of_their_first_token():
    """It is as wide as the vocabulary, and a grammar takes time to make it."""
    row = {"input_ids": [5], "num_return_sequences": 8, "do_sample": True, "stop_strings": ["a"]}
    engine = AsyncEngine(MODEL, TOKENIZER, slots=2, context=64, warm_up=False)
    tasks = engine._reader.read(0, row, grammar=jaxllm.generation.grammar.regex("a+", TOKENIZER))
    assert [task.sample for task in tasks] == [*range(8)]
    assert len({id(processor) for task in tasks for processor in task.processors}) == 1
    assert len({id(task.stops) for task in tasks}) == len({id(task.tokens) for task in tasks}) == 8


def test_cancelled_requests_free_their_slots_and_the_queue_is_bounded():
    row = {"input_ids": [5, 6], "max_new_tokens": 60, "eos_token_id": None}

    async def use(engine: AsyncEngine) -> None:
        pool = engine._run._pool
        decode = pool.decode

        def slow_decode(*arguments: int) -> Any:  # so that all are still running
            time.sleep(0.02)
            return decode(*arguments)

        pool.decode = slow_decode
        streams = [engine.submit(row) for _ in range(4)]
        first = await anext(streams[0])  # all slots are taken
        waiting = [engine.submit(row) for _ in range(3)]
        with pytest.raises(QueueFullError, match="the queue holds 3") as error:
            engine.submit(row)
        assert error.value.retry_after >= 1
        for stream in [*streams, *waiting[:2]]:
            stream.cancel()
        output = [token async for chunk in waiting[2] for token in chunk.tokens]
        assert len(output) == 60
        assert output[: len(first.tokens)] == list(first.tokens)
        assert engine.counts.decode_steps < 3 * 60
        with pytest.raises(StopAsyncIteration):
            await anext(streams[0])

    run(use, queue_size=3, warm_up=False)


@pytest.mark.ci
def test_wrong_requests_are_named_and_change_nothing():
    async def use(engine: AsyncEngine) -> None:
        for fields, error in [
            ({"num_beams": 2}, "num_beams"),
            ({"suppress_tokens": [5]}, "suppress_tokens"),
            ({"guidance_scale": 2.0}, "guidance_scale"),
            ({"temperature": -1.0, "do_sample": True}, "temperature"),
            ({"max_new_tokens": 64}, "a slot holds 64; ask for at most 62"),
            ({"no_such": 1}, "no_such"),
            ({"eos_token_id": list(range(9))}, "eos_token_id: 9 tokens"),
            ({"logit_bias": {"99999": 1}}, "names token 99999"),
        ]:
            with pytest.raises(jaxllm.JaxLLMError, match=error):
                engine.submit({"input_ids": [5, 6], **fields})
        assert engine.waiting == 0

    run(use)


def test_closing_drains_and_a_failure_ends_every_request(monkeypatch, caplog):
    row = {"input_ids": [5, 6], "max_new_tokens": 30, "eos_token_id": None}

    options: dict[str, Any] = {"slots": 4, "context": 64, "kept_prefixes": 0, "warm_up": False}

    async def main() -> None:
        engine = AsyncEngine(MODEL, **options)
        await engine.start()
        streams = [engine.submit(row) for _ in range(6)]
        await engine.close()
        for stream in streams:
            assert sum([len(chunk.tokens) async for chunk in stream]) == 30
        with pytest.raises(EngineStoppedError, match="closing"):
            engine.submit(row)

        engine = AsyncEngine(MODEL, **options)
        await engine.start()
        monkeypatch.setattr(engine._run._pool, "decode", lambda *_: 1 / 0)
        with pytest.raises(EngineStoppedError, match="division by zero"):
            await engine.generate(row)
        with pytest.raises(EngineStoppedError, match="has failed"):
            engine.submit(row)
        assert isinstance(engine.failure, ZeroDivisionError)

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["the engine has failed"]


@pytest.mark.ci
def test_fields_of_all_requests_override_the_models_own():
    model = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))
    model.generation_config = jaxllm.GenerationConfig.from_dict({"num_beams": 4, "top_p": 0.5})
    with pytest.raises(jaxllm.errors.UnsupportedError, match="num_beams"):
        AsyncEngine(model, slots=4, context=64)
    engine = AsyncEngine(model, slots=4, context=64, num_beams=1)
    state = ServerState(engine=engine, tokenizer=TOKENIZER, model_name="tiny")
    fields = state.fields(SamplingFields())
    assert (fields["do_sample"], fields["top_p"], fields["top_k"]) == (True, 0.5, 0)
    state.engine.fields["top_p"] = 0.8  # an option of the command
    assert state.fields(SamplingFields())["top_p"] == 0.8
    assert state.fields(SamplingFields(top_p=0.9))["top_p"] == 0.9
    assert "top_p" not in state.fields(SamplingFields(temperature=0))


def test_a_context_longer_than_the_models_is_refused():
    limit = MODEL.config.context_length
    with pytest.raises(jaxllm.errors.InputError, match=f"at most the model's {limit} tokens"):
        AsyncEngine(MODEL, slots=4, context=limit + 1)


BART = {"max_position_embeddings": 50, "encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.ci
def test_an_encoder_decoders_context_ends_where_its_positions_do():
    assert AsyncEngine(tiny.make("bart", **BART), slots=1).context == 50


def test_a_context_longer_than_an_encoder_decoders_is_refused():
    with pytest.raises(jaxllm.errors.InputError, match="at most the model's 50 tokens"):
        AsyncEngine(tiny.make("bart", **BART), slots=1, context=51)
