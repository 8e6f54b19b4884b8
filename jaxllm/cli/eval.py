"""``jaxllm eval MODEL --perplexity FILE`` or ``--tasks NAMES``: judges a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from pathlib import Path

from jaxllm.cli.devices import add_mesh_flag, local_mesh
from jaxllm.cli.options import (
    add_model,
    add_model_flags,
    check_seed,
    load_named,
)
from jaxllm.cli.process import Flags, Parser, add_flags, command, dests, path, reject
from jaxllm.common.errors import InputError, RunError, naming_file
from jaxllm.common.files import read_text, write_whole
from jaxllm.common.progress import Reporter
from jaxllm.evaluate import perplexity
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers.tokenizer import Tokenizer

_MAX_TEXT_BYTES = 2**28
_EXAMPLES = """\
examples:
  jaxllm eval path/to/model --perplexity book.txt --context 1024 --stride 512
  jaxllm eval path/to/model --tasks arc_easy,gsm8k --limit 100 --output results.json
"""
_WINDOW_FLAGS: Flags = {
    "--context TOKENS": "the tokens of a window (default for a text: at most 2048)",
    "--batch-size N": "the windows or requests that are computed at once",
    "--stride TOKENS": "the tokens between the starts of two windows (half the context)",
}
_TASK_FLAGS: Flags = {
    "--include-path FOLDER": {
        "type": path,
        "help": "a folder with further tasks (YAML files)",
    },
    "--num-fewshot N": "the examples before each question",
    "--limit N": {
        "type": float,
        "help": "the number of examples of each task; below 1, the fraction",
    },
    "--apply-chat-template": "send the prompts as chat messages",
    "--system TEXT": "the system message of the prompts",
    "--src-lang CODE": "the language of the questions, for a translation model",
    "--tgt-lang CODE": "the language of the answers",
    "--output FILE": {"type": path, "help": "the JSON file for all results"},
    "--seed N": "the seed of sampling (0)",
}
"""Options of ``--tasks``, for `add_flags`."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        "MODEL",
        description="Evaluate a checkpoint: the perplexity of a text, as one line of JSON, or "
        "tasks of lm-evaluation-harness, as a table.",
        epilog=_EXAMPLES,
    )
    add_model(parser)
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument(
        "--perplexity", type=path, metavar="FILE", help="measure the perplexity of a UTF-8 text"
    )
    job.add_argument(
        "--tasks",
        type=_names,
        metavar="NAMES",
        help="run tasks, groups or tags of lm-evaluation-harness, separated by commas",
    )
    add_flags(parser, _WINDOW_FLAGS)
    add_flags(parser.add_argument_group("tasks"), _TASK_FLAGS)
    add_model_flags(parser)
    add_mesh_flag(parser)
    parser.add_argument("--quiet", action="store_true", help="print only errors to stderr")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names separated by commas, found {text!r}")
    return names


def _run(arguments: argparse.Namespace) -> int:
    is_text = arguments.tasks is None
    if is_text:
        reject(arguments, dests(_TASK_FLAGS), "needs --tasks")
    else:
        reject(arguments, ["stride"], "needs --perplexity")
    check_seed(arguments.seed)
    reporter = Reporter(quiet=arguments.quiet)
    if arguments.tasks is not None:
        if not arguments.quiet:
            return _run_tasks(arguments, reporter)
        # The harness logs warnings and shows bars of its own.
        with Path(os.devnull).open("w") as sink, contextlib.redirect_stderr(sink):
            return _run_tasks(arguments, reporter)
    text = read_text(arguments.perplexity, max_bytes=_MAX_TEXT_BYTES, error=InputError)
    if not text.strip():
        raise InputError(f"{arguments.perplexity}: has no text")
    model, tokenizer = _load(arguments, reporter)
    start = time.perf_counter()
    output = perplexity(
        model,
        tokenizer,
        text,
        context=arguments.context,
        stride=arguments.stride,
        batch_size=8 if arguments.batch_size is None else arguments.batch_size,
    )
    seconds = time.perf_counter() - start
    reporter.say(f"{output.tokens} tokens, {output.tokens / seconds:.0f} tokens/s")
    is_finite = math.isfinite(output.perplexity)
    result = {
        "perplexity": output.perplexity if is_finite else None,  # JSON has no infinity
        "bits_per_byte": output.bits_per_byte,
        "log_likelihood": output.log_likelihood,
        "tokens": output.tokens,
    }
    print(json.dumps(result))
    return 0


def _run_tasks(arguments: argparse.Namespace, reporter: Reporter) -> int:
    with reporter.phase("importing lm-evaluation-harness"):
        from jaxllm.evaluate.lm_eval import (
            JaxLM,
            load_tasks,
            results_json,
            results_table,
            run_tasks,
        )
    output: Path | None = arguments.output
    if output is not None:
        _check_output(output)
    with reporter.phase("loading the tasks"):
        tasks = load_tasks(arguments.tasks, arguments.include_path)
    model, tokenizer = _load(arguments, reporter)
    lm = JaxLM(
        model,
        tokenizer=tokenizer,
        batch_size="auto" if arguments.batch_size is None else arguments.batch_size,
        max_length=arguments.context,
        src_lang=arguments.src_lang,
        tgt_lang=arguments.tgt_lang,
        seed=arguments.seed or 0,
        name=arguments.model,
        reporter=reporter,
    )
    results = run_tasks(
        lm,
        tasks,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        apply_chat_template=arguments.apply_chat_template,
        system_instruction=arguments.system,
    )
    print(results_table(results))
    if output is not None:
        with naming_file(output, RunError, "written"):
            write_whole(output, results_json(results))
    return 0


def _check_output(path: Path) -> None:
    """Raises a JaxLLMError now if the results could not be written after hours."""
    with naming_file(path, InputError, "written"):
        if not path.parent.is_dir():
            raise InputError(f"--output: {path.parent} is not a folder")
        path.with_name(f".{path.name}.partial").exists()  # an error if the name is too long
        if path.exists() or path.is_symlink():
            raise InputError(f"--output: {path} exists already; give another file, or remove it")
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"--output: {path.parent}: no permission to write a file")


def _load(arguments: argparse.Namespace, reporter: Reporter) -> tuple[GenerativeModel, Tokenizer]:
    mesh = local_mesh(arguments)
    flag = "--apply-chat-template" if arguments.apply_chat_template else None
    model, tokenizer = load_named(
        arguments, mesh, reporter, needs_tokenizer="a text", chat_flag=flag
    )
    return checked_generative(model, arguments.model), tokenizer


main = command(_parser, _run, "jaxllm eval")
