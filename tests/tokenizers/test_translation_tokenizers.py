"""Tokenizers of translation models: ids, languages and texts of transformers 5.23's classes."""

import base64
import json
from dataclasses import replace

import pytest
from translation_tools import CASES, DATA, write

from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import Tokenizer, load_tokenizer, translation_tokenizers

every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def load(tmp_path):
    def loaded(name: str, **config) -> Tokenizer:
        tokenizer = load_tokenizer(write(tmp_path / name, name, **config))
        assert tokenizer is not None
        return tokenizer

    return loaded


@every_case
def test_ids(load, name):
    tokenizer, case = load(name), CASES[name]
    assert {text: tokenizer.encode(text) for text in case["ids"]} == case["ids"]
    first, second, pair = case["pair"]
    assert tokenizer.encode(first, second) == pair
    targets = {text: tokenizer(text_target=text).input_ids for text in case["targets"]}
    assert targets == case["targets"]
    both = tokenizer([first, second], text_target=[second, first])
    assert both.labels == tokenizer(text_target=[second, first]).input_ids


@every_case
def test_languages(load, name):
    """Of one call, and of all calls after they are set."""
    tokenizer = load(name)
    before = tokenizer("Hello.").input_ids
    for source, target, text, ids, target_ids, code in CASES[name]["languages"]:
        languages = {"src_lang": source, "tgt_lang": target}
        assert tokenizer(text, **languages).input_ids == ids
        batch = tokenizer(text, text_target=text, **languages)
        assert (batch.input_ids, batch.labels) == (ids, target_ids)
        assert tokenizer("Hello.").input_ids == before
        assert tokenizer.get_lang_id(target) == tokenizer.lang_code_to_id[target] == code
        other = tokenizer.with_languages()
        other.src_lang, other.tgt_lang = source, target
        assert other(text).input_ids == ids
        with other.as_target_tokenizer():
            assert other(text).input_ids == target_ids
        assert other(text).input_ids == ids


@every_case
def test_texts(load, name):
    tokenizer = load(name)
    for ids, shown, skipped in CASES[name]["decoded"]:
        assert tokenizer.decode(ids) == shown, ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped, ids
        stream = tokenizer.stream_decoder(skip_special_tokens=False)
        pieces = [stream.put(index) for index in ids]
        assert "".join(pieces) + stream.end() == shown, ids


@every_case
def test_saved_files_are_the_originals(load, name, tmp_path):
    load(name).save(tmp_path / "saved")
    files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == files


@pytest.mark.parametrize("name", ["nllb", "xglm"])
def test_a_sentencepiece_model_decides_about_ids(load, tmp_path, name):
    """Also beside a tokenizer.json, which has the same vocabulary."""
    expected, alone = load(name), load(f"{name}_model")
    assert alone.get_vocab() == expected.get_vocab()
    folder = write(tmp_path / "both", f"{name}_model")
    (folder / "tokenizer.json").write_text(json.dumps(DATA["fast"][name]))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    expected_ids = CASES[f"{name}_model"]["ids"]
    assert {text: tokenizer.encode(text) for text in expected_ids} == expected_ids
    assert expected_ids != CASES[name]["ids"]


def test_languages_of_nllb_without_ids(tmp_path):
    """A folder that lists the languages alone has them before the mask."""
    config = {**CASES["nllb"]["config"], "added_tokens_decoder": None}
    folder = write(tmp_path / "nllb", "nllb_model", **config)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    del options["added_tokens_decoder"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer, expected = load_tokenizer(folder), CASES["nllb_model"]
    assert tokenizer is not None
    assert {text: tokenizer.encode(text) for text in expected["ids"]} == expected["ids"]


def test_the_mask_before_the_languages(load):
    """The slow class of transformers 4.57 has another order, which its folder states by ids."""
    slow, published = load("nllb_slow"), load("nllb_model")
    ids = [
        [t.token_to_id(x) for x in ("<mask>", "ace_Arab", "zul_Latn")] for t in (slow, published)
    ]
    first = ids[0][0]
    assert ids == [[first, first + 1, first + 5], [first + 5, first, first + 4]]


@pytest.mark.parametrize("name", ["mbart", "pegasus"])
def test_models_with_other_first_pieces_are_refused(tmp_path, name):
    folder = write(tmp_path / name, name)
    other = DATA["models"]["unigram" if name == "pegasus" else "pegasus"]
    (folder / next(iter(CASES[name]["files"]))).write_bytes(base64.b64decode(other))
    with pytest.raises(TokenizerError, match=r"Tokenizer needs a model with (unk|pad)_id 0"):
        load_tokenizer(folder)


def test_composed_characters_and_the_longest_match(load):
    """The rules of sentencepiece's normalization apply to the longest text that has one."""
    tokenizer = load("mbart")
    assert tokenizer.encode("ﬁne\u00a0word") == tokenizer.encode("fine word")


@every_case
def test_added_tokens_keep_the_languages(load, tmp_path, name):
    tokenizer = load(name)
    before = {text: tokenizer.encode(text) for text in ("Hello.", "")}
    size = len(tokenizer)
    assert tokenizer.add_tokens(["<new>"]) == 1
    tokenizer.save(tmp_path / "more")
    again = load_tokenizer(tmp_path / "more")
    assert again is not None
    assert type(again) is type(tokenizer)
    assert again.token_to_id("<new>") == size
    for each in (tokenizer, again):
        assert {text: each.encode(text) for text in before} == before
        assert size in each.encode("Hello <new>")


def test_languages_that_a_tokenizer_lacks(load, tmp_path):
    tokenizer = load("nllb")
    message = "'fr' is no language of this tokenizer, which has ace_Arab, deu_Latn, eng_Latn"
    for field, wrong in (
        ("src_lang", lambda: tokenizer("Hello", src_lang="fr")),
        ("tgt_lang", lambda: tokenizer.with_languages(tgt_lang="fr")),
        ("tgt_lang", lambda: tokenizer.target_fields("fr")),
        ("src_lang", lambda: setattr(tokenizer, "src_lang", "fr")),
    ):
        with pytest.raises(InputError, match=f"^{field}: {message}"):
            wrong()
    with pytest.raises(InputError, match=r"tgt_lang: a MarianTokenizer has no languages"):
        load("marian")("Hello", tgt_lang="de")
    folder = write(tmp_path / "pegasus", "pegasus")
    with pytest.raises(UnsupportedError, match=r"src_lang: without effect on a PegasusTokenizer"):
        load_tokenizer(folder, src_lang="en")


def test_languages_from_the_call_that_loads(tmp_path):
    """They are saved, too."""
    tokenizer = load_tokenizer(write(tmp_path / "a", "nllb"), src_lang="deu_Latn")
    assert tokenizer is not None
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert again is not None
    assert again.encode("Hello")[0] == tokenizer.token_to_id("deu_Latn")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("marian", {"separate_vocabs": True}, "separate_vocabs: source and target with different"),
        ("marian", {"sp_model_kwargs": {"alpha": 1}}, "sp_model_kwargs: sampling"),
        ("m2m_100", {"language_codes": "m3m"}, "language_codes: expected one of m2m100, wmt21"),
        ("m2m_100", {"src_lang": "xx"}, "src_lang: 'xx' is no language of this tokenizer"),
        ("mbart", {"tgt_lang": "xx"}, "tgt_lang: 'xx' is no language of this tokenizer"),
        ("nllb", {"src_lang": 3}, "src_lang is 3, not a language"),
        ("pegasus", {"offset": "many"}, "offset is 'many', not a number from 2 to 65536"),
    ],
)
def test_settings_that_cannot_be(load, tmp_path, name, config, message):
    """They are an error of the call that loads, which names the file."""
    with pytest.raises((TokenizerError, UnsupportedError)) as caught:
        load(name, **config)
    assert str(caught.value).startswith(f"{tmp_path / name / 'tokenizer_config.json'}: {message}")


@pytest.mark.parametrize(
    ("name", "token"), [("xglm", "eos_token"), ("xglm", "unk_token"), ("pegasus", "unk_token")]
)
def test_tokens_that_a_sentencepiece_model_lacks(tmp_path, name, token):
    folder = write(tmp_path / name, name, **{token: "<nope>"})
    (folder / "tokenizer.json").unlink(missing_ok=True)
    model = base64.b64decode(DATA["models"]["pegasus" if name == "pegasus" else "unigram"])
    kind = getattr(translation_tokenizers, CASES[name]["config"]["tokenizer_class"])
    (folder / kind.model_file).write_bytes(model)
    message = (
        rf"tokenizer_config\.json: {token} is '<nope>', which is no token of s.*\.model or of a "
    )
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_a_tokenizer_without_languages(load):
    tokenizer = load("nllb")
    tokenizer.settings = replace(tokenizer.settings, extra=())
    tokenizer._added = {}
    with pytest.raises(InputError, match=r"which has none: additional_special_tokens of"):
        tokenizer("Hello", src_lang="eng_Latn")


def test_vocabularies_that_cannot_be(tmp_path):
    folder = write(tmp_path / "marian", "marian")
    vocab = DATA["vocabularies"]["marian"]
    (folder / "vocab.json").write_text(json.dumps({**vocab, "</s>": 900}))
    with pytest.raises(TokenizerError, match=r"vocab.json: '</s>' has the id 900; 176 tokens have"):
        load_tokenizer(folder)
    renamed = {"<nope>" if token == "<unk>" else token: index for token, index in vocab.items()}
    (folder / "vocab.json").write_text(json.dumps(renamed))
    with pytest.raises(TokenizerError, match=r"vocab\.json: lacks the unk_token, '<unk>'"):
        load_tokenizer(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "target.spm").unlink()
    with pytest.raises(TokenizerError, match=r"a MarianTokenizer needs target\.spm"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("marian", "marian"), ("mbart", "mbart"), ("m2m_100", "m2m_100"), ("pegasus", "pegasus")],
)
def test_the_class_of_a_model_type(tmp_path, name, model_type):
    """Files of the Hub often name no class."""
    folder = write(tmp_path / name, name, tokenizer_class=None)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert type(tokenizer).__name__ == CASES[name]["config"]["tokenizer_class"]
    assert {text: tokenizer.encode(text) for text in CASES[name]["ids"]} == CASES[name]["ids"]


def test_the_language_in_a_text_for_marian(load):
    tokenizer = load("marian")
    hello = tokenizer.encode("Hello")
    code = DATA["vocabularies"]["marian"][">>deu<<"]
    assert tokenizer.encode(">>deu<< Hello") == tokenizer.encode(">>deu<<Hello") == [code, *hello]
    assert tokenizer.encode(">>xyz<< Hello") == [tokenizer.unk_token_id, *hello]
    assert tokenizer.encode(">>") == tokenizer.encode(" >>")


@pytest.mark.parametrize("name", ["mbart", "mbart50", "nllb_model", "pegasus", "xglm_model"])
def test_another_special_token_moves_no_id(load, tmp_path, name):
    """As in transformers 4.57.6, listed or added, it comes after the languages and the mask."""
    before, ids = load(name), CASES[name]["ids"]
    listed = [*CASES[name]["config"].get("additional_special_tokens", []), "<sp>"]
    tokenizer = load(name, additional_special_tokens=listed)
    before.add_special_tokens(
        {"additional_special_tokens": ["<sp>"]}, replace_extra_special_tokens=False
    )
    for number, each in enumerate((tokenizer, before)):
        each.save(tmp_path / str(number))
        for same in (each, load_tokenizer(tmp_path / str(number))):
            assert same is not None
            assert {text: same.encode(text) for text in ids} == ids
            assert same.convert_tokens_to_ids("<sp>") == CASES[name]["length"] == len(same) - 1


@pytest.mark.parametrize("name", ["mask_token_sent", "mask_token", "pad_token", "eos_token"])
def test_pegasus_needs_its_first_tokens(load, name):
    with pytest.raises(TokenizerError, match=f"tokenizer_config.json: .*{name}.* null"):
        load("pegasus", **{name: None})


def test_an_added_token_in_place_of_a_piece(load):
    """As in an XGLM's folder that transformers 5.24.0 saved without the pieces of its model."""
    added = {"8": {"content": "<madeupword4>", "special": True}}
    with pytest.raises(TokenizerError, match="has the id 8, as the added token '<madeupword4>'"):
        load("xglm_model", added_tokens_decoder=added)
