"""Texts of strangers are tokenized in processes with limits of time and memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_tools import chat_tokenizer, running_server
from small_tokenizers import DATA

from jaxllm.common.errors import InputError, TemplateError, TokenizerError, WorkerStoppedError
from jaxllm.serve import text_worker
from jaxllm.serve.text_worker import TextWorker
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.tokenizer_json import FastTokenizer

SLICES = (
    "{% for m in messages %}{% for other in messages[loop.index0:] %}{% if other.role == m.role %}"
    "{{ '' }}{% endif %}{% endfor %}{% endfor %}"
)
"""An honest template that takes quadratic time in the number of messages."""
SPACES = " " * 400_000 + "x"
"""A text that takes quadratic time with the regular expression of `quadratic`."""


def quadratic() -> FastTokenizer:
    """A tokenizer with an honest regular expression that takes quadratic time for some texts."""
    spec = json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": r"\s+$"}, "behavior": "Isolated"}
    settings = TokenizerSettings(chat_templates={"default": SLICES})
    return FastTokenizer(spec | {"pre_tokenizer": split | {"invert": False}}, settings)


@pytest.fixture(scope="module")
def worker() -> Iterator[TextWorker]:
    worker = TextWorker(quadratic(), cpu_seconds=0.2, memory_bytes=2**28)
    yield worker
    worker.close()


def test_results_and_errors_are_those_of_the_tokenizer(worker):
    tokenizer = quadratic()
    assert worker.call("encode", "aaab d") == tokenizer.encode("aaab d")
    batch = worker.call("__call__", ["a", "ab"], max_bytes=10)
    assert batch["input_ids"] == tokenizer(["a", "ab"])["input_ids"]
    with pytest.raises(InputError, match="a text must be a str, not int"):
        worker.call("encode", 5)
    with pytest.raises(TemplateError, match="roles must alternate"):
        worker.call(
            "apply_chat_template", [], chat_template="{{ raise_exception('roles must alternate') }}"
        )


TOO_MUCH = r"^the text takes more than \d.\d s or too much memory to tokenize: give a shorter one$"


@pytest.mark.parametrize(
    ("method", "argument", "options"),
    [
        ("encode", SPACES, {}),
        ("apply_chat_template", [{"role": "user", "content": "a"}] * 20_000, {}),
        ("apply_chat_template", [], {"chat_template": "{{ 10 ** (10 ** 8) }}"}),
        ("apply_chat_template", [], {"chat_template": "{{ 'a' * 10 ** 10 }}"}),
        (
            "apply_chat_template",
            [],
            {"chat_template": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
             "{% set n.x = n.x ~ n.x %}{% endfor %}"},
        ),
    ],
    ids=["regex", "messages", "power", "product", "doubling"],
)  # fmt: skip
def test_what_exceeds_a_limit_ends_alone(worker, method, argument, options):
    with pytest.raises((InputError, TemplateError), match=rf"{TOO_MUCH}|MemoryError"):
        worker.call(method, argument, **options)
    assert worker.call("encode", "ab") == quadratic().encode("ab")


def test_a_slow_text_does_not_delay_others():
    worker = TextWorker(quadratic(), cpu_seconds=20.0)
    failures: list[BaseException] = []

    def slow() -> None:
        try:
            worker.call("encode", SPACES)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=slow) for _ in range(20)]
    try:
        for thread in threads:
            thread.start()
        assert [worker.call("encode", "ab") for _ in range(5)] == [quadratic().encode("ab")] * 5
        assert all(thread.is_alive() for thread in threads)
    finally:
        assert worker._process is not None
        os.killpg(worker._process.pid, signal.SIGKILL)  # the process and all that it has forked
        for thread in threads:
            thread.join()
    assert len(failures) == 20
    assert worker.call("encode", "ab") == quadratic().encode("ab")  # it starts again
    worker.close()


def process_of(worker: TextWorker) -> int:
    assert worker._process is not None
    return worker._process.pid


def call_in_threads(worker: TextWorker, count: int) -> tuple[list[threading.Thread], list[Any]]:
    """Calls that wait for the process, and the list that their results and errors come to."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(worker.call("encode", "ab"))
        except BaseException as failure:
            results.append(failure)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_calls_in_the_socket_of_a_killed_process_go_to_the_next():
    worker = TextWorker(quadratic())
    first = process_of(worker)
    os.kill(first, signal.SIGSTOP)  # so that the calls stay in the socket
    threads, results = call_in_threads(worker, 10)
    time.sleep(0.3)
    assert not results
    os.kill(first, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert results == [quadratic().encode("ab")] * 10
    assert process_of(worker) != first
    worker.close()


@pytest.mark.parametrize("text", ["ab", "ab " * 300_000], ids=["short", "more than a socket holds"])
def test_a_stopped_process_is_replaced(text):
    worker = TextWorker(quadratic(), answer_seconds=1.0)
    first = process_of(worker)
    os.kill(first, signal.SIGSTOP)
    start = time.monotonic()
    assert worker.call("encode", text) == quadratic().encode(text)
    assert time.monotonic() - start < 30
    assert process_of(worker) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    worker.close()


def test_a_call_that_two_processes_do_not_begin_is_an_error(monkeypatch):
    worker = TextWorker(quadratic(), answer_seconds=1.0)
    start = worker._start

    def start_stopped() -> None:
        start()
        os.kill(process_of(worker), signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_start", start_stopped)
        os.kill(process_of(worker), signal.SIGSTOP)
        with pytest.raises(WorkerStoppedError, match="send the request again"):
            worker.call("encode", "ab")
    assert worker.call("encode", "ab") == quadratic().encode("ab")
    worker.close()


def test_a_client_is_told_to_try_again_while_no_process_starts():
    with running_server(warm_up=False) as server:
        worker = server.state.texts
        assert worker is not None
        tokenizer, worker._tokenizer = worker._tokenizer, Unreadable()
        os.kill(process_of(worker), signal.SIGKILL)
        body = {"model": "tiny", "prompt": "ab"}
        answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("worker_stopped", "server_error")
        worker._tokenizer = tokenizer
        assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).status_code == 200


@pytest.mark.ci
def test_requests_are_answered_beside_slow_ones():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = SLICES + "{{ messages[0].content }}"
    messages = [{"role": "user", "content": "Hello"}]
    with running_server(tokenizer=tokenizer) as server, httpx.Client(timeout=60) as client:
        statuses: list[int] = []

        def attack() -> None:
            body = {"model": "tiny", "messages": messages * 20_000, "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            statuses.append(answer.status_code)

        threads = [threading.Thread(target=attack) for _ in range(8)]
        for thread in threads:
            thread.start()
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        for _ in range(3):
            answer = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
        assert not statuses  # none of the slow ones has ended
        for thread in threads:
            thread.join()
    assert statuses == [400] * 8


def test_a_tokenizer_of_several_megabytes_reaches_the_process():
    spec = json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8"))
    files = {"tokenizer.json": os.urandom(8 * 2**20)}  # more than a socket holds
    tokenizer = FastTokenizer(spec, TokenizerSettings(), files)
    worker = TextWorker(tokenizer)
    text = "ab " * 300_000  # as a request of almost a megabyte
    assert worker.call("encode", text) == tokenizer.encode(text)
    worker.close()


class Unreadable:
    """A tokenizer whose pickle cannot be read."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_process_that_does_not_start_is_an_error_at_once():
    with pytest.raises(TokenizerError, match="ended before it was ready"):
        TextWorker(Unreadable())


def test_without_fork_texts_are_tokenized_here(monkeypatch):
    monkeypatch.setattr(text_worker, "CAN_FORK", False)
    worker = TextWorker(quadratic())
    assert worker._process is None
    assert worker.call("encode", "aaab d") == quadratic().encode("aaab d")
    worker.close()
