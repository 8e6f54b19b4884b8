"""Arguments of public functions: checks that they share, and transformers' names for them.

An argument or attribute of transformers' classes may have another name here, or none. The tables
below say what to write instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from jaxllm.common.errors import InputError, quoted
from jaxllm.common.files import expanded

P = ParamSpec("P")
T = TypeVar("T")


def checked_path(path: str | PathLike[str], name: str) -> Path:
    """A path with ``~`` expanded.

    >>> checked_path(3, "folder")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: folder: expected a path, found 3 (int)
    """
    if isinstance(path, str) and not path:  # which would be the current folder
        raise InputError(f"{name}: expected a path, found an empty text")
    return expanded(checked(path, (str, PathLike), name, "a path"))


def checked_iterable(values: Iterable[T], name: str, expected: str = "a list") -> Iterable[T]:
    """An iterable that is no text, mapping or data frame.

    Iterating over those gives characters, keys or names of columns.

    >>> checked_iterable("Hello", "rows", "a list of prompts")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: rows: expected a list of prompts, found Hello (str)
    """
    if hasattr(values, "columns"):
        raise InputError(
            f"{name}: expected {expected}, found a {type(values).__name__}; pass one of its "
            "columns, or use BatchGenerator.generate_table"
        )
    with contextlib.suppress(TypeError):  # None, a number, an array without axes
        iter(values)
        if not isinstance(values, str | bytes | Mapping):
            return values
    return checked(values, (), name, expected)


def names_in(text: str) -> tuple[str, ...] | Literal["all"]:
    """Names of columns in a text.

    >>> names_in("ticket, lang"), names_in("all")
    (('ticket', 'lang'), 'all')
    """
    return "all" if text == "all" else tuple(name.strip() for name in text.split(","))


def checked_list(values: Iterable[T], name: str) -> list[T]:
    """`checked_iterable` as a list."""
    return list(checked_iterable(values, name))


def checked_function(value: T, name: str) -> T:
    """The value, which must be callable."""
    if not callable(value):
        raise InputError(f"{name}: expected a function, found {quoted(value)}")
    return value


def is_integer(value: object) -> bool:
    """Returns whether ``value`` has an integer type; booleans do not count."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_count(value: int, name: str) -> int:
    """The value, an integer of 1 or more."""
    if not is_integer(value) or value < 1:
        raise InputError(f"{name}: expected an integer of 1 or more, found {quoted(value)}")
    return value


def checked(value: Any, types: tuple[type, ...], name: str, expected: str) -> Any:
    """The value, an instance of one of `types`.

    Raises:
        InputError: it is of another type; `expected` says in words what is needed.
    """
    if not isinstance(value, types):
        text = quoted(value).strip("'")
        raise InputError(f"{name}: expected {expected}, found {text} ({type(value).__name__})")
    return value


def checks_flags(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: parameters annotated ``bool``, or ``bool | None``, take nothing else.

    A text such as "no" would count as true, and the truth of an array is a ValueError.

    >>> @checks_flags
    ... def decode(ids: list[int], skip_special_tokens: bool = False) -> str: ...
    >>> decode([1], skip_special_tokens="no")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: skip_special_tokens: expected True or False, found no (str)
    """
    flags: dict[str, tuple[int, tuple[type, ...]]] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        if annotation in ("bool", "bool | None"):
            types = (bool, np.bool_) if annotation == "bool" else (bool, np.bool_, type(None))
            flags[parameter.name] = position, types

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, (position, types) in flags.items():
            if name in kwargs:
                checked(kwargs[name], types, name, "True or False")
            elif position < len(args):
                checked(args[position], types, name, "True or False")
        return function(*args, **kwargs)

    return call


_PARAMETERS = (
    "a model is its own parameters: call the model that has them"
    " (`graphdef, params = nnx.split(model)`, `nnx.merge(graphdef, params)`)"
)
CALL = {
    "params": _PARAMETERS,
    "train": "give dropout_key=jax.random.key(...) for dropout, and leave it out otherwise",
    "dropout_rng": "give dropout_key=jax.random.key(...)",
    "deterministic": "leave dropout_key out for a call without dropout",
    "past_key_values": "give cache=, made by model.init_cache(batch, capacity)",
    "use_cache": "give cache=, made by model.init_cache(batch, capacity), for a cached call",
    "return_dict": "outputs have their fields by name and by index; out.to_tuple() is the tuple",
    "output_router_logits": (
        "the config's field of this name decides: load a mixture of experts with"
        ' config={"output_router_logits": True}'
    ),
}
"""Arguments of the call of a model."""
GENERATE = {
    "prng_key": "give key=jax.random.key(...)",
    "params": _PARAMETERS,
    "trace": "leave it out; generate() always runs compiled, and works inside jax.jit",
    "rng": "give key=jax.random.key(...)",
    "model_kwargs": "give its entries as arguments",
}
"""Arguments of `generate`."""
FROM_PRETRAINED = {
    "_do_init": "leave it out; `graphdef, params = nnx.split(model)` gives the parameters apart",
    "seed": "leave it out; all weights come from the checkpoint (from_config takes a seed)",
    "input_shape": "leave it out; parameters do not depend on it",
    "torch_dtype": "give dtype=",
    "from_pt": "leave it out, or give True to take pytorch_model.bin first",
    "from_flax": "leave it out, or give True to take flax_model.msgpack first",
    "from_tf": "leave it out; convert the checkpoint to safetensors",
    "use_safetensors": "give from_pt=True or from_flax=True to take another format first",
    "gradient_checkpointing": "give remat=True",
    "device_map": "give mesh=jaxllm.make_mesh(...)",
    "low_cpu_mem_usage": "leave it out; tensors are read one at a time",
    "trust_remote_code": "leave it out; no code of a checkpoint is ever run",
    "cache_dir": "set HF_HUB_CACHE, or give the folder's path",
    "local_files_only": "set HF_HUB_OFFLINE=1, or give the folder's path",
    "force_download": "leave it out, and delete the cached copy (`hf cache`)",
    "token": "run `hf auth login`, or set HF_TOKEN",
    "use_auth_token": "run `hf auth login`, or set HF_TOKEN",
    "subfolder": "give the path of that folder",
    "use_fast": "leave it out; the files decide",
    "quantization_config": "leave it out; quantized weights are read from GGUF files",
    "output_loading_info": "leave it out; a tensor that does not fit raises",
    "ignore_mismatched_sizes": "leave it out; a tensor that does not fit raises",
}
"""Arguments of `from_pretrained` and `from_config`."""
TOKENIZER_FROM_PRETRAINED = {
    **FROM_PRETRAINED,
    "do_lower_case": "leave it out; these tokenizers keep the case",
}
"""Arguments of a tokenizer's `from_pretrained`."""
PIPELINE = {
    **FROM_PRETRAINED,
    "device": "leave it out; JAX uses the accelerator that it has",
    "framework": "leave it out; there is one",
    "model_kwargs": "give its entries as arguments",
}
"""Arguments of `pipeline`."""
SAVE_PRETRAINED = {
    "params": _PARAMETERS,
    "max_shard_size": "give max_shard_bytes=",
    "push_to_hub": "call model.push_to_hub(repo_id)",
    "safe_serialization": "leave it out; weights are always safetensors",
}
"""Arguments of `save_pretrained`."""
NO_HEAD = (
    "it makes embeddings (`jaxllm serve --embeddings` serves them), as config.json or the caller "
    "chose its class; to generate, load a checkpoint with a head: architecture='...ForCausalLM'"
)
"""What to do where a model without a head is asked to generate."""
ATTRIBUTES = {
    "generate": f"this class has no language-model head: {NO_HEAD}",
    "init_cache": f"this class has no language-model head: {NO_HEAD}",
    "params": _PARAMETERS,
    "init_weights": "use from_config(config, seed=0), which draws weights",
    "enable_gradient_checkpointing": "give remat=True to from_pretrained",
    "to_bf16": "give dtype='bfloat16', param_dtype='bfloat16' to from_pretrained",
    "to_fp16": "give dtype='float16', param_dtype='float16' to from_pretrained",
    "to_fp32": "give dtype='float32', param_dtype='float32' to from_pretrained",
    "init_params": "use from_config(config, seed=0), which draws weights",
    "module": "the model itself is the Flax module",
    "device": "arrays say where they are; mesh=jaxllm.make_mesh(...) places them",
    "to": "give mesh= or dtype= to from_pretrained",
    "cuda": "JAX uses the accelerator that it has",
    "half": "give dtype='float16', param_dtype='float16' to from_pretrained",
    "get_input_embeddings": "use model.embedding",
    "prepare_inputs_for_generation": "use model.generate(...), or init_cache and cache=",
}
"""Attributes of a model."""
TOKENIZER_ATTRIBUTES = {
    "encode_plus": "call it: tokenizer(text)",
    "batch_encode_plus": "call it: tokenizer(texts)",
    "prepare_seq2seq_batch": "call it: tokenizer(texts, text_target=targets)",
    "prepare_for_model": "use tokenizer.pad([ids]), or call the tokenizer with the text",
    "build_inputs_with_special_tokens": "use encode(), which adds special tokens",
    "convert_tokens_to_string": "use decode(tokenizer.convert_tokens_to_ids(tokens))",
    "clean_up_tokenization": "use decode(ids, clean_up_tokenization_spaces=True)",
    "vocab": "use get_vocab()",
    "default_chat_template": "use chat_template",
    "get_chat_template": "use chat_template",
    "save_vocabulary": "use save_pretrained(folder)",
    "push_to_hub": "call jaxllm.push_to_hub(repo_id, model, tokenizer)",
}
"""Attributes of a tokenizer."""
# Values with which an argument asks for what happens here without it, beside None; `...`: all.
_SATISFIED: Mapping[str, tuple[object, ...]] = {
    "train": (False,),
    "deterministic": (True,),
    "use_cache": (False,),
    "return_dict": (True,),
    "trace": (True,),
    "_do_init": (True,),
    "seed": (...,),
    "from_pt": (True, False),
    "from_flax": (True, False),
    "from_tf": (False,),
    "use_safetensors": (True,),
    "gradient_checkpointing": (False,),
    "low_cpu_mem_usage": (True, False),
    "trust_remote_code": (True, False),
    "local_files_only": (False,),
    "force_download": (False,),
    "token": (True,),
    "use_auth_token": (True, False),
    "subfolder": ("",),
    "device": (0,),
    "framework": ("flax",),
    "use_fast": (True, False),
    "do_lower_case": (False,),
    "output_loading_info": (False,),
    "ignore_mismatched_sizes": (False,),
    "push_to_hub": (False,),
    "safe_serialization": (True,),
    "return_attention_mask": (True,),
    "return_token_type_ids": (False,),
    "return_special_tokens_mask": (False,),
    "return_overflowing_tokens": (False,),
    "return_length": (False,),
    "is_split_into_words": (False,),
    "verbose": (True, False),
}


def is_satisfied(name: str, value: object) -> bool:
    """Whether an argument of transformers asks for what happens here without it."""
    values = _SATISFIED.get(name, ())
    same = any(value is each or (isinstance(each, str) and value == each) for each in values)
    return value is None or ... in values or same


def drop_renamed(
    where: str, options: Mapping[str, Any], renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Leaves out the arguments of `renamed` that ask for what happens without them.

    Raises:
        InputError: another value of one of them; the message says what to write.

    >>> drop_renamed("from_pretrained()", {"from_pt": True, "dtype": "float32"}, FROM_PRETRAINED)
    {'dtype': 'float32'}
    >>> drop_renamed("generate()", {"prng_key": 0}, GENERATE)
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: generate() has no `prng_key`: give key=jax.random.key(...)
    """
    for name, value in options.items():
        if name in renamed and not is_satisfied(name, value):
            raise InputError(f"{where} has no `{name}`: {renamed[name]}")
    return {name: value for name, value in options.items() if name not in renamed}
