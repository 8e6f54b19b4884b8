"""``jaxllm eval MODEL --perplexity FILE``: judges a model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from jaxllm.cli.devices import local_mesh, mesh_sizes
from jaxllm.cli.exits import Parser, run_command
from jaxllm.cli.model_flags import (
    add_compile_cache_flags,
    add_model_flags,
    keep_programs,
    load_named,
)
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.common.progress import Reporter
from jaxllm.evaluate import perplexity

_EXAMPLES = """\
example:
  jaxllm eval path/to/model --perplexity book.txt --context 1024 --stride 512
"""


def main(argv: Sequence[str] | None = None, program: str = "jaxllm eval") -> int:
    """Entry point; returns the exit code."""
    return run_command(
        lambda arguments: _run(_parser(program).parse_args(arguments)), program, argv
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        usage=f"{program} [options] MODEL",
        description="Evaluate a checkpoint; the result is one line of JSON.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, .safetensors, .gguf or Hub id")
    parser.add_argument(
        "--perplexity", type=Path, required=True, metavar="FILE", help="of this UTF-8 text"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of a window (at most 2048)")
    parser.add_argument(
        "--stride", type=int, metavar="TOKENS", help="between two windows (half the context)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="windows computed at once (8)"
    )
    add_model_flags(parser)
    parser.add_argument(
        "--mesh", type=mesh_sizes, metavar="SIZES", help="shard the model: data=2,tensor=4"
    )
    parser.add_argument("--quiet", action="store_true", help="only errors on stderr")
    add_compile_cache_flags(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    try:
        text = arguments.perplexity.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise InputError(f"{arguments.perplexity}: cannot be read ({failure})") from None
    reporter = Reporter(quiet=arguments.quiet)
    keep_programs(arguments, reporter)
    model, tokenizer = load_named(arguments, local_mesh(arguments), reporter)
    if tokenizer is None or not hasattr(model, "decode"):
        raise UnsupportedError(f"{arguments.model}: needs a tokenizer and a language-model head")
    start = time.perf_counter()
    output = perplexity(
        model,
        tokenizer,
        text,
        context=arguments.context,
        stride=arguments.stride,
        batch_size=arguments.batch_size,
    )
    seconds = time.perf_counter() - start
    reporter.say(f"{output.tokens} tokens, {output.tokens / seconds:.0f} tokens/s")
    result = {
        "perplexity": output.perplexity,
        "bits_per_byte": output.bits_per_byte,
        "log_likelihood": output.log_likelihood,
        "tokens": output.tokens,
    }
    print(json.dumps(result))
    return 0
