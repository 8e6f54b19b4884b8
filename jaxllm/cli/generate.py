"""``generate.py`` and ``jaxllm generate``: generates text with a checkpoint, streamed to stdout.

Only the text goes to stdout; progress and speed go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxllm import load
from jaxllm.cli.batch_flags import add_batch_flags, check_flags
from jaxllm.cli.devices import (
    add_device_flags,
    is_main_process,
    join_processes,
    mesh_from_arguments,
)
from jaxllm.cli.exits import Parser, run_command
from jaxllm.cli.field_flags import add_field_flags, generation_fields, int_list
from jaxllm.cli.model_flags import (
    add_compile_cache_flags,
    add_model_flags,
    keep_programs,
    load_named,
    model_path,
)
from jaxllm.cli.ray_flags import add_ray_flags
from jaxllm.cli.request import IdDecoder, PromptRequest, TextDecoder, print_streamed, print_whole
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import InputError
from jaxllm.common.progress import Reporter
from jaxllm.generation.call.keys import shared_key
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.consistency import UnusedFieldWarning, check_for_use
from jaxllm.generation.settings.lengths import with_default_length
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers.tokenizer import MAX_TEXT_BYTES, Tokenizer

_EXAMPLES = """\
examples:
  generate.py --chat "What is the capital of France?"
  generate.py --model ~/models/llama --do-sample --temperature 0.7 --seed 1 "Once upon a time"
  cat question.txt | generate.py --model google-t5/t5-small -
  generate.py --input rows.jsonl --output out.jsonl --max-new-tokens 128
  generate.py --input rows.jsonl --output out.jsonl --engine ray --actors 4 --actor-resources GPU=1
"""


def main(argv: Sequence[str] | None = None, program: str = "jaxllm generate") -> int:
    """Entry point; returns the exit code."""
    return run_command(
        lambda arguments: _run(_parser(program).parse_args(arguments)), program, argv
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        usage=f"{program} [options] [PROMPT]",
        description="Generate text with a T5, Llama or GPT-2 checkpoint.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument("--prompt", help="the prompt, as an option")
    parser.add_argument("--input-ids", type=_token_ids, help="token ids instead of a prompt: 1,2,3")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the prompt")
    parser.add_argument("--system", help="a system message before the prompt, with --chat")
    parser.add_argument(
        "--model", help="folder, .safetensors, .gguf or Hub id (default: the bundled SmolLM2)"
    )
    parser.add_argument(
        "--assistant-model", metavar="MODEL", help="a smaller draft model with the same vocabulary"
    )
    add_model_flags(parser)
    parser.add_argument("--seed", type=int, help="for --do-sample (default: random)")
    parser.add_argument(
        "--no-stream",
        dest="stream",
        action="store_false",
        help="print the text when it is complete",
    )
    parser.add_argument(
        "--show-special-tokens", action="store_true", help="print special tokens too"
    )
    parser.add_argument("--quiet", action="store_true", help="only errors on stderr")
    add_compile_cache_flags(parser)
    add_batch_flags(parser)
    add_ray_flags(parser, "actor")
    add_device_flags(parser)
    add_field_flags(parser)
    return parser


def _token_ids(text: str) -> list[int]:
    try:
        return int_list(text)
    except ValueError:
        message = f"expected comma separated integers, found {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    fields = GenerationConfig(**generation_fields(arguments))
    check_for_use(fields)  # before loading, which takes minutes
    if arguments.input is not None:
        reporter = Reporter(quiet=arguments.quiet)
        keep_programs(arguments, reporter)
        from jaxllm.cli.batch import run_batch  # with pydantic, the job and the batch engine

        return run_batch(arguments, reporter)
    join_processes(arguments)
    prompt = _prompt(arguments) if arguments.input_ids is None else None
    reporter = Reporter(quiet=arguments.quiet or not is_main_process())
    keep_programs(arguments, reporter)
    _generate(arguments, fields, prompt, reporter)
    return 0


def _generate(
    arguments: argparse.Namespace, fields: GenerationConfig, prompt: str | None, reporter: Reporter
) -> None:
    """Generates for one prompt, or for the ids of the command line, and prints the result."""
    mesh = mesh_from_arguments(arguments)
    with contextlib.closing(CompileClock()) as clock:
        model, tokenizer, assistant = _load(arguments, mesh, reporter)
        ids = _ids(arguments, prompt, tokenizer)
        fields = with_default_length(fields, model, len(ids))
        config, eos_ids = _effective(fields, model, assistant)
        for name in config.to_dict():
            if name.startswith("output_") and getattr(config, name):
                raise InputError(f"{name}: only text is printed; use jaxllm.generate")
        if config.token_healing:
            ids = _healed(model, tokenizer, ids)
            fields = fields.replace(token_healing=False)
        seed = shared_key(arguments.seed, mesh)
        seed = secrets.randbits(32) if seed is None else seed
        if config.do_sample:
            reporter.say(f"seed: {seed}")

        def new_decoder() -> TextDecoder:
            if tokenizer is None:
                return IdDecoder()
            return tokenizer.stream_decoder(not arguments.show_special_tokens)

        request = PromptRequest(
            model,
            ids,
            fields,
            seed,
            eos_ids,
            tokenizer=tokenizer,
            stop_strings=config.stop_strings,
            assistant_model=assistant,
        )
        streaming = arguments.stream and config.num_return_sequences == config.num_beams == 1
        print_result = print_streamed if streaming else print_whole
        print_result(request, new_decoder, reporter, clock)


def _load(
    arguments: argparse.Namespace, mesh: Mesh | None, reporter: Reporter
) -> tuple[GenerativeModel, Tokenizer | None, GenerativeModel | None]:
    """Loads model, tokenizer and assistant model."""
    model, tokenizer = load_named(arguments, mesh, reporter)
    model = checked_generative(model, str(model_path(arguments)))
    assistant = None
    options = {"dtype": arguments.dtype, "param_dtype": arguments.param_dtype, "mesh": mesh}
    if arguments.assistant_model is not None:
        name = arguments.assistant_model
        with reporter.phase(f"loading {Path(name).absolute().name}") as update:
            assistant, _ = load(name, **options, progress=update)
    return model, tokenizer, assistant


def _check(arguments: argparse.Namespace) -> None:
    check_flags(arguments)
    if arguments.seed is not None and not 0 <= arguments.seed < 2**32:  # JAX drops higher bits
        raise InputError(f"--seed must be from 0 to 2**32 - 1, but is {arguments.seed}")
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system has no effect without --chat")
    if arguments.input is not None:
        return
    prompts = [arguments.text, arguments.prompt, arguments.input_ids]
    count = sum(value is not None for value in prompts)
    if count == 0:
        raise InputError('no prompt: give one, such as "Once upon a time", or - for stdin')
    if count > 1:
        raise InputError("give one of PROMPT, --prompt and --input-ids, not several")
    if arguments.chat and arguments.input_ids is not None:
        raise InputError("--chat needs a text prompt, not --input-ids")


def _prompt(arguments: argparse.Namespace) -> str:
    text = arguments.prompt if arguments.text is None else arguments.text
    if text != "-":
        return text
    if jax.process_count() > 1:
        raise InputError("-: several processes cannot read one stdin; give the prompt itself")
    try:
        text = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1).decode("utf-8")
    except UnicodeDecodeError as failure:
        raise InputError(f"stdin is not UTF-8 (byte {failure.start})") from failure
    return text.removesuffix("\n")  # as in a shell's command substitution


def _ids(
    arguments: argparse.Namespace,
    prompt: str | None,
    tokenizer: Tokenizer | None,
) -> list[int]:
    if prompt is None:
        return arguments.input_ids
    if tokenizer is None:
        raise InputError(
            f"{arguments.model} has no tokenizer: give token ids with --input-ids 1,2,3, "
            "or put its tokenizer files into the folder"
        )
    if not arguments.chat:
        return tokenizer([prompt], return_tensors="np").input_ids[0].tolist()
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.apply_chat_template(messages)


def _healed(model: GenerativeModel, tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    if tokenizer is None:
        raise InputError("token_healing: needs a tokenizer, which this model does not have")
    from jaxllm.contrib.token_healing import heal  # rarely used

    healed, mask = heal(model, tokenizer, [ids], None)
    return healed[0][mask[0]].tolist()


def _effective(
    fields: GenerationConfig, model: GenerativeModel, assistant: GenerativeModel | None
) -> tuple[GenerationConfig, tuple[int, ...]]:
    """Returns the merged generation config and the EOS token ids.

    A field without effect is an error here; in the library it is a warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnusedFieldWarning)
            return merged_config(model, fields, {}, assistant)
    except UnusedFieldWarning as warning:
        flag = "; add --do-sample" if FIELDS[warning.field].only_sampling else ""
        raise InputError(f"{warning}{flag}") from None
