"""Reads config.json: a field is used, is known not to affect the outputs, or raises."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from jaxllm.common.config_keys import describe_keys, unknown_keys, with_all_end_tokens
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.common.public_names import public
from jaxllm.models.config_checks import check_size, coerce, spelled

C = TypeVar("C", bound="ModelConfig")

# fmt: off
# Keys that do not change what these models compute, beside those of `common.config_keys`.
INERT_MODEL_KEYS = frozenset({
    # Implied by the class.
    "model_type", "architectures", "is_encoder_decoder", "is_decoder", "n_ctx",
    "cross_attention_hidden_size",
    # Token types are embedded by no family here; a checkpoint that has such weights is refused.
    "type_vocab_size",
    # Settings of pipelines, which `jaxllm.pipeline` reads.
    "prefix", "task_specific_params",
    # Label names (only their number is used), and heads that jaxllm does not have.
    "id2label", "label2id", "predict_special_tokens", "classifier_dropout", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
})

# Old files keep generation settings in config.json; the loader reads them from there.
GENERATION_KEYS = frozenset({
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_return_sequences",
    "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty",
    "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
})
# fmt: on

_ELSEWHERE = {
    "update": "use dataclasses.replace(config, ...)",
    "save_pretrained": "model.save_pretrained(folder) writes it",
    "id2label": "jaxllm.pipeline('text-classification', ...) gives the names of labels",
    "label2id": "jaxllm.pipeline('text-classification', ...) gives the names of labels",
}
MAX_DEFAULT_WINDOW = 2048


@dataclasses.dataclass(frozen=True)
class AuxLoss:
    """What a mixture of experts adds to its loss (`models.losses.load_balancing_loss`)."""

    top_k: int
    """Experts of a token."""
    weight: float
    """The loss of the routers is multiplied by it."""


class _ConfigType(type):
    """Class of the config classes: keys of config.json that are no fields are read as in a file."""

    if not TYPE_CHECKING:  # it would hide misspelt fields from type checkers

        def __call__(cls, *args: Any, **values: Any) -> Any:
            if args or values.keys() <= {field.name for field in dataclasses.fields(cls)}:
                return super().__call__(*args, **values)
            return cls.from_dict({"model_type": cls.__name__, **values})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(metaclass=_ConfigType):
    """Config fields common to all families.

    Their other names and the keys of config.json that are no fields, such as `rope_scaling` and
    `use_cache`, are taken too, and read as by `from_dict`.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, which config.json and `config.NAME` may use too -> field."""
    is_encoder_decoder: ClassVar[bool] = False
    logit_softcap: ClassVar[float | None] = None
    """Soft cap of the logits (`models.model.Head`)."""

    vocab_size: int
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    decoder_start_token_id: int | None = None
    num_labels: int = 2
    problem_type: str | None = None

    def __post_init__(self) -> None:
        """Checks the types of all fields, and makes lists tuples and NumPy's numbers Python's."""
        for name, hint in _field_types(type(self)).items():
            value = coerce(name, getattr(self, name), hint)
            if value is None and type(None) not in typing.get_args(hint):
                raise ConfigError(f"{name}: expected {spelled(hint)}, found None")
            object.__setattr__(self, name, value)

    def check(self) -> None:
        """Raises ConfigError for a value that no model can be made with; families add theirs.

        Token ids beyond the vocabulary are not among them: defaults that a model never produces.
        """
        check_size(self, "vocab_size", "num_labels")
        problems = ("regression", "single_label_classification", "multi_label_classification")
        if self.problem_type is not None and self.problem_type not in problems:
            raise ConfigError(
                f"problem_type: expected one of {', '.join(problems)}, found "
                f"{quoted(self.problem_type)}"
            )

    def forward_part(self, *reads: str) -> Self:
        """The part of the config that the forward pass reads, which is part of a model's tree
        structure.

        Models that compute the same have equal ones: each value has one spelling, and fields that
        the forward pass does not read are None or 0.

        Args:
            reads: fields that the model's class reads, although most classes do not.

        >>> from jaxllm.models import LlamaConfig
        >>> base, instruct = LlamaConfig(eos_token_id=2), LlamaConfig(eos_token_id=7)
        >>> base.forward_part() == instruct.forward_part()
        True
        """
        values = {name: value for name, value in self.forward_values().items() if name not in reads}
        return dataclasses.replace(self, **values)

    def forward_values(self) -> dict[str, Any]:
        """Fields that `forward_part` changes; families add theirs."""
        tokens = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        return {**dict.fromkeys(tokens), "num_labels": 0, "problem_type": None}

    @property
    def model_type(self) -> str:
        """The family's name in config.json; ``"t5"`` for mT5 too, whose configs are T5's."""
        raise NotImplementedError

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else eos

    @property
    def max_positions(self) -> int | None:
        """Number of positions of the architecture, a hard limit; None: no limit."""
        return None

    @property
    def context_length(self) -> int | None:
        """Context length of pretraining, the default limit of `generate()`; None: no limit."""
        return None

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt that the model answers sensibly; None: any number."""
        return self.context_length

    @property
    def default_window(self) -> int:
        """Columns of a window of text or of a server's slot, where the caller names none."""
        return min(self.context_length or MAX_DEFAULT_WINDOW, MAX_DEFAULT_WINDOW)

    @property
    def aux_loss(self) -> AuxLoss | None:
        """The loss of routers that is added to that of the labels; None: there is none."""
        return None

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        raise NotImplementedError

    @property
    def encoder_width(self) -> int:
        """Size of the hidden states of the encoder, if there is one."""
        return self.width

    @property
    def head_counts(self) -> dict[str, int]:
        """Numbers of attention heads by config.json field."""
        return {}

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | PathLike[str], **fields: Any) -> Self:
        """Reads a checkpoint's config, as `jaxllm.auto.AutoConfig`, which must be of this class."""
        config = public("auto").AutoConfig.from_pretrained(path_or_hub_id, **fields)
        if not isinstance(config, cls):
            raise ConfigError(
                f"{path_or_hub_id}: has a {type(config).__name__}, not a {cls.__name__}"
            )
        return config

    if not TYPE_CHECKING:  # it would hide misspelt fields from type checkers

        def __getattr__(self, name: str) -> Any:
            """Other names of fields, and hints for attributes of transformers' configs.

            Called for missing names only.
            """
            if name in type(self).attribute_map:
                return getattr(self, type(self).attribute_map[name])
            hint = _ELSEWHERE.get(name)
            if name in GENERATION_KEYS:
                hint = "model.generation_config has it"
            where = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(where if hint is None else f"{where}: {hint}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict."""
        return dataclasses.asdict(self)

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        """A config.json object from which `from_dict` restores an equal config.

        Both transformers 4 and 5 read it. Families extend it for fields that are not written under
        their own names.

        Args:
            architecture: Hugging Face's name of the model's class.
        """
        raw: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("num_labels", "problem_type"):
                raw[field.name] = list(value) if isinstance(value, tuple) else value
        if self.num_labels != 2:
            raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
        if self.problem_type is not None:
            raw["problem_type"] = self.problem_type
        return raw


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig(ModelConfig):
    """Config fields common to decoder-only families."""

    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @property
    def is_causal(self) -> bool:
        """False: tokens attend to both sides, so that the model cannot generate."""
        return True

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"initializer_range": 0.0}


def read_config(
    cls: type[C],
    raw: Mapping[str, Any],
    *,
    handled: frozenset[str] = frozenset(),
    derived: frozenset[str] = frozenset(),
) -> C:
    """Fills the dataclass `cls` from a config.json object, checking types.

    null means None where the field can be None, else its default. Unknown keys raise by the policy
    of `common.config_keys`.

    Args:
        handled: keys that the caller reads itself.
        derived: fields of `cls` that are computed from others and are not keys of the file.
    """
    raw = with_all_end_tokens(raw)
    aliases = cls.attribute_map
    hints = _field_types(cls)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fields = defaults.keys() - derived
    check_keys(raw, {*aliases, *fields, *handled, *INERT_MODEL_KEYS, *GENERATION_KEYS})
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for key, value in raw.items():
        name = aliases.get(key, key)
        if name not in fields or (value is None and name in values):
            continue
        value = coerce(key, value, hints[name])
        if values.get(name) not in (None, value):
            raise ConfigError(
                f"{key}: {quoted(value)} contradicts {spelling[name]}, {quoted(values[name])}: two "
                "names of one field"
            )
        if value is not None or type(None) in typing.get_args(hints[name]):
            values[name], spelling[name] = value, key
    values["num_labels"] = count_labels(raw.get("id2label"), values.get("num_labels"))
    for name, default in sorted(defaults.items()):
        if default is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{name}: missing")
    return without_absent_tokens(cls(**values), "bos_token_id", "eos_token_id")


def check_keys(raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UnsupportedError for a quantized checkpoint, and for unknown keys, naming them all."""
    for key in ("quantization_config", "quantization"):  # the second is MLX's
        if raw.get(key):
            raise UnsupportedError(
                f"{key}: quantized checkpoints are read from GGUF files only; load the unquantized "
                "checkpoint, or a .gguf file of this model"
            )
    unknown = unknown_keys(raw, known)
    if unknown:
        raise UnsupportedError(
            f"{describe_keys(unknown)}: unknown in a {raw.get('model_type')!r} config, and may "
            "change what the model computes, so not ignored. To ignore a key all the same: "
            'load(..., config={"KEY": None}) or --config KEY=null'
        )


def without_absent_tokens(config: C, *names: str) -> C:
    """The config without token ids that are not in the vocabulary, and that no model can produce.

    Such ids are common: GPT-2's defaults in a smaller vocabulary, or a tokenizer's token that the
    embedding was not resized for. -1 means "no such token" in some old files.
    """

    def present(token: int) -> bool:
        return token < config.vocab_size

    changes: dict[str, Any] = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        if value == -1 or (name in names and isinstance(value, int) and not present(value)):
            changes[name] = None
        elif name in names and isinstance(value, tuple):
            changes[name] = tuple(filter(present, value)) or None
    return dataclasses.replace(config, **changes)


def count_labels(id2label: object, num_labels: int | None) -> int:
    """Number of classes, from `id2label` or `num_labels`; the two must agree."""
    if id2label is None:
        return 2 if num_labels is None else num_labels
    if not isinstance(id2label, Mapping):
        raise ConfigError(f"id2label: expected an object, found {quoted(id2label)}")
    if num_labels not in (None, len(id2label)):
        raise ConfigError(f"num_labels: {num_labels}, but id2label lists {len(id2label)} labels")
    return len(id2label) or 2


def check_token_ids(config: ModelConfig) -> None:
    """Raises ConfigError for a special token that is not in the vocabulary."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        for i in value if isinstance(value, tuple) else (value,):
            if i is not None and not 0 <= i < config.vocab_size:
                raise ConfigError(
                    f"{name}: {quoted(i)} is not in the vocabulary (vocab_size {config.vocab_size})"
                )


@functools.cache
def _field_types(cls: type[ModelConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
