"""Tokenizers from a tokenizer.json: byte-level BPE (GPT-2, Llama 3, SmolLM2) and Unigram.

The tokenizers library splits text into tokens, after the file has been checked. The file's
``post_processor``, which adds special tokens, is implemented here, because settings may replace it;
its ``decoder`` is implemented in ``stream_decoder.py``. GPT-2, RoBERTa (CodeT5, BART), Qwen2,
GPT-NeoX and Blenderbot are read from vocab.json and merges.txt too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar, Self

import tokenizers

from jaxllm.common.errors import JaxLLMError, TokenizerError
from jaxllm.common.files import parse_json
from jaxllm.tokenizers.added_tokens import AddedToken, Parts, parse_added_token, place_added_tokens
from jaxllm.tokenizers.batch import PaddingSide, Span
from jaxllm.tokenizers.settings import (
    COHERE_TOKENS,
    FAIRSEQ_TOKENS,
    GEMMA_TOKENS,
    GPT2_TOKENS,
    LANGUAGES,
    LLAMA_TOKENS,
    PEGASUS_TOKENS,
    QWEN2_TOKENS,
    ROBERTA_TOKENS,
    T5_TOKENS,
    NamedTokens,
    TokenizerFiles,
    TokenizerSettings,
    named_tokens,
    new_config,
)
from jaxllm.tokenizers.stream_decoder import Stage, decoder_stages
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json_check import (
    check_growth,
    check_normalized_size,
    check_tokenizer_json,
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
LLAMA3_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_TAIL
QWEN2_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_TAIL
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_CLASSES: Mapping[str, tuple[NamedTokens, tuple[str, ...]]] = {
    "LlamaTokenizer": (LLAMA_TOKENS, ("add_bos_token", "add_eos_token")),
    "GemmaTokenizer": (GEMMA_TOKENS, ()),
    "CohereTokenizer": (COHERE_TOKENS, ()),
    "GPT2Tokenizer": (GPT2_TOKENS, ("add_prefix_space",)),
    "RobertaTokenizer": (ROBERTA_TOKENS, ("add_prefix_space",)),
    "BartTokenizer": (ROBERTA_TOKENS, ("add_prefix_space",)),
    **dict.fromkeys(("T5Tokenizer", "MT5Tokenizer"), (T5_TOKENS, ())),
    "Qwen2Tokenizer": (QWEN2_TOKENS, ()),
    "MBartTokenizer": (ROBERTA_TOKENS, LANGUAGES),
    "MBart50Tokenizer": (ROBERTA_TOKENS, LANGUAGES),
    "NllbTokenizer": (ROBERTA_TOKENS, LANGUAGES),
    "PegasusTokenizer": (PEGASUS_TOKENS, ()),
    "XGLMTokenizer": (FAIRSEQ_TOKENS, ()),
}
"""Default tokens of transformers' classes, and options that act on their tokenizer.json."""
TEXTS_AT_ONCE = 1024
"""Texts of one call of the library, which holds details of all of them at once."""


class FastTokenizer(Tokenizer):
    """A tokenizer from a tokenizer.json, with the ids of transformers 5.23's ``TokenizersBackend``.

    Args:
        spec: the object in tokenizer.json.
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes. None: from ``spec`` and ``settings``.
        source: name of the file, for messages.
        padding_side: default if the settings have none.
    """

    def __init__(
        self,
        spec: object,
        settings: TokenizerSettings,
        files: Mapping[str, bytes] | None = None,
        *,
        source: str = "tokenizer.json",
        padding_side: PaddingSide = "right",
    ) -> None:
        super().__init__(settings, files or {}, padding_side)
        spec = check_tokenizer_json(spec, source)
        spec["added_tokens"] = all_added_tokens(spec, settings, source)
        spec["post_processor"] = choose_post_processor(spec, settings)
        decoder_stages(spec["decoder"])  # raises for unsupported decoders
        self._growth = check_growth(spec, source)
        self._source = source
        text = json.dumps(spec, ensure_ascii=False)
        self._backend = _build(text, spec["added_tokens"], source)
        self._normalizer = self._backend.normalizer
        self._decoder = spec["decoder"]
        self._template = read_template(spec["post_processor"])
        self._is_bpe = spec["model"]["type"] == "BPE"
        self._added = {
            entry["id"]: parse_added_token(entry, source) for entry in spec["added_tokens"]
        }
        self.special_tokens = {
            token.content: token for token in self._added.values() if token.special
        }
        self.vocab_size = len(spec["model"]["vocab"])
        vocabulary = _ids(spec["model"]) | {t.content: index for index, t in self._added.items()}
        # The ids are 0, 1, ..., each once, and a file's vocabulary is mostly in their order.
        self._tokens_by_id = tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        for entry in spec["added_tokens"]:
            if entry["normalized"]:  # decoded as the normalizer made it: "▁Hello"
                tokens[entry["id"]] = str(self._backend.id_to_token(entry["id"]))
        self.special_ids = frozenset(vocabulary[content] for content in self.special_tokens)
        if files is None:
            self._files = {
                "tokenizer.json": text.encode(),
                **new_config("PreTrainedTokenizerFast", settings),
            }

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder with tokenizer.json, with the defaults of its ``tokenizer_class``.

        As in transformers 4.57, ``add_bos_token`` and ``add_eos_token`` apply to Llama's class,
        which has BOS by default, and ``add_prefix_space`` to GPT-2's and RoBERTa's (BART's). For
        other classes, and for a Llama's file without either, as transformers 5 writes it,
        tokenizer.json decides.
        """
        source = str(files.folder / "tokenizer.json")
        spec = parse_json(files.contents["tokenizer.json"], source=source, error=TokenizerError)
        class_name = (settings.tokenizer_class or "").removesuffix("Fast")
        if not class_name and "tokenizer.model" in files and not files.rank_file:
            class_name = "LlamaTokenizer"
        default_tokens, acting = _CLASSES.get(class_name, ({}, ()))
        files.refuse_options(acting, "a tokenizer.json of this class")
        settings = settings.with_defaults(**default_tokens)
        options = dict(settings.options)
        flags = {name: options.pop(name, None) for name in ("add_bos_token", "add_eos_token")}
        is_llama = class_name == "LlamaTokenizer"
        if is_llama and any(flag is not None for flag in flags.values()):
            bos = flags["add_bos_token"]
            options |= {**flags, "add_bos_token": True if bos is None else bos}
        splitter = spec.get("pre_tokenizer") if isinstance(spec, dict) else None
        if "add_prefix_space" in acting and isinstance(splitter, dict):
            prefix_space = settings.flag("add_prefix_space", False)
            if splitter.get("type") == "ByteLevel":  # alone, and in no Sequence
                splitter["add_prefix_space"] = prefix_space
        pads_left = class_name in ("LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
        side: PaddingSide = "left" if pads_left else "right"
        settings = replace(settings, options=options)
        return cls(spec, settings, files.contents, source=source, padding_side=side)

    @classmethod
    def ids_version(cls, files: Collection[str]) -> int:
        return 2 if "tokenizer.model" in files else 1

    def _token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(self._backend.get_vocab(True).items(), key=itemgetter(1)))

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:
            return [self._run(self._backend, texts[0]).ids]

        with _library(self._source):
            for text in texts:
                self._check_size(text)
            encode = self._backend.encode_batch_fast  # without offsets, in the library's threads
            rows = []
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                some = list(texts[start : start + TEXTS_AT_ONCE])
                rows += [each.ids for each in encode(some, add_special_tokens=False)]
            return rows

    def _text_tokens(self, text: str) -> list[str]:
        return self._run(self._backend, text).tokens

    def _encode_spans(self, text: str, split_special_tokens: bool) -> tuple[list[int], list[Span]]:
        backend = self._backend_for_parts[0] if split_special_tokens else self._backend
        encoding = self._run(backend, text)
        return encoding.ids, encoding.offsets

    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        backend, names = self._backend_for_parts
        text = "".join(p if isinstance(p, str) else names[p.content] for p in parts)
        return self._run(backend, text).ids

    def _run(self, backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        with _library(self._source):
            self._check_size(text)
            return backend.encode(text, add_special_tokens=False)

    def _check_size(self, text: str) -> None:
        if self._normalizer is not None:
            normalize = self._normalizer.normalize_str
            check_normalized_size(normalize, text, self._growth, self._source)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        # The library's own skipping misses special tokens that its normalizer changes.
        if skip_special_tokens and not self.special_ids.isdisjoint(ids):
            ids = [index for index in ids if index not in self.special_ids]
        with _library(self._source):
            return self._backend.decode(ids, skip_special_tokens=False)

    @cached_property
    def _backend_for_parts(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """Copy with the same ids, whose special tokens have names that cannot occur in text.

        The model's vocabulary is renamed as well: otherwise Unigram would find ``</s>`` in it.
        """
        spec = json.loads(self._backend.to_str())
        nonce = secrets.token_hex(16)
        names = {
            content: f"\ufdd0{nonce}:{number}\ufdd1"
            for number, content in enumerate(self.special_tokens)
        }
        for entry in spec["added_tokens"]:
            if entry["content"] in names:
                entry |= {"content": names[entry["content"]], "normalized": False}
        spec["post_processor"] = None
        model = spec["model"]
        if model["type"] == "BPE":
            model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
            model["merges"] = [
                pair
                for pair in model["merges"]
                if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}
            ]
            if model["unk_token"] in names:
                model["unk_token"] = names[model["unk_token"]]
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        text = json.dumps(spec, ensure_ascii=False)
        return _build(text, spec["added_tokens"], self._source), names

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        single, double = self._template
        parts = {"A": ids, "B": pair or []}
        result = []
        for item in single if pair is None else double:
            result += parts[item] if isinstance(item, str) else item
        return result

    def _rebuild(self, settings: TokenizerSettings) -> None:
        spec = json.loads(self._backend.to_str())
        self._become(FastTokenizer(spec, settings, source=self._source))

    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        return decoder_stages(self._decoder)

    @property
    def _cleans_up(self) -> bool:
        """As in transformers 5: not for BPE, where the clean-up would remove real spaces."""
        return not self._is_bpe


@contextmanager
def _library(source: str) -> Generator[None]:
    """Context of calls of the library, whose errors and panics become TokenizerErrors."""
    try:
        yield
    except JaxLLMError:
        raise
    except Exception as failure:
        raise TokenizerError(f"{source}: {failure}") from failure
    except BaseException as failure:  # a panic is no ``Exception``
        if type(failure).__name__ == "PanicException":
            raise TokenizerError(f"{source}: the tokenizers library failed: {failure}") from failure
        raise


def _build(
    text: str, added_tokens: Sequence[Mapping[str, Any]], source: str
) -> tokenizers.Tokenizer:
    """The library's tokenizer of a checked tokenizer.json, with these added tokens."""
    with _library(source):
        backend = tokenizers.Tokenizer.from_str(text)
    for entry in added_tokens:
        index = backend.token_to_id(entry["content"])
        if index != entry["id"]:
            raise TokenizerError(
                f"{source}: the added token {entry['content']!r} has the id {entry['id']}, but it"
                f" follows from its place in the file that it is {index}"
            )
    return backend


def _ids(model: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token, in a new dictionary: of a BPE model, or of a Unigram model's pieces."""
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {p: i for i, (p, _) in enumerate(vocab)}


def all_added_tokens(
    spec: Mapping[str, Any], settings: TokenizerSettings, source: str
) -> list[dict[str, Any]]:
    """Merges the added tokens of tokenizer.json and of the settings as in transformers."""
    ids = _ids(spec["model"])
    entries = sorted(spec["added_tokens"], key=lambda entry: entry["id"])
    added = {entry["id"]: parse_added_token(entry, source, special=False) for entry in entries}
    ids |= {token.content: index for index, token in added.items()}
    for index, token in settings.added.items():
        known = ids.setdefault(token.content, len(ids))
        if index != known:
            raise TokenizerError(
                f"tokenizer_config.json: the added token {token.content!r} has the id {index},"
                f" but in {source} it has the id {known}"
            )
        added[index] = token
    special = (*settings.named.values(), *settings.extra)
    named = {token.content for token in settings.named.values()}
    return [
        {"id": index, **asdict(token), "special": token.special or token.content in named}
        for index, token in sorted(place_added_tokens(ids, added, special, source).items())
    ]


def choose_post_processor(
    spec: Mapping[str, Any], settings: TokenizerSettings
) -> dict[str, Any] | None:
    """Chooses the post-processor: the file's, unless the settings have flags for BOS and EOS."""
    flags = [settings.options.get("add_bos_token"), settings.options.get("add_eos_token")]
    if flags == [None, None]:
        return spec["post_processor"]
    ids = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}

    def special(name: str) -> list[AddedToken]:
        token = settings.named.get(f"{name}_token")
        is_added = token is not None and settings.flag(f"add_{name}_token", False)
        return [token] if token is not None and is_added else []

    bos, eos = special("bos"), special("eos")
    single = [*bos, "A", *eos]
    return template(single, [*single, *bos, "B", *eos], ids, second=len(single))


def template(
    single: Parts, pair: Parts, ids: Mapping[str, int], second: int | None = None
) -> dict[str, Any]:
    """A TemplateProcessing that puts special tokens around one text, "A", or two, "A" and "B".

    Args:
        single, pair: special tokens and texts in order; only an `AddedToken` is a special token.
        ids: ids of the special tokens.
        second: place in `pair` from which token types are 1; None: all are 0.
    """
    used = {str(item) for item in (*single, *pair) if isinstance(item, AddedToken)}
    second = len(pair) if second is None else second

    def entries(items: Parts) -> list[dict[str, Any]]:
        kinds = ("Sequence" if isinstance(item, str) else "SpecialToken" for item in items)
        return [
            {kind: {"id": str(item), "type_id": int(i >= second)}}
            for i, (kind, item) in enumerate(zip(kinds, items, strict=True))
        ]

    return {
        "type": "TemplateProcessing",
        "single": entries(single),
        "pair": entries(pair),
        "special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in sorted(used)},
    }


def read_template(
    processor: Mapping[str, Any] | None,
) -> tuple[list[str | list[int]], list[str | list[int]]]:
    """Reads the templates for one and two sequences: lists of ids, "A" and "B" for sequences."""
    steps = [] if processor is None else processor.get("processors", [processor])
    templates = [step for step in steps if step["type"] != "ByteLevel"]
    if not templates:
        return ["A"], ["A", "B"]
    if len(templates) > 1:
        raise TokenizerError(
            "tokenizer.json: post_processor: more than one of TemplateProcessing and "
            "RobertaProcessing"
        )
    if templates[0]["type"] == "RobertaProcessing":  # of CodeT5
        cls, sep = [templates[0]["cls"][1]], [templates[0]["sep"][1]]
        return [cls, "A", sep], [cls, "A", sep, sep, "B", sep]
    tokens = templates[0]["special_tokens"]

    def read(pieces: list[dict[str, Any]]) -> list[str | list[int]]:
        return [
            tokens[piece["SpecialToken"]["id"]]["ids"]
            if "SpecialToken" in piece
            else piece["Sequence"]["id"]
            for piece in pieces
        ]

    return read(templates[0]["single"]), read(templates[0]["pair"])


class GPT2Tokenizer(FastTokenizer):
    """Byte-level BPE from vocab.json and merges.txt, with the ids of transformers' class."""

    default_tokens: ClassVar[NamedTokens] = GPT2_TOKENS
    pattern: ClassVar[str | None] = None
    """Regular expression of words; None: GPT-2's."""
    normalizer: ClassVar[dict[str, str] | None] = None
    prefix_space: ClassVar[bool] = False
    """Default of ``add_prefix_space``."""

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder with vocab.json and merges.txt, with the class's default tokens."""
        files.refuse_options(("add_prefix_space",), f"a {cls.__name__}")
        source = str(files.folder / "vocab.json")
        model = {
            "type": "BPE",
            "vocab": files.json_object("vocab.json"),
            "merges": read_merges(files.text("merges.txt")),
        }
        decoder = {**BYTE_LEVEL, "use_regex": True}
        prefix_space = settings.flag("add_prefix_space", cls.prefix_space)
        byte_level = {**BYTE_LEVEL, "add_prefix_space": prefix_space}
        spec: dict[str, Any] = {
            "added_tokens": [],
            "model": model,
            "decoder": decoder,
            "normalizer": cls.normalizer,
            "pre_tokenizer": {**byte_level, "use_regex": True},
        }
        if cls.pattern is not None:
            steps = split_before_bytes(cls.pattern, byte_level=byte_level)
            spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        settings = settings.with_defaults(**cls.default_tokens)
        added = all_added_tokens(check_tokenizer_json(spec, source), settings, source)
        ids = {entry["content"]: entry["id"] for entry in added}
        post_processor = cls._post_processor(ids, settings, source)
        if post_processor is not None:  # the class decides, whatever the files say of BOS and EOS
            flags = ("add_bos_token", "add_eos_token")
            options = {k: v for k, v in settings.options.items() if k not in flags}
            settings = replace(settings, options=options)
        spec |= {"added_tokens": added, "post_processor": post_processor}
        return cls(spec, settings, files.contents, source=source)

    @staticmethod
    def _post_processor(
        ids: Mapping[str, int], settings: TokenizerSettings, source: str
    ) -> dict[str, Any] | None:
        """Special tokens around a text: none."""
        return None


class RobertaTokenizer(GPT2Tokenizer):
    """GPT-2's splits, ``<s>`` before and ``</s>`` after a text: CodeT5 and BART."""

    default_tokens = ROBERTA_TOKENS

    @classmethod
    def ids_version(cls, files: Collection[str]) -> int:
        return 2

    @staticmethod
    def _post_processor(
        ids: Mapping[str, int], settings: TokenizerSettings, source: str
    ) -> dict[str, Any] | None:
        around: dict[str, Any] = {"trim_offsets": True, "add_prefix_space": False}
        for name in ("cls", "sep"):
            token = settings.named.get(f"{name}_token")
            if token is None:
                raise TokenizerError(
                    f"{source}: a RobertaTokenizer puts {name}_token around texts, and"
                    " tokenizer_config.json has null for it; name a token"
                )
            around[name] = [token.content, ids[token.content]]
        return {"type": "RobertaProcessing", **around}


class Qwen2Tokenizer(GPT2Tokenizer):
    """Composed characters (NFC), Qwen2's splits, no BOS."""

    default_tokens = QWEN2_TOKENS
    pattern = QWEN2_PATTERN
    normalizer: ClassVar[dict[str, str] | None] = {"type": "NFC"}


class GPTNeoXTokenizer(GPT2Tokenizer):
    """Composed characters (NFC), GPT-2's splits."""

    default_tokens: ClassVar[NamedTokens] = GPT2_TOKENS | named_tokens(pad="<|padding|>")
    normalizer: ClassVar[dict[str, str] | None] = {"type": "NFC"}


class BlenderbotTokenizer(RobertaTokenizer):
    """GPT-2's splits of a text with a space before it, ``</s>`` after a single text."""

    prefix_space = True

    @staticmethod
    def _post_processor(
        ids: Mapping[str, int], settings: TokenizerSettings, source: str
    ) -> dict[str, Any] | None:
        eos = settings.named.get("eos_token")
        return template(["A"] if eos is None else ["A", eos], ["A", "B"], ids, second=1)


_CLASSES_OF_OWN = (RobertaTokenizer, Qwen2Tokenizer, GPTNeoXTokenizer, BlenderbotTokenizer)
CLASSES = {
    "BartTokenizer": RobertaTokenizer,
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), GPT2Tokenizer),
    **{each.__name__: each for each in _CLASSES_OF_OWN},
}
"""Classes that are read from vocab.json and merges.txt, by their names in transformers."""


def split_before_bytes(
    *patterns: str, byte_level: Mapping[str, Any] = BYTE_LEVEL
) -> list[dict[str, Any]]:
    """Steps of a pre-tokenizer that splits by one regular expression after another, then makes
    bytes."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    return [*splits, {**byte_level, "use_regex": False}]


def read_merges(text: str) -> list[str]:
    """Reads the merges of a merges.txt, without its version line and empty lines."""
    lines = re.split(r"\r?\n", text)
    if lines[0].startswith("#version"):
        lines = lines[1:]
    return [line for line in lines if line]
