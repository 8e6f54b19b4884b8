"""``python train.py RECIPE [--field value ...]``: fine-tunes, resumes, says what it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxllm.cli import compile_cache
from jaxllm.cli.exits import Parser, guard
from jaxllm.errors import InputError
from jaxllm.extras import require

STOPS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None, program: str = "jaxllm train") -> int:
    """Entry point; returns the exit code: 143 or 130 for a run that a signal ended, saved."""
    return guard(lambda arguments: run(arguments, program), program, argv)


def parser(program: str) -> Parser:
    made = Parser(
        prog=program,
        description="Trains a model as a recipe says.",
        epilog=(
            "Every field of the recipe is an option, under its dotted name; the value is YAML:\n"
            "  --output-dir runs/a --max-steps 200 --optimizer.learning-rate 1e-4 --lora.rank 16\n"
            "docs/finetuning.md lists the fields."
        ),
    )
    made.add_argument("recipe", help="a YAML file, such as those in configs/")
    made.add_argument("--resume", action="store_true", help="go on with the run in output_dir")
    made.add_argument("--quiet", action="store_true", help="show nothing")
    made.add_argument("--no-compile-cache", action="store_true", help="keep no compiled programs")
    return made


def run(argv: list[str], program: str) -> int:
    """The command proper; raises JaxLLMError for what the user can mend."""
    options, rest = parser(program).parse_known_args(argv)
    for module in ("optax", "orbax.checkpoint", "grain", "yaml"):
        require(module, extra="train", purpose="training runs")
    # What follows takes seconds to import, and a wrong option should not.
    from jaxllm.training.recipe_file import read_recipe
    from jaxllm.training.run import train

    recipe = read_recipe(Path(options.recipe), fields(rest))
    if not options.no_compile_cache:
        compile_cache.enable(compile_cache.default_folder())
    with stopping() as stop:
        result = train(recipe, resume=options.resume, quiet=options.quiet, stop=stop)
    if not options.quiet:
        print(f"{result.folder}: step {result.step}")
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def fields(rest: Sequence[str]) -> dict[str, Any]:
    """Options that are fields of the recipe.

    >>> fields(["--max-steps", "6", "--optimizer.name=lion"])
    {'max_steps': 6, 'optimizer.name': 'lion'}
    """
    from jaxllm.training.recipe_file import parse_value

    found: dict[str, Any] = {}
    words = iter(rest)
    for word in words:
        if not word.startswith("--") or len(word) < 3:
            raise InputError(f"{word!r}: expected --field value; one recipe only")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                raise InputError(f"--{name}: no value follows (`null` switches a field off)")
        found[name.replace("-", "_")] = parse_value(value)
    return found


@contextmanager
def stopping() -> Iterator[Any]:
    """Ctrl-C and SIGTERM end the run after its step; a second one ends it at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
