"""What answers the rows of a batch job, as its input and the options say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllm.batch import BatchGenerator
from jaxllm.batch.job.inputs import Source
from jaxllm.batch.job.inputs.openai_requests import OpenAIRequests
from jaxllm.batch.job.job import RowEngine
from jaxllm.cli.field_flags import generation_fields
from jaxllm.cli.model_flags import load_named, model_path
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.common.progress import Reporter
from jaxllm.generation.settings.lengths import DEFAULT_NEW_TOKENS
from jaxllm.serve.http.batch_requests import BatchRequests


def check_task(arguments: argparse.Namespace, source: Source) -> None:
    """Raises InputError for options that the rows of this input have no use for."""
    is_openai = isinstance(source, OpenAIRequests)
    if not is_openai and arguments.context is not None:
        raise InputError("--context: only for OpenAI batch files; rows have max_new_tokens")
    if is_openai and arguments.chat:
        raise InputError("--chat: an OpenAI batch file says itself which requests are chats")


def load_engine(
    arguments: argparse.Namespace, source: Source, mesh: Mesh | None, reporter: Reporter
) -> RowEngine:
    """Loads the model, and makes the engine for its rows."""
    model, tokenizer = load_named(arguments, mesh, reporter)
    path = model_path(arguments)
    if not hasattr(model, "decode"):
        raise UnsupportedError(f"{path}: a {type(model).__name__} generates no text")
    options: dict[str, Any] = {
        "slots": arguments.slots,
        "memory": arguments.memory,
        "seed": arguments.seed or 0,
        "announce": lambda prediction: reporter.say(str(prediction)),
        **generation_fields(arguments),
    }
    if isinstance(source, OpenAIRequests):
        name = Path(path).resolve().stem
        return BatchRequests(
            model, tokenizer, model_name=name, context=arguments.context, **options
        )
    return BatchGenerator(
        model,
        tokenizer,
        chat=arguments.chat,
        system=arguments.system,
        default_new_tokens=DEFAULT_NEW_TOKENS,
        **options,
    )
