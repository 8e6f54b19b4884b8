"""Prompts and the answers that are wanted, from rows of training data."""

from __future__ import annotations

from jaxllm.errors import ConfigError, DataError
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import DataConfig, rows_of
from jaxllm.training.data.formats import beginning, encode, get, with_end
from jaxllm.training.data.rows import Row
from jaxllm.training.evaluation import Prompt


def generation_rows(
    config: DataConfig, tokenizer: Tokenizer, eos: int, limit: int | None = None
) -> list[Prompt]:
    """The first `limit` rows as prompts, with the tokens that they have in training.

    Of a conversation the prompt is all before its last answer.

    Raises:
        ConfigError: the format has no answers (text, classification).
        DataError: a row lacks a field; its place is named.
    """
    if config.format not in ("prompt_completion", "chat", "seq2seq"):
        raise ConfigError(
            f"evaluation.metrics: rows of format {config.format!r} have no answers to compare with"
        )
    rows = rows_of(config)
    prompts = []
    for number in range(len(rows) if limit is None else min(limit, len(rows))):
        try:
            prompts.append(prompt_of(rows[number], config, tokenizer, eos))
        except DataError as error:
            raise DataError(f"{rows.where(number)}: {error}") from None
    return prompts


def prompt_of(row: Row, config: DataConfig, tokenizer: Tokenizer, eos: int) -> Prompt:
    """One row, as the model will meet it."""
    if config.format == "seq2seq":
        source = config.source_prefix + get(row, config.source_field, str)
        ids = with_end(encode(tokenizer, source), eos)
        return Prompt(ids, get(row, config.target_field, str))
    if config.format == "prompt_completion":
        ids = beginning(tokenizer, get(row, config.prompt_field, str))
        return Prompt(ids, get(row, config.completion_field, str))
    messages = get(row, config.messages_field, list)
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{config.messages_field}: no message of the assistant")
    ids = tokenizer.apply_chat_template(
        messages[: answers[-1]], tools=row.get("tools"), chat_template=config.chat_template
    )
    assert not isinstance(ids, str)
    return Prompt(ids, messages[answers[-1]]["content"])
