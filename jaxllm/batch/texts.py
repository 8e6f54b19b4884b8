"""`generate_texts`: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from jaxllm.batch.generator import BatchGenerator
from jaxllm.common.arguments import checked_iterable
from jaxllm.common.errors import InputError
from jaxllm.loading import load
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.tokenizer import Tokenizer


def generate_texts(
    model: GenerativeModel | str | PathLike[str],
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> list[Any]:
    """Generates from many prompts, in slots that are refilled.

    ::

        texts = jaxllm.generate_texts("path/to/model", ["Once upon a time", "The sea"],
                                      max_new_tokens=40)

    Args:
        model: a model, or what `jaxllm.load` takes.
        prompts: texts, lists of messages, or rows of `BatchGenerator`.
        tokenizer: the model's; needed with a model that is loaded already.
        options: arguments of `BatchGenerator` (`seed`, `chat`, `system`, `schema`, `slots`, ...)
            and generation fields of all prompts.

    Returns:
        A text for each prompt, without the prompt; a list of texts for prompts whose
        `num_return_sequences` is above 1.

    Raises:
        InputError: there is no tokenizer, or a prompt cannot be answered; the message has its
            number, from 0 on.
    """
    prompts = list(checked_iterable(prompts, "prompts", "a list of prompts"))
    if isinstance(model, str | PathLike):
        loaded, own = load(model)
        tokenizer = own if tokenizer is None else tokenizer
    else:
        loaded = model
    if tokenizer is None:
        raise InputError("tokenizer: give the model's, since there is none")
    for number, each in enumerate(prompts):
        if isinstance(each, Mapping) and "role" in each:
            raise InputError(f"prompts[{number}]: is a message; a chat is a list of messages")
    rows = [each if isinstance(each, str | Mapping) else {"messages": each} for each in prompts]
    texts = []
    for output in BatchGenerator(loaded, tokenizer, **options).generate(rows):
        if output.error is not None:
            raise InputError(f"prompts[{output.index}]: {output.error}")
        assert output.texts is not None
        texts.append(output.texts[0] if len(output.texts) == 1 else list(output.texts))
    return texts
