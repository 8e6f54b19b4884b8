"""Which tokenizer a folder holds."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from jaxllm.common.errors import UnsupportedError
from jaxllm.tokenizers.sentencepiece.tokenizers import LlamaTokenizer, T5Tokenizer
from jaxllm.tokenizers.settings import TokenizerFiles, read_settings
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json.tokenizer import FastTokenizer, GPT2Tokenizer

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt")


def load_tokenizer(folder: str | PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None where the folder has no tokenizer files.

    ``tokenizer_class`` in tokenizer_config.json decides. ``LlamaTokenizer`` and ``T5Tokenizer`` are
    read from their sentencepiece model when it is there, which is what their ids are defined by;
    everything else, and these two without a model, from tokenizer.json. A folder that names no
    class is read by the files that it has, in the order of this paragraph.

    Raises:
        MissingFileError: There is no such folder.
        TokenizerError: A file is malformed.
        UnsupportedError: The folder holds a tokenizer of another kind.
    """
    files = TokenizerFiles(Path(folder))
    present = [name for name in _VOCABULARIES if name in files]
    if not present:
        return None
    settings = read_settings(files)
    kind = (settings.tokenizer_class or "").removesuffix("Fast")
    if "tokenizer.model" in files and kind in ("LlamaTokenizer", ""):
        return LlamaTokenizer.from_files(files, settings)
    if "spiece.model" in files and kind in ("T5Tokenizer", ""):
        return T5Tokenizer.from_files(files, settings)
    if "tokenizer.json" in files:
        return FastTokenizer.from_files(files, settings)
    if {"vocab.json", "merges.txt"} <= set(files.contents) and kind in ("GPT2Tokenizer", ""):
        return GPT2Tokenizer.from_files(files, settings)
    raise UnsupportedError(
        f"{files.folder}: cannot read a {kind or 'tokenizer'} from {', '.join(present)}: supported"
        " are tokenizer.json, LlamaTokenizer with tokenizer.model, T5Tokenizer with spiece.model"
        " and GPT2Tokenizer with vocab.json and merges.txt"
    )
