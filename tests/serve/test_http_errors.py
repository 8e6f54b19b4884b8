"""The server with clients that are wrong, too many, slow, or gone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from serving_tools import RunningServer, connected, eventually, running_server, slowed
from starlette.testclient import TestClient

from jaxllm.common.errors import InputError
from jaxllm.serve.http.api_types import ApiError
from jaxllm.serve.http.app import make_app
from jaxllm.serve.http.server import JsonFormatter, bound_socket, listen
from jaxllm.serve.http.state import Limits
from jaxllm.serve.http.streaming import read_limited

KEYS = (b"key-1", b"key-2", "clé".encode())
KEY = {"Authorization": "Bearer key-1"}
LONG = {"prompt": "a", "max_tokens": 60, "temperature": 0, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = Limits(body_bytes=50_000, client_seconds=0.5)
    options: Any = {"queue_size": 4, "embeddings": False, "warm_up": False}
    with running_server(limits=limits, api_keys=KEYS, **options) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer key-2"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        yield client


@pytest.mark.ci
def test_wrong_requests_are_errors_that_name_the_field(http):
    base = {"prompt": "a", "max_tokens": 2}
    for change, field, message in [
        ({"top_pp": 1}, "top_pp", "is it top_p?"),
        ({"best_of": 2, "n": 3}, "best_of", "expected n (3) to 128"),
        ({"suffix": "b"}, "suffix", "not supported by this server"),
        ({"echo": True}, "echo", "not supported by this server"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"temperature": 2.5}, "temperature", "expected 0 to 2"),
        ({"temperature": 1e-300}, "temperature", "is too close to 0; give 0"),
        ({"top_p": 1.5}, "top_p", "`top_p` must be a number in"),
        ({"top_k": -2}, "top_k", "`top_k` must be an integer of at least 0"),
        ({"min_tokens": -1}, "min_tokens", "expected 0 or more"),
        ({"min_tokens": 3}, "min_tokens", "the limit is 2; lower min_tokens, or raise max_tokens"),
        ({"min_tokens": 2**40}, "min_tokens", "the limit is 2; lower"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "must be a map from token ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "names token 9999"),
        ({"max_tokens": 0}, "max_tokens", "expected 1 or more"),
        ({"max_tokens": 64}, "max_tokens", "have 64 together; ask for at most 62"),
        ({"prompt": "a " * 100}, "prompt", "shorten it"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [99999]}, "prompt", "expected one token id or more"),
        ({"n": 9}, "n", "hold 8; ask for fewer"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "n", "9 sequences are asked for"),
        ({"stream_options": {}}, "stream_options", "no effect without stream"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "if and"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "expected 'text'"),
    ]:
        answer = http.post("/v1/completions", json={**base, **change})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert message in error["message"]
        # Nothing of what the fields are called within the library.
        assert not re.search(r"generate|num_|do_sample|_new_tokens|beam", error["message"])
    # The default of 16 new tokens is no demand for them; clients also name what they do not want.
    unused = {"echo": False, "store": False, "suffix": "", "functions": [], "audio": None}
    short = http.post("/v1/completions", json={"prompt": [5] * 60, "ignore_eos": True, **unused})
    assert short.json()["usage"]["completion_tokens"] == 4
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    limit = http.post("/v1/chat/completions", json={**chat, "max_completion_tokens": 64})
    assert limit.json()["error"]["param"] == "max_completion_tokens"
    limits = {"max_completion_tokens": 4, "min_tokens": 5}
    least = http.post("/v1/chat/completions", json={**chat, **limits}).json()["error"]
    assert (least["param"], least["message"].split("raise ")[1]) == (
        "min_tokens",
        "max_completion_tokens",
    )
    for switches in ({"chat_template": True}, {"bos_token": "<s>"}):
        answer = http.post("/v1/chat/completions", json={**chat, "chat_template_kwargs": switches})
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
    for message, problem in [
        ({"role": "user", "content": [{"type": "image_url"}]}, "this server takes no images"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls: expected a list of calls"),
        ({"role": "user", "contents": "a"}, "messages[0].content: expected a string, found none"),
    ]:
        answer = http.post("/v1/chat/completions", json={"messages": [message]})
        assert problem in answer.json()["error"]["message"]
    model = http.post("/v1/completions", json={**base, "model": "gpt-5"})
    assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/nothing").json()["error"]["type"] == "not_found_error"


def test_malformed_and_oversized_bodies(http, server):
    for body, status in [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b'{"prompt": "a", "prompt": "b"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": ' + b"[" * 20_000, 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "' + b"a" * 60_000 + b'"}', 413),
    ]:
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == status, body[:40]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    # A body that does not end.
    with connected(server) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-1\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b"408" in connection.recv(100)
    request = {"prompt": "a", "max_tokens": 3, "temperature": 0, "logit_bias": {"2": -100}}
    whole = http.post("/v1/completions", json=request).json()["choices"][0]
    streamed = http.post("/v1/completions", json={**request, "stream": True}).text
    *events, end = [line.removeprefix("data: ") for line in streamed.split("\n") if line]
    assert end == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(pieces) == whole["text"] != ""


def test_the_parts_of_a_body_count_together():
    parts = [{"type": "http.request", "body": b"a" * 30, "more_body": True}] * 2

    async def receive() -> Any:
        return parts.pop()

    with pytest.raises(ApiError, match="50") as error:
        asyncio.run(read_limited(receive, 50, seconds=60))
    assert error.value.status == 413


def test_keys_are_asked_for_and_no_other_origin_is_told_anything(server):
    for headers in ({}, {"Authorization": "Bearer key-3"}, {"Authorization": "Basic key-1"}):
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    origin = {"Origin": "http://evil.example", "Authorization": "Bearer key-1"}
    answer = httpx.get(f"{server.url}/v1/models", headers=origin)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(
        f"{server.url}/v1/models", headers={b"Authorization": b"Bearer cl\xc3\xa9"}
    ).is_success


def test_pages_of_other_origins_have_no_work_done(server):
    # As a browser sends it without asking first.
    page = {"Origin": "http://page.example", "Content-Type": "text/plain", **KEY}
    for origins, status in [((), 403), (("http://page.example",), 200), (("*",), 200)]:
        state = dataclasses.replace(server.state, cors_origins=origins)
        with TestClient(make_app(state)) as client:
            answer = client.post("/tokenize", content='{"prompt": "a"}', headers=page)
            assert answer.status_code == status
            assert ("access-control-allow-origin" in answer.headers) == bool(origins)
            assert client.post("/tokenize", json={"prompt": "a"}, headers=KEY).status_code == 200


@pytest.mark.ci
def test_a_full_queue_answers_429_and_the_rest_is_served(http, server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-1", max_retries=0)
    results: list[Any] = []

    def ask() -> None:
        try:
            results.append(client.completions.create(model="tiny", **LONG).usage.completion_tokens)
        except openai.RateLimitError as error:
            results.append((error.code, int(error.response.headers["retry-after"]) >= 1))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    with slowed(server, 0.1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    client.close()
    served = [result for result in results if result == 60]
    assert len(results) == 20
    assert 8 <= len(served) < 20
    assert set(results) == {60, ("queue_full", True)}


def leaves_during_a_stream(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-1", max_retries=0) as client:
        stream = client.completions.create(model="tiny", stream=True, **LONG)
        next(stream)
        assert server.engine.running == 1
        stream.close()


def leaves_before_the_answer(server: RunningServer) -> None:
    with connected(server) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-1\r\n"
        body = json.dumps(LONG)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        eventually(lambda: server.engine.running == 1)


@pytest.mark.by_default("leaves_before_the_answer")
@pytest.mark.parametrize("leave", [leaves_during_a_stream, leaves_before_the_answer])
def test_a_client_that_goes_away_frees_its_slot(
    server: RunningServer, leave: Callable[[RunningServer], None]
):
    with slowed(server, 0.05):
        steps = server.engine.counts.decode_steps
        leave(server)
        eventually(lambda: server.engine.running == 0)
        assert server.engine.counts.decode_steps - steps < 40  # of 60


def test_requests_are_logged_without_their_prompts(http, caplog):
    with caplog.at_level(logging.INFO, "jaxllm.serve"):
        body = {"prompt": "secret words", "max_tokens": 3, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
    (record,) = [r for r in caplog.records if r.name == "jaxllm.serve"]
    line = json.loads(JsonFormatter().format(record))
    assert line["id"] == answer.headers["x-request-id"]
    assert (line["path"], line["status"], line["completion_tokens"]) == ("/v1/completions", 200, 3)
    assert line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in json.dumps(line)


@pytest.mark.ci
def test_time_limits_and_draining():
    limits = Limits(request_seconds=1.5)
    options: Any = {"queue_size": 4, "embeddings": False}
    with running_server(limits=limits, **options) as server, slowed(server, 0.2):
        late = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert late.status_code == 504
        assert "longer than" in late.json()["error"]["message"]
        eventually(lambda: server.engine.running == 0)
        # A stream that runs when the server is told to end is answered to its end.
        body = {**LONG, "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.server.stop()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        server.thread.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_port_that_two_servers_want():
    def open_both() -> None:
        with (
            bound_socket("127.0.0.1", 0) as first,
            bound_socket("127.0.0.1", first.getsockname()[1]) as second,
        ):
            listen(first)
            listen(second)

    with pytest.raises(InputError, match=r"127\.0\.0\.1:\d+: cannot be"):
        open_both()
