"""Assisted (speculative) generation: drafts, acceptance and the strategy."""

from jaxllm.generation.strategies.assisted.assisted import Assisted
from jaxllm.generation.strategies.assisted.drafts import (
    AssistantModel,
    Draft,
    EarlyExit,
    PromptLookup,
)

__all__ = ["AssistantModel", "Assisted", "Draft", "EarlyExit", "PromptLookup"]
