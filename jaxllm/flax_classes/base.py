"""Base of the Flax classes: a model, and its parameters beside it.

The parameters are a nested dict with the names and layouts of transformers' Flax classes. Scripts
read this tree: masks of weight decay look for ``("ln_f", "scale")``, partition rules for ``("q",
"kernel")``. It is computed from the weight table of the family, whose tensor names the Flax classes
share but for the last part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxllm import models
from jaxllm.common.arguments import checked, checked_path
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.call.output import GenerateOutput
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import Card, LanguageModel, Model
from jaxllm.models.outputs import ModelOutput
from jaxllm.models.pretrained import pretrained
from jaxllm.models.registry import FAMILIES, Family
from jaxllm.models.weights import Entry, Table, is_quantized, parameters, with_parameters

_ATTRIBUTES = {
    "init_cache": "use model.module.init_cache(batch, capacity), and model.module(..., cache=...)",
    "enable_gradient_checkpointing": "give remat=True to from_pretrained",
    "num_parameters": "use model.module.num_parameters()",
}
"""Attributes that are others here, or none: what to write now."""
_NO_PARAMS = "params: the model was made with _do_init=False: give params= to each call"
TreePath = tuple[str, ...]
_EMBEDDINGS = ("embed.weight", "positions.weight", "shared.weight", "table.weight")
DEFAULT_MAX_LENGTH = 20
"""Columns of a result, prompt included, where neither call nor checkpoint sets a length."""


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

    A class is named ``Flax`` and the name of the class of `jaxllm.models` that it wraps.

    Args:
        config: the family's config.
        input_shape: not needed, since parameters do not depend on it.
        seed: seed of the random weights.
        dtype: dtype of the computation.
        _do_init: False for a model without parameters, which `init_weights` makes.
    """

    model_class: ClassVar[Any]
    main_input_name: ClassVar[str] = "input_ids"
    _positional: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "position_ids")
    """Names of the positional arguments of a call."""

    def __init_subclass__(cls) -> None:
        wrapped = cls.__name__.removeprefix("Flax")
        if wrapped in models.__all__:  # a script's own subclass keeps that of its base
            cls.model_class = getattr(models, wrapped)

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
            model = model.with_card(Card(config))
        self._set_model(model)

    def _set_model(self, model: Model[Any]) -> None:
        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        self._structure: Any = jax.tree.map(shape, model).with_card(model.card)
        has_weights = all(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
        self._bound: Any = model if has_weights else None
        self._params: Mapping[str, Any] | None = None
        # Copies of the dicts: a caller may change the dicts of `params` in place.
        self._bound_params: Mapping[str, Any] | None = None

    @classmethod
    def from_model(cls, model: Model[Any]) -> Any:
        """Wraps a model of jaxllm in its Flax class."""
        each = _class_of(model)
        self = each.__new__(each)
        self._set_model(model)
        return self

    @classmethod
    def can_generate(cls) -> bool:
        """True for models with an LM head."""
        return issubclass(cls.model_class, LanguageModel)

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

        `options` are those of `jaxllm.auto.AutoModel.from_pretrained`. The weights are float32,
        unless `param_dtype` is given.
        """
        return loaded(cls, cls.model_class, path_or_hub_id, dtype, _do_init, options)

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
            with jax.ensure_compile_time_eval():  # the first who asks may be in a jax.jit
                self._params = flax_params(self._bound)
            self._bound_params = jax.tree.map(lambda x: x, self._params)
        return self._params

    @params.setter
    def params(self, params: Mapping[str, Any]) -> None:
        self._bound, self._params = with_flax_params(self._structure, params), params
        self._bound_params = jax.tree.map(lambda x: x, params)

    def _bind(self, params: Mapping[str, Any] | None) -> Any:
        """The model of jaxllm with `params`; None: with its own, also if changed in place."""
        params = self._params if params is None else params
        if params is not None and not same_arrays(params, self._bound_params):
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
        if twice := [name for name in names if name in inputs]:
            raise InputError(f"{twice[0]}: given twice, by position and by name")
        inputs.update(zip(names, args, strict=True))
        given = {name: value for name, value in inputs.items() if value is not None}
        key = dropout_key(dropout_rng, train)
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
        defaults = as_dict(model.generation_config)
        sources = (fields, as_dict(generation_config), defaults)
        lengths = [first_value(name, sources) for name in ("max_new_tokens", "max_length")]
        default = {"max_length": DEFAULT_MAX_LENGTH} if lengths == [None, None] else {}
        options = {**default, **fields, "trace": None}
        out = model.generate(input_ids, generation_config=generation_config, key=key, **options)
        start = fields.get("decoder_input_ids") if model.is_encoder_decoder else input_ids
        length = max_length(1 if start is None else np.shape(start)[-1], sources)
        missing = length - out.sequences.shape[1]
        sequences = out.sequences
        if missing > 0:
            pad = first_value("pad_token_id", (*sources, vars(model.config)))
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
        repo_id = options.pop("repo_id", checked_path(save_directory, "save_directory").name)
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

    def to_bf16(self, params: Mapping[str, Any], mask: Any = None) -> Any:
        """`params` as bfloat16; with a tree of booleans, those that are True there."""
        return _cast(params, jnp.bfloat16, mask)

    def to_fp16(self, params: Mapping[str, Any], mask: Any = None) -> Any:
        """`params` as float16; with a tree of booleans, those that are True there."""
        return _cast(params, jnp.float16, mask)

    def to_fp32(self, params: Mapping[str, Any], mask: Any = None) -> Any:
        """`params` as float32; with a tree of booleans, those that are True there."""
        return _cast(params, jnp.float32, mask)

    if not TYPE_CHECKING:  # it would hide misspelt attributes from type checkers

        def __getattr__(self, name: str) -> Any:
            """Explains attributes of transformers' classes; called for missing names only."""
            where = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = _ATTRIBUTES.get(name)
            raise AttributeError(where if hint is None else f"{where}: {hint}")

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self._structure!r}"


def _class_of(model: Model[Any]) -> type[FlaxPreTrainedModel]:
    """The Flax class of a model; the base where transformers has none, as for Qwen."""
    classes = FlaxPreTrainedModel.__subclasses__()
    classes += [each for cls in classes for each in cls.__subclasses__()]
    return next(
        (c for c in classes if isinstance(model, getattr(c, "model_class", ()))),
        FlaxPreTrainedModel,
    )


def loaded(
    called: type,
    model_class: Any,
    path_or_hub_id: str | PathLike[str],
    dtype: DTypeLike,
    do_init: bool,
    options: Mapping[str, Any],
) -> Any:
    """A checkpoint as its family's Flax class; see `from_pretrained`."""
    # As in transformers, the Flax classes take msgpack where there are several formats.
    options = {
        **{"dtype": dtype, "param_dtype": "float32", "weight_format": "flax"},
        **options,
    }
    model = pretrained(model_class, path_or_hub_id, called=called, **options)
    flax_model = FlaxPreTrainedModel.from_model(model)
    if do_init:
        return flax_model
    params = flax_model.params
    flax_model._bound = flax_model._params = flax_model._bound_params = None
    return flax_model, params


def as_dict(config: GenerationConfig | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The fields that a generation config sets."""
    if isinstance(config, GenerationConfig):
        return config.to_dict()
    return checked(config or {}, (Mapping,), "generation_config", "a GenerationConfig or a dict")


def first_value(name: str, sources: tuple[Mapping[str, Any], ...]) -> Any:
    """The field of the first source that sets it; None: none does."""
    return next((s[name] for s in sources if s.get(name) is not None), None)


def max_length(start: int, sources: tuple[Mapping[str, Any], ...]) -> int:
    """Columns of the result of a prompt of `start` columns."""
    for source in sources:
        if source.get("max_new_tokens") is not None:
            return start + source["max_new_tokens"]
        if source.get("max_length") is not None:
            return source["max_length"]
    return DEFAULT_MAX_LENGTH


def dropout_key(rng: Array | None, train: bool) -> Array | None:
    """The key of a call with dropout; None: without."""
    if train and rng is None:
        raise InputError("train=True: give dropout_rng=jax.random.key(...) too")
    return rng if train else None


def _cast(params: Mapping[str, Any], dtype: DTypeLike, mask: Any) -> Any:
    def cast(x: Any, chosen: bool) -> Any:
        return x.astype(dtype) if chosen and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(
        cast, params, jax.tree.map(lambda _: True, params) if mask is None else mask
    )


def flax_params(model: Model[Any]) -> dict[str, Any]:
    """The model's parameters as the tree of transformers' Flax class."""
    own = parameters(model)
    return unflatten_dict(
        {
            path: _join(entry, [own[name] for name in entry.parameters])
            for path, entry in _entries(model).items()
        }
    )


def with_flax_params(model: Model[Any], params: Mapping[str, Any]) -> Any:
    """A copy of the model with the parameters of `flax_params`; arrays may be traced."""
    entries = _entries(model)
    if not isinstance(params, Mapping):
        raise InputError(f"params: expected a nested dict of arrays, found {quoted(params)}")
    flat: dict[TreePath, Any] = dict(flatten_dict(params))
    own = parameters(model)
    flat = _with_prefix(flat, entries, own, _family(model).table(model.config))
    for problem, paths in (("missing", entries.keys() - flat), ("unknown", flat.keys() - entries)):
        if paths:
            names = sorted("/".join(map(str, path)) for path in paths)
            raise InputError(f"params: {problem}: {', '.join(names[:3])} ({len(names)} in all)")
    changed: dict[str, Array] = {}
    for path, entry in entries.items():
        whole = jnp.asarray(flat[path])
        if path[-1] == "final_logits_bias" and whole.shape[1:] == (1,):
            whole = whole.T  # trees that were saved with an earlier jaxllm
        expected = entry.tensor_shape(own[entry.parameters[0]].shape)
        expected = expected[::-1] if path[-1] == "kernel" else expected
        if whole.shape != expected:
            raise InputError(
                f"params: {'/'.join(path)} has shape {whole.shape}, expected {expected}"
            )
        changed |= zip(entry.parameters, _split(entry, whole), strict=True)
    return with_parameters(model, changed)


def _with_prefix(
    flat: dict[TreePath, Any],
    entries: Mapping[TreePath, Entry],
    own: Mapping[str, Any],
    table: Table,
) -> dict[TreePath, Any]:
    """The parameters, of a class without a head too, under the paths of a class that has one."""
    base = table.prefix.removesuffix(".")
    if base not in {path[0] for path in entries} - {path[0] for path in flat}:
        return flat
    absent = {
        path: jnp.zeros_like(own[name])
        for path, entry in entries.items()
        for name in table.zeros.intersection(entry.parameters)
    }
    return absent | {path if path in entries else (base, *path): x for path, x in flat.items()}


def same_arrays(first: Any, second: Any) -> bool:
    """True for trees of the very same arrays."""
    leaves, structure = jax.tree.flatten(first)
    others, other = jax.tree.flatten(second)
    return structure == other and all(a is b for a, b in zip(leaves, others, strict=True))


def _entries(model: Model[Any]) -> dict[TreePath, Entry]:
    """Entries of the family's weight table by their paths in the tree."""
    if is_quantized(model):
        raise InputError("params: the weights are quantized; load the model without quantize=")
    own, family = parameters(model), _family(model)
    table = family.table(model.config)
    headless = type(model).__name__ in family.parts
    prefix = table.prefix if headless else ""
    return {
        tuple(_path(entry, own, entry.tensor.removeprefix(prefix))): entry
        for entry in table.for_model(own)
    }


def _family(model: Model[Any]) -> Family:
    return next(each for each in FAMILIES.values() if each.config is type(model.config))


def _path(entry: Entry, own: Mapping[str, Any], tensor: str) -> Iterator[str]:
    """The parts of a tensor's name, the last one by Flax's names."""
    *modules, leaf = tensor.split(".")
    yield from modules
    first = entry.parameters[0]
    if leaf != "weight":
        yield leaf
    elif first.endswith(_EMBEDDINGS):
        yield "embedding"
    elif own[first].ndim == 2:
        yield "kernel"
    else:  # LayerNorm has a scale and a bias, RMSNorm one weight
        yield "scale" if first.removesuffix("weight") + "bias" in own else "weight"


def _is_dense(entry: Entry, ndim: int) -> bool:
    """Whether Flax's kernel is [in, out]: that of a Dense. GPT-2's Conv1D is [out, in], as ours."""
    name = entry.parameters[0]
    is_kernel = name.endswith(".weight") and not name.endswith(_EMBEDDINGS)
    return ndim == 2 and is_kernel and not entry.transposed


def _join(entry: Entry, values: list[Shaped[Array, " ..."]]) -> Shaped[Array, " ..."]:
    whole = entry.whole(jnp.concatenate(values) if len(values) > 1 else values[0])
    return whole.T if _is_dense(entry, whole.ndim) else whole


def _split(entry: Entry, whole: Shaped[Array, " ..."]) -> list[Shaped[Array, " ..."]]:
    whole = whole.T if _is_dense(entry, whole.ndim) else whole
    return entry.parts(whole)
