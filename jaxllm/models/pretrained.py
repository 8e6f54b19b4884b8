"""transformers' methods of models: each is a shorthand for a public function of jaxllm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.common import public
from jaxllm.common.arguments import (
    ATTRIBUTES,
    CALL,
    FROM_PRETRAINED,
    GENERATE,
    SAVE_PRETRAINED,
    checked,
    drop_renamed,
)
from jaxllm.common.errors import InputError
from jaxllm.common.hardware import default_device
from jaxllm.models.build_options import Options
from jaxllm.models.config import ModelConfig


class Pretrained:
    """Methods to load, build, save and publish a model, with transformers' names."""

    __slots__ = ()  # NNX wants none in its classes, and looks here before it looks at `Carded`

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Self:
            """Explains `GPT2LMHeadModel(config, seed=0)`, a call of transformers' classes."""
            if (args or options) and "rngs" not in options:
                raise InputError(
                    f"{cls.__name__}(config): use {cls.__name__}.from_config(config, seed=0)"
                )
            return super().__new__(cls)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        *,
        dtype: DTypeLike | None = None,
        config: Mapping[str, Any] | ModelConfig | None = None,
        **options: Any,
    ) -> Self:
        """Loads a model of this class: ``jaxllm.load(path_or_hub_id, architecture=cls)[0]``.

        Args:
            path_or_hub_id: a Hugging Face folder, a .gguf file or a Hub id.
            dtype: compute dtype. None: the checkpoint's own, but float32 on a CPU.
            config: a whole config, or fields that override those of config.json.
            options: the other arguments of `jaxllm.load`, except `architecture`.

        Raises:
            InputError: an argument of transformers that has another name here.
            UnsupportedError: the checkpoint's family has no model of this class.
            JaxLLMError: other errors of `jaxllm.load`.
        """
        return pretrained(cls, path_or_hub_id, dtype=dtype, config=config, **options)

    @classmethod
    def from_config(
        cls,
        config: ModelConfig | Mapping[str, Any] | str | PathLike[str],
        *,
        seed: int = 0,
        dtype: DTypeLike = "float32",
        param_dtype: DTypeLike = "float32",
        attn_implementation: str = "eager",
        remat: bool | str = False,
        scan_layers: bool = False,
        **unknown: Any,
    ) -> Self:
        """Makes a model with random weights.

        Args:
            config: config of the model's family, the object in a config.json, or the path or Hub id
                of a model with such a config; only its config is read.
            seed: seed of the weights.
            dtype, param_dtype: dtypes of the computation and of the weights.
            attn_implementation, remat, scan_layers: as in `jaxllm.load`.

        Raises:
            InputError: the config belongs to another family.
        """
        where = f"{cls.__name__}.from_config()"
        unknown = _drop(where, unknown, "seed")
        if unknown:
            raise InputError(f"{where} does not take {', '.join(sorted(unknown))}")
        config = public("auto").read_config_for(cls, config)
        checked(seed, (int, np.integer), "seed", "an integer")
        try:
            dtypes = jnp.dtype(dtype), jnp.dtype(param_dtype)
        except TypeError as failure:
            raise InputError(f"dtype, param_dtype: {failure}") from None
        options = Options.on(
            default_device().platform,
            attn_implementation=attn_implementation,
            dtype=dtypes[0],
            param_dtype=dtypes[1],
            remat=remat,
            scan_layers=scan_layers,
        )
        make: Any = cls
        return make(config, options, rngs=nnx.Rngs(seed))

    def save_pretrained(
        self, save_directory: str | PathLike[str], *, overwrite: bool = True, **options: Any
    ) -> None:
        """Saves config and weights: ``jaxllm.save_hf(save_directory, model, overwrite=True)``.

        Like transformers, it replaces a model in the folder. `options` are `tokenizer`, `dtype` and
        `max_shard_bytes` of `jaxllm.save_hf`.
        """
        options = drop_renamed("save_pretrained()", options, SAVE_PRETRAINED)
        public("save_hf")(save_directory, self, overwrite=overwrite, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads the model to the Hub: ``jaxllm.push_to_hub(repo_id, model)``; returns its URL."""
        return public("push_to_hub")(repo_id, self, **options)

    def num_parameters(self) -> int:
        """Number of parameters; a tied LM head counts once."""
        return sum(x.size for x in jax.tree.leaves(self))

    def train(self, **attributes: Any) -> None:
        """Raises InputError: a call with `dropout_key=` has dropout, and no other."""
        raise InputError(f"train(): {CALL['train']}")

    if not TYPE_CHECKING:  # it would hide misspelt attributes from type checkers

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuses attributes of transformers' Flax classes, such as `model.params = params`."""
            if name in ATTRIBUTES:
                where = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(f"{where}: {ATTRIBUTES[name]}")
            if isinstance(getattr(type(self), name, None), property):
                object.__setattr__(self, name, value)  # NNX would make it part of the pytree
            else:
                super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            """Explains attributes of transformers' Flax classes; called for missing names only."""
            where = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = ATTRIBUTES.get(name)
            raise AttributeError(where if hint is None else f"{where}: {hint}")


class Generates:
    """The method `generate` of models that decode."""

    def generate(
        self,
        input_ids: object = None,
        attention_mask: object = None,
        generation_config: object = None,
        key: object = None,
        **fields: Any,
    ) -> Any:
        """Generates token ids: ``jaxllm.generate(model, ...)``, whose arguments these are.

        Returns:
            `jaxllm.generation.GenerateOutput`, whose `sequences` are int32
            [B * num_return_sequences, L].
        """
        fields = drop_renamed("generate()", fields, GENERATE)
        return public("generate")(self, input_ids, attention_mask, generation_config, key, **fields)


def pretrained(
    model_class: type,
    path_or_hub_id: str | PathLike[str],
    *,
    called: type | None = None,
    **options: Any,
) -> Any:
    """Loads a checkpoint as `model_class`, or as the family's class derived from it.

    `called` is the class that the caller named, for errors; None: `model_class`.
    """
    where = f"{(called or model_class).__name__}.from_pretrained()"
    if options.get("from_pt") is True and options.get("from_flax") is True:
        raise InputError(f"{where}: from_pt and from_flax are both True; give one of them")
    chosen = [name for flag, name in _FORMATS.items() if options.get(flag) is True]
    options = _drop(where, options)
    if chosen:
        options["weight_format"] = chosen[0]
    load = public("load")
    unknown = options.keys() - inspect.signature(load).parameters.keys() - {"architecture"}
    if unknown:
        fields = ", ".join(f'"{name}": ...' for name in sorted(unknown))
        raise InputError(
            f"{where} does not take {', '.join(sorted(unknown))}: fields of config.json go into "
            f"config={{{fields}}}"
        )
    return load(path_or_hub_id, architecture=model_class, **options)[0]


_FORMATS = {"use_safetensors": "safetensors", "from_pt": "pt", "from_flax": "flax"}
"""`weight_format` of `jaxllm.load` for each argument of transformers, the first that is True."""


def _drop(where: str, options: Mapping[str, Any], *except_: str) -> dict[str, Any]:
    """`drop_renamed` for the arguments of `from_pretrained`, except those in `except_`."""
    renamed = {name: hint for name, hint in FROM_PRETRAINED.items() if name not in except_}
    return drop_renamed(where, options, renamed)
