"""From generation settings to the list of logits processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.processors.base import LogitsProcessor, LogitsProcessorList, Scores
from jaxllm.generation.processors.bias import (
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from jaxllm.generation.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from jaxllm.generation.processors.host.prefix import PrefixConstrainedLogitsProcessor
from jaxllm.generation.processors.lengths import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from jaxllm.generation.processors.ngrams import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)
from jaxllm.generation.processors.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    HammingDiversityLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from jaxllm.generation.processors.tokens import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from jaxllm.generation.processors.warpers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from jaxllm.generation.processors.watermark.config import watermarking_config
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.fields import FIELDS


def build_processors(
    config: GenerationConfig,
    *,
    prompt_len: int | Int[Array, ""],
    max_length: int | Int[Array, ""],
    eos_token_id: tuple[int, ...],
    vocab_size: int,
    encoder_input_ids: Int[Array, "B S"] | None = None,
    encoder_mask: Bool[Array, "B S"] | None = None,
    prompt_ids: Int[Array, "B T"] | None = None,
    prompt_mask: Bool[Array, "B T"] | None = None,
    prefix_allowed_tokens_fn: Callable[..., Iterable[int]] | None = None,
    extra: Iterable[Callable[..., Scores]] = (),
) -> LogitsProcessorList:
    """The processors that the settings ask for, in the order of transformers.

    A processor is in the list if its field has an effect, or was given in code (``config.given``):
    a number that is moved through its neutral value does not change the program. Temperature,
    top-k and top-p are always there when sampling.

    Args:
        config: The settings.
        prompt_len: Length of the prompt with its padding (for T5, of the decoder's).
        max_length: Length of a full row, in the same count.
        eos_token_id: The end-of-sequence tokens in force; may be empty.
        vocab_size: Number of scores.
        encoder_input_ids: The encoder's input; None for decoder-only models, whose prompt stands in
            for it.
        encoder_mask: Which of them are real.
        prompt_ids: The prompt, needed for that.
        prompt_mask: Which of its tokens are real.
        prefix_allowed_tokens_fn: The caller's rule for each prompt and its tokens so far.
        extra: The caller's own processors. They come after the built-in ones and before the
            warpers; one of the same class as a built-in one takes its place.

    Raises:
        InputError: A field names a token outside the vocabulary, or needs an input or an end token
            that is not there.
    """
    _check_ids(config, eos_token_id, vocab_size)
    inputs = (encoder_input_ids, encoder_mask)
    if encoder_input_ids is None:
        inputs = (prompt_ids, prompt_mask)

    built = [
        *_on_tokens(config, eos_token_id, inputs),
        *_on_minimum(config, eos_token_id, prompt_len),
        *_on_prefixes(config, prefix_allowed_tokens_fn),
        *_on_lengths(config, eos_token_id, prompt_len, max_length),
    ]
    # Beams need a token that does not end the text.
    least = 1 if config.num_beams == 1 else max(2, len(eos_token_id) + 1)
    warpers = _warpers(config, least) if config.do_sample else []
    last: list[LogitsProcessor] = []
    if config.watermarking_config is not None:
        last.append(watermarking_config(config.watermarking_config).construct_processor(vocab_size))
    if config.renormalize_logits:
        last.append(LogitNormalization())
    return LogitsProcessorList([*_merged(built, list(extra)), *warpers, *last])


def _wanted(config: GenerationConfig, name: str) -> bool:
    value, field = getattr(config, name), FIELDS[name]
    if value is None:
        return False
    return name in config.given or is_traced(value) or value != field.neutral


def _on_tokens(
    config: GenerationConfig, eos: tuple[int, ...], inputs: tuple[Any, Any]
) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    # Guidance costs a second context: a scale known to be 1 builds nothing, even if it was given.
    scale = config.guidance_scale
    if scale is not None and (is_traced(scale) or scale != 1):
        found.append(UnbatchedClassifierFreeGuidanceLogitsProcessor(scale))
    if _wanted(config, "sequence_bias"):
        found.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.num_beam_groups > 1:
        groups = (config.num_beams, config.num_beam_groups)
        found.append(HammingDiversityLogitsProcessor(config.diversity_penalty, *groups))
    if _wanted(config, "encoder_repetition_penalty"):
        encoder = _needed(inputs, "encoder_repetition_penalty")
        penalty = config.encoder_repetition_penalty
        found.append(EncoderRepetitionPenaltyLogitsProcessor(penalty, *encoder))
    if _wanted(config, "repetition_penalty"):
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if _wanted(config, "no_repeat_ngram_size"):
        found.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if _wanted(config, "encoder_no_repeat_ngram_size"):
        encoder = _needed(inputs, "encoder_no_repeat_ngram_size")
        size = config.encoder_no_repeat_ngram_size
        found.append(EncoderNoRepeatNGramLogitsProcessor(size, *encoder))
    if _wanted(config, "bad_words_ids"):
        found.append(NoBadWordsLogitsProcessor(config.bad_words_ids, eos))
    return found


def _on_minimum(
    config: GenerationConfig, eos: tuple[int, ...], prompt_len: int | Int[Array, ""]
) -> list[LogitsProcessor]:
    if _wanted(config, "min_new_tokens"):
        minimum = config.min_new_tokens  # wins over min_length
        return [MinNewTokensLengthLogitsProcessor(prompt_len, minimum, eos)]
    if _wanted(config, "min_length"):
        return [MinLengthLogitsProcessor(config.min_length, eos)]
    return []


def _on_prefixes(
    config: GenerationConfig, function: Callable[..., Iterable[int]] | None
) -> list[LogitsProcessor]:
    if function is None:
        return []
    # Groups are asked one at a time.
    rows = config.num_beams // config.num_beam_groups
    return [PrefixConstrainedLogitsProcessor(function, rows)]


def _on_lengths(
    config: GenerationConfig,
    eos: tuple[int, ...],
    prompt_len: int | Int[Array, ""],
    max_length: int | Int[Array, ""],
) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if _wanted(config, "forced_bos_token_id"):
        found.append(ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if _wanted(config, "forced_eos_token_id"):
        found.append(ForcedEOSTokenLogitsProcessor(max_length, config.forced_eos_token_id))
    if config.remove_invalid_values:
        found.append(InfNanRemoveLogitsProcessor())
    if _wanted(config, "exponential_decay_length_penalty"):
        if not eos:
            raise InputError("`exponential_decay_length_penalty` needs an `eos_token_id`")
        pair = config.exponential_decay_length_penalty
        found.append(ExponentialDecayLengthPenalty(pair, eos, prompt_len))
    if _wanted(config, "suppress_tokens"):
        found.append(SuppressTokensLogitsProcessor(config.suppress_tokens))
    if _wanted(config, "begin_suppress_tokens"):
        begin = prompt_len
        if config.forced_bos_token_id is not None:  # forced after a prompt of one token
            begin = prompt_len + jnp.where(jnp.asarray(prompt_len) > 1, 0, 1)
        tokens = config.begin_suppress_tokens
        found.append(SuppressTokensAtBeginLogitsProcessor(tokens, begin))
    return found


def _warpers(config: GenerationConfig, least: int) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(config.temperature)]
    if _wanted(config, "top_h"):
        found.append(TopHLogitsWarper(config.top_h))
    found.append(TopKLogitsWarper(config.top_k, min_tokens_to_keep=least))
    found.append(TopPLogitsWarper(config.top_p, min_tokens_to_keep=least))
    if _wanted(config, "min_p"):
        found.append(MinPLogitsWarper(config.min_p, min_tokens_to_keep=least))
    if _wanted(config, "typical_p"):
        found.append(TypicalLogitsWarper(config.typical_p, min_tokens_to_keep=least))
    if _wanted(config, "epsilon_cutoff"):
        found.append(EpsilonLogitsWarper(config.epsilon_cutoff, min_tokens_to_keep=least))
    if _wanted(config, "eta_cutoff"):
        found.append(EtaLogitsWarper(config.eta_cutoff, min_tokens_to_keep=least))
    return found


def _merged(
    built: Sequence[LogitsProcessor], extra: Sequence[Callable[..., Scores]]
) -> list[Callable[..., Scores]]:
    for processor in extra:
        if not callable(processor):
            raise InputError(f"`logits_processor` must hold callables, but holds {processor!r}")
    replacing = {type(p): p for p in reversed(extra) if isinstance(p, LogitsProcessor)}
    merged = [replacing.get(type(processor), processor) for processor in built]
    return [*merged, *(p for p in extra if not any(p is m for m in merged))]


def _needed(inputs: tuple[Any, Any], name: str) -> tuple[Any, Any]:
    if inputs[0] is None:
        raise InputError(f"`{name}` needs token ids as the model's input")
    return inputs


def _check_ids(config: GenerationConfig, eos: tuple[int, ...], vocab_size: int) -> None:
    named: dict[str, Any] = {
        "eos_token_id": eos,
        "bad_words_ids": [i for word in config.bad_words_ids or () for i in word],
        "sequence_bias": [i for word, _ in config.sequence_bias or () for i in word],
    }
    for name in (
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ):
        value = getattr(config, name)
        named[name] = () if value is None else (value,) if not isinstance(value, tuple) else value
    for name, ids in named.items():
        for token in ids:
            if not is_traced(token) and not 0 <= token < vocab_size:
                raise InputError(
                    f"`{name}` names token {token}, but the vocabulary has {vocab_size} tokens"
                )
