"""``generate.py`` and ``jaxllm generate``: generates text with a checkpoint, streamed to stdout.

Only the text goes to stdout; progress and speed go to stderr. With ``--input``, `batch` answers the
rows of a file; it is imported only then, so that a call with one prompt imports nothing of batches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm import generate, load, stream
from jaxllm.cli.devices import (
    PROCESS_OPTIONS,
    add_mesh_flag,
    add_process_flags,
    add_ray_flags,
    check_ray_flags,
    is_main_process,
    join_processes,
    mesh_from_arguments,
)
from jaxllm.cli.options import (
    POOLINGS,
    STREAM,
    add_field_flags,
    add_model,
    add_model_flags,
    check_seed,
    generation_fields,
    int_list,
    load_named,
)
from jaxllm.cli.process import Flags, Parser, add_flags, command, dests, reject
from jaxllm.common.arguments import names_in
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError
from jaxllm.common.progress import Reporter, reports_to
from jaxllm.generation.generate import compile_programs
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.resolve import (
    UnusedFieldWarning,
    check_for_use,
    check_language,
    cut_options,
    merged_config,
    with_default_length,
)
from jaxllm.generation.strategies.draws import shared_key
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers.stream_decoder import StreamDecoder
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.vocabulary import MAX_TEXT_BYTES

_EXAMPLES = """\
examples:
  jaxllm generate --chat "What is the capital of France?"
  jaxllm generate --model ~/models/llama --do-sample --temperature 0.7 --seed 1 "Once upon a time"
  cat question.txt | jaxllm generate --model google-t5/t5-small -
  jaxllm generate --input rows.jsonl --output out.jsonl --max-new-tokens 128
  jaxllm generate --input rows.jsonl --output out.jsonl --engine ray --actors 4
"""

_GIVE_ONE = 'give one, such as "Once upon a time", or - for stdin'
_ONE_PROMPT = ("text", "prompt", "input_ids", "assistant_model")
_RAY = ("engine", "address", "actors", "actor_resources")


def _token_ids(text: str) -> list[int]:
    try:
        return int_list(text)
    except ValueError:
        message = f"expected comma separated integers, found {text!r}"
        raise argparse.ArgumentTypeError(message) from None


_PROMPT_FLAGS: Flags = {
    "--prompt PROMPT": "the prompt, given as an option",
    "--input-ids IDS": {
        "type": _token_ids,
        "help": "token ids in place of a prompt, such as 1,2,3",
    },
    "--chat": "send the prompt as a chat message",
    "--system SYSTEM": "the system message, with --chat",
    "--src-lang CODE": "the language of the prompt of a translation model, such as eng_Latn; rows "
    "of --input may have their own, src_lang",
    "--truncation": "cut a text that is longer than the tokenizer's or the model's longest",
    "--max-source-length N": {"type": int, "help": "cut texts to so many tokens"},
    "--tgt-lang CODE": "the language to translate into; rows of --input may have their own, "
    "tgt_lang",
}
_ANSWER_FLAGS: Flags = {
    "--assistant-model MODEL": "a smaller model with the same vocabulary, which drafts",
    "--seed N": "the seed of --do-sample (default: random)",
    "--no-stream": {
        "dest": "stream",
        "action": "store_false",
        "help": "print the text only when it is complete",
    },
    "--show-special-tokens": "print special tokens too",
    "--quiet": "print only errors to stderr",
}
_BATCH_FLAGS: Flags = {
    "--input ROWS": "the rows to answer: a file (.jsonl, .csv, .tsv, .parquet, also with .gz), - "
    "for stdin, datasets:NAME, or the folder of a data set",
    "--output OUTPUT": {
        "type": os.path.expanduser,
        "help": "the file of the results, in the order of the rows: .jsonl, .csv, .tsv, .parquet, "
        "or - for stdout",
    },
    "--delimiter CHARACTER": "the character between the cells of a .csv file (,)",
    "--prompt-column NAME": "the column that holds the prompts (prompt)",
    "--template TEXT": "write each prompt from the columns of its row: a Jinja template such as "
    "'Context: {{ context }} Question: {{ question }}', or a file that holds one",
    "--system-template TEXT": "write each system message from the columns of its row, with --chat",
    "--keep COLUMNS": {
        "type": names_in,
        "help": "copy these columns of the input to the output: all, or names such as "
        "question,lang",
    },
    "--keep-prefix TEXT": "put this before the names of the copied columns",
    "--score": "write the log-likelihood of each row's completion, and generate nothing",
    "--completion-column NAME": "the column that holds the completions, for --score",
    "--embed": {
        "nargs": "?",
        "const": "auto",
        "choices": POOLINGS,
        "help": "write an embedding of each row, and generate nothing: the mean over all tokens, "
        "the last token's or the first one's (default: as the checkpoint states, else the mean)",
    },
    "--prompt-name NAME": "the prompt of config_sentence_transformers.json to put before each "
    "text, for --embed (default: the default one of that file)",
    "--schema JSON": "a JSON schema that every answer must match, or its file",
    "--regex PATTERN": "a regular expression that every answer must match",
    "--grammar FILE": "the file or the text of a Lark grammar that every answer must match",
    "--dataset-name NAME": "the configuration of the data set",
    "--split NAME": "the split of the data set (train)",
    "--resume": "continue a job that was stopped",
    "--dry-run": "read the rows and the tokenizer, and print lengths, wrong rows and memory; "
    "generate nothing",
    "--calibrate": "with --dry-run: load the model, generate for some rows (10 seconds or more), "
    "and print the expected time of the job",
    "--price-per-hour PRICE": "with --calibrate: print the expected price of the job",
    "--retry-errors": "try the rows with errors of a job again, and go on with the others; "
    "--max-new-tokens and --max-length may be changed",
    "--slots N": "the number of rows that are decoded at once (default: chosen by memory)",
    "--context TOKENS": "the tokens of an OpenAI request and its answer (2048)",
    "--memory MEMORY": "the memory to use in all, such as 12GB",
    "--whole-digest": "let --resume compare all bytes of the weights instead of samples",
}
"""Options of batches, for `add_flags`."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        '[--model MODEL] ["PROMPT"]',
        description="Generate text for one prompt, or for the rows of a file.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "text", nargs="?", metavar="PROMPT", help="the prompt; - reads it from stdin"
    )
    add_flags(parser, _PROMPT_FLAGS)
    add_model(parser, "--model")
    add_model_flags(parser)
    add_flags(parser, _ANSWER_FLAGS)
    add_flags(parser.add_argument_group("many prompts"), _BATCH_FLAGS)
    add_ray_flags(parser, "actor")
    add_process_flags(parser)
    add_mesh_flag(parser)
    add_field_flags(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    fields = GenerationConfig(**generation_fields(arguments))
    check_for_use(fields)  # before loading, which takes minutes
    if arguments.input is not None:
        reporter = Reporter(quiet=arguments.quiet)
        from jaxllm.cli.batch import run_batch  # with pydantic, the job and the batch engine

        return run_batch(arguments, reporter)
    join_processes(arguments)
    prompt = _prompt(arguments) if arguments.input_ids is None else None
    if prompt == "":
        raise InputError(f"the prompt is empty: {_GIVE_ONE}")
    reporter = Reporter(quiet=arguments.quiet or not is_main_process())
    _generate(arguments, fields, prompt, reporter)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_flags(arguments)
    check_seed(arguments.seed)
    if arguments.system is not None and not arguments.chat:
        raise InputError("--system has no effect without --chat")
    if arguments.input is not None:
        return
    prompts = [arguments.text, arguments.prompt, arguments.input_ids]
    count = sum(value is not None for value in prompts)
    if count == 0:
        raise InputError(f"no prompt: {_GIVE_ONE}")
    if count > 1:
        raise InputError("give one of PROMPT, --prompt and --input-ids, not several")
    if arguments.chat and arguments.input_ids is not None:
        raise InputError("--chat needs a text prompt, not --input-ids")
    if arguments.src_lang is not None and (arguments.chat or arguments.input_ids is not None):
        raise InputError("--src-lang has no effect with --chat or --input-ids; leave it out")


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises InputError where options of one prompt and of many are mixed."""
    if arguments.input is None:
        return reject(arguments, (*dests(_BATCH_FLAGS), *_RAY), "has no effect without --input")
    reject(arguments, _ONE_PROMPT, "cannot be combined with --input")
    if not arguments.dry_run:
        reject(arguments, ["calibrate"], "has no effect without --dry-run")
        reject(arguments, ["price_per_hour"], "has no effect without --dry-run --calibrate")
    if arguments.output is None and not arguments.dry_run:
        raise InputError("--input needs --output FILE for the results")
    if arguments.output == STREAM:
        for flag in ("resume", "retry_errors"):
            message = "cannot continue a job that writes to stdout; give a file with --output"
            reject(arguments, [flag], message)
    reject(
        arguments,
        PROCESS_OPTIONS,
        "cannot be combined with --input, whose rows one process answers on all its devices; "
        "--engine ray shares them between machines",
    )
    check_ray_flags(arguments, "actor")
    if not arguments.stream:
        raise InputError("--no-stream: cannot be combined with --input; whole rows are written")
    reject(
        arguments, ["show_special_tokens"], "cannot be combined with --input; output_ids has them"
    )


def _generate(
    arguments: argparse.Namespace, fields: GenerationConfig, prompt: str | None, reporter: Reporter
) -> None:
    """Generates for one prompt, or for the ids of the command line, and prints the result."""
    mesh = mesh_from_arguments(arguments)
    with contextlib.closing(CompileClock()) as clock:

        def compile_programs_of_call(model: Any, tokenizer: Tokenizer | None) -> None:
            checked_generative(model, arguments.model)
            if arguments.chat and (tokenizer is None or tokenizer.chat_template is None):
                return  # an error, which `load_named` raises
            ids, settings, config = _planned(arguments, fields, prompt, model, tokenizer, None)
            if not config.token_healing:  # which changes the prompt by what the model predicts
                compile_programs(
                    model, input_ids=[ids], generation_config=settings, key=0, tokenizer=tokenizer
                )

        model, tokenizer, assistant = _load(arguments, mesh, reporter, compile_programs_of_call)
        ids, settings, config = _planned(arguments, fields, prompt, model, tokenizer, assistant)
        if config.token_healing:
            ids = _healed(model, tokenizer, ids)
            settings = settings.replace(token_healing=False)
        seed = shared_key(arguments.seed, mesh)
        seed = secrets.randbits(32) if seed is None else seed
        if config.do_sample:
            reporter.say(f"seed: {seed}")

        def new_decoder() -> StreamDecoder | IdDecoder:
            if tokenizer is None:
                return IdDecoder()
            return tokenizer.stream_decoder(not arguments.show_special_tokens)

        call = {
            "input_ids": [ids],
            "generation_config": settings,
            "key": seed,
            "tokenizer": tokenizer,
            "assistant_model": assistant,
        }
        if arguments.stream and config.num_return_sequences == config.num_beams == 1:
            count = _print_streamed(stream(model, **call), new_decoder(), reporter, clock)
            answers_chats = tokenizer is not None and tokenizer.chat_template is not None
            if count <= 1 and answers_chats and prompt is not None and not arguments.chat:
                reporter.say("the text is empty; this model answers chats: add --chat")
            return

        def generated() -> list[list[int]]:
            """New ids of every sequence, without the padding after its end."""
            return generate(model, **call).new_tokens(1 if model.is_encoder_decoder else len(ids))

        _print_whole(generated, new_decoder, reporter, clock)


def _planned(
    arguments: argparse.Namespace,
    fields: GenerationConfig,
    prompt: str | None,
    model: GenerativeModel,
    tokenizer: Tokenizer | None,
    assistant: GenerativeModel | None,
) -> tuple[list[int], GenerationConfig, GenerationConfig]:
    """Ids of the prompt, the call's own settings, and all settings with the model's defaults."""
    ids = _ids(arguments, prompt, tokenizer)
    if prompt is not None and not arguments.chat and tokenizer is not None:
        cut = (arguments.truncation, arguments.max_source_length, fields.max_new_tokens)
        options = cut_options(model, tokenizer, *cut)
        if options:
            ids = tokenizer.encode(prompt, src_lang=arguments.src_lang, **options)
    if tokenizer is not None:
        given = generation_fields(arguments)
        fields = GenerationConfig(**tokenizer.with_target(given, arguments.tgt_lang))
    elif arguments.tgt_lang is not None:
        raise InputError(f"--tgt-lang: {arguments.model} has no tokenizer; leave it out")
    fields = with_default_length(fields, model, len(ids))
    config = _effective(fields, model, assistant)
    if prompt is not None:
        check_language(model, tokenizer, config)
        if model.is_encoder_decoder and tokenizer is not None:
            tokenizer.check_not_blank(prompt, "prompt")
    for name, value in config.to_dict().items():
        if FIELDS[name].record and value:
            raise InputError(f"{name}: this command prints only text; use Python")
    return ids, fields, config


def _load(
    arguments: argparse.Namespace,
    mesh: Mesh | None,
    reporter: Reporter,
    while_loading: Callable[[Any, Tokenizer | None], object],
) -> tuple[GenerativeModel, Tokenizer | None, GenerativeModel | None]:
    """Loads model, tokenizer and assistant model."""
    chat_flag = "--chat" if arguments.chat else None
    assisted, adapted = arguments.assistant_model is not None, arguments.adapter is not None
    model, tokenizer = load_named(
        arguments,
        mesh,
        reporter,
        chat_flag=chat_flag,
        while_loading=None if assisted or adapted else while_loading,
    )
    model = checked_generative(model, arguments.model)
    assistant = None
    options = {"dtype": arguments.dtype, "param_dtype": arguments.param_dtype, "mesh": mesh}
    if arguments.assistant_model is not None:
        name = arguments.assistant_model
        label = f"loading {Path(name).absolute().name}"
        with reports_to(reporter), reporter.phase(label) as update:
            assistant, _ = load(name, **options, progress=update)
    return model, tokenizer, assistant


def _prompt(arguments: argparse.Namespace) -> str:
    text = arguments.prompt if arguments.text is None else arguments.text
    if text != STREAM:
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
        languages = {"src_lang": arguments.src_lang}
        return tokenizer([prompt], return_tensors="np", **languages).input_ids[0].tolist()
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
) -> GenerationConfig:
    """Returns the merged generation config.

    A field without effect is an error here; in the library it is a warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnusedFieldWarning)
            return merged_config(model, fields, {}, assistant)[0]
    except UnusedFieldWarning as warning:
        flag = "; add --do-sample" if FIELDS[warning.field].only_sampling else ""
        raise InputError(f"{warning}{flag}") from None


class IdDecoder:
    """Text decoder of a model without a tokenizer: comma-separated ids.

    >>> decoder = IdDecoder()
    >>> decoder.put([5, 6]) + decoder.put([7]) + decoder.end()
    '5,6,7'
    """

    def __init__(self) -> None:
        self._started = False

    def put(self, ids: Iterable[int], /) -> str:
        text = "".join(f",{index}" for index in ids)
        first = bool(text) and not self._started
        self._started = self._started or first
        return text[1:] if first else text

    def end(self) -> str:
        return ""


def _print_streamed(
    chunks: Iterator[Any],
    decoder: StreamDecoder | IdDecoder,
    reporter: Reporter,
    clock: CompileClock,
) -> int:
    """Prints the tokens of one sequence as they are generated; returns their number."""
    with reporter.phase("compiling and reading the prompt"):
        # Two chunks: the first comes from the prefill program, the second from the loop.
        first = [index for chunk in itertools.islice(chunks, 2) for index in chunk[0].tolist()]
    later, start = 0, time.perf_counter()
    _write(decoder.put(first))
    for chunk in chunks:
        _write(decoder.put(chunk[0].tolist()))
        later += len(chunk[0])
    _write(decoder.end() + "\n")
    seconds = time.perf_counter() - start
    speed = f", {later / seconds:.1f} tokens/s after the first {len(first)}" if later else ""
    count = len(first) + later
    reporter.say(f"{count} token{'s' * (count != 1)}{speed}; {clock.summary()}")
    return count


def _print_whole(
    generated: Callable[[], list[list[int]]],
    new_decoder: Callable[[], StreamDecoder | IdDecoder],
    reporter: Reporter,
    clock: CompileClock,
) -> None:
    """Prints complete sequences, with a line of three dashes between them."""
    start, compiled = time.perf_counter(), clock.seconds
    with reporter.phase("compiling and generating"):
        rows = generated()
    seconds = time.perf_counter() - start - (clock.seconds - compiled)
    for number, ids in enumerate(rows):
        decoder = new_decoder()
        _write(("---\n" if number else "") + decoder.put(ids) + decoder.end() + "\n")
    count = sum(map(len, rows))
    reporter.say(f"{count} tokens, {count / seconds:.1f} tokens/s; {clock.summary()}")


def _write(text: str) -> None:
    if is_main_process():
        sys.stdout.write(text)
        sys.stdout.flush()


main = command(_parser, _run, "jaxllm generate")
