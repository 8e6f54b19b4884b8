"""Model families: a config, a wiring and a weight table each, and the registry that chooses one.

`Decoder` is what generation needs of a model. docs/adding-a-family.md adds a family step by step.
"""

from jaxllm.models.decoder import Decoder
from jaxllm.models.gpt2 import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from jaxllm.models.llama import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from jaxllm.models.mistral import (
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
)
from jaxllm.models.qwen2 import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from jaxllm.models.qwen3 import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from jaxllm.models.registry import FAMILIES, ModelSpec, model_spec
from jaxllm.models.t5 import T5Config, T5EncoderModel, T5ForConditionalGeneration

__all__ = [
    "FAMILIES",
    "Decoder",
    "GPT2Config",
    "GPT2ForSequenceClassification",
    "GPT2LMHeadModel",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "MistralConfig",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    "ModelSpec",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    "T5Config",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "model_spec",
]
