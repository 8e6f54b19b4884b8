"""``jaxllm serve`` as a command."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from paths import ROOT

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


@pytest.mark.slow
def test_a_real_model_is_served_and_drains(smollm2_gguf: Path, tmp_path: Path):
    keys = tmp_path / "keys.txt"
    keys.write_text("secret-key\n", encoding="utf-8")
    command = [sys.executable, "-m", "jaxllm", "serve", str(smollm2_gguf), "--port", "0"]
    command += ["--context", "128", "--slots", "4", "--api-keys", str(keys)]
    command += ["--served-model-name", "smol", "--compile-cache", str(tmp_path / "xla")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"serving smol on (http://\S+)", line):
                break
        assert match, "".join(lines)
        said = [line for line in lines if "compiling" in line]
        # Before the minutes that it may take.
        assert said[0].strip() == "jaxllm serve: compiling all programs"
        assert re.search(r"compiling: \d+\.\d s", said[1])
        headers = {"Authorization": "Bearer secret-key"}
        with httpx.Client(base_url=match[1], headers=headers, timeout=60) as client:
            question = {"role": "user", "content": "What is the capital of France?"}
            body = {"messages": [question], "temperature": 0, "max_tokens": 12}
            transport = httpx.HTTPTransport(retries=20)
            with httpx.Client(base_url=match[1], headers=headers, transport=transport) as first:
                answer = first.post("/v1/chat/completions", json=body, timeout=60).json()
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


@pytest.mark.parametrize("option", ["--client-seconds", "--request-seconds"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(option: str, seconds: str, capsys) -> None:
    assert main(["x", option, seconds], program="serve") == 2
    found = float(seconds)
    assert f"{option}: expected a number above 0, found {found}" in capsys.readouterr().err
