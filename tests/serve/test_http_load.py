"""The server under load: many requests, slow readers, half-open sockets, a long queue."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from serving_tools import eventually, running_server

from jaxllm.serve import AsyncEngine

pytestmark = pytest.mark.slow


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def ask(client: httpx.AsyncClient, number: int) -> None:
    """Sends a request of one of ten kinds."""
    sampling = {
        "max_tokens": 1 + number % 12,
        "temperature": 1 + number / 10_000,  # another setting each time
        "seed": number,
        "stop": [f"x{number}"],
    }
    text = {"prompt": "abc" * (1 + number % 5), **sampling}
    chat = {"messages": [{"role": "user", "content": f"a{number}"}], **sampling}
    kind, path, status = number % 10, "/v1/completions", 200
    if kind in (0, 1):
        answer = await client.post(path, json={**text, "stream": kind == 1, "n": 2})
    elif kind in (2, 3):
        path = "/v1/chat/completions"
        answer = await client.post(path, json={**chat, "stream": kind == 3, "logprobs": True})
    elif kind == 4:
        answer = await client.post(path, json={**text, "logprobs": 3, "best_of": 2})
    elif kind == 5:
        answer = await client.post("/v1/embeddings", json={"input": [text["prompt"], "b"]})
    elif kind == 6:
        answer = await client.post("/tokenize", json={"prompt": text["prompt"]})
    elif kind == 7:  # a stream whose client leaves
        body = {**text, "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with client.stream("POST", path, json=body) as answer:
            await anext(answer.aiter_lines())
    elif kind == 8:
        bad: list[Any] = [
            b"{",
            b"[1]",
            b"\xff",
            b"[" * 5000,
            json.dumps({"prompt": number}).encode(),
        ]
        answer, status = await client.post(path, content=bad[number // 10 % len(bad)]), 400
    else:
        answer, status = await client.post(f"/nothing/{number}", json=chat), 404
    assert answer.status_code == status


@pytest.fixture
def default_gc() -> Iterator[None]:
    """Collects garbage as often as a server does; conftest.py makes it rare."""
    earlier = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*earlier)


@pytest.mark.usefixtures("default_gc")
def test_memory_is_flat_over_2500_requests():
    async def many(url: str, start: int, count: int) -> None:
        gate = asyncio.Semaphore(32)

        async def gated(number: int) -> None:
            async with gate:
                await ask(client, number)

        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(gated(start + i) for i in range(count)))

    with running_server(queue_size=256) as server:
        asyncio.run(many(server.url, 0, 500))
        gc.collect()
        before = resident_bytes()
        asyncio.run(many(server.url, 500, 2000))
        gc.collect()
        growth = resident_bytes() / before - 1
        print(f"{before / 2**20:.0f} MiB after 500 requests, {growth:+.2%} after 2500")
        assert growth < 0.02, f"{growth:.1%} of {before / 2**20:.0f} MiB"
        assert set(server.engine.counts.program_calls) <= set(server.engine.programs.names)
        eventually(lambda: server.engine.running == server.engine.waiting == 0)


def test_slow_readers_and_half_open_sockets_do_not_hold_up_the_rest():
    with running_server(embeddings=False) as server:
        host, port = server.url.removeprefix("http://").split(":")
        # An answer of 8 MB, more than the system's buffers hold.
        fields = {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"2": -100}}
        fields |= {"max_tokens": 32, "n": 128, "stream": True, "logprobs": True}
        body = json.dumps({**fields, "top_logprobs": 20})
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        silent = [socket.create_connection((host, int(port))) for _ in range(200)]
        halves = [socket.create_connection((host, int(port))) for _ in range(200)]
        readers = [socket.create_connection((host, int(port))) for _ in range(2)]
        try:
            for connection in halves:
                connection.sendall(head[:40].encode())
            for connection in readers:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                connection.sendall((head + body).encode())  # and never reads
            for _ in range(20):
                answer = httpx.post(
                    f"{server.url}/v1/completions",
                    json={"prompt": "a", "max_tokens": 20, "ignore_eos": True},
                    timeout=60,
                )
                assert answer.json()["usage"]["completion_tokens"] == 20
            # The readers' answers have not ended, but hold no slots.
            assert server.engine.running == server.engine.waiting == 0
            metrics = httpx.get(f"{server.url}/metrics").text
            assert 'jaxllm_requests_total{path="/v1/completions",status="200"} 20.0' in metrics
            assert 'jaxllm_requests_total{path="/v1/chat' not in metrics
        finally:
            for connection in (*silent, *halves, *readers):
                connection.close()


def test_10_000_queued_requests_are_all_answered():
    model = tiny.make("llama", num_hidden_layers=1)
    lengths = [2 + i % 7 for i in range(10_000)]

    async def main() -> None:
        engine = AsyncEngine(model, slots=64, context=16, queue_size=10_000, eos_token_id=None)
        async with engine:
            streams = [
                engine.submit({"input_ids": [5, 6, 7], "max_new_tokens": length})
                for length in lengths
            ]
            for stream, length in zip(streams, lengths, strict=True):
                assert sum([len(chunk.tokens) async for chunk in stream]) == length
        # The first token of a sequence comes with its prompt.
        assert engine.counts.busy_slot_steps == sum(lengths) - len(lengths)
        assert engine.counts.utilisation > 0.9

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_garbage_never_breaks_the_server(path):
    rng = random.Random(0)
    good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    values = [None, -1, 1e9, "", "x", [], {}, [[]], True, {"type": "text"}, [None], "\u0000"]
    names = [*good, "n", "stop", "seed", "logit_bias", "tools", "response_format", "logprobs"]
    with (
        running_server(embeddings=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for _ in range(300):
            name = "prompt" if path == "/v1/completions" else "messages"
            body = {name: good[name], "max_tokens": 2, rng.choice(names): rng.choice(values)}
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 400, 429), answer.text
        assert client.get("/health").status_code == 200
