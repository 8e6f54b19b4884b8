"""Checks generation settings for values that are not implemented and fields that conflict."""

from __future__ import annotations

import warnings

from jaxllm.common.errors import ConfigError, InputError, UnsupportedError
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.fields import checked_value
from jaxllm.generation.settings.mode import draft_options, generation_mode, is_contrastive
from jaxllm.generation.settings.special_tokens import token_tuple
from jaxllm.models.decoder import GenerativeModel

_RECORDS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


class UnusedFieldWarning(UserWarning):
    """A generation field that has no effect beside the other settings.

    Attributes:
        field: name of the field.
        needs: the setting without which it has no effect; empty if no setting helps.
    """

    def __init__(self, message: str, field: str, needs: str = "") -> None:
        super().__init__(message)
        self.field, self.needs = field, needs


def check_for_use(config: GenerationConfig) -> GenerationConfig:
    """Checks that all values are implemented, and those that a file left unchecked.

    As in transformers, values of a file have no effect if they only choose how results are
    computed in ways that jaxllm lacks, or ask for outputs without ``return_dict_in_generate``.

    Returns:
        The settings without such values.

    Raises:
        UnsupportedError: a value is not implemented; the message names the field and the supported
            values.
        ConfigError: a sampling field of a file has an effect, but an invalid value.
    """
    ineffective = set() if config.return_dict_in_generate else {*_RECORDS} - config.explicit
    for name, value in config.to_dict().items():
        field = FIELDS[name]
        in_use = config.do_sample or (name == "top_k" and is_contrastive(config))
        if field.only_sampling and in_use:
            checked_value(field, value, "the model's files", ConfigError)
        if field.supported is None or (not is_traced(value) and value in field.supported):
            continue
        if field.execution and name not in config.explicit:
            ineffective.add(name)
            continue
        supported = " or ".join(map(repr, field.supported))
        raise UnsupportedError(
            f"`{name}`={value!r} ({field.doc}) is not supported: it must be {supported}"
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
                f"`{name}`={getattr(config, name)!r} is also in `suppress_tokens`, "
                "which leaves no token to choose"
            )

    mode = generation_mode(config)
    active = {
        "do_sample": config.do_sample,
        "penalty_alpha": mode == "contrastive_search" or beams > 1,  # with beams it raises
        "do_sample or penalty_alpha": config.do_sample or is_contrastive(config),
        "top_k > 1 and greedy search": mode == "contrastive_search",
        "greedy search or sampling": mode in ("dola_generation", "assisted_generation"),
        "num_beams": beams > 1,
        "num_beam_groups": config.num_beam_groups > 1,
        "an assistant": assistant_model is not None or config.assistant_early_exit is not None,
        "a draft": bool(draft_options(config, assistant_model)),
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_tokenizer": False,
    }

    def has_effect(name: str) -> bool:
        return FIELDS[name].has_effect(getattr(config, name))

    for name in sorted(config.explicit):
        needs = FIELDS[name].needs
        if needs is None or not has_effect(name):
            continue
        if not (active[needs] if needs in active else has_effect(needs)):
            message = f"`{name}`={getattr(config, name)!r} has no effect without `{needs}`"
            warnings.warn(UnusedFieldWarning(message, name, needs), stacklevel=2)
