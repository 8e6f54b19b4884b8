"""``python train.py RECIPE [--field value ...]``: fine-tunes with a recipe; can resume."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import re
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.cli.devices import (
    DEFAULT_RESOURCES,
    PROCESS_OPTIONS,
    RAY,
    add_process_flags,
    add_ray_flags,
    check_ray_flags,
    is_main_process,
    join_processes,
    mesh_sizes,
)
from jaxllm.cli.process import Parser, one_line, reject, run_command, signals
from jaxllm.common.compiling import enable_compile_cache
from jaxllm.common.errors import InputError, RunError

if TYPE_CHECKING:
    from jaxllm.training.run import Recipe

DEFAULT_RESTARTS = 3
RAY_ONLY = ("restarts", "topology", "accelerator_type")
ASSIGNED = re.compile(r"[a-z][\w.-]*=", re.IGNORECASE)
"""A field and its value, without dashes before it."""


def main(argv: Sequence[str] | None = None, program: str = "jaxllm train") -> int:
    """Entry point; returns the exit code, 128 + N for a run that signal N ended (it is saved)."""
    return run_command(lambda arguments: _run(arguments, program), program, argv)


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        "[RECIPE]",
        description="Trains a model by a recipe.",
        epilog=(
            "Every field of the recipe is an option, under its dotted name; the value is YAML:\n"
            "  --output-dir runs/a --max-steps 200 --optimizer.learning-rate 1e-4 --lora.rank 16\n"
            "NAME=VALUE is the same, and NAME=null drops a section: lora=null.\n"
            "docs/finetuning.md lists the fields."
        ),
    )
    parser.add_argument(
        "recipe", nargs="?", help="a YAML file, or the name of a recipe of the package"
    )
    parser.add_argument("--list", action="store_true", help="list the recipes of the package")
    parser.add_argument("--resume", action="store_true", help="resume the run in output_dir")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument(
        "--no-compile-cache", action="store_true", help="do not keep compiled programs"
    )
    add_process_flags(parser)
    add_ray_flags(parser, "worker")
    ray = parser.add_argument_group("Ray Train")
    ray.add_argument(
        "--restarts",
        type=int,
        metavar="K",
        help="the number of times that lost workers are restarted (3)",
    )
    ray.add_argument("--topology", help="the topology of a TPU slice, such as 4x4")
    ray.add_argument("--accelerator-type", help="the type of a TPU slice, such as TPU-V6E")
    return parser


def check_flags(options: argparse.Namespace) -> None:
    """Raises InputError for options of Ray Train without it, and for two ways to have processes."""
    check_ray_flags(options, "worker")
    if options.engine is None:
        reject(options, RAY_ONLY, "has no effect without --engine ray")
    else:
        reject(options, PROCESS_OPTIONS, "Ray starts and connects the processes of --engine ray")


def _run(argv: list[str], program: str) -> int:
    """Runs the command; raises JaxLLMError for errors that the user can correct."""
    parser = _parser(program)
    own, overrides = split_options(argv, parser)
    options = parser.parse(own)
    check_flags(options)
    if options.list:
        from jaxllm.training.run.recipe import description, recipes

        for name, path in recipes().items():
            print(f"{name:22} {description(path)}")
        return 0
    if options.recipe is None:
        raise InputError("no recipe: give a YAML file, or a name that `jaxllm train --list` prints")
    # Imported after option errors, since these imports take seconds.
    from jaxllm.training.run import read_recipe, train
    from jaxllm.training.run.recipe import find_recipe, parse_yaml

    values = {name: parse_yaml(text) for name, text in overrides.items()}
    if isinstance(values.get("mesh"), str):  # data=2,tensor=4, as in all other commands
        try:
            values["mesh"] = mesh_sizes(values["mesh"])
        except argparse.ArgumentTypeError as problem:
            raise InputError(f"--mesh: {problem}") from None
    # Orbax also logs the failed saves that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    recipe = read_recipe(find_recipe(options.recipe), values)
    if options.engine == RAY:
        return _run_on_ray(recipe, options)
    join_processes(options)
    quiet = options.quiet or not is_main_process()
    stop = signals.stop_after("step", quiet=quiet, from_now_on=jax.process_count() > 1)
    if not options.no_compile_cache:
        try:
            enable_compile_cache()
        except RunError as problem:
            if not quiet:
                print(f"{program}: {one_line(str(problem))}", file=sys.stderr)
    with closed_loops_hidden():
        result = train(recipe, resume=options.resume, quiet=options.quiet, stop=stop)
    if not quiet:
        print(f"{result.folder}: step {result.step}")
        if result.stopped_by is not None and signals.received() is None:
            signals.say(f"another process received {signal.Signals(result.stopped_by).name}")
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _run_on_ray(recipe: Recipe, options: argparse.Namespace) -> int:
    from jaxllm.training.run.ray_run import RayWorkers, train_on_ray
    from jaxllm.training.run.run import folder_of

    workers = RayWorkers(
        options.workers,
        options.worker_resources or DEFAULT_RESOURCES,
        address=options.address,
        restarts=DEFAULT_RESTARTS if options.restarts is None else options.restarts,
        topology=options.topology,
        accelerator_type=options.accelerator_type,
    )
    step = train_on_ray(
        recipe,
        workers,
        resume=options.resume,
        quiet=options.quiet,
        keep_programs=not options.no_compile_cache,
    )
    if not options.quiet:
        print(f"{folder_of(recipe)}: step {step}")
    return 0


@contextlib.contextmanager
def closed_loops_hidden() -> Generator[None]:
    """Leaves out what follows a failed save on stderr; the save's own error is raised anyway.

    Orbax ends its event loop with the first array that cannot be written. For each of the others
    TensorStore then reports to `sys.unraisablehook` that the loop is closed.
    """
    earlier = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            earlier(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = earlier


def split_options(argv: Sequence[str], parser: Parser) -> tuple[list[str], dict[str, str]]:
    """Separates recipe fields from the parser's arguments; returns (those arguments, fields).

    >>> words = ["--max-steps", "6", "a.yaml", "--optimizer.name=lion", "lora=null"]
    >>> split_options(words, _parser("train"))
    (['a.yaml'], {'max_steps': '6', 'optimizer.name': 'lion', 'lora': 'null'})
    """
    switches, valued = parser.flags(take_values=False), parser.flags(take_values=True)
    own: list[str] = []
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        is_field = word.startswith("--") or (ASSIGNED.match(word) and not Path(word).exists())
        if not is_field or word in switches or option in valued:
            own.append(word)
            if option in valued and not equals:
                own.extend(itertools.islice(words, 1))
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise InputError(f"{option}: needs a value; `null` switches a field off")
        name = option.removeprefix("--").replace("-", "_")
        if name in found:
            raise InputError(f"{option}: given twice")
        if any(other.startswith(f"{name}.") for other in found):
            raise InputError(f"{option}: replaces its whole section, so give it before its fields")
        found[name] = value
    return own, found
