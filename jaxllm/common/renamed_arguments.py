"""Arguments of transformers' classes that have another name here, or none: what to write now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxllm.common.errors import InputError

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
    "from_pt": "leave it out; safetensors are read, whoever wrote them",
    "from_flax": "leave it out; convert the checkpoint to safetensors",
    "from_tf": "leave it out; convert the checkpoint to safetensors",
    "use_safetensors": "leave it out; nothing else is read",
    "gradient_checkpointing": "give remat=True",
    "device_map": "give mesh=jaxllm.make_mesh(...)",
    "low_cpu_mem_usage": "leave it out; tensors are read one at a time",
    "trust_remote_code": "leave it out; no code of a checkpoint is ever run",
    "cache_dir": "set HF_HUB_CACHE, or give the folder's path",
    "local_files_only": "set HF_HUB_OFFLINE=1, or give the folder's path",
    "force_download": "leave it out, and delete the cached copy (`hf cache`)",
    "token": "run `hf auth login`, or set HF_TOKEN",
    "subfolder": "give the path of that folder",
    "use_fast": "leave it out; the files decide",
    "quantization_config": "leave it out; quantized weights are read from GGUF files",
    "output_loading_info": "leave it out; a tensor that does not fit raises",
    "ignore_mismatched_sizes": "leave it out; a tensor that does not fit raises",
}
"""Arguments of `from_pretrained` and `from_config`."""
ATTRIBUTES = {
    "params": _PARAMETERS,
    "init_weights": "use from_config(config, seed=0), which draws weights",
    "enable_gradient_checkpointing": "give remat=True to from_pretrained",
    "to_bf16": "give dtype='bfloat16', param_dtype='bfloat16' to from_pretrained",
    "to_fp16": "give dtype='float16', param_dtype='float16' to from_pretrained",
    "to_fp32": "give dtype='float32', param_dtype='float32' to from_pretrained",
    "init_params": "use from_config(config, seed=0), which draws weights",
}
"""Attributes of a model."""


def check_renamed(where: str, names: Iterable[str], renamed: Mapping[str, str]) -> None:
    """Raises InputError for the first name that has another one here, with what to write.

    >>> check_renamed("generate()", ["prng_key"], GENERATE)
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: generate() has no `prng_key`: give key=jax.random.key(...)
    """
    for name in names:
        if name in renamed:
            raise InputError(f"{where} has no `{name}`: {renamed[name]}")
