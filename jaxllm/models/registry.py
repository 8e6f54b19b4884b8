"""Registry of model families: config, classes and weight table of each `model_type`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxllm.common.arguments import checked
from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.models import (
    bart,
    bloom,
    cohere,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neo,
    gptj,
    llama,
    m2m_100,
    marian,
    mbart,
    mistral,
    mixtral,
    opt,
    pegasus,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    xglm,
)
from jaxllm.models.absolute_encoder_decoder import absolute_table
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import BaseModel, LanguageModel, Model
from jaxllm.models.rotary_decoder import ROTARY_TABLE
from jaxllm.models.t5 import T5Config, T5EncoderModel, T5ForConditionalGeneration, t5_table
from jaxllm.models.t5gemma import (
    T5GEMMA_TABLE,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from jaxllm.models.weights import Table


@dataclasses.dataclass(frozen=True)
class Family:
    """Config class, model classes and weight table of one `model_type`.

    `classes` are keyed by Hugging Face's names, the language model first. `parts`: classes that are
    part of a larger checkpoint -> prefixes of the tensors that they do not read.
    """

    config: type[Any]
    classes: Mapping[str, Callable[..., Any]]
    table: Callable[[Any], Table]
    structure: tuple[str, ...]
    """Config fields that determine which tensors exist; named in errors, with dots where one
    config holds another."""
    headless_means_tied: bool = False
    """True if a checkpoint without lm_head.weight is tied regardless of its config (T5)."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other class names -> class that reads their checkpoints: old spellings, and headless
    encoder-decoders, whose class is not here and whose head is tied."""
    parts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def _decoder_only(
    file: ModuleType,
    table: Table | Callable[[Any], Table],
    *structure: str,
    old_names: Sequence[str] = (),
) -> Family:
    """The decoder-only family of a file, whose classes have Hugging Face's names.

    The weight table may depend on the config, such as on sizes of fused tensors.
    Args:
        structure: beside the number of layers.
    """
    config, classes = _defined_in(file)
    language_model, *_, headless = classes
    return Family(
        config=config,
        classes=classes,
        table=(lambda config: table) if isinstance(table, Table) else table,
        structure=(config.field("layers") or "", *structure, "tie_word_embeddings"),
        aliases=dict.fromkeys(old_names, language_model),
        parts={headless: ("lm_head.", "score.")},
    )


def _defined_in(file: ModuleType) -> tuple[type[ModelConfig], dict[str, type[Model[Any]]]]:
    """The config that a family's file defines, and its models by name: the language model first, a
    model without a head last."""
    own = [x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__]
    (config,) = (x for x in own if issubclass(x, ModelConfig) and "model_type" in vars(x))
    models = [x for x in own if issubclass(x, Model)]
    models.sort(key=lambda cls: (issubclass(cls, BaseModel), not issubclass(cls, LanguageModel)))
    return config, {cls.__name__: cls for cls in models}


def _t5(prefix: str) -> Family:
    return Family(
        config=T5Config,
        classes={
            f"{prefix}ForConditionalGeneration": T5ForConditionalGeneration,
            f"{prefix}EncoderModel": T5EncoderModel,
        },
        table=lambda config: t5_table(gated=config.gated),
        structure=("num_layers", "num_decoder_layers", "feed_forward_proj", "is_gated_act"),
        headless_means_tied=True,
        aliases=dict.fromkeys(
            (f"{prefix}Model", f"{prefix}WithLMHeadModel"), f"{prefix}ForConditionalGeneration"
        ),
        parts={f"{prefix}EncoderModel": ("decoder.", "lm_head.")},
    )


def _absolute(
    file: ModuleType, table: Callable[[Any], Table] = absolute_table, *structure: str
) -> Family:
    """BART or a relative; a file of the class without a head is read as a language model."""
    config, classes = _defined_in(file)
    return Family(
        config=config,
        classes=classes,
        table=table,
        structure=("encoder_layers", "decoder_layers", *structure, "tie_word_embeddings"),
        aliases={config.__name__.replace("Config", "Model"): next(iter(classes))},
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _decoder_only(
        llama, ROTARY_TABLE, "attention_bias", "mlp_bias", old_names=["LLaMAForCausalLM"]
    ),
    "mistral": _decoder_only(mistral, ROTARY_TABLE),
    "qwen2": _decoder_only(qwen2, ROTARY_TABLE),
    "qwen3": _decoder_only(qwen3, qwen3.QWEN3_TABLE, "attention_bias"),
    "mixtral": _decoder_only(mixtral, mixtral.MIXTRAL_TABLE, "num_local_experts"),
    "qwen3_moe": _decoder_only(
        qwen3_moe,
        qwen3_moe.QWEN3_MOE_TABLE,
        *("num_experts", "decoder_sparse_step", "mlp_only_layers", "attention_bias"),
    ),
    "gemma": _decoder_only(gemma, ROTARY_TABLE, "attention_bias"),
    "gemma2": _decoder_only(gemma2, gemma2.GEMMA2_TABLE, "attention_bias"),
    "gemma3_text": _decoder_only(gemma3, gemma3.GEMMA3_TABLE, "attention_bias"),
    "phi3": _decoder_only(phi3, phi3.phi3_table),
    "cohere": _decoder_only(cohere, cohere.cohere_table, "attention_bias", "use_qk_norm"),
    "gpt2": _decoder_only(gpt2, gpt2.GPT2_TABLE, "add_cross_attention"),
    "opt": _decoder_only(
        opt,
        opt.OPT_TABLE,
        *("enable_bias", "layer_norm_elementwise_affine", "word_embed_proj_dim"),
    ),
    "gpt_neo": _decoder_only(gpt_neo, gpt_neo.GPT_NEO_TABLE),
    "gptj": _decoder_only(gptj, gptj.gptj_table),
    "bloom": _decoder_only(bloom, bloom.bloom_table),
    "bart": _absolute(bart),
    "marian": _absolute(marian, marian.marian_table, "share_encoder_decoder_embeddings"),
    "mbart": _absolute(mbart),
    "m2m_100": _absolute(m2m_100),
    "pegasus": _absolute(pegasus, pegasus.pegasus_table),
    "xglm": _decoder_only(xglm, xglm.xglm_table, "add_cross_attention"),
    "t5gemma": Family(
        config=T5GemmaConfig,
        classes={"T5GemmaForConditionalGeneration": T5GemmaForConditionalGeneration},
        table=lambda config: T5GEMMA_TABLE,
        structure=(
            *("encoder.num_hidden_layers", "encoder.attention_bias"),
            *("decoder.num_hidden_layers", "decoder.attention_bias", "tie_word_embeddings"),
        ),
        aliases={"T5GemmaModel": "T5GemmaForConditionalGeneration"},
    ),
    "t5": _t5("T5"),
    "mt5": _t5("MT5"),
    "umt5": _t5("UMT5"),
}


NOT_READ: Mapping[str, str] = {
    "gemma3": "jaxllm does not read models with a vision tower; use a GGUF file of this model, "
    "which holds the text model alone, or a model of type gemma3_text",
}
"""Model types that are relatives of a family -> what to do instead."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Family, class and config of one config.json."""

    family: Family
    architecture: str
    config: Any

    @property
    def make(self) -> Callable[..., Any]:
        return self.family.classes[self.architecture]

    @property
    def table(self) -> Table:
        return self.family.table(self.config)

    @property
    def unread(self) -> tuple[str, ...]:
        """Prefixes of tensors that this class does not read."""
        return self.family.parts.get(self.architecture, ())


def model_spec(raw: Mapping[str, Any], architecture: str | type | None = None) -> ModelSpec:
    """Selects family and class for a config.json object, and reads the config.

    `architecture` overrides the file's, by name or by class: ``"T5EncoderModel"`` reads the encoder
    of a full T5. A base class such as `CausalLM` stands for the family's class derived from it.
    """
    checked(raw, (Mapping,), "config", "a config.json object")
    model_type = raw.get("model_type")
    if model_type is None or (isinstance(model_type, str) and not model_type):
        model_type = _type_of_class(raw)
    if not isinstance(model_type, str):
        raise ConfigError(
            f"model_type: expected one of {_names(FAMILIES)}, found {quoted(model_type)}; if the "
            'file lacks it: load(..., config={"model_type": ...})'
        )
    if model_type not in FAMILIES:
        why = NOT_READ.get(model_type, f"jaxllm has {_names(FAMILIES)}")
        raise UnsupportedError(f"model_type: {quoted(model_type)}; {why}")
    family = FAMILIES[model_type]
    raw = {**raw, "model_type": model_type}
    if isinstance(architecture, type):
        return ModelSpec(family, _derived(architecture, raw, family), family.config.from_dict(raw))
    name = architecture if architecture is not None else _listed(raw, family)
    name = family.aliases.get(name, name)
    if name not in family.classes:
        raise UnsupportedError(
            f"architectures: {quoted(name)}; for model_type {quoted(model_type)} jaxllm has "
            f"{_names(family.classes)}; to read the file as one of them: "
            "load(..., architecture=NAME) or --architecture NAME"
        )
    return ModelSpec(family, name, family.config.from_dict(raw))


def _type_of_class(raw: Mapping[str, Any]) -> str | None:
    """The `model_type` that a file without one has by its class, as the first files of GPT-2."""
    listed = raw.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1:
        return None
    for model_type, family in FAMILIES.items():
        if listed[0] in (*family.classes, *family.aliases):
            return model_type
    return None


def _derived(base: type, raw: Mapping[str, Any], family: Family) -> str:
    """Name of the family's class that is `base` or derived from it."""
    for name, cls in family.classes.items():
        if isinstance(cls, type) and issubclass(cls, base):
            return name
    raise UnsupportedError(
        f"model_type: {quoted(raw['model_type'])} has no {base.__name__}; it has "
        f"{_names(family.classes)}"
    )


def _listed(raw: Mapping[str, Any], family: Family) -> str:
    """Class name in the file's `architectures`; by default the language model."""
    listed = raw.get("architectures")
    if not listed:
        return next(iter(family.classes))
    if isinstance(listed, str):
        return listed
    if not isinstance(listed, list) or not isinstance(listed[0], str):
        raise ConfigError(f"architectures: expected a list of names, found {quoted(listed)}")
    return listed[0]


def architecture_of(model: Model[Any]) -> tuple[str, str]:
    """Model type and Hugging Face class name of a model; T5's for mT5 and umT5 too."""
    for model_type, family in FAMILIES.items():
        for name, cls in family.classes.items():
            if cls is type(model):
                return model_type, name
    raise UnsupportedError(f"{type(model).__name__}: not a model of jaxllm's registry")


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(names)


__all__ = ["FAMILIES", "Family", "ModelConfig", "ModelSpec", "architecture_of", "model_spec"]
