"""Builds the logits processors that generation settings enable, in transformers' order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation import processors
from jaxllm.generation.inputs.values import ids_in, is_traced
from jaxllm.generation.processors.base import LogitsProcessor, LogitsProcessorList, Scores
from jaxllm.generation.settings.config import FIELDS, GenerationConfig


@dataclasses.dataclass(frozen=True)
class ProcessorInputs:
    """Inputs for building a processor, besides the value of its own field."""

    config: GenerationConfig
    prompt_len: int | Int[Array, ""]
    """Length of the prompt with its padding (for T5, of the decoder's prompt)."""
    max_length: int | Int[Array, ""]
    """Maximum length of a row, prompt and padding included."""
    eos: tuple[int, ...]
    """End-of-sequence tokens in force; may be empty."""
    vocab_size: int
    """Number of scores."""
    encoder_ids: Int[Array, "B S"] | None = None
    """The encoder's input; for a decoder-only model, the prompt."""
    encoder_mask: Bool[Array, "B S"] | None = None
    """Its padding mask."""

    @property
    def min_tokens_to_keep(self) -> int:
        """Least number of tokens that a filter keeps: beams need one that is not an EOS."""
        return 1 if self.config.num_beams == 1 else max(2, len(self.eos) + 1)

    def encoder(self, field: str) -> tuple[Int[Array, "B S"], Bool[Array, "B S"] | None]:
        """Ids and mask of the encoder's input; InputError naming ``field`` if there are no ids."""
        if self.encoder_ids is None:
            raise InputError(
                f"{field}: compares with the token ids of the model's input, which encoder_outputs "
                "and inputs_embeds do not have; give input_ids, or leave the setting out"
            )
        return self.encoder_ids, self.encoder_mask


Builder = Callable[[Any, ProcessorInputs], Callable[..., Scores] | None]
"""Builds a processor from a field's value; returns None if the value needs none."""


def _guidance(scale: Any, inputs: ProcessorInputs) -> LogitsProcessor | None:
    # The unconditional context doubles the cost, so a scale known to be 1 is skipped.
    if not is_traced(scale) and scale == 1:
        return None
    return processors.UnbatchedClassifierFreeGuidanceLogitsProcessor(scale)


def _diversity(groups: int, inputs: ProcessorInputs) -> LogitsProcessor | None:
    if groups == 1:
        return None
    config = inputs.config
    return processors.HammingDiversityLogitsProcessor(
        config.diversity_penalty, config.num_beams, groups
    )


def _min_length(length: Any, inputs: ProcessorInputs) -> LogitsProcessor | None:
    if inputs.config.min_new_tokens is not None:  # wins over min_length
        return None
    return processors.MinLengthLogitsProcessor(length, inputs.eos)


def _length_penalty(pair: Any, inputs: ProcessorInputs) -> LogitsProcessor:
    if not inputs.eos:
        raise InputError("`exponential_decay_length_penalty` needs an `eos_token_id`")
    return processors.ExponentialDecayLengthPenalty(pair, inputs.eos, inputs.prompt_len)


def _suppressed_at_begin(tokens: Any, inputs: ProcessorInputs) -> LogitsProcessor:
    begin = inputs.prompt_len
    if inputs.config.forced_bos_token_id is not None:  # BOS is forced after a prompt of one token
        begin = begin + jnp.where(jnp.asarray(begin) > 1, 0, 1)
    return processors.SuppressTokensAtBeginLogitsProcessor(tokens, begin)


def _alone(processor: Callable[[Any], LogitsProcessor]) -> Builder:
    return lambda value, inputs: processor(value)


def _filter(warper: Callable[..., LogitsProcessor]) -> Builder:
    return lambda value, inputs: warper(value, min_tokens_to_keep=inputs.min_tokens_to_keep)


def _on_encoder(field: str, processor: Callable[..., LogitsProcessor]) -> Builder:
    def build(value: Any, inputs: ProcessorInputs) -> LogitsProcessor | None:
        has_effect = is_traced(value) or value != FIELDS[field].neutral
        if inputs.encoder_ids is None and not has_effect:
            return None
        return processor(value, *inputs.encoder(field))

    return build


# Each table is in the order in which its processors apply.
_PENALTIES: dict[str, Builder] = {
    "guidance_scale": _guidance,
    "sequence_bias": _alone(processors.SequenceBiasLogitsProcessor),
    "num_beam_groups": _diversity,
    "encoder_repetition_penalty": _on_encoder(
        "encoder_repetition_penalty", processors.EncoderRepetitionPenaltyLogitsProcessor
    ),
    "repetition_penalty": _alone(processors.RepetitionPenaltyLogitsProcessor),
    "presence_penalty": _alone(processors.PresencePenaltyLogitsProcessor),
    "frequency_penalty": _alone(processors.FrequencyPenaltyLogitsProcessor),
    "logit_bias": _alone(processors.LogitBiasLogitsProcessor),
    "no_repeat_ngram_size": _alone(processors.NoRepeatNGramLogitsProcessor),
    "encoder_no_repeat_ngram_size": _on_encoder(
        "encoder_no_repeat_ngram_size", processors.EncoderNoRepeatNGramLogitsProcessor
    ),
    "bad_words_ids": lambda words, inputs: processors.NoBadWordsLogitsProcessor(words, inputs.eos),
    "min_new_tokens": lambda count, inputs: processors.MinNewTokensLengthLogitsProcessor(
        inputs.prompt_len, count, inputs.eos
    ),
    "min_length": _min_length,
}
_FORCING: dict[str, Builder] = {
    "forced_bos_token_id": _alone(processors.ForcedBOSTokenLogitsProcessor),
    "forced_eos_token_id": lambda tokens, inputs: processors.ForcedEOSTokenLogitsProcessor(
        inputs.max_length, tokens
    ),
    "remove_invalid_values": lambda on, inputs: (
        processors.InfNanRemoveLogitsProcessor() if on else None
    ),
    "exponential_decay_length_penalty": _length_penalty,
    "suppress_tokens": _alone(processors.SuppressTokensLogitsProcessor),
    "begin_suppress_tokens": _suppressed_at_begin,
}
_WARPERS: dict[str, Builder] = {
    "temperature": _alone(processors.TemperatureLogitsWarper),
    "top_h": _alone(processors.TopHLogitsWarper),
    "top_k": _filter(processors.TopKLogitsWarper),
    "top_p": _filter(processors.TopPLogitsWarper),
    "min_p": _filter(processors.MinPLogitsWarper),
    "typical_p": _filter(processors.TypicalLogitsWarper),
    "epsilon_cutoff": _filter(processors.EpsilonLogitsWarper),
    "eta_cutoff": _filter(processors.EtaLogitsWarper),
}
WHEN_SAMPLING = ("temperature", "top_k", "top_p")
"""Fields whose processors are in every list that samples."""
REGISTERED: dict[str, dict[str, Builder]] = {"penalties": {}, "last": {}}
"""Builders of registered processors, by place: "penalties" are applied before the caller's
processors and the warpers, "last" after all others; see `registration.register_processor`."""


def build_processors(
    inputs: ProcessorInputs,
    *,
    prefix_allowed_tokens_fn: Callable[..., Iterable[int]] | None = None,
    extra: Iterable[Callable[..., Scores]] = (),
) -> LogitsProcessorList:
    """Builds the processors that the settings enable, in transformers' order.

    A processor is in the list if its field has an effect or was set in code (``config.explicit``),
    so a field set to its neutral value does not change the program. Temperature, top-k and top-p
    are always in the list when sampling.

    Args:
        inputs: the settings, and what they depend on.
        prefix_allowed_tokens_fn: `(batch_id, ids) -> allowed token ids`.
        extra: the caller's own processors, placed after the built-in ones and before the warpers.
            One of the same class as a built-in one replaces it.

    Raises:
        InputError: a field names a token outside the vocabulary, or needs an input or an end token
            that is missing.
    """
    config = inputs.config
    _check_ids(inputs)
    built = _build(_PENALTIES, inputs)
    if prefix_allowed_tokens_fn is not None:
        # Each beam group calls it separately, with the rows of that group. Without beams a prompt
        # has a row for each sample.
        rows = config.num_beams // config.num_beam_groups
        rows = config.num_return_sequences if config.num_beams == 1 else rows
        built.append(processors.PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, rows))
    built += _build(_FORCING | REGISTERED["penalties"], inputs)
    warpers = _build(_WARPERS, inputs) if config.do_sample else []
    last = _build(REGISTERED["last"], inputs)
    if config.renormalize_logits:
        last.append(processors.LogitNormalization())
    return LogitsProcessorList([*_merged(built, list(extra)), *warpers, *last])


def _build(builders: dict[str, Builder], inputs: ProcessorInputs) -> list[Callable[..., Scores]]:
    built = []
    for name, build in builders.items():
        if _active(inputs.config, name):
            processor = build(getattr(inputs.config, name), inputs)
            if processor is not None:
                built.append(processor)
    return built


def _active(config: GenerationConfig, name: str) -> bool:
    """Returns whether a field enables its processor."""
    value = getattr(config, name)
    if value is None:
        return False
    is_set = name in WHEN_SAMPLING or name in config.explicit
    return is_set or is_traced(value) or value != FIELDS[name].neutral


def _merged(
    built: Sequence[Callable[..., Scores]], extra: Sequence[Callable[..., Scores]]
) -> list[Callable[..., Scores]]:
    for processor in extra:
        if not callable(processor):
            raise InputError(
                f"`logits_processor` must hold callables, but holds {quoted(processor)}"
            )
    replacing: dict[type, Any] = {
        type(p): p for p in reversed(extra) if isinstance(p, LogitsProcessor)
    }
    merged = [replacing.get(type(processor), processor) for processor in built]
    return [*merged, *(p for p in extra if not any(p is m for m in merged))]


def _check_ids(inputs: ProcessorInputs) -> None:
    for name, value in {**inputs.config.to_dict(), "eos_token_id": inputs.eos}.items():
        if not FIELDS[name].token_ids or value is None:
            continue
        for token in ids_in(value):
            if not is_traced(token) and not 0 <= token < inputs.vocab_size:
                raise InputError(
                    f"`{name}` names token {token}, but the vocabulary has {inputs.vocab_size} "
                    "tokens"
                )
