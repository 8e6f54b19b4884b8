"""Tokenizers of translation models and of fairseq's models: Marian, M2M100, mBART, mBART-50, NLLB,
Pegasus and XGLM.

A language code is a token before or after the text. Sources have that of `src_lang`, and targets
that of `tgt_lang`, with which the generated text begins (`forced_bos_token_id`).

Of Marian and M2M100, sentencepiece models split texts, and vocab.json has the ids. The reference is
transformers 5.23's ``MarianTokenizer`` and ``M2M100Tokenizer``, of which the first does not
normalise punctuation, although old versions did.

The others are read from their sentencepiece model, whose pieces get other ids: fairseq's special
tokens come first. Their reference is sentencepiece's own ids, as transformers 4.57's slow classes
give them. Without the model, they are read from tokenizer.json.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError, quoted, shortened
from jaxllm.tokenizers.added_tokens import AddedToken
from jaxllm.tokenizers.sentencepiece_model import DecodeRules, SentencePieceModel
from jaxllm.tokenizers.sentencepiece_tokenizers import SlowTokenizer, with_tokens_of_json
from jaxllm.tokenizers.settings import (
    FAIRSEQ_TOKENS,
    LANGUAGES,
    M2M100_TOKENS,
    PEGASUS_TOKENS,
    ROBERTA_TOKENS,
    T5_TOKENS,
    NamedTokens,
    TokenizerFiles,
    TokenizerSettings,
)
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json import FastTokenizer

_MBART = """
ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV
my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
"""
_MBART50 = """
af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX
sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
_M2M100 = """
af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi
hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns
oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh
zu
"""
MBART_CODES = _MBART.split()
"""Language codes of mBART in the order of their ids."""
MBART50_CODES = MBART_CODES + _MBART50.split()
M2M100_CODES: Mapping[str, Sequence[str]] = {
    "m2m100": _M2M100.split(),
    "wmt21": ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"],
}
"""Language codes of M2M100 by the option `language_codes`."""


class WithLanguages(Tokenizer):
    """Mixin of tokenizers with language codes.

    Options (tokenizer_config.json): ``src_lang`` and ``tgt_lang``, which are also attributes. A
    call's options of these names act on that call alone. Targets are in `src_lang` while there is
    no `tgt_lang`.

    Attributes:
        default_language: `src_lang` where no file names one.
    """

    default_language: ClassVar[str]
    options = LANGUAGES
    translates = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("src_lang", "tgt_lang"):
            language = _language(self.settings, name)
            try:
                _ = language is None or self.get_lang_id(language, name)
            except InputError as error:
                raise TokenizerError(f"tokenizer_config.json: {error}") from None

    @property
    def code_comes_first(self) -> bool:
        """True for ``code text </s>``, False for ``text </s> code``."""
        return True

    @property
    def lang_code_to_id(self) -> dict[str, int]:
        """Id of the token of each language."""
        raise NotImplementedError

    def get_lang_id(self, lang: str, field: str = "lang") -> int:
        """Id of a language's token, for `forced_bos_token_id`.

        Args:
            lang: the language.
            field: name of the argument or setting that has it, for messages.
        """
        known = self.lang_code_to_id
        index = known.get(lang) if isinstance(lang, str) else None
        if index is None:
            # NLLB's and other files list them.
            none = "none: additional_special_tokens of tokenizer_config.json lists none"
            listed = shortened(", ".join(known), 250) or none
            raise InputError(
                f"{field}: {quoted(lang)} is no language of this tokenizer, which has {listed}"
            )
        return index

    @property
    def src_lang(self) -> str:
        """Language of sources."""
        return _language(self.settings, "src_lang") or self.default_language

    @src_lang.setter
    def src_lang(self, value: str) -> None:
        self.get_lang_id(value, "src_lang")
        self._set_option("src_lang", value)

    @property
    def tgt_lang(self) -> str | None:
        """Language of targets."""
        return _language(self.settings, "tgt_lang")

    @tgt_lang.setter
    def tgt_lang(self, value: str | None) -> None:
        if value is not None:
            self.get_lang_id(value, "tgt_lang")
        self._set_option("tgt_lang", value)

    def with_languages(self, src_lang: str | None = None, tgt_lang: str | None = None) -> Self:
        given = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        changed = {name: lang for name, lang in given.items() if lang is not None}
        for name, lang in changed.items():
            self.get_lang_id(lang, name)
        copied = copy.copy(self)
        copied.settings = replace(self.settings, options={**self.settings.options, **changed})
        return copied

    def target_fields(self, tgt_lang: str) -> dict[str, int]:
        return {"forced_bos_token_id": self.get_lang_id(tgt_lang, "tgt_lang")}

    def with_target(self, fields: Mapping[str, Any], tgt_lang: str | None) -> dict[str, Any]:
        if tgt_lang is None and self.tgt_lang is not None:
            named = {"forced_bos_token_id", *self.target_fields(self.tgt_lang)}
            if all(fields.get(name) is None for name in named):
                tgt_lang = self.tgt_lang
        return super().with_target(fields, tgt_lang)

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        target = self.tgt_lang if self._encodes_targets else None
        code = self.get_lang_id(target or self.src_lang, "tgt_lang" if target else "src_lang")
        end = self.eos_token_id
        if end is None:
            raise TokenizerError("tokenizer_config.json: a language code needs an eos_token")
        before, after = ([code], [end]) if self.code_comes_first else ([], [end, code])
        return [*before, *ids, *(pair or []), *after]


def _language(settings: TokenizerSettings, name: str) -> str | None:
    value = settings.options.get(name)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"tokenizer_config.json: {name} is {quoted(value)}, not a language")
    return value


class VocabularyTokenizer(SlowTokenizer):
    """Base class: pieces of a sentencepiece model, with the ids of vocab.json.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes; those of `model_files` are among them.
        pieces: the tokens of vocab.json, by id.
        source: path of vocab.json, for messages.

    Attributes:
        model_files: names of the sentencepiece models: of sources, and of targets if they differ.
        space_after_special: text after a special token that is not skipped.
    """

    model_files: ClassVar[tuple[str, ...]]
    space_after_special: ClassVar[str] = ""

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        pieces: Sequence[str],
        source: str,
    ) -> None:
        settings = self._complete(settings)
        super().__init__(
            settings, files, "right", pieces=pieces, known=settings.added, source=source
        )
        self.vocab_size = len(pieces)
        self._models = [SentencePieceModel(files[name], name) for name in self.model_files]
        unknown = self.unk_token_id
        if unknown is None:
            raise TokenizerError(f"{source}: needs an unk_token, which tokenizer_config.json names")
        if self.unk_token not in self._pieces:
            raise TokenizerError(f"{source}: lacks the unk_token, {quoted(self.unk_token)}")
        self._unknown_id = unknown

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has vocab.json and the files of `model_files`."""
        files.refuse_options(cls.options, f"a {cls.__name__}")
        source = str(files.folder / "vocab.json")
        missing = [name for name in cls.model_files if name not in files]
        if missing:
            raise TokenizerError(f"{files.folder}: a {cls.__name__} needs {', '.join(missing)}")
        return cls(settings, files.contents, read_vocabulary(files), source)

    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        return type(self)(settings, files, self._pieces, self._source)

    def _tokenize(self, text: str) -> list[str]:
        return self._models[-1 if self._encodes_targets else 0].encode(text)

    @cached_property
    def _rules(self) -> DecodeRules:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecodeRules(
            model=self._models[0],
            special=frozenset(self.all_special_tokens),
            strip_text=not self._models[0].has_spaces_at_ends,
            after_special=self.space_after_special,
            unknown_has_spaces=len(self._models) > 1,
        )


class MarianTokenizer(VocabularyTokenizer):
    """Marian's tokenizer: ``</s>`` after a text; targets are split by a model of their own.

    A text for a model with several target languages begins with the language: ``>>fra<< Hello``.
    """

    model_files = ("source.spm", "target.spm")
    default_tokens = T5_TOKENS
    space_after_special = " "
    translates = True

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        settings = super()._complete(settings)
        if settings.flag("separate_vocabs", False):
            raise UnsupportedError(
                "tokenizer_config.json: separate_vocabs: source and target with different "
                "vocabularies are not implemented"
            )
        length = {"model_max_length": 512, **settings.options}
        return replace(settings, options=length)

    def _tokenize(self, text: str) -> list[str]:
        code, text = self._code_and_text(text)
        return [*code, *super()._tokenize(text)]

    def is_blank(self, text: str) -> bool:
        return not self._code_and_text(text.strip())[1].strip()

    def _code_and_text(self, text: str) -> tuple[list[str], str]:
        """The language that a text begins with, if it does, and the rest."""
        end = text.find("<<") + 2 if text.startswith(">>") else 1
        return ([text[:end]], text[end:]) if end > 1 else ([], text)

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        return [*ids, *(pair or []), *end]


class M2M100Tokenizer(WithLanguages, VocabularyTokenizer):
    """M2M100's tokenizer: ``__en__ text </s>``.

    Options (tokenizer_config.json): ``src_lang`` ("en"), ``tgt_lang``, ``language_codes`` ("m2m100"
    or "wmt21").
    """

    model_files = ("sentencepiece.bpe.model",)
    default_tokens = M2M100_TOKENS
    default_language = "en"

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        settings = super()._complete(settings)
        name = settings.options.get("language_codes", "m2m100")
        if not isinstance(name, str) or name not in M2M100_CODES:
            raise UnsupportedError(
                "tokenizer_config.json: language_codes: expected one of "
                f"{', '.join(M2M100_CODES)}, found {quoted(name)}"
            )
        return settings.with_extra([f"__{code}__" for code in M2M100_CODES[name]])

    @property
    def lang_code_to_id(self) -> dict[str, int]:
        codes = M2M100_CODES[self.settings.options.get("language_codes", "m2m100")]
        return {code: self._added_ids[f"__{code}__"] for code in codes}


def read_vocabulary(files: TokenizerFiles) -> list[str]:
    """The tokens of vocab.json by id, which are numbers from 0 on without gaps."""
    table = files.json_object("vocab.json")
    tokens: list[str | None] = [None] * len(table)
    for token, index in table.items():
        if type(index) is not int or not 0 <= index < len(tokens) or tokens[index] is not None:
            raise TokenizerError(
                f"{files.folder / 'vocab.json'}: {quoted(token)} has the id {quoted(index)}; "
                f"{len(tokens)} tokens have the ids 0 to {len(tokens) - 1}, each once"
            )
        tokens[index] = token
    return [token for token in tokens if token is not None]


FIRST_PIECES = ("<s>", "<pad>", "</s>", "<unk>")
"""Tokens with the first ids, in place of sentencepiece's ``<unk>``, ``<s>`` and ``</s>``."""


class FairseqTokenizer(SlowTokenizer):
    """Base class: pieces of a sentencepiece model, with the ids of fairseq's dictionary.

    Args:
        model: a serialised sentencepiece model.
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        source: name of the model's file, for messages.

    Attributes:
        model_file: name of the model's file in a folder.
    """

    model_file: ClassVar[str] = "sentencepiece.bpe.model"
    default_tokens: ClassVar[NamedTokens] = FAIRSEQ_TOKENS

    def __init__(
        self, model: bytes, settings: TokenizerSettings, files: Mapping[str, bytes], source: str
    ) -> None:
        settings = self._complete(settings)
        self._model = SentencePieceModel(model, source)
        first, own = self._first_tokens(settings), self._model.pieces
        skipped = self._count_replaced(source)
        pieces = [*first, *own[skipped:]]
        known = {index: AddedToken(token) for index, token in enumerate(first)}
        for index, token in settings.added.items():
            if len(first) <= index < len(pieces) and token.content != pieces[index]:
                raise TokenizerError(
                    f"{source}: the piece {quoted(pieces[index])} has the id {index}, as the added"
                    f" token {quoted(token.content)} of another file; remove the file that is wrong"
                )
        placed = {token.content for token in settings.added.values()}
        last = [token for token in self._last_tokens(settings) if token.content not in placed]
        known |= {len(pieces) + number: token for number, token in enumerate(last)}
        super().__init__(
            settings,
            files,
            "right",
            pieces=pieces,
            known={**known, **settings.added},
            source=source,
        )
        self.vocab_size = len(pieces) + len(last)
        for name in ("unk_token", "eos_token"):
            token = settings.named.get(name)
            if token is None or not self._added_ids[token.content] < self.vocab_size:
                found = "null" if token is None else quoted(token.content)
                raise TokenizerError(
                    f"tokenizer_config.json: {name} is {found}, which is no token of "
                    f"{self.model_file} or of a {type(self).__name__}"
                )
        self._unknown_id = self._added_ids[settings.named["unk_token"].content]
        offset = len(first) - skipped
        self._ids_of_pieces = [index + offset for index in range(len(own))]
        self._ids_of_pieces[self._model.unk_id] = self._unknown_id

    @classmethod
    def from_files(cls, files: TokenizerFiles, settings: TokenizerSettings) -> Self:
        """Loads a folder that has the file `model_file`."""
        files.refuse_options(cls.options, f"a {cls.__name__}")
        settings = with_tokens_of_json(files, settings)
        source = str(files.folder / cls.model_file)
        return cls(files.contents[cls.model_file], settings, files.contents, source)

    @classmethod
    def ids_version(cls, files: Collection[str]) -> int:
        return 2

    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        return type(self)(self._files[self.model_file], settings, files, self._source)

    def _first_tokens(self, settings: TokenizerSettings) -> Sequence[str]:
        """The tokens before the pieces."""
        return FIRST_PIECES

    def _last_tokens(self, settings: TokenizerSettings) -> Sequence[AddedToken]:
        """The tokens after the pieces."""
        return ()

    def _count_replaced(self, source: str) -> int:
        """Number of the model's first pieces that other tokens replace.

        Raises:
            TokenizerError: the model has other pieces there.
        """
        model, first = self._model, self._model.pieces[1:3]
        if model.unk_id != 0 or not model.control.issuperset(first):
            raise TokenizerError(
                f"{source}: a {type(self).__name__} needs a model with unk_id 0, bos_id 1 and "
                f"eos_id 2; its first pieces are {quoted(model.pieces[:3])}"
            )
        return 3

    def _tokenize(self, text: str) -> list[str]:
        return self._model.encode(text)

    def _encode_items(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._ids_of_pieces
        return [[ids[index] for index in row] for row in self._model.encode_ids(texts)]

    @cached_property
    def _rules(self) -> DecodeRules:  # pyright: ignore[reportIncompatibleVariableOverride]
        special = frozenset(self.special_tokens)
        return DecodeRules(model=self._model, special=special, keeps_inner_spaces=True)


class _LanguageCodes(WithLanguages):
    """Mixin of tokenizers whose language codes are special tokens such as ``en_XX``."""

    default_language = "en_XX"
    code_pattern: ClassVar[str] = r"[a-z]{2}_[A-Z]{2}"

    @property
    def lang_code_to_id(self) -> dict[str, int]:
        found = {token.content: index for index, token in self._added.items() if token.special}
        return {code: i for code, i in found.items() if re.fullmatch(self.code_pattern, code)}


class _LanguageTokenizer(_LanguageCodes, FairseqTokenizer):
    """Base class of tokenizers whose language codes and mask follow the model's pieces."""

    codes: ClassVar[Sequence[str]] = ()
    default_tokens = ROBERTA_TOKENS

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        return super()._complete(settings).with_extra(cls.codes, first=True)

    def _last_tokens(self, settings: TokenizerSettings) -> Sequence[AddedToken]:
        mask = settings.named.get("mask_token")
        codes = [token for token in settings.extra if self._is_code(token.content)]
        return [*codes, *([] if mask is None else [mask])]

    def _is_code(self, text: str) -> bool:
        """True for a language of the model; other special tokens come after the mask."""
        return text in self.codes if self.codes else bool(re.fullmatch(self.code_pattern, text))


class _MBart(_LanguageCodes):
    @property
    def code_comes_first(self) -> bool:
        return False

    def target_fields(self, tgt_lang: str) -> dict[str, int]:
        # The labels end in the code, so that the decoder's inputs begin with it.
        return {"decoder_start_token_id": self.get_lang_id(tgt_lang, "tgt_lang")}

    def with_target(self, fields: Mapping[str, Any], tgt_lang: str | None) -> dict[str, Any]:
        own = super().with_target(fields, tgt_lang)
        # A language that a file forces would be the first token after the start.
        return own if own.keys() <= fields.keys() else {"forced_bos_token_id": None, **own}


class _Nllb(_LanguageCodes):
    default_language = "eng_Latn"
    code_pattern = r"[a-z]{3}_[A-Z][a-z]{3}"

    @property
    def code_comes_first(self) -> bool:
        return not self.settings.flag("legacy_behaviour", False)


class MBartTokenizer(_MBart, _LanguageTokenizer):
    """mBART's tokenizer: ``text </s> en_XX``."""

    codes = MBART_CODES


class MBart50Tokenizer(_LanguageTokenizer):
    """mBART-50's tokenizer: ``en_XX text </s>``."""

    codes = MBART50_CODES


class NllbTokenizer(_Nllb, _LanguageTokenizer):
    """NLLB's tokenizer: ``eng_Latn text </s>``.

    Its files list the languages. With the option ``legacy_behaviour`` (tokenizer_config.json) it is
    ``text </s> eng_Latn``.
    """


class MBartTokenizerFast(_MBart, FastTokenizer):
    """mBART's tokenizer from tokenizer.json."""


class MBart50TokenizerFast(_LanguageCodes, FastTokenizer):
    """mBART-50's tokenizer from tokenizer.json."""


class NllbTokenizerFast(_Nllb, FastTokenizer):
    """NLLB's tokenizer from tokenizer.json."""


class PegasusTokenizer(FairseqTokenizer):
    """Pegasus's tokenizer: ``</s>`` after a text; 103 special tokens before the pieces.

    Options (tokenizer_config.json): ``offset`` (103), ``mask_token_sent`` ("<mask_1>").
    """

    model_file = "spiece.model"
    default_tokens = PEGASUS_TOKENS

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        settings = super()._complete(settings)
        offset = settings.options.get("offset", 103)
        if type(offset) is not int or not 2 <= offset <= 2**16:
            raise TokenizerError(
                f"tokenizer_config.json: offset is {quoted(offset)}, not a number from 2 to {2**16}"
            )
        if len(cls._masks(settings)) < 2 or not {"pad_token", "eos_token"} <= settings.named.keys():
            raise TokenizerError(
                "tokenizer_config.json: pad_token, eos_token, mask_token or mask_token_sent is"
                " null; a PegasusTokenizer has them before its pieces: name a token"
            )
        unknowns = [f"<unk_{number}>" for number in range(2, offset)]
        return settings.with_extra([cls._masks(settings)[0], *unknowns], first=True)

    @staticmethod
    def _masks(settings: TokenizerSettings) -> list[str]:
        """The tokens that mask a sentence and a word, unless a file sets them to null."""
        sentence = settings.options.get("mask_token_sent", "<mask_1>")
        masks = [sentence, settings.named.get("mask_token")]
        return [str(mask) for mask in masks if mask is not None]

    def _first_tokens(self, settings: TokenizerSettings) -> Sequence[str]:
        first = [settings.named[name].content for name in ("pad_token", "eos_token")]
        unknowns = [f"<unk_{number}>" for number in range(2, settings.options.get("offset", 103))]
        return [*first, *self._masks(settings), *unknowns]

    def _count_replaced(self, source: str) -> int:
        model = self._model
        if model.unk_id < 2 or not model.control.issuperset(model.pieces[:2]):
            raise TokenizerError(
                f"{source}: a {type(self).__name__} needs a model with pad_id 0 and eos_id 1; its "
                f"first pieces are {quoted(model.pieces[:3])}"
            )
        return 2

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        return [*ids, *(pair or []), *end]


class XGLMTokenizer(FairseqTokenizer):
    """XGLM's tokenizer: ``</s> text``; seven made-up words after the pieces."""

    @classmethod
    def _complete(cls, settings: TokenizerSettings) -> TokenizerSettings:
        words = [f"<madeupword{number}>" for number in range(7)]
        return super()._complete(settings).with_extra(words, first=True)

    def _last_tokens(self, settings: TokenizerSettings) -> Sequence[AddedToken]:
        return settings.extra[:7]

    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        return [*end, *ids] if pair is None else [*end, *ids, *end, *end, *pair]
