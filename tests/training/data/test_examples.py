"""All rows of a source encoded: too long ones, empty ones, counts, and errors with their place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.common.errors import DataError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, read_examples
from jaxllm.training.data.examples import (
    CausalExample,
    ClassificationExample,
    Counts,
    Seq2SeqExample,
    fit,
)

BYTES = byte_tokenizer()
GPT2 = ModelInfo(kind="causal", vocab_size=258, context_length=8)
T5 = ModelInfo(kind="seq2seq", vocab_size=258)


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def read(rows, model=GPT2, **fields):
    return read_examples(DataConfig(**{"format": "text", **fields}), BYTES, model, rows)


def test_too_long_is_an_error_that_names_the_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "short"}\n\n{"text": "much too long"}\n')
    config = DataConfig(format="text", path=str(path))
    with pytest.raises(DataError, match=r"x\.jsonl:3: 14 tokens, but max_length is 8"):
        read_examples(config, BYTES, GPT2)


def test_drop_and_truncate_are_counted():
    rows = [{"text": "abc"}, {"text": "0123456789"}, {"text": ""}]
    dropped = read(rows, on_too_long="drop")
    assert dropped.counts == Counts(rows=3, examples=1, dropped=1, empty=1, tokens=4, learnt=3)
    cut = read(rows, on_too_long="truncate")
    assert cut.items[1].input_ids.tolist() == list(b"01234567")
    assert cut.counts.truncated == 1
    assert "2 examples of 3 rows (1 truncated, 1 empty)" in str(cut.counts)


def test_an_answer_that_was_cut_off_is_left_out():
    rows = [{"prompt": "0123456789", "completion": "yes"}, {"prompt": "a", "completion": "b"}]
    cut = read(rows, format="prompt_completion", on_too_long="truncate")
    assert (cut.counts.truncated, cut.counts.empty, cut.counts.examples) == (1, 1, 1)


@given(st.integers(2, 60), st.integers(2, 20))
def test_pieces_of_a_text_learn_every_token_once(length, limit):
    example = CausalExample.of(np.arange(length, dtype=np.int32))
    pieces, counts = fit(example, (limit,), "split")
    assert all(len(piece.input_ids) <= limit for piece in pieces)
    learnt = [label for piece in pieces for label in piece.labels.tolist() if label != -100]
    assert learnt == list(range(1, length))
    assert counts.learnt == length - 1
    assert counts.split == int(length > limit)


def test_truncated_pairs_and_texts():
    pair = Seq2SeqExample(ids(1, 2, 3, 4, 9), ids(5, 6, 7, 9)).truncate((3, 2))
    assert pair.input_ids.tolist() == [1, 2, 9]
    assert pair.labels.tolist() == [5, 6]
    untouched = Seq2SeqExample(ids(1, 9), ids(5, 9)).truncate((3, 2))
    assert (untouched.input_ids.tolist(), untouched.labels.tolist()) == ([1, 9], [5, 9])
    text = ClassificationExample(ids(1, 2, 3), np.asarray(1, np.int32)).truncate((2,))
    assert (text.input_ids.tolist(), text.labels.tolist()) == ([1, 2], 1)


def test_either_side_of_a_pair_can_be_too_long():
    row = {"source": "abc", "target": "abcdef"}
    config = {"format": "seq2seq", "max_length": 8, "max_target_length": 6}
    with pytest.raises(DataError, match="4 and 7 tokens, but max_length is 8 and 6"):
        read([row], T5, **config)
    assert read([row], T5, **{**config, "max_target_length": 7}).lengths.tolist() == [[4, 7]]


def test_errors_in_rows_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: text: no such field; the row has txt"):
        read_examples(DataConfig(format="text", path=str(path)), BYTES, GPT2)
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: not JSON") as caught:
        read_examples(DataConfig(format="text", path=str(path)), BYTES, GPT2)
    assert str(caught.value).count("x.jsonl") == 1
    chat = [{"messages": [{"role": "assistant", "content": "a"}]}]
    with pytest.raises(DataError, match=r"rows\[0\]: this tokenizer has no default chat template"):
        read(chat, format="chat")


def test_nothing_to_learn_from(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"x\.jsonl: nothing to learn from: 0 examples of 0 rows"):
        read_examples(DataConfig(format="text", path=str(path)), BYTES, GPT2)


def test_tokenizer_of_another_model():
    small = ModelInfo(kind="causal", vocab_size=200, context_length=8)
    with pytest.raises(DataError, match=r"the id 256, but the model has 200 \(vocab_size\)"):
        read([{"text": "a"}], small)
    small_t5 = ModelInfo(kind="seq2seq", vocab_size=257)
    pair = {"source": "a", "target": "<|pad|>"}
    with pytest.raises(DataError, match="the id 257"):
        read([pair], small_t5, format="seq2seq", max_length=8)


def test_the_digest_is_of_tokens_and_labels():
    def digest(rows, **fields):
        return read(rows, **fields).digest

    rows = [{"text": "abc", "prompt": "ab", "completion": "c"}, {"text": "d"}]
    digests = [
        digest(rows),
        digest(rows[::-1]),
        digest(rows[:1]),
        digest(rows[:1], format="prompt_completion"),  # the same tokens, other labels
    ]
    assert len(set(digests)) == 4
    assert digest(rows) == digests[0]


def test_many_rows_stay_in_order(tmp_path):
    path = tmp_path / "x.jsonl"
    texts = [f"{number:05d}" for number in range(500)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    examples = read_examples(DataConfig(format="text", path=str(path)), BYTES, GPT2)
    assert [bytes(e.input_ids[:-1].tolist()).decode() for e in examples.items] == texts
