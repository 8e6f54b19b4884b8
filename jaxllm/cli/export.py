"""``jaxllm export SOURCE OUT``: writes a checkpoint, or the model of a run, for transformers."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jaxllm.cli.process import Parser, add_flags, command, path
from jaxllm.common.errors import InputError, quoted

WHICH = ("best", "last")
MAX_DIGITS = 18
"""Of a step's number."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        description="Write a checkpoint of any format that jaxllm reads, or the model of a "
        "training run, as a folder of safetensors for transformers.",
    )
    parser.add_argument(
        "source",
        help="a checkpoint (folder, weight file or Hub id), or the output_dir of a run",
    )
    parser.add_argument("out", type=path, help="the new folder")
    flags = {
        "--dtype DTYPE": "dtype of the weights: float32, bfloat16 or float16",
        "--step STEP": "for a run: the number of a step, best or last (default: best if the run "
        "was evaluated, else last)",
        "--adapter": "for a run: write only the LoRA, as PEFT's files",
        "--no-average": "for a run: the last weights rather than their average",
        "--model MODEL": "for a run: path of the model that it started from, if it moved",
    }
    add_flags(parser, flags)
    return parser


def _run(options: argparse.Namespace) -> int:
    source = Path(os.path.expanduser(options.source))
    is_broken_link = os.path.lexists(source) and not os.path.exists(source)
    has_run_flags = options.step or options.adapter or options.no_average or options.model
    if is_broken_link or has_run_flags or is_run(source):
        return _export_run(source, options)
    return _export_checkpoint(options)


def is_run(folder: Path) -> bool:
    """True for the output_dir of a run, as `check_is_model` tells it from a model."""
    return (folder / "checkpoints").is_dir() and not os.path.lexists(folder / "config.json")


def _export_checkpoint(options: argparse.Namespace) -> int:
    from jaxllm.checkpoint.hub import resolve
    from jaxllm.checkpoint.weight_files import describe_choice
    from jaxllm.common.files import check_new_folder, new_folder
    from jaxllm.common.progress import Reporter
    from jaxllm.saving import export_checkpoint

    check_new_folder(options.out)
    source, reporter = resolve(options.source), Reporter()
    if choice := describe_choice(source):
        reporter.say(f"{source}: {choice}")
    with new_folder(options.out) as folder, reporter.phase(f"writing {options.out}") as update:
        spec = export_checkpoint(source, folder, dtype=options.dtype, progress=update)
    name = spec.architecture
    print(f"{options.out}: open it with transformers.{name}.from_pretrained({str(options.out)!r})")
    return 0


def _export_run(run: Path, options: argparse.Namespace) -> int:
    step = options.step
    if step is not None and step not in WHICH:
        if not step.isdecimal() or len(step) > MAX_DIGITS:
            raise InputError(f"--step: expected a number, best or last, found {quoted(step)}")
        step = int(step)
    from jaxllm.training.run.export import export

    found = export(
        run,
        options.out,
        step=step,
        adapter=options.adapter,
        averaged=not options.no_average,
        dtype=options.dtype,
        model=options.model,
    )
    what = "adapter" if options.adapter else "model"
    print(f"{options.out}: the {what} of step {found.step}")
    return 0


main = command(_parser, _run, "jaxllm export")
