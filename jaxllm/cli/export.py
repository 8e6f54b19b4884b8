"""``jaxllm export RUN OUT``: writes a run's model for transformers, or its LoRA as PEFT's files."""

from __future__ import annotations

import argparse

from jaxllm.cli.process import Parser, add_flags, command, path
from jaxllm.common.errors import InputError, quoted

WHICH = ("best", "last")
MAX_DIGITS = 18
"""Of a step's number."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        description="Write the model of a training run as a folder for transformers or PEFT.",
    )
    parser.add_argument("run", type=path, help="the output_dir of a run")
    parser.add_argument("out", type=path, help="the new folder")
    flags = {
        "--step STEP": "the number of a step, best or last (default: best if the run was "
        "evaluated, else last)",
        "--adapter": "write only the LoRA, as PEFT's files",
        "--dtype DTYPE": "dtype of the weights: float32, bfloat16 or float16",
        "--no-average": "the last weights rather than their average",
        "--model MODEL": "path of the model that the run started from, if it moved",
    }
    add_flags(parser, flags)
    return parser


def _run(options: argparse.Namespace) -> int:
    step = options.step
    if step is not None and step not in WHICH:
        if not step.isdecimal() or len(step) > MAX_DIGITS:
            raise InputError(f"--step: expected a number, best or last, found {quoted(step)}")
        step = int(step)
    from jaxllm.training.run.export import export

    found = export(
        options.run,
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
