"""Model families: a config, a wiring and a weight table each, and the registry that chooses one.

`Decoder` is what generation needs of a model. docs/adding-a-family.md adds a family step by step.
"""

from jaxllm.models.bart import BartConfig, BartForConditionalGeneration
from jaxllm.models.bloom import (
    BloomConfig,
    BloomForCausalLM,
    BloomForSequenceClassification,
    BloomModel,
)
from jaxllm.models.cohere import CohereConfig, CohereForCausalLM, CohereModel
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder_decoder import shift_tokens_right
from jaxllm.models.gemma import (
    GemmaConfig,
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GemmaModel,
)
from jaxllm.models.gemma2 import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2Model,
)
from jaxllm.models.gemma3 import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
)
from jaxllm.models.gpt2 import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from jaxllm.models.gpt_neo import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoForSequenceClassification,
    GPTNeoModel,
)
from jaxllm.models.gptj import GPTJConfig, GPTJForCausalLM, GPTJForSequenceClassification, GPTJModel
from jaxllm.models.joined import join_projections, split_projections
from jaxllm.models.llama import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)
from jaxllm.models.m2m_100 import M2M100Config, M2M100ForConditionalGeneration
from jaxllm.models.marian import MarianConfig, MarianMTModel
from jaxllm.models.mbart import MBartConfig, MBartForConditionalGeneration
from jaxllm.models.mistral import (
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralModel,
)
from jaxllm.models.mixtral import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralModel,
)
from jaxllm.models.model import Card
from jaxllm.models.opt import OPTConfig, OPTForCausalLM, OPTForSequenceClassification, OPTModel
from jaxllm.models.pegasus import PegasusConfig, PegasusForConditionalGeneration
from jaxllm.models.phi3 import (
    Phi3Config,
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3Model,
)
from jaxllm.models.quantize import quantize_model
from jaxllm.models.qwen2 import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)
from jaxllm.models.qwen3 import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)
from jaxllm.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeModel,
)
from jaxllm.models.registry import FAMILIES, ModelSpec, model_spec
from jaxllm.models.t5 import T5Config, T5EncoderModel, T5ForConditionalGeneration
from jaxllm.models.t5gemma import (
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from jaxllm.models.xglm import XGLMConfig, XGLMForCausalLM, XGLMModel

__all__ = [
    "FAMILIES",
    "BartConfig",
    "BartForConditionalGeneration",
    "BloomConfig",
    "BloomForCausalLM",
    "BloomForSequenceClassification",
    "BloomModel",
    "Card",
    "CohereConfig",
    "CohereForCausalLM",
    "CohereModel",
    "Decoder",
    "GPT2Config",
    "GPT2ForSequenceClassification",
    "GPT2LMHeadModel",
    "GPT2Model",
    "GPTJConfig",
    "GPTJForCausalLM",
    "GPTJForSequenceClassification",
    "GPTJModel",
    "GPTNeoConfig",
    "GPTNeoForCausalLM",
    "GPTNeoForSequenceClassification",
    "GPTNeoModel",
    "Gemma2Config",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    "Gemma2Model",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    "Gemma3TextForSequenceClassification",
    "Gemma3TextModel",
    "GemmaConfig",
    "GemmaForCausalLM",
    "GemmaForSequenceClassification",
    "GemmaModel",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "LlamaModel",
    "M2M100Config",
    "M2M100ForConditionalGeneration",
    "MBartConfig",
    "MBartForConditionalGeneration",
    "MarianConfig",
    "MarianMTModel",
    "MistralConfig",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    "MistralModel",
    "MixtralConfig",
    "MixtralForCausalLM",
    "MixtralForSequenceClassification",
    "MixtralModel",
    "ModelSpec",
    "OPTConfig",
    "OPTForCausalLM",
    "OPTForSequenceClassification",
    "OPTModel",
    "PegasusConfig",
    "PegasusForConditionalGeneration",
    "Phi3Config",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    "Phi3Model",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    "Qwen2Model",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    "Qwen3Model",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    "Qwen3MoeModel",
    "T5Config",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5GemmaConfig",
    "T5GemmaForConditionalGeneration",
    "XGLMConfig",
    "XGLMForCausalLM",
    "XGLMModel",
    "join_projections",
    "model_spec",
    "quantize_model",
    "shift_tokens_right",
    "split_projections",
]
