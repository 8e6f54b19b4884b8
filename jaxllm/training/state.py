"""Everything that a training step changes, as one pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxllm.common.errors import InputError
from jaxllm.models.weights import parameter_path

Params = dict[str, Array]
"""Arrays by the path of their parameter, as in ``"backbone.embed.weight"``."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """A model without its parameters; hashable, so it is part of a compiled step's key."""

    treedef: Any
    paths: tuple[str, ...]

    def model(self, params: Params) -> Any:
        """The module with these parameters in it.

        >>> from jaxllm.nn.linear import Linear
        >>> plain = Linear(2, 3, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
        >>> structure, params = take_apart(plain)
        >>> structure.model(params)(jnp.ones(2)).shape
        (3,)
        """
        return jax.tree_util.tree_unflatten(self.treedef, [params[path] for path in self.paths])


def take_apart(model: Any) -> tuple[Structure, Params]:
    """A module as its structure and its parameters, of which the latter is a plain dict."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    params = {parameter_path(path): leaf for path, leaf in leaves}
    return Structure(treedef, tuple(params)), params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run between two steps.

    `params` are what is trained, in float32 whatever the model computes in: an update of a bfloat16
    weight would mostly round away. `frozen` parameters never change and keep their dtype.
    """

    step: Int[Array, ""]
    """Batches seen so far, skipped ones included."""
    params: Params
    frozen: Params
    opt_state: optax.OptState
    key: Array
    """Of the whole run; a step's dropout keys are folded from it and `step`."""
    ema: Params | None
    """Moving average of `params`, where there is one."""
    skipped: Int[Array, ""]
    """Batches without a finite gradient, which changed nothing."""
    skipped_in_a_row: Int[Array, ""]
    structure: Structure = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(
        model: Any,
        optimizer: optax.GradientTransformation,
        *,
        key: Array | int = 0,
        trainable: Callable[[str], bool] | None = None,
        ema: bool = False,
    ) -> TrainState:
        """A fresh state for a model that was loaded or made.

        The trained parameters are copied, since a step donates them: `model` stays usable.

        Args:
            model: any of jaxllm's models.
            optimizer: of optax, over the dict of trained parameters.
            key: a PRNG key or a seed, for dropout.
            trainable: which paths are trained; None: all.
            ema: keep a moving average of the parameters.

        Raises:
            InputError: nothing is trainable.
        """
        structure, params = take_apart(model)
        chosen = [path for path in params if trainable is None or trainable(path)]
        if not chosen:
            raise InputError("trainable: matches none of the model's parameters")
        masters = {path: jnp.array(params[path], jnp.float32) for path in chosen}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=masters,
            frozen={path: x for path, x in params.items() if path not in masters},
            opt_state=jax.jit(optimizer.init)(masters),
            key=jax.random.key(key) if isinstance(key, int) else key,
            ema=jax.tree.map(jnp.copy, masters) if ema else None,
            skipped=jnp.zeros((), jnp.int32),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
            structure=structure,
        )

    @property
    def model(self) -> Any:
        """The model with the current parameters."""
        return self.structure.model({**self.params, **self.frozen})

    @property
    def averaged_model(self) -> Any:
        """The model with the moving average of its parameters.

        Raises:
            InputError: the state keeps none.
        """
        if self.ema is None:
            raise InputError("ema: this state keeps no moving average")
        return self.structure.model({**self.ema, **self.frozen})

    def replace(self, **changes: Any) -> TrainState:
        return dataclasses.replace(self, **changes)


def parameter_count(params: Params) -> int:
    """How many numbers there are."""
    return sum(x.size for x in params.values())


def global_norm(tree: Any) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together, in float32."""
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves))
