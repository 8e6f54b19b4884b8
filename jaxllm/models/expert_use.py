"""How much of a mixture of experts some tokens use: the basis of FLOPs and of bytes read."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.models.lora import module_at
from jaxllm.models.model import Model
from jaxllm.nn.experts import MixtureOfExperts
from jaxllm.parallel.sharding import parameter_path

EXPERTS = ".mlp.expert_"
"""Part of the paths of experts' parameters."""


def used_shares(model: Model[Any], tokens: float = 1) -> dict[str, float]:
    """Share of each parameter that a number of tokens uses, by path: 1 except for experts.

    Of experts it is the expected share that any of the tokens chooses, k of E experts each, if all
    experts are as likely: ``1 - (1 - k / E)^tokens``.
    """
    layers: dict[str, float] = {}
    shares: dict[str, float] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(model):
        path = parameter_path(key_path)
        layer, found, _ = path.partition(EXPERTS)
        if found and layer not in layers:
            mlp = module_at(model, f"{layer}.mlp")
            assert isinstance(mlp, MixtureOfExperts)
            layers[layer] = 1 - (1 - mlp.top_k / leaf.shape[0]) ** tokens
        shares[path] = layers[layer] if found else 1.0
    return shares
