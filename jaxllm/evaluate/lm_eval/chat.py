"""Chats as prompts: the tokenizer's template, with a last message that the model continues."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.common.errors import TemplateError
from jaxllm.tokenizers import Tokenizer

Messages = Sequence[Mapping[str, str]]
_END = "CONTINUE_FINAL_MESSAGE_TAG "


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
    try:
        return _render(tokenizer, messages, add_generation_prompt, variables)
    except TemplateError as failure:
        others = [message for message in messages if message["role"] != "system"]
        if tokenizer.chat_template is None or len(others) == len(messages):
            raise
        text = _render(tokenizer, others, add_generation_prompt, variables)
        warnings.warn(
            f"the chat template takes no system message, which is left out ({failure})",
            stacklevel=2,
        )
        return text


def _render(
    tokenizer: Tokenizer,
    messages: Messages,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    if add_generation_prompt:
        return tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    *earlier, last = messages
    tagged = [*earlier, {**last, "content": last["content"] + _END}]
    text = tokenizer.apply_chat_template(
        tagged, tokenize=False, add_generation_prompt=False, **variables
    )
    end = text.rfind(_END.strip())
    if end < 0:
        raise TemplateError("the chat template leaves out the last message, which is to continue")
    # A template that trims the tag's space also trims the end of the message.
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()
