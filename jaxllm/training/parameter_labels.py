"""Labels of parameters, to freeze some of them in an optax loop of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jaxllm.common.errors import InputError
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import parameter_path


def labels(
    model: Model[Any], patterns: Mapping[str, Hashable], default: Hashable = None
) -> Callable[[Any], Any]:
    """Labels of a model's parameters by path, for `optax.multi_transform` and `optax.masked`.

    The result is a function, as both accept: models are callable, and optax would call a label tree
    that is a model.

    Args:
        model: its paths are matched; the function takes trees of the same paths, such as gradients.
        patterns: labels by regexes, searched in each path; the first that matches counts.
        default: label of parameters that no pattern matches; None: an error.

    Raises:
        InputError: a pattern matches no parameter, or no pattern matches a parameter and there is
            no default.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> from jaxllm.nn.linear import Linear
    >>> layer = Linear(2, 3, use_bias=True, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    >>> layer = jax.tree.map(jnp.ones_like, layer)
    >>> label = labels(layer, {"bias": "train"}, default="freeze")
    >>> optimizer = optax.multi_transform(
    ...     {"train": optax.sgd(0.5), "freeze": optax.set_to_zero()}, label)
    >>> updates, _ = optimizer.update(layer, optimizer.init(layer))
    >>> parameters(updates)["bias"].tolist(), float(parameters(updates)["weight"].max())
    ([-0.5, -0.5, -0.5], 0.0)
    """
    paths = parameters(model)

    def label_of(path: str) -> Hashable:
        return next((value for key, value in patterns.items() if re.search(key, path)), default)

    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise InputError(
                f"labels: {pattern!r} matches no parameter, such as {next(iter(paths))}"
            )
    if (bare := next((path for path in paths if label_of(path) is None), None)) is not None:
        raise InputError(f"labels: no pattern matches {bare}; give a default")

    def label_tree(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: label_of(parameter_path(path)), tree
        )

    return label_tree
