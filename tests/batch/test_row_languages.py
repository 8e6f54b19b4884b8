"""Rows that name their languages, for translation models."""

from __future__ import annotations

import pytest
import tiny
from translation_tools import write

from jaxllm import BatchGenerator
from jaxllm.tokenizers import load_tokenizer


@pytest.fixture(scope="module", params=["nllb", "mbart"])
def engine(request, tmp_path_factory):
    tokenizer = load_tokenizer(write(tmp_path_factory.mktemp("tokenizer"), request.param))
    assert tokenizer is not None
    family = {"nllb": "m2m_100"}.get(request.param, request.param)
    model = tiny.make(family, vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1)
    return BatchGenerator(model, tokenizer, max_new_tokens=4, eos_token_id=None)


def test_each_row_has_its_languages(engine):
    model, tokenizer = engine.model, engine.tokenizer
    codes = list(tokenizer.lang_code_to_id)
    rows = [
        {"prompt": "Hello world.", "src_lang": codes[0], "tgt_lang": codes[1]},
        {"prompt": "Hello world.", "src_lang": codes[2], "tgt_lang": codes[3]},
        {"prompt": "Hello world.", "tgt_lang": codes[3]},
    ]
    for row, output in zip(rows, engine.generate(rows), strict=True):
        assert output.error is None
        ids = tokenizer(row["prompt"], src_lang=row.get("src_lang"), return_tensors="np")
        fields = tokenizer.target_fields(row["tgt_lang"])
        alone = model.generate(**ids, max_new_tokens=4, eos_token_id=None, **fields).sequences[0]
        assert list(output.output_ids[0]) == alone[1:].tolist()
        code = tokenizer.get_lang_id(row["tgt_lang"])
        assert code in alone[:2]


def test_wrong_languages_are_errors_of_their_rows(engine):
    language = next(iter(engine.tokenizer.lang_code_to_id))
    fields = engine.tokenizer.target_fields(language)
    rows = [
        {"prompt": "Hello", "src_lang": "x"},
        {"prompt": "Hello", "tgt_lang": "x"},
        {"input_ids": [5, 6], "src_lang": "en_XX"},
        {"prompt": "Hello", **fields},
        {"prompt": "Hello", "tgt_lang": language, **fields},
        {"prompt": "Hello", "tgt_lang": language, **dict.fromkeys(fields, 7)},
    ]
    errors = [output.error for output in engine.generate(rows)]
    assert "src_lang: 'x' is no language of this tokenizer" in errors[0]
    assert "tgt_lang: 'x' is no language of this tokenizer" in errors[1]
    assert "src_lang: has no effect on input_ids" in errors[2]
    assert errors[3] is errors[4] is None
    assert f"{min(fields)}: 7 contradicts tgt_lang '{language}'" in errors[5]


def test_a_tokenizer_without_languages():
    (output,) = BatchGenerator(tiny.cached("t5")).generate([{"input_ids": [5], "tgt_lang": "fr"}])
    assert "tgt_lang: needs a tokenizer" in output.error
