"""From generation settings to the strategy that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import InputError
from jaxllm.generation.config import GenerationConfig, generation_mode
from jaxllm.generation.contrastive import Contrastive
from jaxllm.generation.dola import DoLa, layers_to_contrast
from jaxllm.generation.sample import Sample
from jaxllm.generation.strategy import Strategy
from jaxllm.generation.values import float_leaf, is_traced


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known on the host when the strategy is chosen."""

    model: Any
    config: GenerationConfig
    eos: tuple[int, ...]
    batch: int
    start_len: int
    """Columns of the prompt, padding included."""
    until: int
    """`max_length`."""
    arguments: Mapping[str, Any]
    """Arguments of generate() that a strategy reads, such as `assistant_model`."""


def _sample(call: Call) -> Strategy[Any]:
    config = call.config
    return Sample(sampling=bool(config.do_sample), count=config.num_return_sequences)


def _contrastive(call: Call) -> Strategy[Any]:
    k, vocabulary = call.config.top_k, call.model.config.vocab_size
    if is_traced(k):
        raise InputError("top_k: contrastive search runs so many candidates; found a tracer")
    if k > vocabulary:
        raise InputError(f"top_k: {k} candidates of a vocabulary of {vocabulary}")
    alpha = float_leaf("generate()", "penalty_alpha", call.config.penalty_alpha, "[0, 1]")
    return Contrastive(alpha=alpha, k=k)


def _dola(call: Call) -> Strategy[Any]:
    if call.model.is_encoder_decoder:
        raise InputError("dola_layers: DoLa decoding is only available for decoder-only models")
    config = call.config
    return DoLa(
        sampling=bool(config.do_sample),
        count=config.num_return_sequences,
        layers=layers_to_contrast(call.model, config.dola_layers),
    )


MODES: Mapping[str, Callable[[Call], Strategy[Any]]] = {
    "greedy_search": _sample,
    "sample": _sample,
    "contrastive_search": _contrastive,
    "dola_generation": _dola,
}


def choose_strategy(call: Call) -> Strategy[Any]:
    """The strategy of a call, by the rule of transformers (`generation_mode`)."""
    return MODES[generation_mode(call.config, call.arguments.get("assistant_model"))](call)
