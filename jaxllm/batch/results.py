"""A text that has ended."""

from __future__ import annotations

import dataclasses

from jaxllm.batch.queue import Task
from jaxllm.common.errors import JaxLLMError, NonFiniteError


@dataclasses.dataclass(frozen=True)
class Done:
    """A text that has ended."""

    task: Task
    tokens: list[int]
    """New ones."""
    reason: str
    error: JaxLLMError | None = None
    """Why there is no text."""

    @staticmethod
    def failed(task: Task, error: JaxLLMError) -> list[Done]:
        """All texts of a task that has none."""
        return [Done(text, [], "", error) for text in task.texts]


def not_finite(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"at new token {step} the model's logits are NaN or infinite, or the settings forbid every "
        "token; check the weights and the settings, or compute in float32 (dtype='float32')"
    )
