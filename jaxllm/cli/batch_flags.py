"""Options of ``--input`` and their checks.

Apart from `batch`, which runs such a job: a call with one prompt imports nothing of batches.
"""

from __future__ import annotations

import argparse
import os

from jaxllm.cli.ray_flags import check_ray_flags
from jaxllm.common.errors import InputError

STREAM = "-"
"""Name of stdin and of stdout."""
_ONE_PROMPT = ("text", "prompt", "input_ids", "assistant_model")
_BATCH = (
    *("output", "resume", "slots", "memory", "whole_digest"),
    *("prompt_column", "completion_column", "dataset_name", "split", "context"),
    *("score", "embed", "schema", "regex", "grammar"),
    *("engine", "address", "actors", "actor_resources"),
)
_PROCESSES = ("coordinator", "num_processes", "process_id", "distributed")


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--input`` and the other options of batches."""
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input",
        metavar="ROWS",
        help="rows to answer: a file (.jsonl, .csv, .tsv, .parquet, also with .gz), - for stdin, "
        "datasets:NAME, or the folder of a data set",
    )
    group.add_argument(
        "--output",
        type=os.path.expanduser,
        help="results in the same order: .jsonl, .csv, .tsv, .parquet, or - for stdout",
    )
    group.add_argument(
        "--prompt-column", metavar="NAME", help="the column of the prompts, if not `prompt`"
    )
    group.add_argument(
        "--score",
        action="store_true",
        default=None,
        help="generate nothing: log-likelihoods of the rows' completions",
    )
    group.add_argument(
        "--completion-column", metavar="NAME", help="the column of the completions, for --score"
    )
    group.add_argument(
        "--embed",
        nargs="?",
        const="mean",
        choices=("mean", "last"),
        help="generate nothing: embeddings, pooled over all tokens (mean) or the last one",
    )
    group.add_argument(
        "--schema", metavar="JSON", help="a JSON schema that all answers match, or a file of it"
    )
    group.add_argument("--regex", metavar="PATTERN", help="a pattern that all answers match")
    group.add_argument(
        "--grammar", metavar="FILE", help="a Lark grammar that all answers match, or its text"
    )
    group.add_argument("--dataset-name", metavar="NAME", help="configuration of a data set")
    group.add_argument("--split", metavar="NAME", help="split of a data set (train)")
    group.add_argument(
        "--resume", action="store_true", default=None, help="go on with a job that was stopped"
    )
    group.add_argument("--slots", type=int, help="maximum number of rows that are decoded at once")
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="of an OpenAI request and its answer (2048)"
    )
    group.add_argument("--memory", help="bytes to use in all, such as 12GB")
    group.add_argument(
        "--whole-digest",
        action="store_true",
        default=None,
        help="for --resume: compare all bytes of the weights, not samples of them",
    )


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises InputError where options of one prompt and of many are mixed."""
    if arguments.input is None:
        for name in _BATCH:
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} has no effect without --input")
        return
    for name in _ONE_PROMPT:
        if getattr(arguments, name) is not None:
            shown = "PROMPT" if name == "text" else "--" + name.replace("_", "-")
            raise InputError(f"{shown}: not together with --input")
    if arguments.output is None:
        raise InputError("--output: --input needs a file for the results")
    if arguments.output == STREAM and arguments.resume:
        raise InputError(
            "--resume: nothing is kept of a job that writes to stdout; give --output a file"
        )
    for name in _PROCESSES:
        if getattr(arguments, name) not in (None, False):
            raise InputError(
                f"--{name.replace('_', '-')}: not together with --input, whose rows one process "
                "answers on all its devices; --engine ray shares them between machines"
            )
    check_ray_flags(arguments, "actor")
    if not arguments.stream:
        raise InputError("--no-stream: not together with --input; whole rows are written")
    if arguments.show_special_tokens:
        raise InputError("--show-special-tokens: not together with --input; output_ids has them")
