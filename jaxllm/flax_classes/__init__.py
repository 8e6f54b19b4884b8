"""transformers' Flax classes over jaxllm's models, for scripts that were written for them.

A script changes its imports: ``from jaxllm.flax_classes import FlaxT5ForConditionalGeneration``.
Parameters stand beside the model here, as those scripts expect: ``model.params`` is a nested dict
with the names and layouts of transformers, and ``model(..., params=params, train=True,
dropout_rng=rng)`` and ``model.generate(..., params=params, prng_key=key)`` take others. New code
calls the models of `jaxllm` themselves, which are their own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm import auto, models
from jaxllm.auto import AutoConfig, AutoTokenizer
from jaxllm.common.errors import InputError
from jaxllm.flax_classes.base import (
    FlaxBeamSearchOutput,
    FlaxPreTrainedModel,
    dropout_key,
    loaded,
)
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models import (
    BartConfig,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    MarianConfig,
    MBartConfig,
    MistralConfig,
    OPTConfig,
    PegasusConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    XGLMConfig,
    shift_tokens_right,
)
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import base_output
from jaxllm.models.outputs import BaseOutput


class FlaxGPT2Model(FlaxPreTrainedModel): ...


class FlaxGPT2LMHeadModel(FlaxPreTrainedModel): ...


class FlaxLlamaModel(FlaxPreTrainedModel): ...


class FlaxLlamaForCausalLM(FlaxPreTrainedModel): ...


class FlaxMistralModel(FlaxPreTrainedModel): ...


class FlaxMistralForCausalLM(FlaxPreTrainedModel): ...


class FlaxGemmaModel(FlaxPreTrainedModel): ...


class FlaxGemmaForCausalLM(FlaxPreTrainedModel): ...


class FlaxOPTModel(FlaxPreTrainedModel): ...


class FlaxOPTForCausalLM(FlaxPreTrainedModel): ...


class FlaxGPTNeoModel(FlaxPreTrainedModel): ...


class FlaxGPTNeoForCausalLM(FlaxPreTrainedModel): ...


class FlaxGPTJModel(FlaxPreTrainedModel): ...


class FlaxGPTJForCausalLM(FlaxPreTrainedModel): ...


class FlaxBloomModel(FlaxPreTrainedModel): ...


class FlaxBloomForCausalLM(FlaxPreTrainedModel): ...


class FlaxT5EncoderModel(FlaxPreTrainedModel):
    _positional = ("input_ids", "attention_mask")


class FlaxT5ForConditionalGeneration(FlaxPreTrainedModel):
    _positional = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")

    def encode(
        self,
        input_ids: Int[Array | np.ndarray, "B E"],
        attention_mask: Int[Array | np.ndarray, "B E"] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        dropout_rng: Array | None = None,
        train: bool = False,
        **records: Any,
    ) -> BaseOutput:
        """The encoder's output: `last_hidden_state` [B, E, D]."""
        model = self._bind(params)
        inputs = model.inputs(input_ids, None, attention_mask, None)
        key = dropout_key(dropout_rng, train)
        return base_output(model.encode(inputs.input_ids, inputs.mask, key=key, **_true(records)))

    def decode(
        self,
        decoder_input_ids: Int[Array | np.ndarray, "B T"],
        encoder_outputs: BaseOutput | tuple[Float[Array, "B E D"], ...],
        encoder_attention_mask: Int[Array | np.ndarray, "B E"] | None = None,
        decoder_attention_mask: Int[Array | np.ndarray, "B T"] | None = None,
        **options: Any,
    ) -> Any:
        """The decoder's output for the result of `encode`; `options` are keywords of a call."""
        states = encoder_outputs[0] if isinstance(encoder_outputs, tuple) else encoder_outputs
        return self(
            None,
            encoder_attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=states,
            **options,
        )


class FlaxBartForConditionalGeneration(FlaxT5ForConditionalGeneration): ...


class FlaxMarianMTModel(FlaxT5ForConditionalGeneration): ...


class FlaxMBartForConditionalGeneration(FlaxT5ForConditionalGeneration): ...


class FlaxPegasusForConditionalGeneration(FlaxT5ForConditionalGeneration): ...


class FlaxXGLMModel(FlaxPreTrainedModel): ...


class FlaxXGLMForCausalLM(FlaxPreTrainedModel): ...


class _FlaxAuto:
    """Base of the Auto classes, which have no instances."""

    auto_class: ClassVar[Any]

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        *,
        dtype: DTypeLike = "float32",
        _do_init: bool = True,
        **options: Any,
    ) -> Any:
        """Loads a checkpoint as its family's Flax class."""
        model_class = cls.auto_class.model_class
        return loaded(cls, model_class, path_or_hub_id, dtype, _do_init, options)

    @classmethod
    def from_config(cls, config: ModelConfig, **options: Any) -> Any:
        """A model with random weights; `options` are `seed` and `dtype`."""
        return FlaxPreTrainedModel.from_model(cls.auto_class.from_config(config, **options))


class FlaxAutoModel(_FlaxAuto):
    auto_class = auto.AutoModel


class FlaxAutoModelForCausalLM(_FlaxAuto):
    auto_class = auto.AutoModelForCausalLM


class FlaxAutoModelForSeq2SeqLM(_FlaxAuto):
    auto_class = auto.AutoModelForSeq2SeqLM


def _true(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without values of None and without `return_dict=True`."""
    asked = {name: value for name, value in options.items() if value is not None}
    if asked.pop("return_dict", True) is not True:
        raise InputError("return_dict: give True; out.to_tuple() is the tuple")
    return asked


FlaxMT5EncoderModel = FlaxT5EncoderModel
FlaxMT5ForConditionalGeneration = FlaxT5ForConditionalGeneration
BartTokenizer = BartTokenizerFast = AutoTokenizer
GPT2Tokenizer = GPT2TokenizerFast = AutoTokenizer
GemmaTokenizer = GemmaTokenizerFast = AutoTokenizer
LlamaTokenizer = LlamaTokenizerFast = AutoTokenizer
MarianTokenizer = AutoTokenizer
MBartTokenizer = MBartTokenizerFast = MBart50Tokenizer = MBart50TokenizerFast = AutoTokenizer
PegasusTokenizer = PegasusTokenizerFast = AutoTokenizer
T5Tokenizer = T5TokenizerFast = MT5Tokenizer = MT5TokenizerFast = AutoTokenizer
XGLMTokenizer = XGLMTokenizerFast = AutoTokenizer
CONFIG_MAPPING: Mapping[str, Any] = {
    name: family.config for name, family in models.FAMILIES.items()
}
_HEADLESS = {
    f"Flax{family}Model": f"Flax{family}{head}"
    for head, families in (
        ("ForConditionalGeneration", ("Bart", "MBart", "MT5", "Pegasus", "T5")),
        ("MTModel", ("Marian",)),
    )
    for family in families
}
"""transformers' encoder-decoders without a head -> the class whose output has the same states."""

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers

    def __getattr__(name: str) -> Any:
        """Explains classes that transformers has; called for missing names only."""
        hint = ""
        if name in _HEADLESS:
            hint = (
                f": take {_HEADLESS[name]}, and its output's decoder_hidden_states[-1] (with "
                "output_hidden_states=True) for last_hidden_state"
            )
        elif name.startswith("Flax"):
            classes = ", ".join(each for each in __all__ if each.startswith("Flax"))
            hint = f": of transformers' Flax classes jaxllm has {classes}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


__all__ = [
    "CONFIG_MAPPING",
    "AutoConfig",
    "AutoTokenizer",
    "BartConfig",
    "BartTokenizer",
    "BartTokenizerFast",
    "BloomConfig",
    "FlaxAutoModel",
    "FlaxAutoModelForCausalLM",
    "FlaxAutoModelForSeq2SeqLM",
    "FlaxBartForConditionalGeneration",
    "FlaxBeamSearchOutput",
    "FlaxBloomForCausalLM",
    "FlaxBloomModel",
    "FlaxGPT2LMHeadModel",
    "FlaxGPT2Model",
    "FlaxGPTJForCausalLM",
    "FlaxGPTJModel",
    "FlaxGPTNeoForCausalLM",
    "FlaxGPTNeoModel",
    "FlaxGemmaForCausalLM",
    "FlaxGemmaModel",
    "FlaxLlamaForCausalLM",
    "FlaxLlamaModel",
    "FlaxMBartForConditionalGeneration",
    "FlaxMT5EncoderModel",
    "FlaxMT5ForConditionalGeneration",
    "FlaxMarianMTModel",
    "FlaxMistralForCausalLM",
    "FlaxMistralModel",
    "FlaxOPTForCausalLM",
    "FlaxOPTModel",
    "FlaxPegasusForConditionalGeneration",
    "FlaxPreTrainedModel",
    "FlaxT5EncoderModel",
    "FlaxT5ForConditionalGeneration",
    "FlaxXGLMForCausalLM",
    "FlaxXGLMModel",
    "GPT2Config",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "GPTJConfig",
    "GPTNeoConfig",
    "GemmaConfig",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "GenerationConfig",
    "LlamaConfig",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "MBart50Tokenizer",
    "MBart50TokenizerFast",
    "MBartConfig",
    "MBartTokenizer",
    "MBartTokenizerFast",
    "MT5Tokenizer",
    "MT5TokenizerFast",
    "MarianConfig",
    "MarianTokenizer",
    "MistralConfig",
    "OPTConfig",
    "PegasusConfig",
    "PegasusTokenizer",
    "PegasusTokenizerFast",
    "Qwen2Config",
    "Qwen3Config",
    "T5Config",
    "T5Tokenizer",
    "T5TokenizerFast",
    "XGLMConfig",
    "XGLMTokenizer",
    "XGLMTokenizerFast",
    "shift_tokens_right",
]
