"""Makes evaluation prompts and expected answers from rows of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.common.errors import ConfigError, DataError, JaxLLMError
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, rows_of
from jaxllm.training.data.chat import messages_of
from jaxllm.training.data.config import eos_of, length_limits
from jaxllm.training.data.examples import fit
from jaxllm.training.data.formats import beginning, encode, get, with_end
from jaxllm.training.data.pipeline import make_format
from jaxllm.training.data.rows import Row
from jaxllm.training.evaluation.evaluate import EvalPrompt


def generation_rows(
    config: DataConfig,
    tokenizer: Tokenizer,
    model: ModelInfo,
    limit: int | None = None,
    *,
    check: Callable[[Sequence[int]], None] = lambda ids: None,
) -> list[EvalPrompt]:
    """Converts the first `limit` rows to prompts, with the same tokens as in training.

    The prompt of a conversation is everything before its last answer. Rows dropped by
    `on_too_long: drop` are dropped here as well.

    Args:
        check: raises a JaxLLMError for the ids of an invalid prompt, such as one that is too long.

    Raises:
        ConfigError: the format has no answers (text, classification).
        DataError: a row lacks a field, or its prompt is invalid; names file and line.
    """
    if config.format not in ("prompt_completion", "chat", "seq2seq"):
        raise ConfigError(
            f"evaluation.metrics: rows of format {config.format!r} have no answers to compare with"
        )
    rows, eos = rows_of(config), eos_of(tokenizer, model)
    encode, limits = make_format(config, tokenizer, model), length_limits(config, model)
    prompts: list[EvalPrompt] = []
    for number in range(len(rows)):
        if len(prompts) == limit:
            break
        row = rows[number]
        try:
            if config.on_too_long == "drop" and not fit(encode(row), limits, "drop")[0]:
                continue
            ids, reference = prompt_of(row, config, tokenizer, eos)
            check(ids)
        except JaxLLMError as error:
            raise DataError(f"{rows.where(number)}: {error}") from None
        prompts.append(EvalPrompt(ids, reference))
    return prompts


def prompt_of(
    row: Row, config: DataConfig, tokenizer: Tokenizer, eos: int
) -> tuple[list[int], str]:
    """Prompt ids of a row and the expected answer."""
    if config.format == "seq2seq":
        source = config.source_prefix + get(row, config.source_field, str)
        ids = with_end(encode(tokenizer, source), eos)
        return ids, get(row, config.target_field, str)
    if config.format == "prompt_completion":
        ids = beginning(tokenizer, get(row, config.prompt_field, str))
        return ids, get(row, config.completion_field, str)
    messages = messages_of(row, config.messages_field)
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"{config.messages_field}: no message of the assistant")
    reference = messages[answers[-1]].get("content")
    if not isinstance(reference, str):
        raise DataError(
            f"{config.messages_field}[{answers[-1]}]: evaluation.metrics compare texts, and the "
            f"content of this answer is {str(reference)[:60]!r}"
        )
    ids = tokenizer.apply_chat_template(
        messages[: answers[-1]], tools=row.get("tools"), chat_template=config.chat_template
    )
    assert not isinstance(ids, str)
    return ids, reference
