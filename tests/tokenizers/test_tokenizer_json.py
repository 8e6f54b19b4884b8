"""tokenizer.json: parity with transformers 5.23, and the checks before parsing."""

import base64
import json
import pickle
import random
import struct

import paths
import pytest
import tokenizers

from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import FastTokenizer, GPT2Tokenizer, load_tokenizer
from jaxllm.tokenizers.settings import TokenizerSettings

DATA = paths.DATA / "tokenizers"
NAMES = ("gpt2", "llama3", "smollm", "t5", "llama2", "metaspace", "gemma", "cohere")


@pytest.fixture(params=NAMES)
def case(request, load_fast, fast_cases):
    return load_fast(request.param), fast_cases[request.param]


def spec(name="gpt2") -> dict:
    return json.loads((DATA / "fast" / f"{name}.json").read_text(encoding="utf-8"))


def test_ids(case):
    tokenizer, expected = case
    assert {text: tokenizer.encode(text) for text in expected["ids"]} == expected["ids"]
    for first, second, pair in expected["pairs"]:
        assert tokenizer.encode(first, second) == pair


def test_sizes_and_named_tokens(case):
    tokenizer, expected = case
    assert len(tokenizer) == expected["length"]
    assert tokenizer.vocab_size == expected["vocab_size"]
    # transformers lists the named tokens only; the library skips all that are marked as special.
    assert tokenizer.special_ids >= set(expected["special_ids"])
    for name, index in expected["named"].items():
        assert getattr(tokenizer, name) == index, name


def test_decode_and_stream(case):
    tokenizer, expected = case
    for ids, shown, skipped in expected["decoded"]:
        for skip, text in ((False, shown), (True, skipped)):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == text, ids
            stream = tokenizer.stream_decoder(skip_special_tokens=skip)
            assert "".join(stream.put(index) for index in ids) + stream.end() == text, ids


@pytest.mark.parametrize("name", NAMES)
def test_decode_matches_the_tokenizers_library(load_fast, name):
    """Random ids, invalid UTF-8 and byte tokens included."""
    tokenizer = load_fast(name, clean_up_tokenization_spaces=False)
    backend = tokenizers.Tokenizer.from_file(str(DATA / "fast" / f"{name}.json"))
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(backend.get_vocab_size()) for _ in range(rng.randint(0, 20))]
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False), ids


def test_split_special_tokens_changes_nothing_else(case):
    tokenizer, expected = case
    for text in expected["ids"]:
        ids = tokenizer.encode_user(text)
        if any(special in text for special in tokenizer.special_tokens):
            assert not (tokenizer.special_ids - {tokenizer.unk_token_id}) & set(ids), text
        else:
            assert ids == tokenizer.encode(text, add_special_tokens=False), text


def test_streams_hold_back_incomplete_characters(load_fast):
    tokenizer = load_fast("gpt2")
    ids = tokenizer.encode("né 😀")
    stream = tokenizer.stream_decoder()
    pieces = [stream.put(index) for index in ids]
    assert "".join(pieces) == "né 😀"
    assert "\ufffd" not in "".join(pieces)
    assert stream.end() == ""


def test_stream_cost_per_token_is_constant(load_fast):
    """The work for a token does not grow with the text: neither what is held back nor what is
    returned grows."""
    tokenizer = load_fast("t5")
    stream = tokenizer.stream_decoder()
    sizes = []
    for index in tokenizer.encode("Hello world. " * 500, add_special_tokens=False):
        text = stream.put(index)
        sizes.append(len(text) + len(pickle.dumps([vars(stage) for stage in stream._stages])))
    assert max(sizes) < sizes[0] + 40


def test_saved_files_are_the_originals(fast_folder, tmp_path):
    folder = fast_folder("llama3")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.save(tmp_path)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in tmp_path.iterdir()
    }


def test_gpt2_from_vocab_and_merges(tmp_path, fast_cases):
    model = spec("gpt2")["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\r\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", newline="")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, GPT2Tokenizer)
    expected = fast_cases["gpt2"]["ids"]
    assert {text: tokenizer.encode(text) for text in expected} == expected
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert tokenizer.pad_token_id is None


OPT_FILE = {
    "add_bos_token": True,
    "add_prefix_space": False,
    **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
    "pad_token": "<pad>",
    "tokenizer_class": "GPT2Tokenizer",
}


@pytest.mark.parametrize("options", [OPT_FILE, None], ids=["published", "vocabulary alone"])
def test_opt_puts_its_end_token_before_a_text(tmp_path, fast_cases, options):
    """As the published tokenizer_config.json has it, and without that file."""
    model = spec("gpt2")["model"]
    end = len(model["vocab"])
    vocabulary = {**model["vocab"], "</s>": end, "<pad>": end + 1}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    if options is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    for tokenizer in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "saved")):
        ids = {text: ids for text, ids in fast_cases["gpt2"]["ids"].items() if "<" not in text}
        assert {text: tokenizer.encode(text)[1:] for text in ids} == ids
        assert tokenizer.encode("a", "b")[::2] == [end, end]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (end, end)
        assert (tokenizer.unk_token, tokenizer.pad_token_id) == ("</s>", end + 1)


VOCABULARY_CASES = json.loads((DATA / "vocabulary_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", VOCABULARY_CASES["cases"])
def test_the_class_of_a_vocabulary(tmp_path, name):
    """Named in tokenizer_config.json or config.json, or that of the model type; saved with it."""
    expected, model = VOCABULARY_CASES["cases"][name], spec("gpt2")["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    for file in ("config", "tokenizer_config"):
        (tmp_path / f"{file}.json").write_text(json.dumps(expected[file]))
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    for tokenizer in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "saved")):
        for text, ids in zip(VOCABULARY_CASES["texts"], expected["ids"], strict=True):
            assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(*VOCABULARY_CASES["texts"][7:9]) == expected["pair"]
        assert {each: getattr(tokenizer, each) for each in expected["named"]} == expected["named"]


def test_the_model_type_gives_a_tokenizer_json_its_class(fast_folder):
    """As in the folder of GPT-2 itself: else it would have no EOS, and no space before a text."""
    folder = fast_folder("gpt2", tokenizer_class=None, add_prefix_space=True)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    for token in ("bos_token", "eos_token", "unk_token"):
        options.pop(token, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.encode("Hello") == tokenizer.encode(" Hello")
    (folder / "config.json").write_text('{"model_type": "gpt2", "tokenizer_class": 3}')
    with pytest.raises(TokenizerError, match=r"config\.json: tokenizer_class is 3, not a string"):
        load_tokenizer(folder)


def test_the_tokens_of_bart_with_a_tokenizer_json(fast_folder):
    """As in the folders of BART itself, whose tokenizer_config.json names no tokens."""
    folder = fast_folder("gpt2", tokenizer_class=None)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (folder / "config.json").write_text('{"model_type": "bart"}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<s>",
        "</s>",
        "<pad>",
    )
    assert (tokenizer.mask_token, tokenizer.unk_token) == ("<mask>", "<unk>")


def test_the_class_of_gemma_names_its_tokens_and_pads_on_the_left(load_fast):
    tokenizer = load_fast("gemma")
    assert (tokenizer.padding_side, tokenizer.mask_token) == ("left", "<mask>")
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ids == [2, 1, 0]


def test_the_class_of_cohere_names_its_tokens_and_pads_on_the_left(load_fast):
    tokenizer = load_fast("cohere")
    assert (tokenizer.padding_side, tokenizer.sep_token) == ("left", "<SEP>")
    composed, apart = "caf\u00e9 12", "cafe\u0301 12"
    assert tokenizer.encode(composed) == tokenizer.encode(apart)
    assert tokenizer.encode(composed)[0] == tokenizer.bos_token_id == 5


def test_folder_without_tokenizer_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_unsupported_tokenizer_names_its_files(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PhiTokenizer"}')
    with pytest.raises(UnsupportedError, match=r"PhiTokenizer from tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UnsupportedError, match=r"GPT2, .*Blenderbot\).*writes a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "RobertaTokenizer", "sep_token": null}'
    )
    with pytest.raises(TokenizerError, match=r"puts sep_token around texts.*name a token"):
        load_tokenizer(tmp_path)


def test_padding_and_truncation_of_the_file_are_dropped():
    changed = spec() | {
        "padding": {"strategy": {"Fixed": 2**40}, "direction": "Left"},
        "truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0},
    }
    tokenizer = FastTokenizer(changed, TokenizerSettings())
    assert tokenizer.encode("Hello world") == FastTokenizer(spec(), TokenizerSettings()).encode(
        "Hello world"
    )


def test_bos_and_eos_flags_apply_to_llama_only(load_fast):
    plain = load_fast("llama2").encode("Hello")
    flags = {"add_bos_token": False, "add_eos_token": True}
    assert load_fast("llama2", **flags).encode("Hello") == plain
    llama = load_fast("llama2", **flags, tokenizer_class="LlamaTokenizerFast")
    assert llama.encode("Hello") == [*plain[1:], llama.eos_token_id]
    assert llama.encode("Hello", "Hello") == [*plain[1:], 2, *plain[1:], 2]
    assert llama.padding_side == "left"


def test_a_special_token_with_the_name_of_a_text(load_fast):
    plain = load_fast("llama2").encode("Hello")[1:]
    flags = {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "LlamaTokenizer"}
    llama = load_fast("llama2", **flags, bos_token="A", eos_token="B")
    bos, eos = llama.bos_token_id, llama.eos_token_id
    assert llama.encode("Hello") == [bos, *plain, eos]
    assert llama.encode("Hello", "Hello") == [bos, *plain, eos] * 2


def test_named_tokens_beyond_the_vocabulary_get_new_ids(load_fast):
    tokenizer = load_fast("gpt2", pad_token="<pad>")
    assert tokenizer.pad_token_id == len(tokenizer) - 1 == tokenizer.vocab_size
    assert tokenizer.encode("a<pad>")[-1] == tokenizer.pad_token_id


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_llama_folder_of_transformers_5(fast_folder, tokenizer_class):
    """The folder has no flags: whether there is BOS follows from the post-processor, as in 5.23."""
    folder = fast_folder("llama2", tokenizer_class=tokenizer_class)
    with_bos = load_tokenizer(folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**file, "post_processor": None}))
    without = load_tokenizer(folder)
    assert with_bos is not None
    assert without is not None
    assert with_bos.encode("Hello")[0] == with_bos.bos_token_id
    assert without.encode("Hello") == with_bos.encode("Hello")[1:]
    assert without.encode("Hello", "b") == without.encode("Hello") + without.encode("b")


def change(path: str, value):
    def apply(tokenizer: dict) -> None:
        *parents, last = path.split("/")
        for key in parents:
            tokenizer = tokenizer[int(key) if isinstance(tokenizer, list) else key]
        tokenizer[int(last) if isinstance(tokenizer, list) else last] = value

    return apply


def charsmap(units: list[int], strings: bytes = b"x\0") -> dict:
    """A normalizer whose trie has these units, and the value 99 at unit 1."""
    trie = struct.pack("<I256I", 1024, *units, *[99] * (256 - len(units)))
    table = base64.b64encode(trie + strings).decode()
    return {"type": "Precompiled", "precompiled_charsmap": table}


MANY_SPLITS = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}] * 17}
ROBERTA = {"type": "RobertaProcessing", "sep": ["b", 1], "cls": ["a", 0]}
ROBERTA |= {"trim_offsets": True, "add_prefix_space": False}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


def test_special_tokens_around_a_text_as_in_codet5():
    file = {**spec(), "post_processor": ROBERTA}
    tokenizer = FastTokenizer(file, TokenizerSettings())
    backend = tokenizers.Tokenizer.from_str(json.dumps(file))
    assert tokenizer.encode("a b") == backend.encode("a b").ids
    assert tokenizer.encode("a b", "c d") == backend.encode("a b", "c d").ids
    for wrong in (["b"], ["b", 10**6], [1, "b"], "b"):
        with pytest.raises(TokenizerError, match=r"RobertaProcessing\.sep"):
            FastTokenizer(
                {**file, "post_processor": {**ROBERTA, "sep": wrong}}, TokenizerSettings()
            )


def test_normalizer_of_the_t5_that_flax_examples_trained():
    steps = [{"type": "Nmt"}, {"type": "NFKC"}]
    raw = spec("t5") | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    text = "a\u200b\u0001b\u2028\ufb01 c"
    assert FastTokenizer(raw, TokenizerSettings()).encode(text) == backend.encode(text).ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (change("model", None), "model: NoneType, not an object"),
        (change("model/type", "WordPiece"), "type is 'WordPiece'"),
        (change("model/extra", 1), r"unknown fields \['extra'\]"),
        (change("surprise", 1), r"unknown fields \['surprise'\]"),
        (change("model/dropout", 0.1), "dropout is 0.1"),
        (change("model/unk_token", "nowhere"), "unk_token is 'nowhere'"),
        (change("model/byte_fallback", 3), "byte_fallback is 3"),
        (change("model/vocab/!", 5), "two tokens have the id 5"),
        (change("model/vocab/new", 2**40), "is not an id"),
        (change("model/vocab/new", -1), "-1 is not an id"),
        (change("model/vocab/new", True), "True is not an id"),
        (change("model/vocab/new", 7000), "no token has the id 400"),
        (change("model/merges/0", ["t", "nowhere"]), r"merges\[0\]"),
        (change("model/merges/0", "a b c"), r"merges\[0\]"),
        (change("model/merges", {}), "merges is dict"),
        (change("added_tokens/0/id", 7), r"\[0\]: '<.endoftext.>' has the id 7, but \d+ in"),
        (change("added_tokens/0", "q"), r"added_tokens\[0\]: str, not an object"),
        (change("added_tokens/0/special", "yes"), "special is 'yes'"),
        (change("added_tokens/0/content", ""), "content is empty"),
        (change("added_tokens", {}), "added_tokens: dict, not a list"),
        (change("pre_tokenizer/type", "UnicodeScripts"), "type is 'UnicodeScripts'"),
        (change("pre_tokenizer/use_regex", 1), "use_regex is '1'"),
        (change("pre_tokenizer", MANY_SPLITS), "at most 16 components"),
        (change("decoder", {"type": "CTC"}), "decoder: type is 'CTC'"),
        (
            change("normalizer", {"type": "Replace", "content": ""}),
            r"lacks the fields \['pattern'\]",
        ),
        (change("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAA"}), "charsmap"),
        (change("normalizer", charsmap([1 << 20])), "charsmap"),  # leads out of the array
        (change("normalizer", charsmap([1024 | 256])), "charsmap"),  # a value beyond the strings
        (change("normalizer", charsmap([256], b"\xff")), "charsmap"),  # no UTF-8
        (
            change(
                "post_processor", TEMPLATE | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]}
            ),
            "names no sequence",
        ),
    ],
)
def test_malformed_files_are_refused_before_the_parser(changes, message, monkeypatch):
    broken = spec()
    changes(broken)
    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", lambda text: pytest.fail("parsed"))
    with pytest.raises((TokenizerError, UnsupportedError), match=message):
        FastTokenizer(broken, TokenizerSettings())


def test_panic_becomes_a_tokenizer_error(load_fast, monkeypatch):
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode(self, text, add_special_tokens):
            raise PanicException("index out of bounds")

    tokenizer = load_fast("gpt2")
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    with pytest.raises(TokenizerError, match="index out of bounds"):
        tokenizer.encode("a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"bytes", "must be a str, not bytes"),
        ("a\ud800", "unpaired surrogate at character 1"),
        ("é" * 11, "22 bytes, but at most 20"),
    ],
)
def test_invalid_texts(load_fast, text, message):
    with pytest.raises(InputError, match=message):
        load_fast("gpt2").encode(text, max_bytes=20)


@pytest.mark.ci
def test_long_prompts_are_refused_unless_asked(load_fast):
    tokenizer = load_fast("gpt2")
    with pytest.raises(InputError, match="pass max_bytes"):
        tokenizer.encode("a " * 500_001)
    assert len(tokenizer.encode("a " * 500_001, max_bytes=2_000_000)) > 500_000


def replace(old: str, new: str, number: int = 1) -> list[dict]:
    return [{"type": "Replace", "pattern": {"String": old}, "content": new}] * number


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@pytest.mark.parametrize(
    ("section", "steps", "message"),
    [
        ("normalizer", replace("a", "a" * 10, 8), "normalizer: .* more than 1024 times longer"),
        ("normalizer", replace("a", "aa", 30), "normalizer: .* more than 1024 times longer"),
        ("normalizer", replace("a", "b" * 10**6), "normalizer: .* more than 1024 times longer"),
        ("decoder", replace("a", "a" * 10, 9), "decoder: .* more than 8 times longer"),
        ("pre_tokenizer", [BYTE_LEVEL, BYTE_LEVEL], "ByteLevel more than once"),
    ],
)
def test_components_that_multiply_text_are_refused(section, steps, message):
    lists = {"normalizer": "normalizers", "decoder": "decoders", "pre_tokenizer": "pretokenizers"}
    broken = spec() | {section: {"type": "Sequence", lists[section]: steps}}
    with pytest.raises(UnsupportedError, match=message):
        FastTokenizer(broken, TokenizerSettings())


def test_texts_that_a_normalizer_makes_too_long_are_refused():
    [normalizer] = replace("a", "b" * 500)
    tokenizer = FastTokenizer(spec() | {"normalizer": normalizer}, TokenizerSettings())
    assert len(tokenizer.encode("a" * 100)) == 50_000
    assert len(tokenizer.encode("b" * 100_000)) == 100_000  # long enough to be measured
    with pytest.raises(InputError, match="text of 100000 bytes longer than 1248576 bytes"):
        tokenizer.encode("a" * 100_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (change("added_tokens/0/content", "<" * 257), "has more than 256 bytes"),
        (change("model/vocab/" + "x" * 1025, 400), "has more than 1024 bytes"),
        (
            change("model", {"type": "Unigram", "unk_id": 0, "vocab": [["x" * 129, 0.0]]}),
            "has more than 128 bytes",
        ),
    ],
)
def test_long_tokens_are_refused(changes, message):
    """Decoding n ids makes at most n times a token's length."""
    broken = spec()
    changes(broken)
    with pytest.raises(TokenizerError, match=message):
        FastTokenizer(broken, TokenizerSettings())


def test_messages_are_short():
    broken = spec()
    broken["model"]["merges"][0] = "x" * 10**6
    with pytest.raises(TokenizerError, match=r"merges\[0\] is 'x+\.\.\.', not a pair") as failure:
        FastTokenizer(broken, TokenizerSettings())
    assert len(str(failure.value)) < 200
