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
from jaxllm.serve import EngineStoppedError, QueueFullError
from jaxllm.serve.http.api_types import ApiError
from jaxllm.serve.http.app import make_app, read_limited
from jaxllm.serve.http.server import JsonFormatter, bound_socket, listen
from jaxllm.serve.http.state import Limits, Startup

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
        ({"prompt": ["a", ""]}, "prompt[1]", "has no text; it must not"),
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
        ({"role": "user", "content": [{"type": "image_url"}]}, "expected a part of type text"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls: expected a list of calls"),
        ({"role": "user", "contents": "a"}, "messages[0].content: is missing"),
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
        with TestClient(make_app(Startup(state))) as client:
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


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines of the server's log."""
    records = [record for record in caplog.records if record.name == "jaxllm.serve"]
    return [json.loads(JsonFormatter().format(record)) for record in records]


SECRET = "my secret's words"
CHAT = "/v1/chat/completions"
STRANGE_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": SECRET}}}
}


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "reason"),
    [
        ("/v1/completions", {"prompt": SECRET, "top_pp": 1}, 400, "top_pp", "is it top_p?"),
        ("/v1/completions", {"prompt": SECRET, "topP": 1}, 400, "topP", "unknown"),
        ("/v1/completions", {"prompt": SECRET, "n": 500}, 400, "n", "found 500"),
        ("/v1/completions", {"prompt": {SECRET: 1}}, 400, "prompt", "expected a string"),
        ("/v1/completions", {"prompt": [SECRET, 1]}, 400, "prompt", "expected a string"),
        ("/v1/completions", {"prompt": "a", "stop": [[SECRET]]}, 400, "stop", "expected"),
        ("/v1/completions", {"prompt": "a", SECRET: 1}, 400, None, "unknown"),
        ("/v1/completions", {"prompt": "a", "model": SECRET}, 404, "model", "this server has"),
        ("/v1/completions", {"prompt": SECRET * 400}, 400, "prompt", "shorten it"),
        ("/v1/completions", SECRET, 400, "body", "not JSON"),
        ("/v1/completions", f'{{"{SECRET}": 1, "{SECRET}": 2}}', 400, None, "appears twice"),
        ("/v1/completions", SECRET * 5000, 413, "body", "larger than 50000 bytes"),
        ("/v1/completions", {"prompt": "a", **STRANGE_SCHEMA}, 400, "json_schema", "json_schema:"),
        (CHAT, {"messages": [{"role": 5, "content": SECRET}]}, 400, "messages[0].role", "role"),
        (CHAT, {"messages": [{"role": "user", "content": {SECRET: 1}}]}, 400, None, "content"),
        (CHAT, {"messages": [SECRET]}, 400, "messages", "expected a list of messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": SECRET}]}, 400, None, "failed"),
        ("/detokenize", {"tokens": [SECRET]}, 400, "tokens", "expected"),
        ("/v1/embeddings", {"input": SECRET}, 404, None, "--embeddings"),
        ("/v1/nothing", {"prompt": SECRET}, 404, None, "Not Found"),
        ("/health", {"prompt": SECRET}, 405, None, "Method Not Allowed"),
    ],
)
def test_a_refused_request_is_logged_with_its_reason(
    http, server, caplog, monkeypatch, path, body, status, field, reason
):
    template = "{{ raise_exception(messages[0].content) }}" if path == "/tokenize" else "{{ '' }}"
    monkeypatch.setattr(server.state.tokenizer, "chat_template", template)
    monkeypatch.setattr(server.state.texts, "_tokenizer", server.state.tokenizer)
    server.state.texts._end()  # the next process has this template
    content = body if isinstance(body, str) else json.dumps(body)
    with caplog.at_level(logging.INFO, "jaxllm.serve"):
        answer = http.post(path, content=content)
    assert answer.status_code == status, answer.text
    (line,) = logged(caplog)
    assert (line["path"], line["method"], line["client"]) == (path, "POST", "127.0.0.1")
    assert line["status"] == status
    assert reason in line["reason"]
    if field is not None:
        assert line["field"] == field
    assert not re.search("secret|words", json.dumps(line))
    server.state.texts._end()


def test_refusals_of_keys_origins_and_http_are_logged(server, caplog):
    with caplog.at_level(logging.INFO, "jaxllm.serve"):
        httpx.post(f"{server.url}/v1/completions", headers={"Authorization": "Bearer key-9"})
        httpx.post(f"{server.url}/tokenize", headers={**KEY, "Origin": "https://a.example"})
        with connected(server) as connection:
            connection.sendall(b"secret\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        with connected(server) as connection:  # the body takes too long
            head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-1\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in connection.recv(100)
    lines = logged(caplog)
    assert [line["status"] for line in lines] == [401, 403, 400, 408]
    assert [line["client"] for line in lines] == ["127.0.0.1"] * 4
    assert "expected a valid API key" in lines[0]["reason"]
    assert lines[0]["code"] == "invalid_api_key"
    assert "--cors-origin" in lines[1]["reason"]
    assert "not valid HTTP" in lines[2]["reason"]
    assert "did not arrive within 0.5 seconds" in lines[3]["reason"]
    assert not re.search("secret|key-[0-9]", json.dumps(lines))


def test_a_page_that_may_not_call_and_a_stopped_engine_are_logged(server, caplog, monkeypatch):
    state = dataclasses.replace(server.state, cors_origins=("https://a.example",))
    client = TestClient(make_app(Startup(state)))
    with caplog.at_level(logging.INFO, "jaxllm.serve"):
        asks = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=asks).status_code == 400
        for failure in (EngineStoppedError("it ended"), QueueFullError("5 wait", retry_after=2)):
            monkeypatch.setattr(server.engine, "submit_in_thread", raiser(failure))
            for stream in (False, True):
                body = {"prompt": "secret", "stream": stream}
                client.post("/v1/completions", json=body, headers=KEY)
    refused, *others = logged(caplog)
    assert (refused["status"], refused["reason"]) == (400, "Disallowed CORS origin")
    ended, full = (503, "it ended"), (429, "5 wait")
    assert [(line["status"], line["reason"]) for line in others] == [ended, ended, full, full]


def raiser(failure: Exception) -> Callable[..., Any]:
    async def submit(*_: Any, **__: Any) -> Any:
        raise failure

    return submit


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
