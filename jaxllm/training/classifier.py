"""A classifier with a new head, from a language model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from jaxllm.common.errors import UnsupportedError
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier
from jaxllm.models.model import Model, model_shapes
from jaxllm.models.registry import FAMILIES, architecture_of
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.parallel.placement import mesh_of, put_tree


def with_classifier(
    model: Model[Any], *, num_labels: int, problem_type: str | None = None, key: int | Array = 0
) -> SequenceClassifier:
    """A sequence classifier that shares the backbone of a language model.

    The weight of its head `score` is new, drawn from N(0, initializer_range^2) as in Hugging Face.

    Args:
        model: a decoder-only language model.
        num_labels: number of outputs.
        problem_type: "single_label_classification", "multi_label_classification" or "regression";
            None: single label, or regression for one output.
        key: seed or `jax.random.key` of the head's weight.

    Raises:
        UnsupportedError: the family has no classifier (T5).
    """
    model_type, architecture = architecture_of(model)
    name = next((n for n in FAMILIES[model_type].classes if n.endswith("Classification")), None)
    if name is None or not isinstance(model, CausalLM):
        raise UnsupportedError(f"{architecture}: cannot be made a classifier")
    config: Any = model.checked_card("with_classifier").config
    config = dataclasses.replace(config, num_labels=num_labels, problem_type=problem_type)
    weight = model.backbone.embed.weight[...]
    options = Options(
        dtype=model.backbone.embed.dtype,
        param_dtype=weight.dtype,
        remat=model.backbone.stack.remat,
        scan_layers=model.backbone.stack.scan_layers,
        attn_implementation=model.backbone.stack.blocks[0].attn.attn_implementation,
        platform=model.backbone.stack.platform,
    )
    make = FAMILIES[model_type].classes[name]
    empty = model_shapes(make, config, options)
    key = jax.random.key(key) if isinstance(key, int) else key
    shape = (num_labels, weight.shape[1])
    score = jax.random.normal(key, shape) * config.initializer_range
    body = {p: x for p, x in parameters(model).items() if p.startswith("backbone.")}
    made = with_parameters(empty, {**body, "score.weight": score.astype(weight.dtype)})
    mesh = mesh_of(model)
    return made if mesh is None else put_tree(made, mesh)
