"""The server over the loopback interface, with OpenAI's own client: answers and streams."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tiny
from serving_tools import RunningServer, running_server
from translation_tools import write, write_model

import jaxllm
from jaxllm.tokenizers import load_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(server: RunningServer, ids: list[int], **fields: Any) -> list[tuple[list[int], str]]:
    """New tokens and text of every sample of `generate` on one prompt, its end token included."""
    model, tokenizer = server.state.engine.model, server.state.tokenizer
    out = jaxllm.generate(model, [ids], **fields)
    results = []
    for row in np.asarray(out.sequences)[:, 1 if model.is_encoder_decoder else len(ids) :].tolist():
        end = row.index(2) + 1 if 2 in row else len(row)
        results.append((row[:end], tokenizer.decode(row[:end], skip_special_tokens=True)))
    return results


def sampled(seed: int, **fields: Any) -> dict[str, Any]:
    """Fields of `generate` that OpenAI's defaults stand for."""
    return {"do_sample": True, "top_k": 0, "key": seed, **fields}


def test_64_clients_at_once_get_what_generate_alone_gives(server):
    tokenizer = server.state.tokenizer
    rng = np.random.default_rng(0)
    requests: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for i in range(64):
        prompt = "".join(rng.choice(list("abcdefgh "), rng.integers(1, 14)))
        new = int(rng.integers(1, 16))
        ours, theirs = [
            ({"temperature": 0}, {}),
            (
                {"seed": i, "temperature": 0.5, "n": 2, "extra_body": {"top_k": 9}},
                sampled(i, temperature=0.5, num_return_sequences=2, top_k=9),
            ),
            (
                {"temperature": 0, "presence_penalty": 1.0, "logit_bias": {"9": 4}},
                {"presence_penalty": 1.0, "logit_bias": {9: 4}},
            ),
        ][i % 3]
        request = {"prompt": prompt, "max_tokens": new, **ours}
        requests.append((request, {"max_new_tokens": new, **theirs}))

    async def ask_all() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(client.completions.create(model="tiny", **request) for request, _ in requests)
            )

    for answer, (request, fields) in zip(asyncio.run(ask_all()), requests, strict=True):
        expected = alone(server, tokenizer.encode(request["prompt"]), **fields)
        assert [choice.text for choice in answer.choices] == [text for _, text in expected]
        assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _ in expected)
    assert set(server.engine.counts.program_calls) <= set(server.engine.programs.names)
    assert server.engine.running == server.engine.waiting == 0


def test_chat_whole_and_streamed(server, client):
    messages: Any = [
        {"role": "system", "content": "abc"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "de"}, {"type": "text", "text": "f"}],
        },
    ]
    ids = server.state.tokenizer.apply_chat_template(
        [{"role": "system", "content": "abc"}, {"role": "user", "content": "def"}]
    )
    arguments: Any = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "n": 2}
    answer = client.chat.completions.create(**arguments, seed=5)
    expected = alone(server, ids, max_new_tokens=20, **sampled(5, num_return_sequences=2))
    assert [choice.message.content for choice in answer.choices] == [text for _, text in expected]
    assert answer.usage.prompt_tokens == len(ids)
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}

    texts, reasons, events = ["", ""], [None, None], 0
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        **arguments, seed=5, stream=True, stream_options=options
    ):
        events += 1
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert chunk.usage == answer.usage
    assert texts == [choice.message.content for choice in answer.choices]
    assert reasons == [choice.finish_reason for choice in answer.choices]
    assert events > 8  # not all at once
    # Without a limit the answer goes on to the end of the slot.
    full = client.chat.completions.create(
        model="tiny", messages=messages, logit_bias={"2": -100}, temperature=0
    )
    assert full.usage.total_tokens == server.engine.context


def test_stop_strings_end_the_text_before_them(server, client):
    arguments: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 30, "temperature": 0}
    arguments["logit_bias"] = {"2": -100}
    text = client.completions.create(**arguments).choices[0].text
    place = next(i for i in range(4, 20) if text.index(text[i : i + 2]) == i)
    stop = text[place : place + 2]
    answer = client.completions.create(**arguments, stop=["no such", stop])
    assert answer.choices[0].text == text[:place]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30
    chunks = list(client.completions.create(**arguments, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:place]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_the_answers_of_several_prompts_stream_side_by_side(client):
    arguments: Any = {"max_tokens": 20, "logit_bias": {"2": -100}, "stream": True}
    chunks = client.completions.create(model="tiny", prompt=["Hello", "you"], **arguments)
    indices = [chunk.choices[0].index for chunk in chunks]
    assert sorted(indices) != indices


def test_log_probabilities_are_those_of_score(server, client):
    tokenizer, model = server.state.tokenizer, server.state.engine.model
    ids = tokenizer.encode("Hello")
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=6, logprobs=3, seed=1, logit_bias={"2": -100}
    )
    fields = sampled(1, max_new_tokens=6, logit_bias={2: -100})
    ((tokens, _),) = alone(server, ids, **fields)
    score = jaxllm.score(model, [ids], [tokens])
    logprobs = answer.choices[0].logprobs
    np.testing.assert_allclose(logprobs.token_logprobs, score.token_log_probs[0], atol=1e-4)
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)
    arguments: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    content = client.chat.completions.create(**arguments).choices[0].logprobs.content
    # Greedily the chosen token is the most probable one.
    assert all(item.logprob == item.top_logprobs[0].logprob for item in content)
    assert all(len(item.top_logprobs) == 2 for item in content)
    chunks = client.chat.completions.create(**arguments, stream=True)
    streamed = [
        item
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for item in chunk.choices[0].logprobs.content
    ]
    assert [item.bytes for item in streamed] == [item.bytes for item in content]


def test_best_of_is_the_most_probable_of_the_choices(client):
    request = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 6, "seed": 3}
    request |= {"temperature": 1.5, "logprobs": 0}
    choices = client.completions.create(**request, n=4).choices
    best = client.completions.create(**request, n=2, best_of=4)
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in choices)
    expected = []
    for of_prompt in (choices[:4], choices[4:]):
        of_prompt.sort(key=lambda choice: -np.mean(choice.logprobs.token_logprobs))
        expected += [choice.text for choice in of_prompt[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert len(set(expected)) > 2


def test_answers_match_a_json_schema_and_become_tool_calls(client):
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": "look"},
            "parameters": {
                "type": "object",
                "properties": {"x": number},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    arguments: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ""}],
        "seed": 3,
        "max_tokens": 38,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    message = client.chat.completions.create(**arguments).choices[0].message
    call = json.loads(message.content)
    assert call["name"] == "look"
    assert 0 <= call["parameters"]["x"] < 100
    # The same text is a call where the request has this tool.
    choice = client.chat.completions.create(**arguments, tools=[TOOL]).choices[0]
    (tool_call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert tool_call.function.name == "look"
    assert 0 <= json.loads(tool_call.function.arguments)["x"] < 100
    *_, last = client.chat.completions.create(**arguments, tools=[TOOL], stream=True)
    (delta,) = last.choices[0].delta.tool_calls
    assert delta.function.arguments == tool_call.function.arguments
    assert last.choices[0].finish_reason == "tool_calls"
    one: Any = {**arguments, "tools": [TOOL], "parallel_tool_calls": False}
    assert len(client.chat.completions.create(**one).choices[0].message.tool_calls) == 1
    # And it can be given back, with its result.
    messages = [
        *arguments["messages"],
        {"role": "assistant", "tool_calls": [tool_call.model_dump()]},
        {"role": "tool", "tool_call_id": tool_call.id, "content": "7"},
    ]
    more = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, tools=[TOOL], tool_choice="none"
    )
    assert more.usage.completion_tokens <= 2


def test_embeddings_are_pooled_hidden_states(server, client):
    texts = ["Hello", "You there"]
    answer = client.embeddings.create(model="tiny", input=texts)
    for text, item in zip(texts, answer.data, strict=True):
        ids = server.state.tokenizer.encode(text)
        states = server.state.engine.model(np.array([ids]), output_hidden_states=True)
        mean = np.asarray(states.hidden_states[-1])[0].mean(axis=0)
        np.testing.assert_allclose(item.embedding, mean / np.linalg.norm(mean), atol=1e-5)
    raw = httpx.post(
        f"{server.url}/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}
    ).json()
    values = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, answer.data[0].embedding, atol=1e-6)
    for blank in ("", "  "):
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: has no text"):
            client.embeddings.create(model="tiny", input=["Hello", blank])


def test_tokens_models_health_and_metrics(server, client):
    post = {"prompt": "Hello"}
    tokens = httpx.post(f"{server.url}/tokenize", json=post).json()
    assert tokens["tokens"] == server.state.tokenizer.encode("Hello")
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text["prompt"].endswith("Hello")
    chat = httpx.post(
        f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": "Hello"}]}
    ).json()
    assert chat["count"] > tokens["count"]
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == server.engine.context
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny', not 'other'"):
        client.models.retrieve("other")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt="Hello", max_tokens=3)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'jaxllm_requests_total{path="/v1/completions",status="200"}' in metrics
    assert "jaxllm_time_to_first_token_seconds_count" in metrics
    assert f"jaxllm_slots {server.engine.slots}.0" in metrics


@pytest.mark.slow
def test_t5_reads_the_prompt_with_its_encoder():
    from serving_tools import chat_tokenizer

    model = tiny.make("t5", vocab_size=len(chat_tokenizer()))
    with running_server(model, eos_token_id=2) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="tiny", prompt=["Hello", "You there"], max_tokens=12, seed=4
        )
        embedding = client.embeddings.create(model="tiny", input="Hello").data[0].embedding
        for prompt, choice in zip(["Hello", "You there"], answer.choices, strict=True):
            ids = server.state.tokenizer.encode(prompt)
            fields = sampled(4, max_new_tokens=12, eos_token_id=2)
            assert choice.text == alone(server, ids, **fields)[0][1]
        assert len(embedding) == 32
        with pytest.raises(openai.BadRequestError, match="prompt: has 80 tokens"):
            client.completions.create(model="tiny", prompt=[5] * 80, max_tokens=1)
        client.close()


@pytest.mark.parametrize(("name", "family"), [("nllb", "m2m_100"), ("mbart", "mbart")])
def test_requests_name_their_languages(tmp_path, name, family):
    tokenizer = load_tokenizer(write(tmp_path, name))
    assert tokenizer is not None
    first, second, third, *_ = tokenizer.lang_code_to_id
    model = tiny.make(family, vocab_size=len(tokenizer), seed=1)
    with running_server(model, tokenizer, embeddings=False) as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "Hello world.", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for source, target in ((first, second), (second, third)):
            named = {**body, "src_lang": source, "tgt_lang": target}
            (choice,) = httpx.post(url, json=named).json()["choices"]
            ids = tokenizer.encode("Hello world.", src_lang=source)
            fields = {"eos_token_id": None, **tokenizer.target_fields(target)}
            out = jaxllm.generate(model, [ids], max_new_tokens=4, **fields).sequences[0]
            assert choice["text"] == tokenizer.decode(out, skip_special_tokens=True) != ""
        for wrong, message in (
            ({"tgt_lang": "xx"}, "tgt_lang: 'xx' is no language"),
            ({"src_lang": "xx", "tgt_lang": first}, "src_lang: 'xx' is no language"),
            ({"tgt_lang": first, "prompt": " "}, "prompt[0]: has no text, found ' '"),
            ({"src_lang": first, "prompt": [5, 6]}, "src_lang: has no effect on token ids"),
        ):
            answer = httpx.post(url, json={**body, **wrong})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        # The files of mBART name a target language, those of NLLB do not.
        answer = httpx.post(url, json=body)
        assert (tokenizer.tgt_lang is None) == (name == "nllb")
        if name == "nllb":
            needs = "tgt_lang: this translation model needs the language"
            assert needs in answer.json()["error"]["message"]
        else:
            (choice,) = answer.json()["choices"]
            assert choice["text"]


def test_a_language_alone_is_no_prompt(tmp_path):
    model, tokenizer = jaxllm.load(write_model(tmp_path, "marian"))
    with running_server(model, tokenizer, embeddings=False) as server:
        body = {"prompt": [">>deu<< Hello", ">>deu<<"], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert "prompt[1]: has no text" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_choices_are_equal(client, server, stream):
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "n": 3}
    texts = [text for p in ("Hello", "you") for _, text in [greedy(server, p, 5)] * 3]
    assert texts[0] != texts[3]
    answer = client.completions.create(prompt=["Hello", "you"], stream=stream, **arguments)
    if stream:
        found = [""] * 6
        for chunk in answer:
            for choice in chunk.choices:
                found[choice.index] += choice.text
    else:
        found = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == list(range(6))
        lengths = [len(greedy(server, p, 5)[0]) for p in ("Hello", "you")]
        assert answer.usage.completion_tokens == 3 * sum(lengths)
    assert found == texts
    arguments |= {"n": 2, "messages": [{"role": "user", "content": "Hello"}]}
    answer = client.chat.completions.create(stream=stream, **arguments)
    contents = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            contents[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert contents[0] == contents[1] != ""


def greedy(server: RunningServer, prompt: str, new: int) -> tuple[list[int], str]:
    """New tokens and text of a prompt."""
    (result,) = alone(server, server.state.tokenizer.encode(prompt), max_new_tokens=new)
    return result


def test_best_of_equal_choices(client):
    best = client.completions.create(model="tiny", prompt="Hello", temperature=0, n=2, best_of=3)
    assert len({choice.text for choice in best.choices}) == 1
    assert len(best.choices) == 2


@pytest.mark.parametrize("tier", ["auto", None])
def test_fields_that_are_accepted_and_not_used(client, tier):
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    messages: Any = [{"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(messages=messages, **arguments)
    unused: Any = {"service_tier": tier, "user": "somebody", "metadata": {"a": "b"}}
    answer = client.chat.completions.create(messages=messages, **arguments, **unused)
    assert answer.choices == plain.choices
    body = {"prompt": "Hello", "service_tier": tier}
    assert httpx.post(f"{client.base_url}completions", json=body).status_code == 200


@pytest.mark.parametrize("stop", ["<s>", "</s>", "<s><s>"])
def test_a_stop_string_of_special_tokens_stops_as_in_a_batch_row(server, client, stop):
    special = 2 if stop == "</s>" else 1
    count = stop.count("<")
    fields: Any = {"max_tokens": 12, "stop": stop, "logit_bias": {str(special): 100}}
    fields |= {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "Hello"}]
    row = {"prompt": "Hello", "max_new_tokens": 12, "stop_strings": [stop]}
    row |= {"logit_bias": {special: 100.0}, "eos_token_id": None}
    model, tokenizer = server.state.engine.model, server.state.tokenizer
    (output,) = jaxllm.BatchGenerator(model, tokenizer, slots=4).generate([row])
    assert (output.output_ids, output.finish_reasons) == (([special] * count,), ("stop",))
    for whole in (
        client.completions.create(prompt="Hello", **fields),
        client.chat.completions.create(messages=messages, **fields),
    ):
        assert whole.usage.completion_tokens == count
        assert whole.choices[0].finish_reason == "stop"
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    for chunks in (
        list(client.completions.create(prompt="Hello", **fields, **options)),
        list(client.chat.completions.create(messages=messages, **fields, **options)),
    ):
        assert chunks[-1].usage.completion_tokens == count
        assert chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", [None, "a"])
def test_places_of_streamed_tokens_are_those_of_the_whole_answer(client, stop):
    for seed in range(4):
        arguments: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "logprobs": 2}
        arguments |= {"seed": seed, "temperature": 1.5, "stop": stop}
        whole = client.completions.create(**arguments).choices[0]
        offsets = whole.logprobs.text_offset
        assert len(offsets) == len(whole.logprobs.tokens)
        assert offsets == sorted(offsets)
        assert max(offsets) <= len(whole.text)
        ends = [*offsets[1:], None]
        for name, first, last in zip(whole.logprobs.tokens, offsets, ends, strict=True):
            if name.isascii() and name.isalpha() and stop is None:
                assert whole.text[first:last] == name
        choices = [x.choices[0] for x in client.completions.create(**arguments, stream=True)]
        parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
        assert [x for part in parts for x in part.text_offset] == offsets
        assert [x for part in parts for x in part.tokens] == whole.logprobs.tokens
        assert "".join(choice.text for choice in choices) == whole.text


def test_options_that_are_null_and_fields_without_effect(server, client, caplog):
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": [None]}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    named = {"name": "x", "schema": schema, "strict": None, "description": None}
    fields: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": named},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "extra_body": {"prompt_cache_retention": "24h"},
    }
    with caplog.at_level("WARNING", logger="jaxllm.serve"):
        answer = client.chat.completions.create(**fields, store=False)
        assert not caplog.records
        text = answer.choices[0].message.content
        # A null inside the schema keeps its meaning.
        assert json.loads(text) == {"x": None}
        stored = client.chat.completions.create(**fields, store=True)
        assert stored.choices[0].message.content == text
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["store"]
    options = {"include_usage": None, "include_obfuscation": False}
    chunks = client.chat.completions.create(**fields, stream=True, stream_options=options)
    assert all(chunk.usage is None for chunk in chunks)
    plain = {"type": "text", "json_schema": None}
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_body={"response_format": plain, "store": True}
    )
    assert answer.usage.completion_tokens == 1
    for change, param in (
        ({"store": "yes"}, "store"),
        ({"stream_options": {"include_usages": None, "x": 1}, "stream": True}, "stream_options.x"),
        ({"response_format": {"type": None}}, "response_format.type"),
    ):
        body = {"prompt": "a", **change}
        error = httpx.post(f"{server.url}/v1/completions", json=body).json()["error"]
        assert error["param"] == param, error
