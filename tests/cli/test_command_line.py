"""The jaxllm command, the compile cache's folder, and options of generation fields."""

from __future__ import annotations

import argparse
import importlib
import sys
import typing
from pathlib import Path

import pytest

import jaxllm
from jaxllm.batch.row_tasks import Pooling
from jaxllm.cli.main import COMMANDS, main
from jaxllm.cli.options import POOLINGS, add_field_flags, generation_fields
from jaxllm.cli.process import run_command
from jaxllm.common.compiling import default_folder
from jaxllm.generation.inputs.values import boolean
from jaxllm.generation.settings.config import FIELDS, GenerationConfig


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: jaxllm {name}" in capsys.readouterr().out


def test_commands_know_every_kind_of_pooling():
    """They list the kinds without importing the engine, which is slow."""
    assert typing.get_args(Pooling) == POOLINGS


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_one_value_is_given_once(name: str, capsys: pytest.CaptureFixture[str]):
    parser = importlib.import_module(COMMANDS[name][0])._parser(name)
    once = [
        action
        for action in parser._actions
        if action.nargs != 0 and not isinstance(action, argparse._AppendAction)
    ]
    flags = [flag for action in once for flag in action.option_strings]
    assert flags or name == "doctor"
    for flag in flags:
        for words in ([flag, "1", flag, "1"], [f"{flag}=1", flag, "2"], [flag, "1", f"{flag}=2"]):
            with pytest.raises(SystemExit, match="2"):
                main([name, *words])
            assert f"error: {flag}: given twice, but it takes one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "--do-sample", "--no-do-sample"],
            "--do-sample and --no-do-sample contradict",
        ),
        (["generate", "--config", "a=1", "--config=a=1", "hi"], "--config a: given 2 times"),
        (["verify", "smollm2", "--adapter", "a", "--adapter", "b"], "--adapter: given twice"),
        (["train", "a.yaml", "--model.path", "a", "--model.path=b"], "--model.path: given twice"),
        (["train", "a.yaml", "model.path=a", "--model.path", "b"], "--model.path: given twice"),
        (["train", "a.yaml", "--workers=1", "--workers", "2"], "--workers: given twice"),
        (["generate", "--adapter", "no such", "hi"], "a model takes one adapter at most"),
    ],
)
def test_nothing_that_is_given_is_dropped(words, message, capsys: pytest.CaptureFixture[str]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert (code, message in (err := capsys.readouterr().err)) == (2, True), err


def test_options_that_may_be_repeated(tmp_path: Path):
    words = ["--config", "a=1", "--config", "b=2", "--quiet", "--quiet", "--", "--seed", "--seed"]
    parser = importlib.import_module("jaxllm.cli.generate")._parser("generate")
    parser._check_repeats(words)
    for module, flag in (("serve", "--cors-origin"), ("verify", "--prompt"), ("plan", "--program")):
        parser = importlib.import_module(f"jaxllm.cli.{module}")._parser(module)
        value = "train" if module == "plan" else "*"
        parsed = parser.parse([flag, value, flag, value])
        assert vars(parsed)[flag[2:].replace("-", "_")] == [value, value]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxllm {jaxllm.__version__}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert "'genrate'" in capsys.readouterr().err


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_field_flags(parser)
    return parser


def test_no_fields_by_default(parser: argparse.ArgumentParser) -> None:
    assert generation_fields(parser.parse_args([])) == {}


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if not f.metadata])
def test_every_field_is_an_option(parser: argparse.ArgumentParser, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    words = [flag] if FIELDS[name].check is boolean else [flag, "none"]
    expected = True if FIELDS[name].check is boolean else None
    assert generation_fields(parser.parse_args(words)) == {name: expected}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--top-k", "5"], 5),
        (["--temperature", "1e-1"], 0.1),
        (["--eos-token-id", "2,7"], (2, 7)),
        (["--bad-words-ids", "[[1, 2], [3]]"], ((1, 2), (3,))),
        (["--sequence-bias", "[[[1], -2.5]]"], (((1,), -2.5),)),
        (["--exponential-decay-length-penalty", "[5, 1.2]"], (5, 1.2)),
        (["--no-do-sample"], False),
        (["--early-stopping", "never"], "never"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_values_reach_the_config(
    parser: argparse.ArgumentParser, words: list[str], value: object
) -> None:
    fields = generation_fields(parser.parse_args(words))
    (name,) = fields
    assert getattr(GenerationConfig(**fields), name) == value


def test_compile_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXLLM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder() == Path("/home/someone/.cache/jaxllm/xla")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/jaxllm/xla")
    monkeypatch.setenv("JAXLLM_CACHE_DIR", "/mine")
    assert default_folder() == Path("/mine")


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command(lambda arguments: print("text") or 0, "x", []) == 2
    error = capfd.readouterr().err
    assert error == "x: error: nothing more can be written (No space left on device)\n"


def test_a_bug_keeps_its_traceback() -> None:
    def command(arguments: list[str]) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(command, "test", [])


def test_full_devices_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: list[str]) -> int:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nbuffers: ...")

    assert run_command(command, "x", []) == 2
    error = capsys.readouterr().err
    assert error.startswith("x: error: the memory of the devices is full; lower ")
    assert error.endswith("(RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.)\n")
