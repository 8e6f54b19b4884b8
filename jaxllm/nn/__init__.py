"""Layers that all model families share: attention, positions, MLPs, norms, blocks and stacks.

Every layer is a Flax NNX module that is never changed after it is built. Position comes in as data
(cosines and sines, or a bias), so no layer knows the model that it is part of.
"""

from jaxllm.nn.activations import activation
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import Block
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.lora import LoraLinear
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.relative_bias import RelativeBias
from jaxllm.nn.rope import Rope
from jaxllm.nn.rope_config import rope_from_config
from jaxllm.nn.stack import Stack, StackOutput

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "LoraLinear",
    "RMSNorm",
    "RelativeBias",
    "Rope",
    "Stack",
    "StackOutput",
    "activation",
    "rope_from_config",
]
