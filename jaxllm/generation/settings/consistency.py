"""Checks generation settings for values that are not implemented and fields that conflict."""

from __future__ import annotations

import jax
import numpy as np

from jaxllm.common.errors import ConfigError, InputError, UnsupportedError, quoted, warn
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.fields import Condition, checked_value
from jaxllm.generation.settings.mode import is_contrastive
from jaxllm.generation.settings.special_tokens import token_tuple
from jaxllm.models.decoder import GenerativeModel


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
    ineffective: set[str] = set()
    if not config.return_dict_in_generate:
        ineffective = {name for name, field in FIELDS.items() if field.record} - config.explicit
    for name, value in config.to_dict().items():
        field = FIELDS[name]
        in_use = config.do_sample or (name == "top_k" and is_contrastive(config))
        if field.only_sampling and in_use:
            checked_value(field, value, "the model's files", ConfigError)
        if field.supported is None:
            continue
        if not isinstance(value, np.ndarray | jax.Array) and value in field.supported:
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
