"""The run card: complete and without secrets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import subprocess
from pathlib import Path

import flax
import jax
import pytest

from jaxllm.common.errors import RunError
from jaxllm.training.monitor.run_card import (
    HIDDEN,
    DataFile,
    git_commit,
    is_secret,
    make_run_card,
    without_secrets,
    write_run_card,
)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: str = "adamw"
    learning_rate: float = 1e-4
    clip: float = math.inf


@dataclasses.dataclass(frozen=True)
class Config:
    model: Path = Path("models/x")
    optimizer: Optimizer = Optimizer()
    layers: tuple[int, ...] = (1, 2)
    eos_token: str = "</s>"
    max_tokens: int = 64
    hf_token: str | None = "hf_abcdefghijklmnopqrst"
    note: str = "a | b\nc"


COMMAND = ["train.py", "configs/a.yaml", "--hf-token", "verysecret", "--url=https://me:pw@host/"]


def card(tmp_path: Path, resumed_at: int | None = None):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    return make_run_card(
        config=Config(),
        data={"train": DataFile(str(data), hashlib.sha256(data.read_bytes()).hexdigest(), 14)},
        total_parameters=1000,
        trainable_parameters=10,
        resumed_at=resumed_at,
        command=COMMAND,
    )


def test_contents_of_the_run_card(tmp_path: Path) -> None:
    write_run_card(tmp_path / "run", card(tmp_path))
    actual = json.loads(
        (tmp_path / "run" / "run_card.json").read_text(), parse_constant=pytest.fail
    )
    assert actual["config"] == {
        "model": "models/x",
        "optimizer": {"name": "adamw", "learning_rate": 1e-4, "clip": "inf"},
        "layers": [1, 2],
        "eos_token": "</s>",
        "max_tokens": 64,
        "hf_token": HIDDEN,
        "note": "a | b\nc",
    }
    sha = hashlib.sha256(b'{"text": "a"}\n').hexdigest()
    path = str(tmp_path / "rows.jsonl")
    assert actual["data"] == {"train": {"path": path, "sha256": sha, "bytes": 14}}
    assert actual["parameters"] == {"total": 1000, "trainable": 10}
    (start,) = actual["starts"]
    assert start["time"].endswith("+00:00")
    assert start["versions"]["jax"] == jax.__version__
    assert start["versions"]["flax"] == flax.__version__
    assert {"python", "jaxllm", "optax", "orbax-checkpoint"} <= start["versions"].keys()
    assert start["devices"]["platform"] == "cpu"
    assert start["devices"]["count"] == jax.device_count()
    assert start["command"][:3] == ["train.py", "configs/a.yaml", "--hf-token"]


def test_no_secret_is_written(tmp_path: Path) -> None:
    write_run_card(tmp_path / "run", card(tmp_path))
    for file in (tmp_path / "run").iterdir():
        text = file.read_text()
        for secret in ("verysecret", "hf_abc", "me:pw"):
            assert secret not in text, file.name


def test_a_resume_adds_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run_card(folder, card(tmp_path))
    write_run_card(folder, card(tmp_path, resumed_at=6))
    actual = json.loads((folder / "run_card.json").read_text())
    assert [start["resumed_at"] for start in actual["starts"]] == [None, 6]
    (folder / "run_card.json").write_text('{"starts": [{"when": 1}]}')
    with pytest.raises(RunError, match=r"run_card\.json: not a run card"):
        write_run_card(folder, card(tmp_path, resumed_at=7))
    write_run_card(folder, card(tmp_path))


def test_the_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert git_commit(tmp_path) is None
    git("init", "-q")
    assert git_commit(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    assert git_commit(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "file").write_text("b")
    assert git_commit(tmp_path) == {"commit": head, "dirty": True}


def test_no_git_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "HF-TOKEN", "api_key", "wandb.apikey", "client_secret", "password"],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)
    assert without_secrets({name: "x"}) == {name: HIDDEN}
    assert without_secrets({name: {"a": 1}}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "name", ["eos_token", "pad_token_id", "tokens_per_batch", "tokenizer", "key", "max_new_tokens"]
)
def test_names_that_are_no_secrets(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "value",
    ["hf_" + "a1" * 17, "sk-" + "b2" * 20, "ghp_" + "c3" * 18, "AKIA" + "D4" * 8],
)
def test_values_that_look_like_secrets(value: str) -> None:
    assert without_secrets({"note": [f"uses {value} here"]}) == {"note": [f"uses {HIDDEN} here"]}
