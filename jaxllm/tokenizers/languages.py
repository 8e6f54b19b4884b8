"""Tokenizers of translation models, which say in what language a text is.

A language code is a token before or after the text. Sources have that of `src_lang`, and targets
that of `tgt_lang`, with which the generated text begins (`forced_bos_token_id`).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self

from jaxllm.common.errors import InputError, TokenizerError, quoted, shortened
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.tokenizer import Tokenizer

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
    _encodes_targets = False

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

    def for_targets(self) -> Self:
        copied = copy.copy(self)
        copied._encodes_targets = True
        return copied

    @contextmanager
    def as_target_tokenizer(self) -> Generator[None]:
        """Context in which texts are encoded as targets, as old scripts do; see ``text_target``."""
        self._encodes_targets = True
        try:
            yield
        finally:
            self._encodes_targets = False

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
