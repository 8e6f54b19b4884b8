"""A server before its model is loaded: what it answers, and which requests wait."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving_tools import eventually, running_server

from jaxllm.common.errors import CheckpointError
from jaxllm.serve.http.state import Limits, Startup

KEY = {"Authorization": "Bearer key-1"}
BODY = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"api_keys": (b"key-1",), "warm_up": False, "embeddings": False}


class Loading:
    """Loading that takes until the test says that it ends."""

    def __init__(self) -> None:
        self.compiles, self.ends = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def __call__(self, startup: Startup) -> None:
        assert self.compiles.wait(60)
        startup.begin_compiling(2)
        assert self.ends.wait(60)
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        self.compiles.set()
        self.ends.set()


def test_the_port_answers_before_the_model_is_loaded() -> None:
    loading = Loading()
    limits = Limits(body_bytes=1000)
    with (
        running_server(while_loading=loading, limits=limits, **OPTIONS) as server,
        httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client,
        ThreadPoolExecutor() as threads,
    ):

        def status(answer: httpx.Response) -> tuple[int, Any]:
            return answer.status_code, answer.json()

        def refused(path: str, **options: Any) -> int:
            answer = client.post(path, **{"json": BODY, **options})
            assert answer.json()["error"]["message"]
            return answer.status_code

        assert status(client.get("/health", headers={"Authorization": ""})) == (
            503,
            {"status": "loading"},
        )
        early = threads.submit(client.post, "/v1/completions", json=BODY)
        named = threads.submit(client.get, "/v1/models")
        wrong: Future[httpx.Response] = threads.submit(
            client.post, "/v1/completions", json={**BODY, "max_tokens": 10_000}
        )
        assert refused("/v1/completions", headers={"Authorization": "Bearer key-2"}) == 401
        assert refused("/v1/completions", headers={"Origin": "http://page.example"}) == 403
        assert refused("/v1/completions", json={**BODY, "model": "another"}) == 404
        assert refused("/v1/completions", json={**BODY, "prompt": "a" * 2000}) == 413
        assert refused("/v1/chat/completions", content=b"{") == 400
        assert "jaxllm_slots 0.0" in client.get("/metrics").text
        loading.compiles.set()
        compiling = {"status": "compiling", "program": 1, "of": 2}
        eventually(lambda: status(client.get("/health")) == (503, compiling))
        assert not early.done()
        loading.end()
        assert early.result().json()["usage"]["completion_tokens"] == 8
        assert named.result().json()["data"][0]["max_model_len"] == 64
        assert status(wrong.result())[0] == 400
        assert status(client.get("/health")) == (200, {"status": "ok"})
        metrics = client.get("/metrics").text
        assert "jaxllm_slots 4.0" in metrics
        assert 'jaxllm_requests_total{path="/v1/completions",status="200"} 1.0' in metrics


def test_a_request_that_waits_too_long_is_told_when_to_come_again() -> None:
    loading = Loading()
    limits = Limits(start_seconds=0.3)
    with running_server(while_loading=loading, limits=limits, **OPTIONS) as server:
        ask: Callable[..., httpx.Response] = functools.partial(
            httpx.post, f"{server.url}/v1/completions", json=BODY, headers=KEY
        )

        def metrics() -> str:
            return httpx.get(f"{server.url}/metrics", headers=KEY).text

        answer = ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = answer.json()["error"]
        assert error["code"] == "server_starting"
        assert "after 0.3 seconds" in error["message"]
        with pytest.raises(httpx.ReadTimeout):
            ask(timeout=0.1)
        eventually(lambda: 'path="/v1/completions",status="499"' in metrics())
        loading.end()
        assert ask().status_code == 200


def test_loading_that_fails_ends_the_server_and_the_requests_that_wait() -> None:
    loading = Loading()
    loading.failure = CheckpointError("model: is not there")

    def serve() -> None:
        with running_server(while_loading=loading, **OPTIONS) as server:
            url = f"{server.url}/v1/completions"
            early = threads.submit(httpx.post, url, json=BODY, headers=KEY, timeout=60)
            eventually(lambda: server.server.running_requests == 1)
            loading.end()
            answers.append(early.result())
            server.thread.join(10)

    answers: list[httpx.Response] = []
    with ThreadPoolExecutor() as threads, pytest.raises(CheckpointError, match="is not there"):
        serve()
    (answer,) = answers
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_stopping"
