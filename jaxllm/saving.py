"""Saves a model with its tokenizer, in Hugging Face's format and in Orbax's."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxllm.checkpoint.embedding_files import read_embedding_recipe, write_embedding_files
from jaxllm.checkpoint.load import open_checkpoint
from jaxllm.checkpoint.load_parameters import LoadProgress
from jaxllm.checkpoint.orbax.model import WEIGHTS_FOLDER, save_weights
from jaxllm.checkpoint.save import (
    MAX_SHARD_BYTES,
    LazyHostArray,
    check_no_lora,
    check_no_model,
    check_parameters,
    model_files,
    save_model,
    save_tensors,
    with_host_arrays,
)
from jaxllm.common.arguments import checked, checked_path, checks_flags, is_integer
from jaxllm.common.errors import CheckpointError, InputError, listed, quoted, warn
from jaxllm.common.files import write_json
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.loading import read_generation_config, tokenizer_of, without_unknown_tokens
from jaxllm.models.model import Model
from jaxllm.models.registry import ModelSpec
from jaxllm.models.weights import parameters
from jaxllm.parallel.processes import in_all_processes
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.settings import FILE_NAMES


@checks_flags
def save_hf(
    folder: str | PathLike[str],
    model: Model[Any],
    tokenizer: Tokenizer | None = None,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Saves a model as a folder that transformers 4 and 5 load: configs, weights, tokenizer.

    Loading a checkpoint and saving it gives the same tensor names, shapes, dtypes and bytes. Every
    weight file is read back and compared before it gets its final name. Weights are copied to the
    host one tensor at a time. With several processes, process 0 writes, but all must call.

    Args:
        folder: created if it does not exist.
        model: a loaded model, or one of your own config.
        tokenizer: its files are written too.
        dtype: dtype of the written tensors. None: the checkpoint's own if that is lossless, else
            the parameters'.
        max_shard_bytes: larger models are split into several files.
        overwrite: replace a model that is in the folder. Its flax_model.msgpack or
            pytorch_model.bin is removed, with a warning. Its tokenizer stays, with a warning, if
            `tokenizer` is None.

    Raises:
        CheckpointError: the folder holds a model already, or cannot be written.
        TokenizerError: a file of the tokenizer cannot be written.
        InputError: the model has LoRA, which `save_adapter` and `merge_lora` are for.
        UnsupportedError: the weights are quantized, which only `save_orbax` writes.
    """
    folder = checked_path(folder, "folder")
    _check_saved("save_hf", model, tokenizer)
    if not is_integer(max_shard_bytes) or max_shard_bytes < 1:
        raise InputError(
            f"max_shard_bytes: expected a positive integer, found {quoted(max_shard_bytes)}"
        )

    def write(arrays: dict[str, LazyHostArray]) -> None:
        if not overwrite:
            check_no_model(folder)
        replaces = bool(model_files(folder))
        if replaces and tokenizer is None:
            _warn_of_tokenizer(folder)
        save_model(folder, model, arrays, dtype=dtype, max_shard_bytes=max_shard_bytes)
        save_settings(folder, model.generation_config, tokenizer, replaces=replaces)
        write_embedding_files(folder, model.checked_card("save_hf").embedding)

    with_host_arrays(parameters(model), write)


def _check_saved(name: str, model: Any, tokenizer: object) -> None:
    """Raises InputError unless there is a model with its card, and a tokenizer or None."""
    checked(model, (Model,), "model", "a model")
    check_parameters(model, name)
    checked(tokenizer, (Tokenizer, type(None)), "tokenizer", "a tokenizer or None")


def _warn_of_tokenizer(folder: Path) -> None:
    """Warns of a tokenizer that stays in the folder of a model that is replaced."""
    if names := [name for name in FILE_NAMES if (folder / name).exists()]:
        warn(
            f"{folder}: keeps the tokenizer of the model that is replaced ({listed(names)}), which "
            "will be loaded with the new one; give tokenizer= to replace it"
        )


def save_settings(
    folder: Path,
    settings: GenerationConfig | None,
    tokenizer: Tokenizer | None,
    *,
    replaces: bool = False,
) -> None:
    """Writes generation_config.json, or removes that of a replaced model, and the tokenizer."""
    path = folder / "generation_config.json"
    if settings is not None:
        write_json(path, settings.to_json())
    elif replaces:
        path.unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(folder)


def export_checkpoint(
    source: Path,
    folder: Path,
    *,
    dtype: DTypeLike | None = None,
    progress: LoadProgress | None = None,
) -> ModelSpec:
    """Writes a checkpoint of any format as a Hugging Face folder of safetensors.

    Tensors are read and written one at a time; the model is not built.

    Args:
        source: path of a checkpoint, as from `jaxllm.checkpoint.resolve`.
        folder: an existing, empty folder.
        dtype: dtype of the written tensors. None: the checkpoint's own; float32 for the quantized
            tensors of a GGUF file.
        progress: called as ``progress(tensor_name, bytes_done, bytes_total)``.

    Returns:
        The family and the class of the model.
    """
    checkpoint = open_checkpoint(source)
    with checkpoint.weights:
        settings, tokenizer = read_generation_config(checkpoint), tokenizer_of(checkpoint)
        spec = save_tensors(folder, checkpoint, dtype=dtype, progress=progress)
    settings = without_unknown_tokens(settings, spec.config.vocab_size)
    save_settings(folder, settings, tokenizer)
    write_embedding_files(folder, read_embedding_recipe(checkpoint.path))
    return spec


def push_to_hub(
    repo_id: str,
    model: Model[Any],
    tokenizer: Tokenizer | None = None,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    **options: Any,
) -> str:
    """Uploads the files of `save_hf` to the Hugging Face Hub, and returns the commit's URL.

    Args:
        repo_id: repository such as ``"me/my-model"``, created if it does not exist.
        model: a loaded model, or one of your own config.
        tokenizer: its files are uploaded too.
        private: for a new repository; None: as the organisation's setting.
        revision: branch to commit to. None: the main one.
        commit_message: first line of the commit.
        options: `dtype` and `max_shard_bytes` of `save_hf`.

    Raises:
        CheckpointError: the upload failed: no login, no right to write, or no network.
    """
    import huggingface_hub  # a slow import, which local files do not need

    with tempfile.TemporaryDirectory() as folder:
        save_hf(folder, model, tokenizer, **options)
        try:
            api = huggingface_hub.HfApi()
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
            )
        except Exception as failure:  # errors of the client and of its HTTP library
            reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            raise CheckpointError(
                f"{repo_id!r}: not uploaded to the Hub ({reason}); log in with `hf auth login`"
            ) from failure
    return commit.commit_url


def save_orbax(
    folder: str | PathLike[str], model: Model[Any], tokenizer: Tokenizer | None = None
) -> None:
    """Saves a model in Orbax's format, with a digest of every parameter.

    Parameters keep their dtypes, and the Hugging Face metadata is kept: `load_orbax` and then
    `save_hf` write the same bytes as `load` and then `save_hf`. An older model in the folder is
    deleted once the new one is on disk.

    Its tokenizer stays, with a warning, if `tokenizer` is None.

    Raises:
        CheckpointError: it could not be written; an older model is intact.
        RunError: another process writes to the folder.
        InputError: the model has LoRA, which `save_adapter` and `merge_lora` are for.
    """
    folder = checked_path(folder, "folder")
    _check_saved("save_orbax", model, tokenizer)
    check_no_lora(parameters(model), "save_orbax")
    replaces = (folder / WEIGHTS_FOLDER).is_dir()
    if replaces and tokenizer is None:
        _warn_of_tokenizer(folder)
    save_weights(folder, model)

    # Weights are written by all processes, the other files by process 0.
    def write_other_files() -> None:
        if jax.process_index() == 0:
            save_settings(folder, model.generation_config, tokenizer, replaces=replaces)
            write_embedding_files(folder, model.checked_card("save_orbax").embedding)

    in_all_processes(write_other_files, CheckpointError)
