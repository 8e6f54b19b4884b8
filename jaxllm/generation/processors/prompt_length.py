"""Where the new tokens begin, for processors that look at them alone."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from jaxllm.common.errors import InputError


def prompt_length(processor: Any, of_call: Int[Array, ""] | int | None) -> Int[Array, ""] | int:
    """The columns before the first new token: what the call says, or else the processor.

    Raises:
        InputError: Neither knows.
    """
    found = processor.prompt_len if of_call is None else of_call
    if found is None:
        raise InputError(
            f"{type(processor).__name__}: needs `prompt_len`, the number of columns of the prompt: "
            "give it to the processor when it is made"
        )
    return found
