"""Reads config.json: a field is used, is known not to affect the outputs, or raises."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from jaxllm.common import public
from jaxllm.common.config_keys import describe_keys, unknown_keys, with_all_end_tokens
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.models.config_checks import check_fields, coerce, spelled

C = TypeVar("C", bound="ModelConfig")

# fmt: off
# Keys that do not change what these models compute, beside those of `common.config_keys`.
INERT_MODEL_KEYS = frozenset({
    # Implied by the class.
    "model_type", "architectures", "is_encoder_decoder", "is_decoder", "n_ctx",
    "cross_attention_hidden_size",
    # Token types are embedded by no family here; a checkpoint that has such weights is refused.
    "type_vocab_size",
    # Settings of pipelines, which `jaxllm.pipeline` reads, and `Card.pooling`.
    "prefix", "task_specific_params", "pooling_type",
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
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

NAMES: Mapping[str, tuple[str, ...]] = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim", "d_kv"),
    "positions": ("max_position_embeddings", "n_positions"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "activation": ("hidden_act", "activation_function"),
    "epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "std": ("initializer_range", "init_std", "initializer_factor"),
    "embedding_dropout": ("embd_pdrop", "embed_dropout"),
    "attention_dropout": ("attn_pdrop", "attention_dropout", "dropout_rate"),
    "activation_dropout": ("activation_dropout",),
    "bias": ("enable_bias",),
    "attention_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "experts": ("num_local_experts", "num_experts"),
    "affine": ("layer_norm_elementwise_affine",),
}
"""Meaning of a config field -> names of the field. A family has a field of one name, or none."""


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

    model_type: ClassVar[str]
    """The family's name in config.json; ``"t5"`` for mT5 too, whose configs are T5's."""
    attribute_map: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, which config.json and `config.NAME` may use too -> field."""
    written_names: ClassVar[Mapping[str, str]] = {}
    """Field -> its name in a written config.json, where that is another one."""
    no_effect: ClassVar[Mapping[str, Any]] = {}
    """Keys that are no fields, and that change nothing with these values -> the value."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """Fields that are computed from others, and are not keys of config.json."""
    absent_tokens: ClassVar[tuple[str, ...]] = ("bos_token_id", "eos_token_id")
    """Tokens that a file may name although the vocabulary lacks them: there are none then."""
    unread: ClassVar[tuple[str, ...]] = (*TOKENS, "num_labels", "problem_type")
    """Fields that the forward pass does not read from the config; families add theirs. The model's
    layers have some of them."""
    flax_constants: ClassVar[Mapping[str, Any]] = {}
    """Fields that transformers' Flax class does not read -> the value that it computes with."""
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
        check_fields(self)
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
        """New values of the fields that `forward_part` changes: `unread` fields get None or 0.

        Families add fields that have several spellings.
        """
        hints = _field_types(type(self))
        return {name: _nothing(hints[name]) for name in self.unread}

    @classmethod
    def field(cls, what: str) -> str | None:
        """Name of the field that says `what`, a key of `NAMES`; None: the family has none."""
        own = _field_types(cls)
        return next((name for name in NAMES[what] if name in own), None)

    def value(self, what: str, default: Any) -> Any:
        """Value of the field that says `what`; the default if it is None, or there is no field."""
        name = self.field(what)
        value = None if name is None else getattr(self, name)
        return default if value is None else value

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
        return self.value("positions", None) or None

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
    def hidden(self) -> int:
        """Size of the hidden states within the blocks."""
        return self.value("width", 0)

    @property
    def width(self) -> int:
        """Size of token embeddings, and of the hidden states that the LM head reads."""
        return self.hidden

    @property
    def encoder_width(self) -> int:
        """Size of the hidden states of the encoder, if there is one."""
        return self.width

    @property
    def head_counts(self) -> dict[str, int]:
        """Numbers of attention heads by config.json field."""
        name = self.field("heads")
        return {} if name is None else {name: getattr(self, name)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads and checks a config.json object.

        Raises ConfigError or UnsupportedError, naming the field.
        """
        config = read_config(cls, raw)
        config.check()
        check_token_ids(config)
        return config

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        """Keys of a config.json object that are no fields, and that the family reads itself or that
        change nothing in it."""
        keys = cls.no_effect.items()
        return frozenset(key for key, value in keys if raw.get(key) in (None, value))

    def flax_differences(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that transformers' Flax class reads in another way than the PyTorch class, with
        the values that give jaxllm the results of the Flax class.

        Args:
            raw: the config.json object that this config is from.
        """
        constants = self.flax_constants.items()
        return {name: value for name, value in constants if getattr(self, name) != value}

    def is_extra_in_flax(self, tensor: str) -> bool:
        """True for a tensor that only the Flax class has with this config."""
        return False

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
                name = self.written_names.get(field.name, field.name)
                raw[name] = list(value) if isinstance(value, tuple) else value
        if self.num_labels != 2:
            raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
        if self.problem_type is not None:
            raw["problem_type"] = self.problem_type
        if self.is_encoder_decoder:
            raw["is_encoder_decoder"] = True
        return raw


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig(ModelConfig):
    """Config fields common to decoder-only families."""

    unread: ClassVar[tuple[str, ...]] = (*ModelConfig.unread, "initializer_range")

    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @property
    def heads(self) -> int:
        return self.value("heads", 1)

    @property
    def kv_heads(self) -> int:
        return self.value("kv_heads", self.heads)

    @property
    def size_per_head(self) -> int:
        return self.value("head_size", self.hidden // self.heads)

    @property
    def inner(self) -> int:
        """Size of the hidden layer of the feed-forward layer."""
        return self.value("inner", 4 * self.hidden)

    @property
    def embedding_dropout(self) -> float:
        """Dropout rate of the token embeddings with their positions."""
        return self.value("embedding_dropout", 0.0)

    @property
    def is_causal(self) -> bool:
        """False: tokens attend to both sides, so that the model cannot generate."""
        return True


def read_config(cls: type[C], raw: Mapping[str, Any]) -> C:
    """Fills the dataclass `cls` from a config.json object, checking types.

    null means None where the field can be None, else its default. Unknown keys raise by the policy
    of `common.config_keys`.
    """
    raw = with_all_end_tokens(raw)
    aliases = cls.attribute_map
    hints = _field_types(cls)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fields, handled = defaults.keys() - cls.derived, cls.handled_keys(raw)
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
    return without_absent_tokens(cls(**values))


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


def without_absent_tokens(config: C) -> C:
    """The config without token ids that are not in the vocabulary, and that no model can produce.

    Such ids are common: GPT-2's defaults in a smaller vocabulary, or a tokenizer's token that the
    embedding was not resized for. -1 means "no such token" in some old files.
    """

    def present(token: int) -> bool:
        return token < config.vocab_size

    changes: dict[str, Any] = {}
    names = config.absent_tokens
    for name in TOKENS:
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
    for name in TOKENS:
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


def _nothing(hint: Any) -> Any:
    """None if a field of this type can be None, else 0, false or an empty value.

    >>> _nothing(int | None), _nothing(float), _nothing(tuple[str, ...])
    (None, 0.0, ())
    """
    if type(None) in typing.get_args(hint):
        return None
    return (typing.get_origin(hint) or hint)()
