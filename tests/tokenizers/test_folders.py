"""Llama folders with a tokenizer.json, as transformers 4.57.6 and 5.24.0 save them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest
import sentencepiece
import tiny
from folder_cases import CASES, DATA, edit, write
from serving_tools import running_server
from small_tokenizers import check_streams

import jaxllm
from jaxllm.tokenizers import AddedToken, FastTokenizer, LlamaTokenizer, Tokenizer, load_tokenizer
from jaxllm.training.data.chat_formats import ChatFormat

MASKS = json.loads((DATA / "folder_cases_4.json").read_text())["masks"]
CHATS = [name for name, case in CASES.items() if "chats" in case]


def loaded(folder: Path, **options) -> Tokenizer:
    tokenizer = load_tokenizer(folder, **options)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    return loaded(write(tmp_path / "folder", request.param)), CASES[request.param]


def test_ids(case):
    tokenizer, expected = case
    ours = {text: tokenizer.encode(text) for text in expected["ids"]}
    assert ours == expected["ids"]
    assert len(tokenizer) == expected["length"]


def test_chats(case):
    tokenizer, expected = case
    for chat, ids in expected.get("chats", []):
        assert tokenizer.apply_chat_template(chat) == ids
    for (chat, _), ids in zip(expected.get("chats", []), expected.get("turns", []), strict=False):
        assert tokenizer.apply_chat_template(chat) == ids


def test_texts_without_special_tokens(case):
    tokenizer, expected = case
    for ids, text in expected.get("skipped", []):
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.put, ids)) + stream.end() == text


@pytest.mark.by_default("phi3-4")
@pytest.mark.parametrize("name", CHATS)
def test_every_entrance_has_the_ids(tmp_path, name):
    """A batch, a training example and a request to the server."""
    tokenizer = loaded(write(tmp_path / "folder", name))
    model = tiny.make(
        "llama", num_hidden_layers=1, vocab_size=len(tokenizer), max_position_embeddings=128
    )
    chats = CASES[name]["chats"]
    limits = {"max_new_tokens": 4, "slots": 4}
    by_ids = [{"input_ids": ids} for _, ids in chats]
    texts = jaxllm.generate_texts(model, [chat for chat, _ in chats], tokenizer, **limits)
    assert texts == jaxllm.generate_texts(model, by_ids, tokenizer, **limits)
    assert len(set(texts)) > 1
    learned = [*chats[1][0], {"role": "assistant", "content": "The end."}]
    example = ChatFormat(tokenizer, (2,), "messages")({"messages": learned})
    assert list(example.input_ids[: len(chats[1][1])]) == chats[1][1]
    with running_server(model, tokenizer, embeddings=False, context=128) as server:
        for (chat, ids), text in zip(chats, texts, strict=True):
            body = {"model": "tiny", "messages": chat, "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["usage"]["prompt_tokens"] == len(ids)
            assert answer["choices"][0]["message"]["content"] == text


def test_the_options_of_sentencepiece_read_its_model(tmp_path):
    """They are kept by the saved folder, which has the same ids."""
    folder = write(tmp_path / "folder", "phi3-4")
    assert isinstance(loaded(folder), FastTokenizer)
    tokenizer = loaded(folder, legacy=False)
    assert isinstance(tokenizer, LlamaTokenizer)
    text = "<|user|> The garden<|end|>"
    pieces = [tokenizer.id_to_token(index) for index in tokenizer.encode(text)]
    assert pieces[:4] == ["<s>", "<|user|>", "T", "he"]
    tokenizer.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "tokenizer.json").exists()
    again = loaded(tmp_path / "saved")
    assert again.encode(text) == tokenizer.encode(text) != loaded(folder).encode(text)
    assert again.get_added_vocab() == tokenizer.get_added_vocab()
    old = [tokenizer.id_to_token(i) for i in loaded(folder, legacy=True).encode(text)]
    assert old[:4] == ["<s>", "<|user|>", "▁The", "▁g"]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_token_that_fine_tuning_added_to_one_file(tmp_path, file):
    folder = write(tmp_path / "folder", "tinyllama-4")
    token = {"content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": False}
    content = json.loads((folder / file).read_text())
    if file == "tokenizer.json":
        content["added_tokens"].append({"id": 420, **token})
    else:
        content["added_tokens_decoder"]["420"] = token
    (folder / file).write_text(json.dumps(content))
    for tokenizer in (loaded(folder), loaded(folder, legacy=False)):
        ids = tokenizer.encode("Hello<new>")
        assert ids[-1] == 420 == tokenizer.get_added_vocab()["<new>"]
        assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<new>")
        tokenizer.save(tmp_path / "saved")
        assert loaded(tmp_path / "saved").encode("Hello<new>") == ids


def test_tokens_added_here_are_saved_with_the_class(tmp_path):
    tokenizer = loaded(write(tmp_path / "folder", "phi3-4"))
    tokenizer.add_tokens([AddedToken("<new>", special=True)])
    tokenizer.save(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again.padding_side == tokenizer.padding_side == "left"
    for text, ids in CASES["phi3-4"]["ids"].items():
        assert again.encode(text) == tokenizer.encode(text) == ids
    assert again.encode("a<new>")[-1] == 424


def test_a_folder_that_names_no_class(tmp_path):
    folder = write(tmp_path / "folder", "llama2-4")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").unlink()
    tokenizer = loaded(folder)
    expected = CASES["llama2-4"]["ids"]
    assert {text: tokenizer.encode(text) for text in expected} == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_a_list_of_extra_tokens_flags_nothing(tmp_path):
    """A token that tokenizer.json calls ordinary is kept, one that no file has is special."""
    folder = write(tmp_path / "folder", "pieces-5")
    edit(folder / "tokenizer_config.json", extra_special_tokens=["\n", "▁▁", "<extra>"])
    tokenizer = loaded(folder)
    assert tokenizer.additional_special_tokens == ["\n", "▁▁", "<extra>"]
    ids = tokenizer.encode("a\nb  c<extra><table>")
    extra = tokenizer.token_to_id("<extra>")
    assert tokenizer.special_ids == {*range(3), extra}
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == tokenizer.decode([index for index in ids if index not in (1, extra)])
    assert text.startswith("a\n")
    assert text.endswith("c<table>")


def test_streams_are_the_decoded_texts(case):
    tokenizer, _ = case
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 9))]
        check_streams(tokenizer, ids)


@pytest.mark.parametrize(("config", "named", "ids"), MASKS)
def test_the_mask_of_bart_and_roberta(tmp_path, config, named, ids):
    """It takes the space before it, unless a file states other flags."""
    model = json.loads((DATA / "fast" / "gpt2.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = loaded(tmp_path)
    assert {text: tokenizer.encode(text) for text in ids} == ids
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)  # of other classes
    assert {text: loaded(tmp_path).encode(text) for text in ids} == ids


def test_turns_are_those_of_sentencepiece():
    """The stored ids of Llama 2 are made of sentencepiece's, which this repeats for one turn."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(DATA / "llama.model"))
    turn = [1, *processor.encode("[INST] The garden [/INST]")]
    assert turn == CASES["llama2-4"]["turns"][0] == CASES["llama2-4"]["chats"][0][1]
