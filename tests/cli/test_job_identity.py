"""Options of a job that a resumed one must have, too."""

from __future__ import annotations

import argparse

import pytest
from paths import ROOT

from jaxllm.cli.options import add_model_flags, model_options

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
VALUES = {
    "--adapter": "adapter",
    "--dtype": "bfloat16",
    "--param-dtype": "bfloat16",
    "--matmul-precision": "high",
    "--quantize": "int8",
    "--float-embeddings": None,
    "--allow-nonfinite": None,
    "--architecture": "T5EncoderModel",
    "--config": "rope_theta=5",
}
WITHOUT_EFFECT_ON_RESULTS = ("--compile-cache", "--no-compile-cache")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    add_model_flags(flags)
    return flags


def options(*words: str) -> dict[str, object]:
    return model_options(parser().parse_args(words, argparse.Namespace(model=MODEL)), "cpu")


def compared() -> list[str]:
    flags = [flag for action in parser()._actions for flag in action.option_strings]
    return [flag for flag in flags if flag not in WITHOUT_EFFECT_ON_RESULTS]


@pytest.mark.parametrize("flag", compared())
def test_options_of_the_model_are_compared(flag: str):
    value = VALUES[flag]
    words = (flag,) if value is None else (flag, value)
    assert options(*words) != options()
    assert flag in options(*words)
