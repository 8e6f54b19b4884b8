"""State of a training run as one pytree: parameters, optimizer state, random key, counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxllm.common.errors import InputError
from jaxllm.models.model import Card, Model
from jaxllm.models.weights import is_quantized
from jaxllm.parallel.placement import mesh_of, put_everywhere
from jaxllm.parallel.sharding import parameter_path, tree_shardings

M = TypeVar("M", bound=nnx.Module)
TRAINED = ("step", "params", "opt_state", "key", "ema", "skipped", "skipped_in_a_row")
"""Fields that a step changes; they are the arrays of a checkpoint."""
Params = dict[str, Array]
"""Arrays by parameter path, such as ``"backbone.embed.weight"``."""


@dataclasses.dataclass(frozen=True)
class Structure(Generic[M]):
    """A model without its parameters; hashable, so that it can be static in a compiled step."""

    treedef: Any
    paths: tuple[str, ...]

    def model(self, params: Params) -> M:
        """The model with these parameters.

        >>> from jaxllm.nn.linear import Linear
        >>> plain = Linear(2, 3, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
        >>> structure, params = split_model(plain)
        >>> structure.model(params)(jnp.ones(2)).shape
        (3,)
        """
        return jax.tree_util.tree_unflatten(self.treedef, [params[path] for path in self.paths])


def split_model(model: M) -> tuple[Structure[M], Params]:
    """Splits a model into its structure and a dict of its parameters by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    params = {parameter_path(path): leaf for path, leaf in leaves}
    return Structure(treedef, tuple(params)), params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run between two steps."""

    step: Int[Array, ""]
    """Number of batches so far, skipped ones included."""
    params: Params
    """Trained parameters, always in float32: most updates of a bfloat16 weight would be lost to
    rounding."""
    frozen: Params
    """Parameters that are not trained, in the model's dtype."""
    opt_state: optax.OptState
    """Optimizer state over `params`."""
    key: Key[Array, ""]
    """PRNG key of the run; the dropout keys of a step are folded from it and `step`."""
    ema: Params | None
    """Moving average of `params`; None if not kept."""
    skipped: Int[Array, ""]
    """Number of batches without a finite gradient, which changed no parameter."""
    skipped_in_a_row: Int[Array, ""]
    """Number of skipped batches since the last finite gradient."""
    structure: Structure[Model[Any]] = dataclasses.field(metadata={"static": True})
    """The model without its parameters."""

    @property
    def card(self) -> Card | None:
        """Card of the model, which is no part of the pytree. None after a JAX transformation other
        than a `Step`."""
        return vars(self).get("_card")

    def with_card(self, card: Card | None) -> TrainState:
        """A copy whose models have this card."""
        copied = dataclasses.replace(self)
        object.__setattr__(copied, "_card", card)
        return copied

    @staticmethod
    def create(
        model: Model[Any],
        optimizer: optax.GradientTransformation,
        *,
        key: Array | int = 0,
        trainable: Callable[[str], bool] | None = None,
        ema: bool = False,
        donate: bool = False,
    ) -> TrainState:
        """Creates a state at step 0, on the devices of the model.

        The trained parameters are copied, because a step donates them; `model` stays usable. On a
        mesh no device ever holds more than its shards of the state.

        Args:
            model: any of jaxllm's models.
            optimizer: an optax optimizer, over the dict of trained parameters.
            key: a PRNG key or a seed, for dropout.
            trainable: predicate of parameter paths; None: all are trained.
            ema: keep a moving average of the parameters.
            donate: take the model's arrays instead of copies; those that are not float32 are
                deleted. The model cannot be used afterwards.

        Raises:
            InputError: nothing is trainable, or the weights are quantized.
        """
        if is_quantized(model):
            raise InputError(
                "training: the weights are quantized; load the model without quantize="
            )
        structure, params = split_model(model)
        trained = [path for path in params if trainable is None or trainable(path)]
        if not trained:
            raise InputError("trainable: matches none of the model's parameters")
        masters: Params = {}
        for path in trained:
            x = params[path]
            taken = donate and x.dtype == jnp.float32
            masters[path] = x if taken else jnp.array(x, jnp.float32)
            if donate and not taken:
                x.delete()
        zero, key = jnp.int32(0), jax.random.key(key) if isinstance(key, int) else key
        mesh, shardings = mesh_of(model), None
        if mesh is not None:  # zeros, which follow from no array, would all be on the first device
            shardings = tree_shardings(jax.eval_shape(optimizer.init, masters), mesh)
            zero, key = put_everywhere((zero, key), mesh)
        return TrainState(
            step=zero,
            params=masters,
            frozen={path: x for path, x in params.items() if path not in masters},
            opt_state=jax.jit(optimizer.init, out_shardings=shardings)(masters),
            key=key,
            ema=jax.tree.map(jnp.copy, masters) if ema else None,
            skipped=jnp.copy(zero),
            skipped_in_a_row=jnp.copy(zero),
            structure=structure,
        ).with_card(model.card)

    @property
    def model(self) -> Model[Any]:
        """The model with the current parameters."""
        return self._model(self.params)

    @property
    def averaged_model(self) -> Model[Any]:
        """The model with the moving average of its parameters.

        Raises:
            InputError: the state keeps no moving average.
        """
        if self.ema is None:
            raise InputError("ema: this state keeps no moving average")
        return self._model(self.ema)

    def _model(self, trained: Params) -> Model[Any]:
        model = self.structure.model({**trained, **self.frozen})
        return model if self.card is None else model.with_card(self.card)

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes).with_card(self.card)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Euclidean norm of all leaves together, in float32."""
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves))
