"""transformers' Flax classes over jaxllm's models, for scripts that were written for them.

A script changes its imports: ``from jaxllm.flax_classes import FlaxT5ForConditionalGeneration``.
Parameters stand beside the model here, as those scripts expect: ``model.params`` is a nested dict
with the names and layouts of transformers, and ``model(..., params=params, train=True,
dropout_rng=rng)`` and ``model.generate(..., params=params, prng_key=key)`` take others. New code
calls the models of `jaxllm` themselves, which are their own parameters.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm import models
from jaxllm.auto import AutoConfig, AutoTokenizer
from jaxllm.flax_classes.base import FlaxBeamSearchOutput, FlaxPreTrainedModel
from jaxllm.flax_classes.families import (
    FlaxAutoModel,
    FlaxAutoModelForCausalLM,
    FlaxAutoModelForSeq2SeqLM,
    FlaxBartForConditionalGeneration,
    FlaxBloomForCausalLM,
    FlaxBloomModel,
    FlaxGemmaForCausalLM,
    FlaxGemmaModel,
    FlaxGPT2LMHeadModel,
    FlaxGPT2Model,
    FlaxGPTJForCausalLM,
    FlaxGPTJModel,
    FlaxGPTNeoForCausalLM,
    FlaxGPTNeoModel,
    FlaxLlamaForCausalLM,
    FlaxLlamaModel,
    FlaxMarianMTModel,
    FlaxMBartForConditionalGeneration,
    FlaxMistralForCausalLM,
    FlaxMistralModel,
    FlaxOPTForCausalLM,
    FlaxOPTModel,
    FlaxPegasusForConditionalGeneration,
    FlaxT5EncoderModel,
    FlaxT5ForConditionalGeneration,
    FlaxXGLMForCausalLM,
    FlaxXGLMModel,
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
