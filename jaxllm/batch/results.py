"""Results of finished sequences."""

from __future__ import annotations

import dataclasses

from jaxllm.batch.queue import Task
from jaxllm.common.errors import JaxLLMError, NonFiniteError


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished sequence, or its error."""

    task: Task
    tokens: list[int]
    """New tokens."""
    reason: str
    error: JaxLLMError | None = None
    """Set if the sequence could not be generated."""

    @staticmethod
    def failed(task: Task, error: JaxLLMError) -> list[Done]:
        """A failed result for each sequence of a task."""
        return [Done(text, [], "", error) for text in task.texts]


def not_finite(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"at new token {step} the model's logits are NaN or infinite, or the settings forbid every "
        "token; check the weights and the settings, or compute in float32 (dtype='float32')"
    )
