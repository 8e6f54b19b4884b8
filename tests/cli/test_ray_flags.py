"""Options of `--engine ray` that are refused."""

from __future__ import annotations

import pytest
from tiny_runs import write_recipe

from jaxllm.cli import generate, train

BATCH = ("--input", "rows.jsonl", "--output", "out.jsonl")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((*BATCH, "--engine", "ray"), "--engine ray needs --actors N, the number of actors"),
        ((*BATCH, "--engine", "ray", "--actors", "0"), "--actors: expected 1 or more"),
        ((*BATCH, "--actors", "2"), "--actors: has no effect without --engine ray"),
        (("--engine", "ray", "--actors", "2", "Hi"), "--engine: has no effect without --input"),
        ((*BATCH, "--actor-resources", "GPU"), "expected amounts such as GPU=1,CPU=4, found 'GPU'"),
        ((*BATCH, "--num-processes", "2"), "--num-processes: cannot be combined with --input"),
    ],
)
def test_generate(flags, why, capsys):
    assert refused(lambda: generate.main(list(flags))) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--engine", "ray"), "--engine ray needs --workers N, the number of workers"),
        (("--restarts", "2"), "--restarts: has no effect without --engine ray"),
        (("--engine", "ray", "--workers", "2", "--distributed"), "--distributed: Ray starts"),
        (("--engine", "ray", "--workers", "2", "--topology", "4x4"), "only with TPU"),
    ],
)
def test_train(flags, why, tmp_path, capsys):
    assert refused(lambda: train.main([str(write_recipe(tmp_path)), *flags])) == 2
    assert why in capsys.readouterr().err


def refused(command):
    """The exit code, also of options that argparse refuses."""
    try:
        return command()
    except SystemExit as exit_code:
        return exit_code.code
