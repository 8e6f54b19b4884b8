"""Entry point of ``jaxllm COMMAND ...``: runs the command with the remaining arguments."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jaxllm
from jaxllm.cli.process import (
    USAGE_ERROR,
    escape_on_stdout,
    one_line,
    open_missing_streams,
    run_command,
    signals,
)
from jaxllm.common.errors import nearest

# Each command's module has `main(argv, program) -> int`, and is imported on use.
COMMANDS = {
    "chat": ("jaxllm.cli.chat", "talk with a model in the terminal"),
    "doctor": ("jaxllm.cli.doctor", "show what this installation has and lacks"),
    "eval": (
        "jaxllm.cli.eval",
        "measure the perplexity of a text, or run tasks of lm-evaluation-harness",
    ),
    "export": (
        "jaxllm.cli.export",
        "write a checkpoint or the model of a run for transformers or PEFT",
    ),
    "generate": ("jaxllm.cli.generate", "generate text for a prompt or for the rows of a file"),
    "plan": ("jaxllm.cli.plan", "show the memory and time of a model on a TPU or GPU"),
    "serve": ("jaxllm.cli.serve", "serve a model over HTTP with OpenAI's API"),
    "train": ("jaxllm.cli.train", "train a model from a recipe"),
    "verify": ("jaxllm.cli.verify", "compare a checkpoint's logits with transformers'"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``jaxllm`` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        return run_command(_about, "jaxllm", arguments)
    name, *rest = arguments
    if name not in COMMANDS:
        hint = nearest(name, list(COMMANDS))
        if name == "batch":
            hint = "a batch is `jaxllm generate --input FILE --output FILE`"
        print(f"jaxllm: error: no command {one_line(name)!r}; {hint}", file=sys.stderr)
        return USAGE_ERROR
    return run_named(name, f"jaxllm {name}", rest)


def _about(arguments: list[str]) -> int:
    """Prints the version, or the list of commands."""
    if arguments[:1] == ["--version"]:
        print(f"jaxllm {jaxllm.__version__}")
        return 0
    print("usage: jaxllm COMMAND ...\n")
    for name, (_, summary) in COMMANDS.items():
        print(f"  {name:10} {summary}")
    print("\n`jaxllm COMMAND --help` lists a command's options; `jaxllm --version`.")
    return 0


def run_named(name: str, program: str, argv: Sequence[str] | None = None) -> int:
    """Runs a command; signals are handled before its module, and so JAX, is imported."""
    with signals.handled(program):
        module = importlib.import_module(COMMANDS[name][0])
        return module.main(argv, program=program)


def script(name: str | None = None, program: str = "jaxllm") -> NoReturn:
    """Runs ``jaxllm``, or one command of it as a script of its own, and exits."""
    escape_on_stdout()
    open_missing_streams()  # before the pipe for signals gets one of their numbers
    signals.install(program)
    # Importing JAX and loading a model make objects that stay. With Python's own threshold of 700
    # the garbage collector visits them for 0.3 s.
    gc.set_threshold(50_000, 20, 20)
    # The threads of NumPy's linear algebra, which no command uses, would spin for 0.1 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = main() if name is None else run_named(name, program)
    gc.freeze()  # the interpreter's last collection would visit all objects of JAX for 0.5 s
    sys.exit(code)
