"""Chooses and loads the engine of a batch job, from its input and the options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllm.batch import BatchGenerator
from jaxllm.batch.constraints import CONSTRAINT_KEYS, only_one
from jaxllm.batch.embedded_rows import EMBED_KEYS, RowEmbedder
from jaxllm.batch.job.inputs import ColumnChoice, Source
from jaxllm.batch.job.inputs.columns import generation_keys
from jaxllm.batch.job.inputs.openai_requests import OpenAIRequests
from jaxllm.batch.job.job import RowEngine
from jaxllm.batch.scored_rows import SCORE_KEYS, RowScorer
from jaxllm.cli.field_flags import generation_fields
from jaxllm.cli.model_flags import load_named, model_path
from jaxllm.common.errors import InputError
from jaxllm.common.messages import quoted
from jaxllm.common.progress import Reporter
from jaxllm.common.strict_json import parse_json
from jaxllm.common.text_file import read_text
from jaxllm.generation.processors.host.grammar import llguidance
from jaxllm.generation.settings.lengths import DEFAULT_NEW_TOKENS
from jaxllm.models.decoder import checked_generative
from jaxllm.serve.http.batch_requests import BatchRequests

_MAX_CONSTRAINT_BYTES = 2**20


def column_choice(arguments: argparse.Namespace) -> ColumnChoice:
    """The keys that the task reads, and the columns that the options name."""
    columns = {"prompt": arguments.prompt_column, "completion": arguments.completion_column}
    if arguments.score:
        return ColumnChoice(SCORE_KEYS, **columns)
    if arguments.completion_column is not None:
        raise InputError("--completion-column: only for --score")
    return ColumnChoice(EMBED_KEYS if arguments.embed else generation_keys(), **columns)


def constraint(arguments: argparse.Namespace) -> dict[str, Any]:
    """The schema, regex or grammar of the job.

    Raises:
        InputError: there are several, or a schema is no JSON object.
        UnsupportedError: llguidance is not installed.
    """
    chosen = only_one({f"--{key}": getattr(arguments, key) for key in CONSTRAINT_KEYS})
    if chosen is None:
        return {}
    llguidance()  # before loading
    key, text = chosen[0].removeprefix("--"), chosen[1]
    if key != "regex" and names_file(text):
        text = read_text(Path(text), max_bytes=_MAX_CONSTRAINT_BYTES, error=InputError)
    elif key == "schema" and text.lstrip()[:1] not in ("{", "["):
        raise InputError(f"--schema: {quoted(text)} is no JSON object, and no such file is there")
    if key != "schema":
        return {key: text}
    schema = parse_json(os.fsencode(text), source="--schema", error=InputError)
    if not isinstance(schema, dict):
        raise InputError("--schema: expected a JSON object, or the name of a file that has one")
    return {key: schema}


def names_file(text: str) -> bool:
    """True if a schema or a grammar is the name of a file, not the text itself."""
    if text.lstrip().startswith("{") or "\n" in text:
        return False
    try:
        return Path(text).exists()
    except OSError:  # a text that is too long for a name
        return False


def check_task(arguments: argparse.Namespace, source: Source) -> None:
    """Raises InputError for options that the task, or the rows of this input, do not use."""
    if arguments.score and arguments.embed:
        raise InputError("--score and --embed: give one of them")
    if arguments.slots is not None and arguments.slots < 1:
        raise InputError(f"--slots: expected 1 or more, found {arguments.slots}")
    task = "--score" if arguments.score else "--embed" if arguments.embed else None
    constraint_keys = list(constraint(arguments))
    if task is not None:
        fields = [name.replace("_", "-") for name in generation_fields(arguments)]
        given = [name for name in ("seed", "memory") if getattr(arguments, name) is not None]
        if options := [*fields, *given, *constraint_keys]:
            raise InputError(f"--{options[0]}: has no effect with {task}, which generates nothing")
    if not isinstance(source, OpenAIRequests):
        if arguments.context is not None:
            raise InputError("--context: only for OpenAI batch files; rows have max_new_tokens")
        return
    if task is not None:
        raise InputError(f"{task}: not for an OpenAI batch file")
    if constraint_keys:
        raise InputError(
            f"--{constraint_keys[0]}: requests of an OpenAI batch file have response_format"
        )
    if arguments.chat:
        raise InputError("--chat: an OpenAI batch file says itself which requests are chats")


def load_engine(
    arguments: argparse.Namespace,
    constraint: Mapping[str, Any],
    are_requests: bool,
    mesh: Mesh | None,
    reporter: Reporter,
) -> Callable[[], RowEngine]:
    """Loads the model, and returns a function that makes an engine for rows.

    Args:
        constraint: of `constraint`.
        are_requests: the rows are those of an OpenAI batch file.
    """
    model, tokenizer = load_named(arguments, mesh, reporter)
    path = model_path(arguments)
    rows: dict[str, Any] = {
        "batch_size": arguments.slots,
        "chat": arguments.chat,
        "system": arguments.system,
    }
    if arguments.embed:
        return partial(RowEmbedder, model, tokenizer, pooling=arguments.embed, **rows)
    if arguments.score:
        return partial(RowScorer, model, tokenizer, **rows)
    model = checked_generative(model, str(path))
    options: dict[str, Any] = {
        "slots": arguments.slots,
        "memory": arguments.memory,
        "seed": arguments.seed or 0,
        "announce": lambda prediction: reporter.say(str(prediction)),
        **generation_fields(arguments),
    }
    if are_requests:
        name = Path(path).absolute().stem
        return partial(
            BatchRequests, model, tokenizer, model_name=name, context=arguments.context, **options
        )
    return partial(
        BatchGenerator,
        model,
        tokenizer,
        chat=arguments.chat,
        system=arguments.system,
        default_new_tokens=DEFAULT_NEW_TOKENS,
        **constraint,
        **options,
    )
