"""New tokens of a request, as the engine delivers them."""

from __future__ import annotations

import dataclasses

from jaxllm.common.errors import JaxLLMError


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the most probable tokens in its place.

    They are those of the model's own distribution: before temperature, penalties and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token, log-probability), the most probable first."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one sample of a request."""

    sample: int
    """Number of the sample, from 0."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, if the request asks for them."""
    finish_reason: str | None = None
    """In the last chunk of a sample: "eos", "length" or "stop" (a stop string)."""
    error: JaxLLMError | None = None
    """Why the sample ends here, without its result."""

    @property
    def is_last(self) -> bool:
        """True if the sample has no more chunks."""
        return self.finish_reason is not None or self.error is not None
