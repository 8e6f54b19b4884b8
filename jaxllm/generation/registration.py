"""The choice of a call's strategy, and hooks that add to `generate()`: strategies, processors and
prompt transforms.

A module registers its additions when it is imported; docs/extending.md has examples. Also exported
from here is what such a module builds on: `Strategy` and `Sample` to subclass, `store` and
`float_leaf` for the numbers of a processor, the `History` it reads, checks for a `Field`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.inputs.arguments import check_positions
from jaxllm.generation.inputs.values import (
    as_leaf,
    boolean,
    bucket,
    float_leaf,
    int_leaf,
    integer,
    is_traced,
    number,
)
from jaxllm.generation.processors.base import History, store
from jaxllm.generation.processors.build import REGISTERED, Builder, ProcessorInputs
from jaxllm.generation.request import PROMPT_TRANSFORMS, PromptTransform
from jaxllm.generation.request import Request as Call
from jaxllm.generation.settings.config import (
    FIELDS,
    GenerationConfig,
    declare_field,
    draft_options,
    generation_mode,
)
from jaxllm.generation.settings.fields import Condition, Field
from jaxllm.generation.strategies.assisted import Assisted
from jaxllm.generation.strategies.beam_search import BeamSearch
from jaxllm.generation.strategies.constrained_beam import (
    ConstrainedBeamSearch,
    DisjunctiveConstraint,
    PhrasalConstraint,
    Tries,
    force_words,
)
from jaxllm.generation.strategies.contrastive import Contrastive
from jaxllm.generation.strategies.dola import DoLa, layers_to_contrast
from jaxllm.generation.strategies.drafts import AssistantModel, Draft, EarlyExit, PromptLookup
from jaxllm.generation.strategies.draws import choose_greedy, choose_sample
from jaxllm.generation.strategies.group_beam import GroupBeamSearch
from jaxllm.generation.strategies.sample import Sample, SampleState
from jaxllm.generation.strategies.strategy import (
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
    Result,
    Strategy,
)
from jaxllm.models.decoder import GenerativeModel, checked_generative

__all__ = [
    "Call",
    "Condition",
    "DecodeSettings",
    "Field",
    "History",
    "PrefillInputs",
    "ProcessorInputs",
    "Result",
    "Sample",
    "SampleState",
    "Strategy",
    "boolean",
    "choose_greedy",
    "choose_sample",
    "declare_field",
    "float_leaf",
    "int_leaf",
    "integer",
    "number",
    "register_processor",
    "register_prompt_transform",
    "register_strategy",
    "store",
]

SMALLEST_DRAFT = 8
DEFAULT_NGRAM_SIZE = 2


@dataclasses.dataclass(frozen=True)
class RegisteredStrategy:
    """A strategy added by another module (`register_strategy`)."""

    name: str
    selects: Callable[[Call], bool]
    """Returns True if the settings of a call select it."""
    build: Callable[[Call], AnyStrategy]
    modes: tuple[str, ...]
    """Generation modes that it replaces, as `generation_mode` names them."""


REGISTERED_STRATEGIES: dict[str, RegisteredStrategy] = {}
"""Registered strategies by name, tried in this order before the built-in ones."""


def register_strategy(
    name: str,
    selects: Callable[[Call], bool],
    build: Callable[[Call], AnyStrategy],
    *,
    modes: tuple[str, ...] = ("greedy_search", "sample"),
) -> None:
    """Adds a generation strategy. Registered strategies are tried before the built-in ones. In the
    batch engine their rows run in static batches of one row.

    Args:
        name: used in messages; a second registration under the same name replaces the first.
        selects: returns True if the settings of a call ask for this strategy. The first registered
            strategy that returns True is used.
        build: creates the strategy of a call; raises `InputError` or `UnsupportedError` for
            settings that contradict it.
        modes: generation modes that it replaces; settings that ask for another, such as beams,
            raise `UnsupportedError`.

    >>> def asks_for_typical(call):
    ...     return call.config.typical_p is not None and call.config.do_sample
    >>> register_strategy("typical", asks_for_typical, lambda call: Sample(sampling=True))
    >>> REGISTERED_STRATEGIES.pop("typical").name
    'typical'
    """
    REGISTERED_STRATEGIES[name] = RegisteredStrategy(name, selects, build, modes)


def register_processor(
    name: str,
    build: Builder,
    *,
    field: Field | None = None,
    place: Literal["penalties", "last"] = "penalties",
) -> None:
    """Adds a logits processor that a generation field enables.

    It is part of every call in which the field has an effect or was given in code, in every
    strategy. Rows with it run in the slots of the batch engine unless the field has `slots=False`.

    Args:
        name: the field; a second registration under the same name replaces the first.
        build: `(value, inputs) -> processor`, from the field's value and
            `processors.build.ProcessorInputs`; None if the value needs no processor.
        field: declares a new field. None: `GenerationConfig` already has it.
        place: "penalties": before the caller's own processors and the sampling filters; "last":
            after them.

    Raises:
        ValueError: `GenerationConfig` has no such field, or `field` has the name of a built-in one.
    """
    if field is not None:
        declare_field(name, field)
    elif name not in FIELDS:
        raise ValueError(f"register_processor: GenerationConfig has no field {name!r}; give field=")
    for builders in REGISTERED.values():
        builders.pop(name, None)
    REGISTERED[place][name] = build


def register_prompt_transform(field: str, transform: PromptTransform) -> None:
    """Adds a function that changes the prompt before generation, in calls where `field` is set.

    Args:
        field: a field of `GenerationConfig`.
        transform: `(model, tokenizer, input_ids, attention_mask) -> (input_ids, attention_mask)`,
            on the host. The call must have a tokenizer, and no other inputs than `input_ids`.

    Raises:
        ValueError: `GenerationConfig` has no such field.
    """
    if field not in FIELDS:
        raise ValueError(f"register_prompt_transform: GenerationConfig has no field {field!r}")
    PROMPT_TRANSFORMS[field] = transform


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


def _sample(call: Call) -> AnyStrategy:
    config = call.config
    return Sample(sampling=bool(config.do_sample), num_return_sequences=config.num_return_sequences)


def _contrastive(call: Call) -> AnyStrategy:
    k, vocabulary = call.config.top_k, call.model.config.vocab_size
    if is_traced(k):
        raise InputError("top_k: contrastive search runs so many candidates; found a tracer")
    if k > vocabulary:
        raise InputError(f"top_k: {k} candidates of a vocabulary of {vocabulary}")
    assert call.config.penalty_alpha is not None
    alpha = as_leaf(call.config.penalty_alpha, np.float32)
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
    return {
        "length_penalty": as_leaf(config.length_penalty, np.float32),
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
    vocabulary, own_constraints = call.model.config.vocab_size, config.constraints or ()
    for constraint in own_constraints:
        if not isinstance(constraint, PhrasalConstraint | DisjunctiveConstraint):
            raise InputError(
                f"`constraints` must hold PhrasalConstraint or DisjunctiveConstraint, but holds "
                f"{quoted(constraint)}"
            )
        largest = max(map(max, constraint.words))
        if largest >= vocabulary:
            raise InputError(
                f"`constraints` names token {largest}, but the vocabulary has {vocabulary} tokens"
            )
    constraints = (*own_constraints, *force_words(config.force_words_ids or ()))
    if not constraints:
        raise InputError("`constraints` is empty; give None for a search without them")
    return ConstrainedBeamSearch(**_beam_fields(call), tries=Tries.of(constraints))


def _assisted(call: Call) -> AnyStrategy:
    config, model, assistant_model = call.config, call.model, call.arguments.assistant_model
    options = draft_options(config, assistant_model)
    if len(options) > 1:
        raise InputError(f"{', '.join(options)}: give one of them; a call has one draft")
    if config.dola_layers is not None:
        raise UnsupportedError(
            f"{options[0]}: DoLa (dola_layers) takes no draft; drop one of the two"
        )
    check_rotary(model, options[0], call.max_length)
    weight = config.assistant_ensemble_weight
    if options[0] == "prompt_lookup_num_tokens":
        if weight is not None:
            raise UnsupportedError(
                "assistant_ensemble_weight: mixes the model with its draft's distribution, which a "
                "prompt lookup does not have; drop one of the two"
            )
        assert config.prompt_lookup_num_tokens is not None
        num_tokens, grows = config.prompt_lookup_num_tokens, False
        size = config.max_matching_ngram_size
        size = DEFAULT_NGRAM_SIZE if size is None else size
        draft: Draft = PromptLookup(as_leaf(size, np.int32))
    else:
        settings = assistant_settings(config, assistant_model)
        num_tokens = settings.num_assistant_tokens
        grows = settings.num_assistant_tokens_schedule in ("heuristic", "heuristic_transient")
        draft = network_draft(model, settings, assistant_model)
    longest = bucket(2 * num_tokens if grows else num_tokens, SMALLEST_DRAFT)
    return Assisted(
        draft=draft,
        num_assistant_tokens=as_leaf(num_tokens, np.int32),
        grows=np.bool_(grows),  # pyright: ignore[reportArgumentType]
        sampling=bool(config.do_sample),
        max_draft=min(longest, bucket(call.max_new_tokens, SMALLEST_DRAFT)),
        num_return_sequences=config.num_return_sequences,
        ensemble_weight=None if weight is None else as_leaf(weight, np.float32),
    )


def network_draft(
    model: GenerativeModel, settings: GenerationConfig, assistant_model: GenerativeModel | None
) -> Draft:
    """The draft of an assistant model, or of the model's own first layers."""
    threshold = as_leaf(settings.assistant_confidence_threshold, np.float32)
    if assistant_model is not None:
        check_assistant(model, assistant_model)
        return AssistantModel(assistant_model, threshold)
    assert settings.assistant_early_exit is not None
    model.early_exit(settings.assistant_early_exit)  # raises if there are fewer layers
    return EarlyExit(settings.assistant_early_exit, threshold)


def assistant_settings(
    config: GenerationConfig, assistant_model: GenerativeModel | None
) -> GenerationConfig:
    """Length, schedule and threshold of drafts: the call's, or else the assistant's own.

    transformers reads all three from the assistant's generation_config alone.
    """
    own = getattr(assistant_model, "generation_config", None)
    if own is None:
        return config
    names = {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    }
    return config.replace(**{name: getattr(own, name) for name in names - config.explicit})


def check_assistant(model: GenerativeModel, assistant: GenerativeModel) -> None:
    """Raises UnsupportedError if the assistant's vocabulary or inputs differ from the model's."""
    assistant = checked_generative(assistant, "assistant_model")
    if assistant.is_encoder_decoder != model.is_encoder_decoder:
        raise UnsupportedError(
            f"assistant_model: {type(assistant).__name__} does not read what "
            f"{type(model).__name__} reads: one of them is an encoder-decoder"
        )
    sizes = assistant.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UnsupportedError(
            f"assistant_model: its vocabulary has {sizes[0]} tokens and the model's {sizes[1]}; "
            "both need the same (assistant_tokenizer is not supported). If one is only padded, "
            f"call resize_token_embeddings({max(sizes)}) of the other one"
        )


def check_assistant_inputs(call: Call) -> None:
    """Raises InputError for inputs that the call's assistant, if there is one, cannot take."""
    assistant, arguments = call.arguments.assistant_model, call.arguments
    if assistant is None:
        return
    if type(assistant) is not type(call.model):
        arguments.refuse(
            ("token_type_ids", "encoder_hidden_states"),
            "cannot be combined with an assistant_model of another family",
        )
    check_positions(assistant, call.prompt, call.max_new_tokens, whose="assistant_model")


def check_rotary(model: GenerativeModel, option: str, max_length: int) -> None:
    """Raises UnsupportedError if the model's RoPE depends on the length so far, which would count
    drafted tokens that are rejected later."""
    rope = getattr(model.config, "rotary", None)
    limits = {"dynamic": "max_positions", "longrope": "original_positions"}
    if rope is None or rope.rope_type not in limits:
        return
    limit = getattr(rope, limits[rope.rope_type])
    if max_length > limit:
        raise UnsupportedError(
            f"{option}: beyond {limit} positions this model's RoPE ({rope.rope_type}) depends on "
            f"the length so far, rejected drafts included; lower max_length ({max_length}), or "
            "drop the draft"
        )


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
