"""Generation mode: the name of the strategy that the settings select, and conditions on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.settings.fields import Condition
from jaxllm.models.decoder import GenerativeModel

if TYPE_CHECKING:
    from jaxllm.generation.settings.config import GenerationConfig

SLOT_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Modes that the slots of the batch engine have; rows of other modes run in static batches."""
INDEPENDENT_MODES = ("beam_search", "beam_sample", "group_beam_search")
"""Modes whose rows do not depend on the other rows of a static batch."""


def generation_mode(
    config: GenerationConfig, assistant_model: GenerativeModel | None = None
) -> str:
    """Name of the strategy that the settings select, by transformers' rule.

    >>> from jaxllm.generation.settings.config import GenerationConfig
    >>> generation_mode(GenerationConfig(num_beams=4))
    'beam_search'
    """
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained_beam_search"
    if config.num_beams > 1:
        if config.num_beam_groups > 1:
            return "group_beam_search"
        return "beam_sample" if config.do_sample else "beam_search"
    if not config.do_sample and is_contrastive(config):
        top_k = config.top_k
        if is_traced(top_k) or top_k > 1:
            return "contrastive_search"
    if draft_options(config, assistant_model):
        return "assisted_generation"
    if config.dola_layers is not None:
        return "dola_generation"
    return "sample" if config.do_sample else "greedy_search"


def is_contrastive(config: GenerationConfig) -> bool:
    """Returns whether `penalty_alpha` enables contrastive search (also if it is a tracer)."""
    alpha = config.penalty_alpha
    return is_traced(alpha) or bool(alpha)


def draft_options(config: GenerationConfig, assistant_model: GenerativeModel | None) -> list[str]:
    """Names of the options set that enable drafts."""
    options = {
        "assistant_early_exit": config.assistant_early_exit,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "assistant_model": assistant_model,
    }
    return [name for name, value in options.items() if value is not None]


SAMPLING_OR_CONTRASTIVE = Condition(
    "do_sample or penalty_alpha",
    lambda config, assistant: config.do_sample or is_contrastive(config),
    met_by_sampling=True,
)
CONTRASTIVE = Condition(
    "top_k > 1 and greedy search",
    lambda config, assistant: generation_mode(config) == "contrastive_search",
)
CONTRASTIVE_OR_BEAMS = Condition(  # beams raise: no warning comes before
    "penalty_alpha",
    lambda config, assistant: (
        generation_mode(config) == "contrastive_search" or config.num_beams > 1
    ),
)
GREEDY_OR_SAMPLING = Condition(
    "greedy search or sampling",
    lambda config, assistant: generation_mode(config) in ("dola_generation", "assisted_generation"),
)
ASSISTANT = Condition(
    "an assistant",
    lambda config, assistant: assistant is not None or config.assistant_early_exit is not None,
)
DRAFT = Condition("a draft", lambda config, assistant: bool(draft_options(config, assistant)))
OTHER_VOCABULARY = Condition("assistant_tokenizer", lambda config, assistant: False)
