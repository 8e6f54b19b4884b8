"""``jaxllm serve`` as a command."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from paths import ROOT
from serving_tools import CHAT_TEMPLATE, chat_tokenizer, wait_until_open
from small_tokenizers import DATA

from jaxllm.cli.serve import api_keys, main
from jaxllm.common.errors import InputError, MissingFileError


def test_keys_are_the_lines_of_a_file(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("# of the team\nkey-1\n\n  key-2  \n", encoding="utf-8")
    assert api_keys(file) == (b"key-1", b"key-2")
    file.write_text("clé\n", encoding="utf-8-sig")
    assert api_keys(file) == ("clé".encode(),)
    assert api_keys(None) is None
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no API key"):
        api_keys(file)
    with pytest.raises(MissingFileError, match="cannot be read"):
        api_keys(tmp_path / "nothing")


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["no/such/model", "--port", str(port), "--no-compile-cache"]) == 2
    assert f"127.0.0.1:{port}: cannot be bound" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"vocab_size": len(chat_tokenizer()), "max_position_embeddings": 1024}
    tiny.make("llama", num_hidden_layers=1, **sizes).save_pretrained(folder)
    shutil.copy(DATA / "llama.model", folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_model_that_is_not_there_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no/such/model", "--port", "0", "--no-compile-cache"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("jaxllm serve: error: 'no/such/model': ")


@contextlib.contextmanager
def serving(
    model: Path, *options: str, said: str = "serving tiny on "
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The command, and its address when it takes requests; ends it if the block has not.

    Args:
        said: what the command says before the address when the block begins.
    """
    command = [sys.executable, "-m", "jaxllm", "serve", str(model), "--port", "0"]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            found = (re.search(rf"{said}http://(\S+):(\d+)", line) for line in lines)
            match = next(filter(None, found))
            wait_until_open((match[1], int(match[2])))
            yield process, f"http://{match[1]}:{match[2]}"
        finally:
            process.kill()


@pytest.mark.ci
@pytest.mark.parametrize(("number", "running"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_signal_says_what_is_finished_first(tiny_chat: Path, number: signal.Signals, running):
    options = ["--slots", "4", "--compile-cache", str(tiny_chat.parent / "xla")]
    options += ["--drain-seconds", "600"]
    with serving(tiny_chat, *options) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for begun in (
                "",
                "GET ",
                "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
            ):
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(begun.encode())
            assert httpx.get(f"{url}/health").is_success  # after it the server has read these
            body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            ask = functools.partial(httpx.stream, "POST", f"{url}/v1/completions", json=body)
            answers = [stack.enter_context(ask(timeout=60)) for _ in range(running)]
            streams = [answer.iter_lines() for answer in answers]
            for stream in streams:
                assert "error" not in next(stream)
            process.send_signal(number)
            for stream in streams:
                assert [line for line in stream if line][-1] == "data: [DONE]"
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    after = " after the 2 requests that run; a second signal ends at once" if running else ""
    logged = errors.splitlines()
    assert f"jaxllm serve: {number.name}: stopping{after}" in logged
    requests = [json.loads(line) for line in logged if line.startswith("{")]
    statuses = [request["status"] for request in requests if request["path"] != "/health"]
    assert sorted(statuses) == [*[200] * running, 503]
    assert "Traceback" not in errors


@pytest.mark.ci
def test_a_signal_before_the_model_is_ready_ends_the_command_at_once(tiny_chat: Path) -> None:
    with serving(tiny_chat, "--no-compile-cache", said="") as (process, url):
        assert httpx.get(f"{url}/health").status_code == 503
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 143
    assert errors.splitlines()[-1] == "jaxllm serve: stopped by SIGTERM"


@pytest.mark.ci
def test_the_states_of_a_start_and_an_early_request(tiny_chat: Path) -> None:
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
    with (
        serving(tiny_chat, "--no-compile-cache", "--slots", "4", "--context", "32", said="") as (
            _,
            url,
        ),
        ThreadPoolExecutor() as threads,
    ):
        early = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=100)
        states: list[dict[str, Any]] = []
        while not states or states[-1]["status"] != "ok":
            answer = httpx.get(f"{url}/health")
            assert answer.is_success == (answer.json()["status"] == "ok")
            if answer.json() not in states:
                states.append(answer.json())
            time.sleep(0.01)
        if states[0]["status"] == "loading":  # which may be over before the first look
            del states[0]
        assert {state["status"] for state in states[:-1]} == {"compiling"}
        programs = [state["program"] for state in states[:-1]]
        assert programs == sorted(programs)
        assert programs[-1] == states[-2]["of"]
        assert early.result().json()["usage"]["completion_tokens"] == 8


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@pytest.mark.ci
def test_all_programs_are_compiled_before_or_while_requests_run(tiny_chat: Path) -> None:
    cache = str(tiny_chat.parent / "xla2")
    options = ["--slots", "8", "--context", "64", "--embeddings", "--compile-cache", cache]
    with serving(tiny_chat, *options) as (process, url):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60)
        assert answer.is_success
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if "jaxllm serve: all " in line)
        found = metrics(url)
        assert found["jaxllm_programs"] == found["jaxllm_compiled_programs"] > 9
        assert f"all {found['jaxllm_programs']:.0f} programs are compiled" in said
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    with serving(tiny_chat, *options, "--compile-all") as (_, url):
        assert metrics(url)["jaxllm_compiled_programs"] == found["jaxllm_programs"]


@pytest.mark.slow
def test_a_real_model_is_served_and_drains(smollm2_gguf: Path, tmp_path: Path):
    keys = tmp_path / "keys.txt"
    keys.write_text("secret-key\n", encoding="utf-8")
    command = [sys.executable, "-m", "jaxllm", "serve", str(smollm2_gguf), "--port", "0"]
    command += ["--context", "128", "--slots", "4", "--api-keys", str(keys)]
    command += ["--served-model-name", "smol", "--compile-cache", str(tmp_path / "xla")]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # Popen would wait for it after a failed assertion
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"serving smol on (http://\S+)", line):
                break
        assert match, "".join(lines)
        said = [line for line in lines if "compiling" in line]
        assert re.search(r"compiling: \d+\.\d s", said[-1])
        headers = {"Authorization": "Bearer secret-key"}
        with httpx.Client(base_url=match[1], headers=headers, timeout=60) as client:
            question = {"role": "user", "content": "What is the capital of France?"}
            body = {"messages": [question], "temperature": 0, "max_tokens": 12}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert "Paris" in answer["choices"][0]["message"]["content"]
            body |= {"stream": True, "max_tokens": 60, "ignore_eos": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                events = stream.iter_lines()
                next(events)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in events if line]
            assert rest[-1] == "data: [DONE]"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 143
        logged = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        assert [line["status"] for line in logged if line["message"] == "request"] == [200, 200]
        assert "France" not in errors


@pytest.mark.parametrize("port", ["-1", "65536", "99999999"])
def test_a_port_out_of_range(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--port", port], program="serve") == 2
    assert f"--port: expected 0 to 65535, found {port}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--client-seconds", "--request-seconds", "--start-seconds"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(option: str, seconds: str, capsys) -> None:
    assert main(["x", option, seconds], program="serve") == 2
    found = float(seconds)
    assert f"{option}: expected a number above 0, found {found}" in capsys.readouterr().err
