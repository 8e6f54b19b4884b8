"""Contradictions between the tokenizer files of folders that transformers saved."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from folder_cases import CASES, edit, write
from translation_tools import DATA
from translation_tools import write as write_translation

from jaxllm.cli.main import main
from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.contradictions import contradictions


@pytest.fixture
def folder(tmp_path):
    """A folder of transformers 4.57.6 whose settings and tokenizer.json agree."""
    path = write(tmp_path / "folder", "phi3-4")
    edit(path / "tokenizer_config.json", legacy=True)
    return path


@pytest.mark.parametrize("name", CASES)
def test_folders(tmp_path, name):
    """Settings that deny `legacy` contradict a tokenizer.json that was written with it."""
    found = contradictions(write(tmp_path / "folder", name))
    if not CASES[name]["has_model"]:
        assert found == []
        return
    assert len(found) == 1
    assert found[0].startswith("tokenizer.json and tokenizer.model: 'The<s>The <s> [a]' is [")
    assert found[0].endswith("; tokenizer.json decides")


def test_a_folder_without_contradictions(folder):
    assert contradictions(folder) == []


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "XLMRobertaTokenizer"])
def test_a_model_that_the_class_does_not_read(folder, name):
    """tokenizer.json decides alone, so its flags are compared and the model is not."""
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    assert contradictions(folder) == []
    change_flags(folder)
    assert len(contradictions(folder)) == 1


def change_flags(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["420"] |= {"rstrip": False, "special": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def change_ids(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["e"], vocab["a"] = vocab["a"], vocab["e"]
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def change_prefix(folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    del spec["normalizer"]["normalizers"][0]
    (folder / "tokenizer.json").write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_flags,
            r"tokenizer_config.json and tokenizer.json: '<\|user\|>' is 'id 420' and 'id 420, "
            r"special, rstrip'; tokenizer_config.json decides",
        ),
        (change_ids, r"json and tokenizer.model: 'a' is \d+ and \d+; tokenizer.json decides"),
        (change_prefix, r"'The capital of France is Paris.' is \['T', 'he', .*\['▁The', '▁c"),
        (
            lambda folder: edit(folder / "special_tokens_map.json", eos_token="<|end|>"),
            r"tokenizer_config.json and special_tokens_map.json: 'eos_token' is '</s>' and "
            r"'<\|end\|>'; tokenizer_config.json decides",
        ),
        (
            lambda folder: edit(folder / "tokenizer_config.json", chat_template="{{ 1 }}"),
            r"'chat_template' is '\{\{ 1 \}\}' and .*; chat_template.jinja decides",
        ),
    ],
)
def test_each_kind_is_found(folder, change, message):
    change(folder)
    found = contradictions(folder)
    assert any(re.search(message, each) for each in found), found


def test_a_model_that_is_none(folder):
    (folder / "tokenizer.model").write_bytes(b"<html>")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: not a sentencepiece model"):
        contradictions(folder)


def test_many_contradictions_are_counted(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    pieces = [piece for piece in vocab if len(piece) == 1][:20]
    ids = [vocab[piece] for piece in pieces]
    vocab |= dict(zip(pieces, [*ids[1:], ids[0]], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert contradictions(folder)[-1].endswith("tokenizer.model: 16 other contradictions")


def test_a_model_that_decides(tmp_path):
    folder = write_translation(tmp_path / "xglm", "xglm")
    model = base64.b64decode(DATA["models"]["unigram"])
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    found = contradictions(folder)
    assert found
    assert all(each.endswith("; sentencepiece.bpe.model decides") for each in found)


def test_the_command_says_them_first(folder, capsys):
    change_flags(folder)
    assert main(["verify", str(folder)]) != 0  # the folder has no model
    assert "tokenizer files disagree: tokenizer_config.json and" in capsys.readouterr().out
