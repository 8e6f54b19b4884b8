"""``python train.py RECIPE [--field value ...]``: fine-tunes with a recipe; can resume."""

from __future__ import annotations

import itertools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxllm.cli import compile_cache
from jaxllm.cli.devices import add_process_flags, is_main_process, join_processes
from jaxllm.cli.exits import Parser, one_line, run_command
from jaxllm.common.errors import InputError

STOPS = (signal.SIGTERM, signal.SIGINT)
SWITCHES = ("--resume", "--quiet", "--no-compile-cache", "--debug", "--help", "--distributed")
VALUED = ("--coordinator", "--num-processes", "--process-id")
"""Options that are not recipe fields: `SWITCHES` without a value, `VALUED` with one."""


def main(argv: Sequence[str] | None = None, program: str = "jaxllm train") -> int:
    """Entry point; returns the exit code: 143 or 130 for a run that a signal ended (it is
    saved)."""
    return run_command(lambda arguments: run(arguments, program), program, argv)


def parser(program: str) -> Parser:
    made = Parser(
        prog=program,
        description="Trains a model by a recipe.",
        epilog=(
            "Every field of the recipe is an option, under its dotted name; the value is YAML:\n"
            "  --output-dir runs/a --max-steps 200 --optimizer.learning-rate 1e-4 --lora.rank 16\n"
            "docs/finetuning.md lists the fields."
        ),
    )
    made.add_argument("recipe", help="a YAML file, such as those in configs/")
    made.add_argument("--resume", action="store_true", help="resume the run in output_dir")
    made.add_argument("--quiet", action="store_true", help="show nothing")
    made.add_argument("--no-compile-cache", action="store_true", help="cache no compiled programs")
    add_process_flags(made)
    return made


def run(argv: list[str], program: str) -> int:
    """Runs the command; raises JaxLLMError for errors that the user can correct."""
    own, overrides = split(argv)
    options = parser(program).parse_args(own)
    # Imported after option errors, since these imports take seconds.
    from jaxllm.training.run import read_recipe, train
    from jaxllm.training.run.recipe_file import parse_value

    values = {name: parse_value(text) for name, text in overrides.items()}
    # Orbax also logs the failed saves that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    recipe = read_recipe(Path(options.recipe), values)
    join_processes(options)
    if not options.no_compile_cache:
        warning = compile_cache.enable(compile_cache.default_folder())
        if warning is not None and not options.quiet and is_main_process():
            print(f"{program}: {one_line(warning)}", file=sys.stderr)
    with stopping(quiet=options.quiet or not is_main_process()) as stop:
        result = train(recipe, resume=options.resume, quiet=options.quiet, stop=stop)
    if not options.quiet and is_main_process():
        print(f"{result.folder}: step {result.step}")
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates recipe fields from other arguments; returns (other arguments, fields).

    >>> split(["--max-steps", "6", "a.yaml", "--optimizer.name=lion", "--resume"])
    (['a.yaml', '--resume'], {'max_steps': '6', 'optimizer.name': 'lion'})
    """
    own: list[str] = []
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if not word.startswith("--") or word in SWITCHES or option in VALUED:
            own.append(word)
            if option in VALUED and not equals:
                own.extend(itertools.islice(words, 1))
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise InputError(f"{option}: no value follows (`null` switches a field off)")
        name = option[2:].replace("-", "_")
        if name in found:
            raise InputError(f"{option}: given twice")
        found[name] = value
    return own, found


@contextmanager
def stopping(*, quiet: bool = False) -> Iterator[Callable[[], int | None]]:
    """Makes Ctrl-C and SIGTERM save and end the run after its step; a second one ends it at once.

    Yields the `stop` argument of `train`. Signals act as usual until its first call, since there
    is nothing to save before.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if not quiet:
            print("stopping after this step; a second signal ends at once", file=sys.stderr)
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)

    def stop() -> int | None:
        if not before:
            before.update({number: signal.signal(number, note) for number in STOPS})
        return received[0] if received else None

    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
