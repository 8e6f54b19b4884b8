"""Loads a model with its tokenizer, from Hugging Face's format, GGUF and Orbax's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.checkpoint.embedding_files import read_embedding_recipe
from jaxllm.checkpoint.gguf.generation import unused_sampling
from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.load import Checkpoint, load_model, open_checkpoint
from jaxllm.checkpoint.load_parameters import LoadProgress
from jaxllm.checkpoint.orbax.model import load_weights
from jaxllm.checkpoint.peft import load_adapter
from jaxllm.checkpoint.weight_files import FORMATS, describe_choice
from jaxllm.common.arguments import checked, checked_function, checked_path, checks_flags
from jaxllm.common.errors import CheckpointError, ConfigError, InputError, listed, quoted, warn
from jaxllm.common.files import is_there
from jaxllm.common.progress import progress_line, progress_phase
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.config import GENERATION_KEYS, ModelConfig
from jaxllm.models.lora import merge_lora
from jaxllm.models.model import Model
from jaxllm.models.quantize import KEEP, quantize_model
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.processes import in_all_processes
from jaxllm.parallel.sharding import check_mesh
from jaxllm.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_gguf

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def load(
    path_or_hub_id: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    architecture: str | type | None = None,
    config: Mapping[str, Any] | ModelConfig | None = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
    quantize: str | None = None,
    quantize_embeddings: bool = True,
    allow_nonfinite: bool = False,
    adapter: str | PathLike[str] | None = None,
    weight_format: str | None = None,
    progress: LoadProgress | None = None,
    while_loading: Callable[[Any, Tokenizer | None], object] | None = None,
) -> tuple[Any, Tokenizer | None]:
    """Loads a model and its tokenizer.

    Args:
        path_or_hub_id: a Hugging Face folder (config.json, and weights as safetensors,
            flax_model.msgpack or pytorch_model.bin, in one file or in shards), the path of one of
            its weight files, a .gguf file, a checkpoint of T5X, a Hub id such as
            ``"HuggingFaceTB/SmolLM2-135M-Instruct"``, or ``"smollm2"``, the bundled model.
        dtype: compute dtype: float32, bfloat16 or float16. None: the checkpoint's own, but float32
            on a CPU, where half precision is many times slower.
        param_dtype: dtype of the weights. None: as in the file (float32 on a CPU that computes in
            float32; saving still writes the file's bytes).
        mesh: a mesh of `jaxllm.make_mesh` to shard the weights over. Each process reads the shards
            of its own devices; all processes must call.
        revision: branch, tag or commit on the Hub.
        architecture: class that replaces the one in config.json: a name, such as
            ``"T5EncoderModel"``, or a class of `jaxllm.models`, also a base class.
        config: fields that override config.json's, such as dropout rates. None: as if the file had
            none, for a field that jaxllm does not know and that you know to change nothing. Or a
            whole config, which replaces the file's.
        attn_implementation: "auto" (splash on a TPU, triton on a GPU, eager elsewhere), "eager",
            "blockwise", "splash" (TPU), "triton", "cudnn" or "mosaic" (GPU), "xla"; see
            docs/models.md.
        remat: what the backward pass recomputes of each block, to save memory: True or "full",
            all activations; "dots", all but the results of linear layers; False, nothing.
        scan_layers: run equal layers in a scan wherever there is no KV cache, as in training: a
            deep model compiles faster; see docs/models.md.
        quantize: keep the weights of linear layers as integers with scales, for inference: "int8"
            in a quarter of float32's memory, "int4" in an eighth, with less exact answers; "keep",
            the exact blocks of a GGUF file (Q8_0, Q4_0, Q4_1, Q4_K, Q6_K); see
            docs/quantization.md. None: as floats.
        quantize_embeddings: with `quantize`, also the token embedding and the LM head, as int8.
        allow_nonfinite: accept NaN and infinite weights.
        adapter: folder with a LoRA adapter of PEFT, which is merged into the weights. To keep its
            parameters apart, for more training, use `jaxllm.checkpoint.load_adapter` instead.
        weight_format: format to take first if the checkpoint has weights in several:
            "safetensors", "flax" (flax_model.msgpack) or "pt" (pytorch_model.bin). None: in this
            order.
        progress: called as ``progress(tensor_name, bytes_done, bytes_total)``, in place of the
            messages of `set_progress`.
        while_loading: called in a thread while weights are read, as ``while_loading(model,
            tokenizer)``, with a model whose parameters are `jax.ShapeDtypeStruct`. What
            `jaxllm.generation.compile_programs` compiles for that model is compiled for the one
            that is returned. Errors of the function are raised here.

    Returns:
        (model, tokenizer); the tokenizer is None if the checkpoint has none. `model.config` and
        `model.generation_config` come from its files.

    Raises:
        MissingFileError, ConfigError, CheckpointError, TokenizerError, UnsupportedError: each names
            the file and field, what was found, and what to do.
    """
    checked(path_or_hub_id, (str, PathLike), "path_or_hub_id", "a path or a Hub id")
    options: dict[str, Any] = {
        "architecture": architecture,
        "attn_implementation": attn_implementation,
        "remat": remat,
        "scan_layers": scan_layers,
        "quantize": quantize,
        "quantize_embeddings": quantize_embeddings,
        "allow_nonfinite": allow_nonfinite,
    }
    checked(adapter, (str, PathLike, type(None)), "adapter", "the folder of an adapter")
    if weight_format not in (None, *FORMATS):
        names = ", ".join(map(repr, FORMATS))
        raise InputError(f"weight_format: expected {names} or None, found {quoted(weight_format)}")
    _check_options(config, mesh, options, progress)
    if while_loading is not None:
        checked_function(while_loading, "while_loading")
        if adapter is not None:
            raise InputError("while_loading: not with an adapter, which is merged after loading")
    if adapter is not None:
        if quantize == KEEP:
            raise InputError("quantize='keep': not with an adapter; use 'int8' or 'int4'")
        options["quantize"] = None  # the merged weights are quantized

    def read() -> tuple[Any, Tokenizer | None]:
        return _read(
            resolve(path_or_hub_id, revision, prefer=weight_format),
            weight_format,
            update if progress is None else progress,
            while_loading,
            dtype=dtype,
            param_dtype=param_dtype,
            overrides=config,
            mesh=mesh,
            **options,
        )

    shared = mesh is not None and mesh.is_multi_process
    phase = contextlib.nullcontext() if progress else progress_phase(f"loading {path_or_hub_id}")
    with phase as update:
        model, tokenizer = in_all_processes(read, CheckpointError) if shared else read()
    if adapter is not None:
        model = merge_lora(load_adapter(model, adapter))
        if quantize is not None:
            model = quantize_model(model, quantize, embeddings=quantize_embeddings)
        if mesh is not None:
            model = put_tree(model, mesh)
    return model, tokenizer


def _read(
    path: Path,
    weight_format: str | None,
    progress: LoadProgress | None,
    while_loading: Callable[[Any, Tokenizer | None], object] | None,
    **options: Any,
) -> tuple[Any, Tokenizer | None]:
    """The model of a local checkpoint with its settings, and its tokenizer.

    Weights are copied without Python's lock, so that a thread reads the tokenizer meanwhile, and
    then calls `while_loading`. `options` are those of `load_model`.
    """
    if choice := describe_choice(path, weight_format):
        progress_line(f"{path}: {choice}")
    checkpoint = open_checkpoint(path, weight_format)
    with checkpoint.weights, ThreadPoolExecutor(1) as thread:
        generation_config = read_generation_config(checkpoint)
        tokenizer = thread.submit(tokenizer_of, checkpoint)
        begun: list[Future[Any]] = [tokenizer]

        def when_planned(model: Any) -> None:
            def work() -> None:
                assert while_loading is not None
                found = tokenizer.result()
                # The loaded model gets the same settings, and the warnings about them.
                while_loading(with_settings(model, generation_config, found, warns=False), found)

            if while_loading is not None:
                begun.append(thread.submit(with_settings_of_this_thread(work)))

        def report(name: str, bytes_done: int, bytes_total: int) -> None:
            for future in begun:
                if future.done():
                    future.result()  # its error ends the loading
            if progress is not None:
                progress(name, bytes_done, bytes_total)

        model = load_model(checkpoint, progress=report, when_planned=when_planned, **options)
        for future in begun:
            future.result()
    model = model.with_card(embedding=read_embedding_recipe(checkpoint.path))
    return with_settings(model, generation_config, tokenizer.result()), tokenizer.result()


_OPTION_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "architecture": ((str, type, type(None)), "a class or its name"),
    "attn_implementation": ((str,), "a name"),
    "remat": ((bool, np.bool_, str), "True, False or a name"),
    "quantize": ((str, type(None)), "a name or None"),
}
"""Types of the options of `load`, and what is expected in words; others are True or False."""


def _check_options(
    config: object, mesh: object, options: Mapping[str, Any], progress: object
) -> None:
    """Raises InputError for an argument of `load` of a wrong type."""
    if mesh is not None:
        check_mesh(mesh)
    checked(config, (Mapping, ModelConfig, type(None)), "config", "a config or a dict of fields")
    if isinstance(config, Mapping):
        for name in config:
            checked(name, (str,), "config", "names of fields")
    for name, value in options.items():
        types, expected = _OPTION_TYPES.get(name, ((bool,), "True or False"))
        checked(value, types, name, expected)
    if options["quantize"] is not None and options["allow_nonfinite"]:
        raise InputError("allow_nonfinite cannot be combined with quantize; remove one of them")
    if progress is not None:
        checked_function(progress, "progress")


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of an opened checkpoint; None if it has none."""
    if checkpoint.gguf is not None:
        return tokenizer_from_gguf(checkpoint.gguf.metadata)
    return load_tokenizer(checkpoint.path)


def with_settings(
    model: Model[Any],
    config: GenerationConfig,
    tokenizer: Tokenizer | None,
    *,
    warns: bool = True,
) -> Model[Any]:
    """The model with generation defaults and the tokenizer's end token in its card.

    Warns of special tokens that the vocabulary does not have. They count as unset.
    """
    size, origin = model.config.vocab_size, model.checked_card("load").origin
    eos = None if tokenizer is None else tokenizer.eos_token_id
    files = {
        "config.json": {} if origin is None else json.loads(origin.config),
        "generation_config.json": config.to_dict(),
        "the tokenizer": {"eos_token_id": eos},
    }
    unknown = unknown_tokens(files, size)
    if unknown and warns:
        where = "" if origin is None else f"{origin.file}: "
        named = ", ".join(f"{name} {i} ({file})" for (name, i), file in unknown.items())
        warn(f"{where}not in the vocabulary of {size} tokens, and so ignored: {named}")
    return model.with_card(
        generation_config=without_unknown_tokens(config, size),
        # A chat tokenizer may end turns with a token that config.json does not name.
        tokenizer_eos=() if eos is None or eos >= size else (eos,),
        unknown_eos=tuple(i for name, i in unknown if name == "eos_token_id"),
    )


def unknown_tokens(
    files: Mapping[str, Mapping[str, Any]], vocab_size: int
) -> dict[tuple[str, int], str]:
    """Special tokens that are not in the vocabulary, with the first file that names them.

    >>> unknown_tokens({"a.json": {"eos_token_id": [7, 50256]}, "b.json": {}}, 1000)
    {('eos_token_id', 50256): 'a.json'}
    """
    unknown: dict[tuple[str, int], str] = {}
    for file, fields in files.items():
        for name in SPECIAL_TOKENS:
            value = fields.get(name)
            for token in value if isinstance(value, list | tuple) else (value,):
                if isinstance(token, int) and token >= vocab_size:
                    unknown.setdefault((name, token), file)
    return unknown


def without_unknown_tokens(config: GenerationConfig, vocab_size: int) -> GenerationConfig:
    """The config without BOS, EOS and pad ids that the model's vocabulary does not have.

    They are common in files of smaller vocabularies, where GPT-2's 50256 was left behind.
    """
    fields = config.to_dict()
    for name in {"bos_token_id", "eos_token_id", "pad_token_id"} & fields.keys():
        value = fields[name]
        if isinstance(value, int) and value >= vocab_size:
            fields[name] = None
        elif isinstance(value, list | tuple):
            fields[name] = tuple(token for token in value if token < vocab_size) or None
    return config if fields == config.to_dict() else GenerationConfig.from_dict(fields)


def read_generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """Reads generation_config.json, or the generation fields of an old config.json or of a GGUF
    file. Warns of sampling settings of a GGUF file that jaxllm does not have."""
    path = checkpoint.path / "generation_config.json"
    if checkpoint.gguf is None and is_there(path, ConfigError):
        return GenerationConfig.from_file(path)
    names = GENERATION_KEYS.union(SPECIAL_TOKENS)
    old: dict[str, Any] = {k: v for k, v in checkpoint.config.items() if k in names}
    # BART's key in transformers 3, for a bos_token_id that is 0 by default.
    is_forced = checkpoint.config.get("force_bos_token_to_be_generated")
    if is_forced and old.get("forced_bos_token_id") is None:
        old["forced_bos_token_id"] = old.get("bos_token_id", 0)
    if isinstance(checkpoint.weights, HFView):
        old |= checkpoint.weights.generation
        if unused := unused_sampling(checkpoint.weights.file.metadata):
            warn(f"{checkpoint.path}: jaxllm has no such settings, and ignores {listed(unused)}")
    return GenerationConfig.from_dict(old, where=str(checkpoint.config_file))


@checks_flags
def load_orbax(
    folder: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
) -> tuple[Any, Tokenizer | None]:
    """Loads a model of `save_orbax`: (model, tokenizer).

    Args:
        folder: the folder given to `save_orbax`.
        dtype: compute dtype. None: the parameters' own, but float32 on a CPU.
        mesh: shards the weights, as in `load`.
        attn_implementation: "auto" (splash on a TPU, triton on a GPU, eager elsewhere), "eager",
            "blockwise", "splash" (TPU), "triton", "cudnn" or "mosaic" (GPU), "xla"; see
            docs/models.md.
        remat: what the backward pass recomputes of each block, to save memory: True or "full",
            all activations; "dots", all but the results of linear layers; False, nothing.
        scan_layers: run equal layers in a scan wherever there is no KV cache, as in training: a
            deep model compiles faster; see docs/models.md.

    Raises:
        MissingFileError: there is no model in the folder.
        CheckpointError: a file is damaged; names the parameters whose digests differ.
    """
    folder = checked_path(folder, "folder")
    if mesh is not None:
        check_mesh(mesh)
    model = load_weights(
        folder,
        dtype=dtype,
        mesh=mesh,
        attn_implementation=attn_implementation,
        remat=remat,
        scan_layers=scan_layers,
    )
    model = model.with_card(embedding=read_embedding_recipe(folder))
    tokenizer = load_tokenizer(folder)
    path = folder / "generation_config.json"
    if is_there(path, ConfigError):
        model = with_settings(model, GenerationConfig.from_file(path), tokenizer)
    return model, tokenizer
