"""Layers that all model families share: attention, positions, MLPs, norms, blocks and stacks.

Every layer is a Flax NNX module that is never changed after it is built. Position comes in as data
(cosines and sines, or a bias), so no layer knows the model that it is part of. Read `attention`,
`rope`, `positions`, `block`, `linear`, `mlp`, `quantized` and `lora` in this order; what is
tuned for one kind of device is in `platform/`.
"""

from jaxllm.nn.attention import Attention
from jaxllm.nn.block import Block, Stack, StackOutput
from jaxllm.nn.linear import Embedding, LayerNorm, Linear, RMSNorm
from jaxllm.nn.lora import LoraLinear
from jaxllm.nn.mlp import MLP, GatedMLP, activation
from jaxllm.nn.positions import RelativeBias
from jaxllm.nn.rope import Rope, rope_from_config

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
