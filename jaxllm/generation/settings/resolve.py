"""Settings of a call: merges and checks them, and finds its lengths and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.common.arguments import checked, checked_count
from jaxllm.common.errors import ConfigError, InputError, UnsupportedError, counted, quoted, warn
from jaxllm.generation.inputs.arguments import PaddedBatch, check_positions
from jaxllm.generation.inputs.values import any_traced, is_traced
from jaxllm.generation.settings.config import FIELDS, GenerationConfig, is_contrastive
from jaxllm.generation.settings.fields import Condition, checked_value
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.batch import Truncation, check_truncation
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.translation_tokenizers import WithLanguages
from jaxllm.tokenizers.vocabulary import NO_MAX_LENGTH

MAX_COLUMNS = 2**20
DEFAULT_NEW_TOKENS = 256
"""New tokens of a text or answer, where neither the caller nor the model's files set a length."""


class UnusedFieldWarning(UserWarning):
    """A generation field that has no effect beside the other settings.

    Attributes:
        field: name of the field.
        needs: the setting without which it has no effect; empty if no setting helps.
    """

    def __init__(self, message: str, field: str, needs: str = "") -> None:
        super().__init__(message)
        self.field, self.needs = field, needs


def merged_config(
    model: GenerativeModel,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    assistant_model: GenerativeModel | None = None,
) -> tuple[GenerationConfig, tuple[int, ...]]:
    """Merged settings of a call, and its end tokens.

    A field of the call overrides `generation_config`, which overrides the model's own generation
    config. If neither of the first two sets `eos_token_id`, all end tokens of the model's files
    apply.
    """
    if isinstance(generation_config, Mapping):
        for name in generation_config:
            checked(name, (str,), "generation_config", "names of fields")
        generation_config = GenerationConfig(**generation_config)
    elif not isinstance(generation_config, GenerationConfig | None):
        raise InputError(
            f"generation_config: expected a GenerationConfig, found {type(generation_config)}"
        )
    generation_config = generation_config or GenerationConfig()
    explicit = generation_config.merge(GenerationConfig(**fields))
    for name, value in explicit.to_dict().items():
        if FIELDS[name].static and any_traced(value):
            raise InputError(f"{name}: must be known outside jax.jit; found a tracer")
    if model.card is None:
        check_explicit(model, explicit)
    own = getattr(model.card, "generation_config", None) or GenerationConfig()
    config = check_for_use(own.merge(explicit))
    check_consistent(config, assistant_model)
    for name, value in config.to_dict().items():
        if (provider := FIELDS[name].provider) and value is not FIELDS[name].neutral:
            import_module(provider)
    if "decoder_start_token_id" in config.explicit and not model.is_encoder_decoder:
        name = "decoder_start_token_id"
        message = f"`{name}` has no effect: this model has a decoder only"
        warn(UnusedFieldWarning(message, name))
    if "eos_token_id" in explicit.to_dict():
        return config, token_tuple(config.eos_token_id)
    card = model.checked_card("generate")
    own_ends = token_tuple(own.eos_token_id)
    end_tokens = (*own_ends, *card.config.eos_token_ids, *card.tokenizer_eos)
    known = tuple(dict.fromkeys(i for i in end_tokens if 0 <= i < model.config.vocab_size))
    if card.unknown_eos and not known:
        warn(
            f"no end token: {', '.join(map(str, card.unknown_eos))}, which the model's files name, "
            "is not in its vocabulary, so every row has the maximum length; give eos_token_id="
        )
    return config, known


def check_explicit(model: GenerativeModel, fields: GenerationConfig) -> None:
    """Checks that a call sets what a model without a card cannot know: end and pad token, length.

    Raises:
        InputError: a setting is missing.
    """
    given = {*fields.to_dict()}
    if model.forward_config.pad_token_id is not None:
        given.add("pad_token_id")
    if "max_length" in given:
        given.add("max_new_tokens")
    names = ("eos_token_id", "pad_token_id", "max_new_tokens")
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            f"{', '.join(missing)}: not given, and unknown, because this model came out of a JAX "
            "transformation, which keeps the weights but not the settings of its files; give a "
            "value to each, or use model.with_card(original.card)"
        )


def check_for_use(config: GenerationConfig) -> GenerationConfig:
    """Checks that all values are implemented, and checks the values of a file, which are unchecked.

    As in transformers, values of a file have no effect if they only choose how results are
    computed in ways that jaxllm lacks, or ask for outputs without ``return_dict_in_generate``.

    Returns:
        The settings without such values.

    Raises:
        UnsupportedError: a value is not implemented; the message names the field and the supported
            values.
        ConfigError: a sampling field of a file has an effect, but an invalid value.
    """
    ineffective: set[str] = set()
    if not config.return_dict_in_generate:
        ineffective = {name for name, field in FIELDS.items() if field.record} - config.explicit
    for name, value in config.to_dict().items():
        field = FIELDS[name]
        in_use = config.do_sample or (name == "top_k" and is_contrastive(config))
        if field.only_sampling and in_use:
            checked_value(field, value, "the model's files", ConfigError)
        is_array = isinstance(value, np.ndarray | jax.Array)
        if field.supported is None or (not is_array and value in field.supported):
            continue
        if field.execution and name not in config.explicit:
            ineffective.add(name)
            continue
        supported = " or ".join(map(repr, field.supported))
        raise UnsupportedError(
            f"`{name}`={quoted(value)} ({field.doc}) is not supported: it must be {supported}"
        )
    if "cache_implementation" in ineffective:
        ineffective |= {"cache_config"} - config.explicit
    return config.without(ineffective)


def check_consistent(
    config: GenerationConfig, assistant_model: GenerativeModel | None = None
) -> None:
    """Raises for settings that contradict each other, and warns of settings without effect.

    As in transformers, it warns only of fields given in code: a checkpoint's file may set a
    temperature and be used greedily.

    Raises:
        InputError: several results from greedy search, more results than beams, beam groups that do
            not divide the beams, or a token that is both forced and suppressed.
    """
    results, beams = config.num_return_sequences, config.num_beams
    if results > 1 and beams == 1 and not config.do_sample:
        raise InputError(
            f"`num_return_sequences`={results}: greedy search finds one result; set do_sample=True "
            "or num_beams"
        )
    groups = config.num_beam_groups
    if groups > 1 and (beams == 1 or beams % groups):
        raise InputError(f"`num_beam_groups`: {groups} groups do not divide num_beams, {beams}")
    if 1 < beams < results:
        raise InputError(
            f"`num_return_sequences`={results} must be at most `num_beams`={beams}, "
            "since each beam gives one result"
        )
    suppressed = set(config.suppress_tokens or ())
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = token_tuple(getattr(config, name))
        if forced and suppressed.issuperset(forced):
            raise InputError(
                f"`{name}`={quoted(getattr(config, name))} is also in `suppress_tokens`, "
                "which leaves no token to choose"
            )

    for name in sorted(config.explicit):
        field, value = FIELDS[name], getattr(config, name)
        if field.has_effect(value) and not _is_met(field.needs, config, assistant_model):
            message = f"`{name}`={quoted(value)} has no effect without `{field.needs_text}`"
            warn(UnusedFieldWarning(message, name, field.needs_text))


def _is_met(
    needs: str | Condition | None, config: GenerationConfig, assistant_model: GenerativeModel | None
) -> bool:
    if isinstance(needs, Condition):
        return needs.holds(config, assistant_model)
    return needs is None or FIELDS[needs].has_effect(getattr(config, needs))


def resolve_max_length(
    config: GenerationConfig,
    prompt_len: int,
    max_positions: int | None = None,
    *,
    is_encoder_decoder: bool = False,
) -> int | Int[Array, ""]:
    """Maximum length of a row with a prompt of ``prompt_len`` tokens, padding included.

    As in transformers ``max_new_tokens`` overrides ``max_length``. With neither, the maximum is 20
    new tokens, but at most ``max_positions`` in total; lengths that were set are not reduced. The
    minimum, ``min_new_tokens`` or else ``min_length``, is only compared with the maximum.

    Raises:
        InputError: the prompt alone reaches the maximum, or the minimum is above it.

    >>> resolve_max_length(GenerationConfig(max_new_tokens=5), prompt_len=10)
    15
    """
    for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if getattr(config, new) is not None and total in config.explicit:
            warn(f"`{total}` has no effect beside `{new}`")
    is_default = config.max_new_tokens is None and "max_length" not in config.to_dict()
    if config.max_new_tokens is not None:
        max_length = prompt_len + config.max_new_tokens
    elif is_default:
        max_length = prompt_len + config.max_length
        max_length = max_length if max_positions is None else min(max_length, max_positions)
    else:
        max_length = config.max_length
    if is_traced(max_length):
        return max_length
    if prompt_len >= max_length:
        prompt = "the decoder's prompt" if is_encoder_decoder else "the prompt"
        limit = f"`max_length` is {max_length}: nothing can be generated; raise it"
        if is_default:
            limit = f"the model's context has {max_length}: nothing can be generated; shorten it"
        raise InputError(
            f"{prompt} has {counted(prompt_len)}, but {limit}, or set `max_new_tokens`"
        )
    name, min_length = "min_length", config.min_length
    if config.min_new_tokens is not None:
        name, min_length = "min_new_tokens", prompt_len + config.min_new_tokens
    # A minimum from a checkpoint's file does not forbid a call with a smaller maximum.
    if name in config.explicit and not is_traced(min_length) and min_length > max_length:
        raise InputError(
            f"`{name}` asks for at least {min_length} tokens in all, but the maximum is "
            f"{max_length}: lower it, or raise `max_new_tokens`"
        )
    return max_length


def checked_lengths(
    model: GenerativeModel, config: GenerationConfig, prompt: PaddedBatch
) -> tuple[GenerationConfig, int]:
    """Settings and `max_length`, checked, with lengths counted in columns of the result.

    A prompt of embeddings is not part of the result, so it takes none of these columns.
    """
    max_length = resolve_max_length(
        config,
        prompt.start_len,
        model.config.context_length,
        is_encoder_decoder=model.is_encoder_decoder,
    )
    if is_traced(max_length):  # it sizes buffers
        raise InputError(
            "max_length: must be a Python int, since it sizes the result; found a tracer"
        )
    max_length = int(max_length)
    if prompt.ids is None and "max_length" in config.to_dict() and config.max_new_tokens is None:
        max_length -= prompt.length  # max_length counts the embedded prompt, which is not returned
        if max_length < 1:
            raise InputError("inputs_embeds: the prompt alone reaches max_length; raise it")
    min_length = config.min_length
    if prompt.ids is None and (is_traced(min_length) or min_length):  # counts the embeddings too
        min_length = min_length - prompt.length
        config = config.replace(
            min_length=jnp.maximum(min_length, 0) if is_traced(min_length) else max(min_length, 0)
        )
    if max_length > MAX_COLUMNS:
        raise InputError(
            f"max_length: {max_length} tokens, but a KV cache has room for {MAX_COLUMNS} at most: "
            "lower max_new_tokens or max_length"
        )
    check_positions(model, prompt, max_length - prompt.start_len)
    return config, max_length


def with_default_length(
    fields: GenerationConfig,
    model: GenerativeModel,
    prompt_length: int,
    new_tokens: int = DEFAULT_NEW_TOKENS,
) -> GenerationConfig:
    """Sets max_new_tokens to `new_tokens` (less if the context is shorter) unless a length is set.

    The default of commands, batches and pipelines; that of ``generate`` is transformers' 20.
    """
    model_defaults = model.generation_config or GenerationConfig()
    if {"max_length", "max_new_tokens"} & model_defaults.merge(fields).to_dict().keys():
        return fields
    limit = new_tokens
    taken = 1 if model.is_encoder_decoder else prompt_length  # the decoder's start token
    if model.config.context_length is not None:
        limit = max(1, min(limit, model.config.context_length - taken))
    return fields.replace(max_new_tokens=limit)


def check_language(
    model: GenerativeModel, tokenizer: Tokenizer | None, config: GenerationConfig
) -> None:
    """Raises InputError if a text would be translated into a language that nothing names."""
    if isinstance(tokenizer, WithLanguages) and config.forced_bos_token_id is None:
        start = config.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        if start not in tokenizer.lang_code_to_id.values():
            raise InputError(
                "tgt_lang: this translation model needs the language of the new text; give "
                "tgt_lang in the call, the row or the request, or --tgt-lang; or set "
                "tokenizer.tgt_lang, or the forced_bos_token_id of the generation config"
            )


def target_settings(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    fields: Mapping[str, Any] | None = None,
    tgt_lang: str | None = None,
) -> GenerationConfig:
    """The settings of a call, in which `Tokenizer.with_target` has set the target language.

    Raises:
        InputError: a translation model needs a language, and nothing names one.
    """
    given = GenerationConfig(**tokenizer.with_target(fields or {}, tgt_lang))
    config = (model.generation_config or GenerationConfig()).merge(given)
    check_language(model, tokenizer, config)
    return config


def cut_options(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    truncation: Truncation,
    max_source_length: int | None,
    new_tokens: int | None = None,
) -> dict[str, Any]:
    """Options with which the tokenizer cuts long texts; none where they are not cut.

    Args:
        truncation: True for the tokenizer's `model_max_length`, or the model's context if that is
            shorter. A causal model's context also has room for `new_tokens` (None: 20).
        max_source_length: the limit in tokens; takes precedence.
    """
    is_cut, limit = check_truncation(truncation), max_source_length
    if limit is not None:
        limit = int(checked_count(limit, "max_source_length"))
    elif is_cut:
        context = model.config.context_length or NO_MAX_LENGTH
        if not model.is_encoder_decoder:
            context -= min(new_tokens or 20, context // 2)
        limit = min(tokenizer.model_max_length, context)
        if limit == NO_MAX_LENGTH:
            raise InputError("truncation: the model has no longest text; give max_source_length")
    return {} if limit is None else {"truncation": True, "max_length": limit}


def token_tuple(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Converts None, one token id or several to a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_pad(
    model: GenerativeModel, config: GenerationConfig, eos: tuple[int, ...]
) -> int | None:
    """Padding token of a call: from the settings, else the first end token, else the model's.

    A token of a file that is not in the vocabulary counts as unset.

    Raises:
        InputError: the call sets a token that is not in the vocabulary.
    """
    size, pad = model.config.vocab_size, config.pad_token_id
    if pad is not None and 0 <= pad < size:
        return pad
    if pad is not None and "pad_token_id" in config.explicit:
        raise InputError(f"pad_token_id: {pad} is not in the vocabulary (0 to {size - 1})")
    return eos[0] if eos else model.config.pad_token_id
