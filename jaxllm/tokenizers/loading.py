"""Loads the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers.byte_level import ByT5Tokenizer
from jaxllm.tokenizers.rank_files import RankTokenizer
from jaxllm.tokenizers.sentencepiece_tokenizers import (
    GemmaTokenizer,
    LlamaTokenizer,
    T5Tokenizer,
)
from jaxllm.tokenizers.settings import (
    DECIDING_OPTIONS,
    TokenizerFiles,
    TokenizerSettings,
    read_settings,
)
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json import CLASSES, FastTokenizer, GPT2Tokenizer
from jaxllm.tokenizers.translation_tokenizers import (
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBart50TokenizerFast,
    MBartTokenizer,
    MBartTokenizerFast,
    NllbTokenizer,
    NllbTokenizerFast,
    PegasusTokenizer,
    XGLMTokenizer,
)

_RANKS = "tokenizer.model in tiktoken's format"
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm"),
    *("vocab.json", "merges.txt", "tekken.json", _RANKS),
)
_OTHER_FORMATS = {
    "vocab.txt": "a WordPiece vocabulary, such as BERT's",
    "*.tiktoken": "ranks in tiktoken's format without their regular expression, such as Qwen 1's",
    "encoder.json": "GPT-2's original vocabulary; call it vocab.json, and vocab.bpe merges.txt",
    "vocab.bpe": "GPT-2's original merges; call it merges.txt, and encoder.json vocab.json",
    "bpe.codes": "merges of fastBPE, such as PhoBERT's",
    "spm.model": "a sentencepiece model of another class, such as DeBERTa's",
    "sentencepiece.model": "a sentencepiece model of another class, such as RemBERT's",
    "tokenizer.model.v*": "Mistral's sentencepiece model with control tokens",
}
"""Vocabularies that are not read, by the names of their files."""
_FAIRSEQ = (MBartTokenizer, MBart50Tokenizer, NllbTokenizer, PegasusTokenizer, XGLMTokenizer)
_FAST = {
    "MBartTokenizer": MBartTokenizerFast,
    "MBart50Tokenizer": MBart50TokenizerFast,
    "NllbTokenizer": NllbTokenizerFast,
}
_READERS = (
    (("ByT5Tokenizer",), (), ByT5Tokenizer),
    *(((each.__name__,), (each.model_file,), each) for each in _FAIRSEQ),
    *(((each.__name__,), ("vocab.json",), each) for each in (MarianTokenizer, M2M100Tokenizer)),
    (("T5Tokenizer", "MT5Tokenizer", ""), ("spiece.model",), T5Tokenizer),
    *(((name,), ("tokenizer.json",), each) for name, each in _FAST.items()),
    (None, ("tokenizer.json",), FastTokenizer),
    (("LlamaTokenizer", ""), ("tokenizer.model",), LlamaTokenizer),
    (("GemmaTokenizer",), ("tokenizer.model",), GemmaTokenizer),
    (("LlamaTokenizer", "PreTrainedTokenizer", "TokenizersBackend", ""), (_RANKS,), RankTokenizer),
    (None, ("tekken.json",), RankTokenizer),
    *(((name,), ("vocab.json", "merges.txt"), each) for name, each in CLASSES.items()),
    (("",), ("vocab.json", "merges.txt"), GPT2Tokenizer),
)
"""Names of transformers' classes ("": a folder names none; None: any), files that a folder needs,
and the class that reads them. The first that fits decides."""


def load_tokenizer(folder: str | PathLike[str], **options: Any) -> Tokenizer | None:
    """Loads the tokenizer of a Hugging Face folder; None if it has no tokenizer files.

    ``tokenizer_class`` in tokenizer_config.json decides, or in config.json, or its ``model_type``,
    as in transformers. T5's, mBART's, NLLB's, Pegasus's and XGLM's tokenizers are read from their
    sentencepiece model if present, since it defines their ids; Marian's and M2M100's from
    vocab.json and their sentencepiece models. All others, and these without a model, are read from
    tokenizer.json; without one, Llama's from its sentencepiece model, and GPT-2's, RoBERTa's
    (BART's) and Qwen2's from vocab.json and merges.txt. ``ByT5Tokenizer`` needs none. Without a
    class, the first of these files decides. The options ``legacy`` and ``add_prefix_space``
    belong to sentencepiece: a call that gives one of them reads Llama's tokenizer.model.

    Args:
        folder: the folder.
        options: fields that override those of tokenizer_config.json, also in the files that `save`
            writes: `padding_side`, `truncation_side`, `model_max_length`, `chat_template`,
            `split_special_tokens`, `additional_special_tokens`, `clean_up_tokenization_spaces`,
            and named tokens such as `pad_token`, as a string, an `AddedToken` or None; Llama's
            class also has `add_bos_token` and `add_eos_token`, GPT-2's `add_prefix_space`,
            sentencepiece models `add_prefix_space` and `legacy`, translation models `src_lang` and
            `tgt_lang`.
    """
    files = TokenizerFiles(Path(folder), options)
    files.add_class()
    try:
        return read_tokenizer(files, read_settings(files))
    except (TokenizerError, UnsupportedError) as error:
        if not str(error).startswith("tokenizer_config.json: "):
            raise
        raise type(error)(f"{files.folder}/{error}") from None


def ids_version(folder: str | PathLike[str]) -> int:
    """`Tokenizer.ids_version` of a folder's tokenizer, which is not loaded; 1 if it has none."""
    files = TokenizerFiles(Path(folder))
    files.add_class()
    kind = _choose(files, read_settings(files))
    return 1 if kind is None else kind.ids_version(files.contents)


def read_tokenizer(files: TokenizerFiles, settings: TokenizerSettings) -> Tokenizer | None:
    """The tokenizer of the class that the settings name, or that the files say; None if there are
    no tokenizer files."""
    kind = _choose(files, settings)
    return None if kind is None else kind.from_files(files, settings)


def _choose(files: TokenizerFiles, settings: TokenizerSettings) -> Any:
    """The class that reads the files; None if there are no tokenizer files."""
    class_name = (settings.tokenizer_class or "").removesuffix("Fast")
    found = {_RANKS if name == files.rank_file else name for name in files.contents}
    asks_model = not DECIDING_OPTIONS.isdisjoint(files.options)
    if asks_model and class_name in ("LlamaTokenizer", "") and "tokenizer.model" in found:
        return LlamaTokenizer
    for names, needed, kind in _READERS:
        if (names is None or class_name in names) and set(needed) <= found:
            return kind
    present = [name for name in _VOCABULARIES if name in found]
    if not present:
        other = (path for pattern in _OTHER_FORMATS for path in files.folder.glob(pattern))
        if (path := next(other, None)) is None or any(files.folder.glob("*.gguf")):
            return None
        kind = next(kind for name, kind in _OTHER_FORMATS.items() if path.match(name))
        raise UnsupportedError(
            f"{path}: {kind}. jaxllm does not read this format; save_pretrained of transformers 5's"
            " AutoTokenizer writes a tokenizer.json of most models"
        )
    classes = ", ".join(name.removesuffix("Tokenizer") for name in CLASSES)
    raise UnsupportedError(
        f"{files.folder}: cannot read a {class_name or 'tokenizer'} from {', '.join(present)}:"
        " supported are tokenizer.json, tokenizer.model (Llama, Gemma), spiece.model (T5),"
        f" vocab.json with merges.txt ({classes}), ByT5Tokenizer, tokenizers of translation models;"
        " save_pretrained of transformers 5's AutoTokenizer writes a tokenizer.json of others"
    )
