"""Chats as prompts: the tokenizer's template, with a last message that the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.common.errors import TemplateError, warn
from jaxllm.tokenizers import Tokenizer

Messages = Sequence[Mapping[str, str]]


def render_chat(
    tokenizer: Tokenizer, messages: Messages, *, add_generation_prompt: bool, **variables: Any
) -> str:
    """The text of a chat, as lm-eval's own backend makes it with transformers.

    Args:
        add_generation_prompt: append the start of the assistant's turn; if False, the text ends
            with the content of the last message, which the model continues.
        variables: further variables of the template.

    Raises:
        TemplateError: there is no template, or it fails, and not only because of a system message.
    """
    options = {
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
        **variables,
    }
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as failure:
        others = [message for message in messages if message["role"] != "system"]
        if tokenizer.chat_template is None or len(others) == len(messages):
            raise
        text = tokenizer.apply_chat_template(others, **options)
        warn(f"the chat template takes no system message, which is left out ({failure})")
        return text
