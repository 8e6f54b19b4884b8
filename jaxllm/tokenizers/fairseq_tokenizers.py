"""Tokenizers of mBART, mBART-50, NLLB, Pegasus and XGLM.

They are read from tokenizer.json, or from their sentencepiece model, whose pieces get other ids:
fairseq's special tokens come first. The reference is transformers 5.23. It leaves out two things
that the sentencepiece models have, and that are kept here: mBART's normalizer, and XGLM's pieces.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from jaxllm.common.errors import TokenizerError, quoted
from jaxllm.common.strict_json import parse_json
from jaxllm.tokenizers.languages import MBART50_CODES, MBART_CODES, WithLanguages
from jaxllm.tokenizers.sentencepiece_model import BPE, UNIGRAM, SentencePieceModel
from jaxllm.tokenizers.settings import AddedToken, TokenizerFiles, TokenizerSettings
from jaxllm.tokenizers.tokenizer_json import FastTokenizer

FAIRSEQ_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
}
FIRST_PIECES = ("<s>", "<pad>", "</s>", "<unk>")
"""Tokens with the first ids, in place of sentencepiece's ``<unk>``, ``<s>`` and ``</s>``."""
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


class FairseqTokenizer(FastTokenizer):
    """Base class: a tokenizer.json, or one that is made of a sentencepiece model.

    Attributes:
        model_file: name of the model's file in a folder.
        default_tokens: named tokens of transformers' class, used where no file names others.
        model_type: sentencepiece's number of the model's algorithm.
        options: those of `CLASS_OPTIONS` that act.
    """

    model_file: ClassVar[str] = "sentencepiece.bpe.model"
    default_tokens: ClassVar[Mapping[str, str]] = FAIRSEQ_TOKENS
    model_type: ClassVar[int] = UNIGRAM
    options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has tokenizer.json or the file `model_file`."""
        files.refuse_options(cls.options, f"a {cls.__name__}")
        settings = settings.with_defaults(**cls.default_tokens)
        if "tokenizer.json" in files:
            source = str(files.folder / "tokenizer.json")
            spec: Any = parse_json(
                files.contents["tokenizer.json"], source=source, error=TokenizerError
            )
        else:
            source = str(files.folder / cls.model_file)
            model = SentencePieceModel(files.contents[cls.model_file], source)
            if model.model_type != cls.model_type:
                raise TokenizerError(
                    f"{source}: expected a sentencepiece model of type {cls.model_type} (1: "
                    f"unigram, 2: BPE) for a {cls.__name__}, found {model.model_type}"
                )
            settings = cls._completed(settings)
            spec = cls._spec(model, settings)
        return cls(spec, settings, files.contents, source=source)

    @classmethod
    def _completed(cls, settings: TokenizerSettings) -> TokenizerSettings:
        """The settings, with tokens that the class has without being told."""
        return settings

    @classmethod
    def _pieces(
        cls, model: SentencePieceModel, settings: TokenizerSettings
    ) -> list[tuple[str, float]]:
        """The tokens and their scores, by id."""
        return [(piece, 0.0) for piece in FIRST_PIECES] + model.scored_pieces[3:]

    @classmethod
    def _spec(cls, model: SentencePieceModel, settings: TokenizerSettings) -> dict[str, Any]:
        """A tokenizer.json of the model."""
        pieces = cls._pieces(model, settings)
        ids = {piece: index for index, (piece, _) in enumerate(pieces)}
        for name in ("unk_token", "eos_token"):
            token = settings.named.get(name)
            if token is None or token.content not in ids:
                found = "null" if token is None else quoted(token.content)
                raise TokenizerError(
                    f"tokenizer_config.json: {name} is {found}, which is no token of "
                    f"{cls.model_file} or of a {cls.__name__}"
                )
        unknown = settings.named["unk_token"].content
        if cls.model_type == BPE:
            merges = [list(pair) for pair in merges_of(ids)]
            algorithm: dict[str, Any] = {"type": "BPE", "vocab": ids, "merges": merges}
            algorithm |= {"fuse_unk": True}
            algorithm |= {"unk_token": unknown}
        else:
            algorithm = {"type": "Unigram", "vocab": [list(pair) for pair in pieces]}
            algorithm |= {"unk_id": ids[unknown], "byte_fallback": False}
        charsmap = base64.b64encode(model.flags.charsmap).decode()
        normalizers = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
        if charsmap:
            normalizers.insert(0, {"type": "Precompiled", "precompiled_charsmap": charsmap})
        return {
            "model": algorithm,
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": cls._pre_tokenizer(),
            "post_processor": cls._processor(pieces, settings),
            "decoder": METASPACE,
        }

    @classmethod
    def _pre_tokenizer(cls) -> dict[str, Any]:
        return METASPACE

    @classmethod
    def _processor(
        cls, pieces: Sequence[tuple[str, float]], settings: TokenizerSettings
    ) -> dict[str, Any] | None:
        """Special tokens around a text."""
        return None


class _LanguageTokenizer(WithLanguages, FairseqTokenizer):
    """Base class of tokenizers with languages, whose codes are special tokens such as ``en_XX``."""

    options = ("src_lang", "tgt_lang")
    codes: ClassVar[Sequence[str]] = ()
    code_pattern: ClassVar[str] = r"[a-z]{2}_[A-Z]{2}"
    mask: ClassVar[AddedToken] = AddedToken("<mask>", lstrip=True)

    @classmethod
    def _completed(cls, settings: TokenizerSettings) -> TokenizerSettings:
        listed = {token.content for token in settings.extra}
        missing = [AddedToken(code) for code in cls.codes if code not in listed]
        extra = (*settings.extra, *missing)
        named = {"mask_token": cls.mask, **settings.named}
        return replace(settings, extra=extra, named=named)

    @classmethod
    def _pieces(
        cls, model: SentencePieceModel, settings: TokenizerSettings
    ) -> list[tuple[str, float]]:
        codes = [token.content for token in settings.extra]
        last = [(token, 0.0) for token in (*codes, "<mask>")]
        return super()._pieces(model, settings) + last

    @property
    def lang_code_to_id(self) -> dict[str, int]:
        found = {token.content: index for index, token in self._added.items() if token.special}
        return {code: i for code, i in found.items() if re.fullmatch(self.code_pattern, code)}


class MBartTokenizer(_LanguageTokenizer):
    """mBART's tokenizer: ``text </s> en_XX``."""

    codes = MBART_CODES
    default_language = "en_XX"

    @property
    def code_comes_first(self) -> bool:
        return False

    def target_fields(self, tgt_lang: str) -> dict[str, int]:
        # The labels end in the code, so that the decoder's inputs begin with it.
        return {"decoder_start_token_id": self.get_lang_id(tgt_lang, "tgt_lang")}

    @classmethod
    def _pre_tokenizer(cls) -> dict[str, Any]:
        return {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]}


class MBart50Tokenizer(_LanguageTokenizer):
    """mBART-50's tokenizer: ``en_XX text </s>``."""

    codes = MBART50_CODES
    default_language = "en_XX"


class NllbTokenizer(_LanguageTokenizer):
    """NLLB's tokenizer: ``eng_Latn text </s>``.

    Its files list the languages. With the option ``legacy_behaviour`` (tokenizer_config.json) it is
    ``text </s> eng_Latn``.
    """

    model_type = BPE
    default_language = "eng_Latn"
    code_pattern = r"[a-z]{3}_[A-Z][a-z]{3}"
    mask = AddedToken("<mask>", lstrip=True, normalized=True)

    @property
    def code_comes_first(self) -> bool:
        return not self.settings.flag("legacy_behaviour", False)


class PegasusTokenizer(FairseqTokenizer):
    """Pegasus's tokenizer: ``</s>`` after a text; 103 special tokens before the pieces.

    Options (tokenizer_config.json): ``offset`` (103), ``mask_token_sent`` ("<mask_1>").
    """

    model_file = "spiece.model"
    default_tokens: ClassVar[Mapping[str, str]] = {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask_2>",
    }

    @classmethod
    def _completed(cls, settings: TokenizerSettings) -> TokenizerSettings:
        offset = settings.options.get("offset", 103)
        if type(offset) is not int or not 2 <= offset <= 2**16:
            raise TokenizerError(
                f"tokenizer_config.json: offset is {quoted(offset)}, not a number from 2 to {2**16}"
            )
        sentence = settings.options.get("mask_token_sent", "<mask_1>")
        own = [] if sentence is None else [str(sentence)]
        own += [f"<unk_{number}>" for number in range(2, offset)]
        listed = [token for token in settings.extra if token.content not in own]
        return replace(settings, extra=(*map(AddedToken, own), *listed))

    @classmethod
    def _pieces(
        cls, model: SentencePieceModel, settings: TokenizerSettings
    ) -> list[tuple[str, float]]:
        named, extra = settings.named, [token.content for token in settings.extra]
        first = [named[name].content for name in ("pad_token", "eos_token")]
        mask = [named["mask_token"].content] if "mask_token" in named else []
        masks = [token for token in extra if not token.startswith("<unk_")]
        unknown = [(token, -100.0) for token in extra if token.startswith("<unk_")]
        head = [(token, 0.0) for token in (*first, *masks, *mask)]
        return [*head, *unknown, *model.scored_pieces[2:]]

    @classmethod
    def _processor(
        cls, pieces: Sequence[tuple[str, float]], settings: TokenizerSettings
    ) -> dict[str, Any]:
        end = settings.named["eos_token"].content
        return template([], [["A"], ["A", "B"]], [end], pieces)


class XGLMTokenizer(FairseqTokenizer):
    """XGLM's tokenizer: ``</s> text``; seven made-up words after the pieces."""

    @classmethod
    def _completed(cls, settings: TokenizerSettings) -> TokenizerSettings:
        words = [f"<madeupword{number}>" for number in range(7)]
        listed = [token for token in settings.extra if token.content not in words]
        return replace(settings, extra=(*map(AddedToken, words), *listed))

    @classmethod
    def _pieces(
        cls, model: SentencePieceModel, settings: TokenizerSettings
    ) -> list[tuple[str, float]]:
        words = [(token.content, 0.0) for token in settings.extra[:7]]
        return super()._pieces(model, settings) + words

    @classmethod
    def _processor(
        cls, pieces: Sequence[tuple[str, float]], settings: TokenizerSettings
    ) -> dict[str, Any]:
        end = settings.named["eos_token"].content
        return template([end], [["A"], ["A", end, end, "B"]], [], pieces)


def template(
    before: Sequence[str],
    middles: Sequence[Sequence[str]],
    after: Sequence[str],
    pieces: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """A TemplateProcessing for one and two texts, "A" and "B", with tokens around them."""
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}

    def entry(name: str) -> dict[str, Any]:
        kind = "Sequence" if name in ("A", "B") else "SpecialToken"
        return {kind: {"id": name, "type_id": 0}}

    single, pair = ([entry(name) for name in (*before, *middle, *after)] for middle in middles)
    used = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": used,
    }


def merges_of(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE, in order: all pairs of pieces that make a piece.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "abb": 3})
    [('a', 'b'), ('ab', 'b')]
    """
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=vocab.__getitem__):
        pairs = [(piece[:end], piece[end:]) for end in range(1, len(piece))]
        found = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(found, key=lambda pair: (len(pair[0]), len(pair[1])))
    return merges


CLASSES = {
    each.__name__: each
    for each in (MBartTokenizer, MBart50Tokenizer, NllbTokenizer, PegasusTokenizer, XGLMTokenizer)
}
"""Classes by their names in transformers."""
