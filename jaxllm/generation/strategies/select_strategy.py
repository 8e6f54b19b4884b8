"""Selects the decoding strategy of a call from its generation settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.inputs.arguments import CallArguments
from jaxllm.generation.inputs.values import float_leaf, is_traced
from jaxllm.generation.settings.config import GenerationConfig, draft_options, generation_mode
from jaxllm.generation.strategies.assisted.select_draft import build_assisted
from jaxllm.generation.strategies.beam.beam_search import BeamSearch
from jaxllm.generation.strategies.beam.constrained_beam import (
    ConstrainedBeamSearch,
    DisjunctiveConstraint,
    PhrasalConstraint,
    Tries,
    force_words,
)
from jaxllm.generation.strategies.beam.group_beam import GroupBeamSearch
from jaxllm.generation.strategies.contrastive import Contrastive
from jaxllm.generation.strategies.dola import DoLa, layers_to_contrast
from jaxllm.generation.strategies.sample import Sample
from jaxllm.generation.strategies.strategy import AnyStrategy
from jaxllm.models.decoder import GenerativeModel


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of `generate`: the input of strategy selection, which runs on the host."""

    model: GenerativeModel
    config: GenerationConfig
    """Merged settings: of the call, its `generation_config` and the model."""
    eos: tuple[int, ...]
    """End tokens."""
    batch: int
    """Number of prompts."""
    start_len: int
    """Columns of the prompt, padding included; 0 for embeddings alone."""
    max_length: int
    """Columns of the longest result, prompt included."""
    arguments: CallArguments

    @property
    def max_new_tokens(self) -> int:
        return self.max_length - self.start_len


@dataclasses.dataclass(frozen=True)
class RegisteredStrategy:
    """A strategy added by another module (`registration.register_strategy`)."""

    name: str
    selects: Callable[[Call], bool]
    """Returns True if the settings of a call select it."""
    build: Callable[[Call], AnyStrategy]
    modes: tuple[str, ...]
    """Generation modes that it replaces, as `generation_mode` names them."""


REGISTERED_STRATEGIES: dict[str, RegisteredStrategy] = {}
"""Registered strategies by name, tried in this order before the built-in ones."""


def _sample(call: Call) -> AnyStrategy:
    config = call.config
    return Sample(sampling=bool(config.do_sample), num_return_sequences=config.num_return_sequences)


def _assisted(call: Call) -> AnyStrategy:
    return build_assisted(
        call.model,
        call.config,
        call.arguments.assistant_model,
        max_new_tokens=call.max_new_tokens,
        max_length=call.max_length,
    )


def _contrastive(call: Call) -> AnyStrategy:
    k, vocabulary = call.config.top_k, call.model.config.vocab_size
    if is_traced(k):
        raise InputError("top_k: contrastive search runs so many candidates; found a tracer")
    if k > vocabulary:
        raise InputError(f"top_k: {k} candidates of a vocabulary of {vocabulary}")
    assert call.config.penalty_alpha is not None
    alpha = float_leaf("generate()", "penalty_alpha", call.config.penalty_alpha, "[0, 1]")
    return Contrastive(alpha=alpha, k=k, low_memory=bool(call.config.low_memory))


def _dola(call: Call) -> AnyStrategy:
    if call.model.is_encoder_decoder:
        raise InputError("dola_layers: DoLa decoding is only available for decoder-only models")
    config = call.config
    assert config.dola_layers is not None
    return DoLa(
        sampling=bool(config.do_sample),
        num_return_sequences=config.num_return_sequences,
        layers=layers_to_contrast(call.model, config.dola_layers),
    )


def _beam_fields(call: Call) -> dict[str, Any]:
    config = call.config
    if config.low_memory:
        raise UnsupportedError(
            "low_memory: only contrastive search has it (transformers refuses it with beams, too); "
            "beams share the prompt's keys and values anyway"
        )
    penalty = float_leaf("generate()", "length_penalty", config.length_penalty, "(-inf, inf)")
    return {
        "length_penalty": penalty,
        "num_beams": config.num_beams,
        "num_return_sequences": config.num_return_sequences,
        "early_stopping": config.early_stopping,
    }


def _check_no_stopping_criteria(call: Call) -> None:
    for name, value in (
        ("stop_strings", call.config.stop_strings),
        ("max_time", call.config.max_time),
        ("stopping_criteria", call.arguments.stopping_criteria),
    ):
        if value:
            raise UnsupportedError(
                f"{name}: groups and constraints end by end tokens and lengths only (transformers "
                "looks at other criteria just when all beams meet them)"
            )


def _beam_search(call: Call) -> AnyStrategy:
    return BeamSearch(**_beam_fields(call), sampling=bool(call.config.do_sample))


def _group_beam_search(call: Call) -> AnyStrategy:
    config = call.config
    _check_no_stopping_criteria(call)
    if config.do_sample:
        raise UnsupportedError("num_beam_groups: diverse beam search does not sample")
    if not is_traced(config.diversity_penalty) and config.diversity_penalty == 0:
        raise InputError("diversity_penalty: must be above 0, or all groups find the same")
    return GroupBeamSearch(**_beam_fields(call), num_groups=config.num_beam_groups)


def _constrained_beam_search(call: Call) -> AnyStrategy:
    config = call.config
    if config.num_beams == 1:
        name = "constraints" if config.force_words_ids is None else "force_words_ids"
        raise InputError(f"{name}: constraints need beams; set num_beams above 1")
    for name, is_set in (
        ("do_sample", config.do_sample),
        ("num_beam_groups", config.num_beam_groups > 1),
    ):
        if is_set:
            raise UnsupportedError(f"{name}: cannot be combined with constraints")
    _check_no_stopping_criteria(call)
    own_constraints = () if config.constraints is None else config.constraints
    if not isinstance(own_constraints, list | tuple):
        raise InputError(
            f"`constraints` must be a list of constraints, but is {quoted(own_constraints)}"
        )
    for constraint in own_constraints:
        if not isinstance(constraint, PhrasalConstraint | DisjunctiveConstraint):
            raise InputError(
                f"`constraints` must hold PhrasalConstraint or DisjunctiveConstraint, but holds "
                f"{quoted(constraint)}"
            )
    phrases = () if config.force_words_ids is None else force_words(config.force_words_ids)
    constraints = (*own_constraints, *phrases)
    if not constraints:
        raise InputError("`constraints` is empty; give None for a search without them")
    vocabulary = call.model.config.vocab_size
    for token in (t for constraint in constraints for word in constraint.words for t in word):
        if token >= vocabulary:
            raise InputError(
                f"`force_words_ids` names token {token}, but the vocabulary has {vocabulary} tokens"
            )
    return ConstrainedBeamSearch(**_beam_fields(call), tries=Tries.of(constraints))


BUILDERS: Mapping[str, Callable[[Call], AnyStrategy]] = {
    "greedy_search": _sample,
    "sample": _sample,
    "assisted_generation": _assisted,
    "contrastive_search": _contrastive,
    "dola_generation": _dola,
    "beam_search": _beam_search,
    "beam_sample": _beam_search,
    "group_beam_search": _group_beam_search,
    "constrained_beam_search": _constrained_beam_search,
}


def registered_strategy(call: Call) -> RegisteredStrategy | None:
    """The registered strategy that the settings of a call select, if any."""
    return next((s for s in REGISTERED_STRATEGIES.values() if s.selects(call)), None)


def select_strategy(call: Call) -> AnyStrategy:
    """The strategy of a call: a registered one that its settings select, or else the one that
    transformers would choose (`generation_mode`)."""
    assistant = call.arguments.assistant_model
    mode = generation_mode(call.config, assistant)
    if registered := registered_strategy(call):
        if mode not in registered.modes:
            replaced = " and ".join(registered.modes)
            raise UnsupportedError(
                f"{registered.name}: takes the place of {replaced}, and these settings ask for "
                f"{mode}; drop one of the two"
            )
        return registered.build(call)
    drafts = draft_options(call.config, assistant)
    if drafts and mode != "assisted_generation":
        raise UnsupportedError(
            f"{drafts[0]}: drafts go with greedy search and sampling alone, and these settings ask "
            f"for {mode} (transformers would leave the draft out); drop one of the two"
        )
    return BUILDERS[mode](call)
