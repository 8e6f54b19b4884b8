"""transformers' Flax classes over jaxllm's models, for scripts that were written for them.

A script changes its imports: ``from jaxllm.flax_classes import FlaxT5ForConditionalGeneration``.
Parameters stand beside the model here, as those scripts expect: ``model.params`` is a nested dict
with the names and layouts of transformers, and ``model(..., params=params, train=True,
dropout_rng=rng)`` and ``model.generate(..., params=params, prng_key=key)`` take others. New code
calls the models of `jaxllm` themselves, which are their own parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm import auto, models
from jaxllm.auto import AutoConfig, AutoTokenizer
from jaxllm.common.errors import InputError
from jaxllm.generation.call.output import GenerateOutput
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    shift_tokens_right,
)
from jaxllm.models.config import ModelConfig
from jaxllm.models.flax_params import flax_params, with_flax_params
from jaxllm.models.model import Model
from jaxllm.models.outputs import BaseOutput, ModelOutput, base_output
from jaxllm.models.pretrained import pretrained

DEFAULT_MAX_LENGTH = 20
"""Columns of a result, prompt included, where neither call nor checkpoint sets a length."""
_NO_PARAMS = "params: the model was made with _do_init=False: give params= to each call"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FlaxBeamSearchOutput(ModelOutput):
    """Output of `generate` with beams. Bn: results, `num_return_sequences` for each prompt."""

    sequences: Int[Array | np.ndarray, "Bn L"]
    scores: Float[Array | np.ndarray, " Bn"]
    """Score of each sequence, length penalty included. transformers leaves the penalty out for
    sequences without an end token."""


class FlaxPreTrainedModel:
    """A model, and its parameters beside it; base of the Flax classes.

    Args:
        config: the family's config.
        input_shape: not needed, since parameters do not depend on it.
        seed: seed of the random weights.
        dtype: dtype of the computation.
        _do_init: False for a model without parameters, which `init_weights` makes.
    """

    model_class: ClassVar[Any]
    _positional: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "position_ids")
    """Names of the positional arguments of a call."""

    def __init__(
        self,
        config: ModelConfig,
        input_shape: tuple[int, ...] | None = None,
        seed: int = 0,
        dtype: DTypeLike = "float32",
        _do_init: bool = True,
        **options: Any,
    ) -> None:
        make = self.model_class.from_config
        if _do_init:
            model = make(config, seed=seed, dtype=dtype, **options)
        else:
            model = jax.eval_shape(lambda: make(config, dtype=dtype, **options))
        self._set_model(model)

    def _set_model(self, model: Model[Any]) -> None:
        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        self._structure: Any = jax.tree.map(shape, model)
        has_weights = all(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
        self._bound: Any = model if has_weights else None
        self._params: Mapping[str, Any] | None = None

    @classmethod
    def from_model(cls, model: Model[Any]) -> Any:
        """Wraps a model of jaxllm in its Flax class."""
        each = next((c for c in CLASSES if isinstance(model, c.model_class)), FlaxPreTrainedModel)
        self = each.__new__(each)
        self._set_model(model)
        return self

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        *,
        dtype: DTypeLike = "float32",
        _do_init: bool = True,
        **options: Any,
    ) -> Any:
        """Loads a checkpoint: the model, or ``(model, params)`` with ``_do_init=False``.

        `options` are those of `jaxllm.AutoModel.from_pretrained`. The weights are float32, unless
        `param_dtype` is given.
        """
        return _loaded(cls, cls.model_class, path_or_hub_id, dtype, _do_init, options)

    @property
    def module(self) -> Any:
        """The model of jaxllm with the current parameters."""
        return self._bind(None)

    @property
    def config(self) -> Any:
        return self._structure.config

    @property
    def generation_config(self) -> Any:
        return self._structure.generation_config

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the computation."""
        return self._structure.dtype

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters: a nested dict of arrays, named and laid out as by transformers."""
        if self._params is None:
            if self._bound is None:
                raise InputError(_NO_PARAMS)
            self._params = flax_params(self._bound)
        return self._params

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        self._bound, self._params = with_flax_params(self._structure, params), params

    def _bind(self, params: Mapping[str, Any] | None) -> Any:
        """The model of jaxllm with `params`; None: with its own."""
        if params is not None:
            return with_flax_params(self._structure, params)
        if self._bound is None:
            raise InputError(_NO_PARAMS)
        return self._bound

    def init_weights(
        self, rng: Array, input_shape: tuple[int, ...] | None = None, params: Any = None
    ) -> dict[str, Any]:
        """Random parameters; `rng` may be traced."""
        if params is not None:
            raise InputError("init_weights(): has no params=: the checkpoint's are complete")
        make, config = type(self._structure), self.config
        return flax_params(make(config, rngs=nnx.Rngs(rng)))

    def __call__(
        self,
        *args: Any,
        params: Mapping[str, Any] | None = None,
        dropout_rng: Array | None = None,
        train: bool = False,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """One forward pass; see the `__call__` of the model's class in `jaxllm.models`.

        Args:
            args, inputs: arguments of that call.
            params: parameters in place of the model's own.
            dropout_rng: key of the dropout; has an effect with `train` alone.
            train: with dropout.
            return_dict: False for a tuple.
        """
        names = self._positional[: len(args)]
        if len(args) > len(names):
            raise InputError(f"{type(self).__name__}: give the arguments after {names} by name")
        inputs.update(zip(names, args, strict=True))
        given = {name: value for name, value in inputs.items() if value is not None}
        key = _dropout_key(dropout_rng, train)
        out = self._bind(params)(**given, dropout_key=key)
        return out.to_tuple() if return_dict is False else out

    def generate(
        self,
        input_ids: Int[Array | np.ndarray, "B T"],
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        prng_key: Array | None = None,
        trace: bool = True,
        params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> GenerateOutput | FlaxBeamSearchOutput:
        """Generates as ``jaxllm.generate``, with the results' shapes of transformers' Flax classes.

        `sequences` have all `max_length` columns, with pad tokens at the end; without any length
        there are 20, prompt included. `prng_key` is 0 by default. `trace` has no effect.
        """
        model = self._bind(params)
        key = jax.random.key(0) if prng_key is None else prng_key
        defaults = _dict(model.generation_config)
        sources = (fields, _dict(generation_config), defaults)
        start = fields.get("decoder_input_ids") if model.is_encoder_decoder else input_ids
        length = _max_length(1 if start is None else np.shape(start)[-1], sources)
        if length is None:
            length = fields["max_length"] = DEFAULT_MAX_LENGTH
        out = model.generate(
            input_ids, generation_config=generation_config, key=key, **{**fields, "trace": None}
        )
        missing = length - out.sequences.shape[1]
        sequences = out.sequences
        if missing > 0:
            pad = _first("pad_token_id", (*sources, vars(model.config)))
            pad = model.config.eos_token_ids[0] if pad is None else pad
            sequences = np.pad(sequences, ((0, 0), (0, missing)), constant_values=pad)
        if out.sequences_scores is not None:
            return FlaxBeamSearchOutput(sequences, out.sequences_scores)
        return dataclasses.replace(out, sequences=sequences)

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        params: Mapping[str, Any] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Saves config and weights as safetensors, which transformers loads; `params` as above.

        With `push_to_hub` they are uploaded to the repository `repo_id` too, by default that of the
        folder's name; `commit_message` is for it.
        """
        repo_id = options.pop("repo_id", Path(save_directory).name)
        message = {k: options.pop(k) for k in ("commit_message",) if k in options}
        model = self._bind(params)
        model.save_pretrained(save_directory, **options)
        if push_to_hub:
            model.push_to_hub(repo_id, **message)

    def push_to_hub(
        self, repo_id: str, params: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Uploads the model to the Hub; returns its URL."""
        return self._bind(params).push_to_hub(repo_id, **options)

    def to_bf16(self, params: Mapping[str, Any]) -> Any:
        """`params` as bfloat16."""
        return _cast(params, jnp.bfloat16)

    def to_fp16(self, params: Mapping[str, Any]) -> Any:
        """`params` as float16."""
        return _cast(params, jnp.float16)

    def to_fp32(self, params: Mapping[str, Any]) -> Any:
        """`params` as float32."""
        return _cast(params, jnp.float32)

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self._structure!r}"


class FlaxGPT2Model(FlaxPreTrainedModel):
    model_class = models.GPT2Model


class FlaxGPT2LMHeadModel(FlaxPreTrainedModel):
    model_class = models.GPT2LMHeadModel


class FlaxLlamaModel(FlaxPreTrainedModel):
    model_class = models.LlamaModel


class FlaxLlamaForCausalLM(FlaxPreTrainedModel):
    model_class = models.LlamaForCausalLM


class FlaxMistralModel(FlaxPreTrainedModel):
    model_class = models.MistralModel


class FlaxMistralForCausalLM(FlaxPreTrainedModel):
    model_class = models.MistralForCausalLM


class FlaxT5EncoderModel(FlaxPreTrainedModel):
    model_class = models.T5EncoderModel
    _positional = ("input_ids", "attention_mask")


class FlaxT5ForConditionalGeneration(FlaxPreTrainedModel):
    model_class = models.T5ForConditionalGeneration
    _positional = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")

    def encode(
        self,
        input_ids: Int[Array | np.ndarray, "B E"],
        attention_mask: Int[Array | np.ndarray, "B E"] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        dropout_rng: Array | None = None,
        train: bool = False,
        **records: Any,
    ) -> BaseOutput:
        """The encoder's output: `last_hidden_state` [B, E, D]."""
        model = self._bind(params)
        inputs = model.inputs(input_ids, None, attention_mask, None)
        key = _dropout_key(dropout_rng, train)
        return base_output(model.encode(inputs.input_ids, inputs.mask, key=key, **_true(records)))

    def decode(
        self,
        decoder_input_ids: Int[Array | np.ndarray, "B T"],
        encoder_outputs: BaseOutput | tuple[Float[Array, "B E D"], ...],
        encoder_attention_mask: Int[Array | np.ndarray, "B E"] | None = None,
        decoder_attention_mask: Int[Array | np.ndarray, "B T"] | None = None,
        **options: Any,
    ) -> Any:
        """The decoder's output for what `encode` returned; `options` are those of a call."""
        states = encoder_outputs[0] if isinstance(encoder_outputs, tuple) else encoder_outputs
        return self(
            None,
            encoder_attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=states,
            **options,
        )


CLASSES: tuple[type[FlaxPreTrainedModel], ...] = (
    FlaxGPT2LMHeadModel,
    FlaxGPT2Model,
    FlaxLlamaForCausalLM,
    FlaxLlamaModel,
    FlaxMistralForCausalLM,
    FlaxMistralModel,
    FlaxT5EncoderModel,
    FlaxT5ForConditionalGeneration,
)
"""Flax classes that transformers has; a model of another family is a `FlaxPreTrainedModel`."""


class _FlaxAuto:
    """Base of the Auto classes, which have no instances."""

    auto_class: ClassVar[Any]

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        *,
        dtype: DTypeLike = "float32",
        _do_init: bool = True,
        **options: Any,
    ) -> Any:
        """Loads a checkpoint as its family's Flax class."""
        model_class = cls.auto_class.model_class
        return _loaded(cls, model_class, path_or_hub_id, dtype, _do_init, options)

    @classmethod
    def from_config(cls, config: ModelConfig, **options: Any) -> Any:
        """A model with random weights; `options` are `seed` and `dtype`."""
        return FlaxPreTrainedModel.from_model(cls.auto_class.from_config(config, **options))


class FlaxAutoModel(_FlaxAuto):
    auto_class = auto.AutoModel


class FlaxAutoModelForCausalLM(_FlaxAuto):
    auto_class = auto.AutoModelForCausalLM


class FlaxAutoModelForSeq2SeqLM(_FlaxAuto):
    auto_class = auto.AutoModelForSeq2SeqLM


GPT2Tokenizer = GPT2TokenizerFast = AutoTokenizer
LlamaTokenizer = LlamaTokenizerFast = AutoTokenizer
T5Tokenizer = T5TokenizerFast = AutoTokenizer
CONFIG_MAPPING: Mapping[str, Any] = {
    name: family.config for name, family in models.FAMILIES.items()
}


def _loaded(
    called: type,
    model_class: Any,
    path_or_hub_id: str | PathLike[str],
    dtype: DTypeLike,
    do_init: bool,
    options: Mapping[str, Any],
) -> Any:
    options = {"dtype": dtype, "param_dtype": "float32", **options}
    model = pretrained(model_class, path_or_hub_id, called=called, **options)
    flax_model = FlaxPreTrainedModel.from_model(model)
    if do_init:
        return flax_model
    params = flax_model.params
    flax_model._bound = flax_model._params = None
    return flax_model, params


def _dropout_key(rng: Array | None, train: bool) -> Array | None:
    if train and rng is None:
        raise InputError("train=True: give dropout_rng=jax.random.key(...) too")
    return rng if train else None


def _dict(config: GenerationConfig | Mapping[str, Any] | None) -> Mapping[str, Any]:
    return config.to_dict() if isinstance(config, GenerationConfig) else config or {}


def _first(name: str, sources: tuple[Mapping[str, Any], ...]) -> Any:
    return next((s[name] for s in sources if s.get(name) is not None), None)


def _max_length(start: int, sources: tuple[Mapping[str, Any], ...]) -> int | None:
    """Columns of the result of a prompt of `start` columns; None: no length is set."""
    for source in sources:
        if source.get("max_new_tokens") is not None:
            return start + int(source["max_new_tokens"])
        if source.get("max_length") is not None:
            return int(source["max_length"])
    return None


def _true(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that are None or `return_dict=True`."""
    asked = {name: value for name, value in options.items() if value is not None}
    if asked.pop("return_dict", True) is not True:
        raise InputError("return_dict: give True; out.to_tuple() is the tuple")
    return asked


def _cast(params: Mapping[str, Any], dtype: DTypeLike) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


__all__ = [
    "CONFIG_MAPPING",
    "AutoConfig",
    "AutoTokenizer",
    "FlaxAutoModel",
    "FlaxAutoModelForCausalLM",
    "FlaxAutoModelForSeq2SeqLM",
    "FlaxBeamSearchOutput",
    "FlaxGPT2LMHeadModel",
    "FlaxGPT2Model",
    "FlaxLlamaForCausalLM",
    "FlaxLlamaModel",
    "FlaxMistralForCausalLM",
    "FlaxMistralModel",
    "FlaxPreTrainedModel",
    "FlaxT5EncoderModel",
    "FlaxT5ForConditionalGeneration",
    "GPT2Config",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "GenerationConfig",
    "LlamaConfig",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "T5Config",
    "T5Tokenizer",
    "T5TokenizerFast",
    "shift_tokens_right",
]
