"""Reading config.json: every field acts, is known to have no effect on the numbers, or raises."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxllm.errors import ConfigError, UnsupportedError

C = TypeVar("C")

# Bookkeeping of other tools: no effect on what the model computes.
INERT = frozenset(
    ["_name_or_path", "_from_model_config", "_commit_hash", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation", "architectures", "auto_class", "custom_pipelines", "dtype", "torch_dtype", "transformers_version", "transformers.js_config", "model_type", "tokenizer_class", "use_cache", "is_llama_config", "is_encoder_decoder", "is_decoder", "return_dict", "finetuning_task", "task_specific_params", "prefix", "label2id", "id2label", "tf_legacy_loss", "use_bfloat16", "pruned_heads", "chunk_size_feed_forward", "is_gated_act", "dense_act_fn", "n_ctx", "output_past", "predict_special_tokens", "gradient_checkpointing", "keys_to_ignore_at_inference", "unsloth_version", "unsloth_fixed", "unsloth_optimized", "model_max_length", "max_sequence_length", "classifier_dropout", "cross_attention_hidden_size", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "sep_token_id"]
)

# Old files keep generation settings in config.json; the loader takes them from there.
GENERATION_KEYS = frozenset(
    ["max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"]
)

MAX_LAYERS = 4096
MAX_SIZE = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Fields of every family."""

    vocab_size: int
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    decoder_start_token_id: int | None = None
    num_labels: int = 2
    problem_type: str | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else eos

    @property
    def max_positions(self) -> int | None:
        """A hard limit of the architecture on positions, or None."""
        return None


def read_config(
    cls: type[C],
    raw: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
    handled: frozenset[str] = frozenset(),
) -> C:
    """Fills the dataclass `cls` from a config.json object, checking types.

    `aliases` maps other spellings to field names; `handled` are keys that the caller reads itself.
    A key that nobody knows raises, unless its value is off (null, false, empty): it might change what
    the model computes, and a dropped setting gives fluent nonsense.
    """
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = (aliases or {}).get(key, key)
        if name in names:
            if value is not None or name not in values:
                values[name] = coerce(key, value, hints[name])
        elif key == "quantization_config" and value:
            raise UnsupportedError(
                "quantization_config: quantised checkpoints are read from GGUF files only; load the "
                "unquantised checkpoint, or a .gguf file of this model"
            )
        elif value and key not in INERT and key not in GENERATION_KEYS and key not in handled:
            raise UnsupportedError(
                f"{key}: unknown field of a {raw.get('model_type')!r} config, found {value!r}; it may "
                "change what the model computes, so it is not ignored. Remove it from config.json "
                "if you know that it does not"
            )
    if values.get("num_labels") is None:
        labels = raw.get("id2label")
        if labels is not None and not isinstance(labels, Mapping):
            raise ConfigError(f"id2label: expected an object, found {labels!r}")
        values["num_labels"] = len(labels) if labels else 2
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}  # type: ignore[arg-type]
    for name in sorted(required - {k for k, v in values.items() if v is not None}):
        raise ConfigError(f"{name}: missing")
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kept = {
        k: v
        for k, v in values.items()
        if v is not None or type(None) in typing.get_args(hints[k]) or defaults[k] is None
    }
    return cls(**kept)


def coerce(key: str, value: Any, hint: Any) -> Any:
    """The value as the annotated type, or ConfigError. JSON's 1 may stand for 1.0, not for true."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if value != value or value in (float("inf"), float("-inf")):
                break
            return float(value)
        if option is str and isinstance(value, str):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(option)[0]
            return tuple(coerce(key, v, inner) for v in value)
    if value is None:  # null in a file means: not set
        return None
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    raise ConfigError(f"{key}: expected {wanted}, found {value!r}")


def check_size(config: Any, *names: str, limit: int = MAX_SIZE) -> None:
    """Each named field is an integer in 1..limit."""
    for name in names:
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"{name}: expected 1 to {limit}, found {value}")


def check_rate(config: Any, *names: str) -> None:
    """Each named field is a probability below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}: expected 0 <= rate < 1, found {value}")


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}: expected a number > 0, found {value}")


def check_divides(config: Any, whole: str, part: str) -> None:
    a, b = getattr(config, whole), getattr(config, part)
    if a % b:
        raise ConfigError(f"{whole}: {a} is not a multiple of {part}, {b}")


def check_common(config: ModelConfig) -> None:
    """Sizes, token ids and label settings that every family has."""
    check_size(config, "vocab_size", "num_labels")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        for i in value if isinstance(value, tuple) else (value,):
            # Some old files write -1 for "no such token".
            if i is not None and not -1 <= i < config.vocab_size:
                raise ConfigError(
                    f"{name}: {i} is not in the vocabulary (vocab_size {config.vocab_size})"
                )
    problems = ("regression", "single_label_classification", "multi_label_classification")
    if config.problem_type is not None and config.problem_type not in problems:
        raise ConfigError(
            f"problem_type: expected one of {', '.join(problems)}, found {config.problem_type!r}"
        )
