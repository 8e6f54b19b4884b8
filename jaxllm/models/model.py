"""Base class of all models: config, weights and checkpoint metadata."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxllm.common.arguments import checked, checks_flags
from jaxllm.common.errors import InputError
from jaxllm.common.renamed_arguments import CALL, drop_renamed
from jaxllm.models.config import ModelConfig, check_token_ids
from jaxllm.models.pretrained import Pretrained
from jaxllm.models.summary import summary
from jaxllm.models.weights import is_quantized, parameters, with_parameters
from jaxllm.nn.blocks import shallow_copy
from jaxllm.nn.linear import Embedding

C = TypeVar("C", bound=ModelConfig)
M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Metadata of a model's checkpoint, needed to save the same files again."""

    config: str
    """Text of config.json."""
    dtypes: tuple[tuple[str, str], ...]
    """(tensor name, dtype) of every tensor in the file."""
    copies: tuple[tuple[str, str], ...] = ()
    """(tensor name, our path) of tensors that are copies of another parameter."""
    stripped: bool = False
    """True if tensor names lack the base model's prefix."""
    file: str = ""
    """Path of the checkpoint."""
    quantized: bool = False


class Model(Pretrained, nnx.Module, Generic[C]):
    """Config, weights, and metadata that the forward pass does not use.

    Attributes other than weights are static: part of the pytree's structure, and so of the key of
    compiled programs. `without_metadata` resets those that programs should not depend on.
    """

    is_encoder_decoder = False

    config: C
    generation_config: Any
    """`GenerationConfig` of the checkpoint: defaults of `generate()`. None: there is none."""
    extra_eos_token_ids: tuple[int, ...]
    """End token of the tokenizer, which config.json may lack; it also ends a sequence."""
    origin: Origin | None
    """Metadata of the checkpoint that the model was loaded from, if any."""
    modules_to_save: tuple[str, ...]
    """Paths of modules that are fully trained beside LoRA, and saved with the adapter."""

    def __init__(self, config: C):
        config.check()
        self.config = config
        self.generation_config = None
        self.extra_eos_token_ids = ()
        self.origin = None
        self.modules_to_save = ()

    @property
    def embedding(self) -> Embedding:
        """Token embedding (of an encoder-decoder: shared by both)."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """Compute dtype, as of transformers' Flax classes."""
        return self.embedding.dtype

    def resize_token_embeddings(self, size: int) -> Self:
        """A copy with ``size`` token embeddings; new rows are the mean of the old ones.

        After ``tokenizer.add_tokens(...)``:
        ``model = model.resize_token_embeddings(len(tokenizer))``. transformers changes the model.
        A mean makes a new token as probable as the others on average (Hewitt 2021, "Initializing
        new word embeddings for pretrained language models"). The other parameters are shared.

        Raises:
            InputError: a special token of the config would have no row, or quantized weights.
        """
        checked(size, (int, np.integer), "size", "an integer")
        if is_quantized(self):
            raise InputError(
                f"resize_token_embeddings({size}): the weights are quantized; load the model "
                "without quantize="
            )
        config = dataclasses.replace(self.config, vocab_size=size)
        try:
            config.check()
            check_token_ids(config)
        except ValueError as error:
            raise InputError(f"resize_token_embeddings({size}): {error}") from None
        resized = {
            name: _resized(x, self.config.vocab_size, size)
            for name, x in parameters(self).items()
            if name.split(".")[-2] in ("embed", "shared", "lm_head")
        }
        model: Any = with_parameters(self, resized)
        if hasattr(model, "backbone"):
            model = shallow_copy(model, backbone=shallow_copy(model.backbone, config=config))
        return shallow_copy(model, config=config)

    def __repr__(self) -> str:
        return summary(self)

    __str__ = __repr__


def _resized(x: Float[jax.Array, "V D"], old: int, size: int) -> Float[jax.Array, "W D"]:
    """Rows of the tokens that stay, then rows of new tokens."""
    if size <= old:
        return x[:size]
    mean = jnp.mean(x.astype(jnp.float32), 0, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(mean, (size - old, x.shape[1]))])


class BaseModel(Model[C]):
    """Base of models without a head, whose call returns a `BaseOutput`."""


def has_arrays(tree: object) -> bool:
    """True if any leaf is an array or the shape of one."""
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    return any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(tree))


def model_call(call: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorates a model's `__call__`: checks names and flags, and allows for trees of labels.

    `optax.multi_transform` and `optax.masked` call a tree of labels or masks if it is callable. One
    with the structure of a model is, and returns itself then.
    """

    call = checks_flags(call)

    @functools.wraps(call)
    def wrapped(self: M, *args: P.args, **kwargs: P.kwargs) -> Any:
        if list(map(type, args)) == [type(self)] and not has_arrays(self):
            return self
        own: Any = drop_renamed(type(self).__name__, kwargs, CALL)
        return call(self, *args, **own)  # pyright: ignore[reportCallIssue]

    return wrapped


def without_metadata(model: M) -> M:
    """A copy without metadata, so that models of one config share programs; shares weights."""
    return shallow_copy(
        model, generation_config=None, extra_eos_token_ids=(), origin=None, modules_to_save=()
    )
