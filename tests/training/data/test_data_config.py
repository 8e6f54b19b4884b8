"""Strict settings: wrong types and values, and fields without effect."""

from __future__ import annotations

import pytest
from paths import DATA

import jaxllm
from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo
from jaxllm.training.data.config import check_together, eos_of, length_limits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "chats"}, "format: expected 'text', .* found 'chats'"),
        ({"path": 3}, "path: expected a string or a list of strings or null, found 3"),
        ({"path": ["a", 3]}, "path: expected"),
        ({"max_length": "12"}, "max_length: expected an integer or null, found '12'"),
        ({"max_length": 0}, "max_length: expected 1 or more, found 0"),
        ({"max_length": True}, "max_length: expected an integer"),
        ({"bucket": "power_of_three"}, "bucket: expected an integer or 'power_of_two' or null"),
        ({"bucket": 0}, "bucket: expected 1 or more"),
        ({"packing": 1}, "packing: expected true or false, found 1"),
        ({"seed": -1}, "seed: expected 0 or more"),
        ({"path": "a", "dataset": "b"}, "path, dataset: give one of the two"),
        ({"path": "a", "split": "test"}, "split: has no effect with path"),
        ({"dataset": "a", "by_line": True}, "by_line: has no effect with dataset"),
        ({"messages_field": "m"}, "messages_field: has no effect with format 'text'; .* chat"),
        ({"format": "chat", "text_field": "t"}, "text_field: .* read by text, classification"),
        ({"max_target_length": 5}, "max_target_length: has no effect with format 'text'"),
        ({"format": "chat", "on_too_long": "split"}, "on_too_long: 'split' is for format 'text'"),
        ({"on_too_long": "split", "max_length": 1}, "pieces of at least 2 tokens"),
        ({"format": "classification", "packing": True}, "packing: .* cannot be packed"),
        ({"packing": True, "bucket": 8}, "bucket: has no effect with packing"),
        ({"format": "classification", "label_names": ["a", "a"]}, "listed twice"),
    ],
)
def test_wrong_settings(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{"format": "text", **fields})


def test_lists_of_a_file_become_tuples():
    config = DataConfig(format="classification", path=["a", "b"], label_names=["x", "y"])  # type: ignore[arg-type]
    assert (config.path, config.label_names) == (("a", "b"), ("x", "y"))
    assert hash(config) == hash(DataConfig(**vars(config)))


def test_format_and_model_fit():
    t5 = ModelInfo(kind="seq2seq", vocab_size=9)
    with pytest.raises(ConfigError, match=r"'chat' trains a causal model, .* takes seq2seq"):
        check_together(DataConfig(format="chat"), t5)
    check_together(DataConfig(format="seq2seq"), t5)


def test_lengths():
    gpt2 = ModelInfo(kind="causal", vocab_size=9, context_length=64)
    t5 = ModelInfo(kind="seq2seq", vocab_size=9)
    assert length_limits(DataConfig(format="text"), gpt2) == (64,)
    assert length_limits(DataConfig(format="text", max_length=8), gpt2) == (8,)
    assert length_limits(DataConfig(format="seq2seq", max_length=8), t5) == (8, 8)
    pair = DataConfig(format="seq2seq", max_length=8, max_target_length=4)
    assert length_limits(pair, t5) == (8, 4)
    with pytest.raises(ConfigError, match="65 tokens, but the model's context has 64"):
        length_limits(DataConfig(format="text", max_length=65), gpt2)
    with pytest.raises(ConfigError, match="max_length: required"):
        length_limits(DataConfig(format="seq2seq"), t5)


def test_end_token():
    tokenizer = byte_tokenizer()
    info = ModelInfo(kind="causal", vocab_size=300, eos_token_ids=(3, 4))
    assert eos_of(tokenizer, info) == 256


@pytest.mark.in_ci("conformance/models/s_t5-seq2seq")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("conformance/models/s_gpt2", "causal"),
        ("conformance/models/s_llama", "causal"),
        ("conformance/models/s_t5", "seq2seq"),
        ("parity/llama_cls_multi", "classification"),
    ],
)
def test_info_of_a_model(name, kind):
    model, _ = jaxllm.load(DATA / name)
    info = ModelInfo.of(model)
    assert info.kind == kind
    assert info.vocab_size == model.config.vocab_size
    assert info.eos_token_ids == model.config.eos_token_ids
    assert (info.context_length is None) == (kind == "seq2seq")


def test_an_encoder_has_nothing_to_predict():
    model, _ = jaxllm.load(DATA / "parity" / "t5_encoder")
    with pytest.raises(UnsupportedError, match="T5EncoderModel: has no labels to predict"):
        ModelInfo.of(model)
