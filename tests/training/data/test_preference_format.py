"""Preference rows as in TRL: which tokens are learnt, and what becomes of odd rows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, make_batches, read_examples

MODEL = ModelInfo(kind="causal", vocab_size=258, context_length=64, eos_token_ids=(256,))
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def examples(*rows: dict[str, Any], model: ModelInfo = MODEL, **fields: Any):
    config = DataConfig(format="preference", **fields)
    return read_examples(config, byte_tokenizer(), model, rows)


def learnt(sequence: Any) -> str:
    ids = sequence.labels[sequence.labels != -100]
    return byte_tokenizer().decode(ids.tolist())


TEXTS = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
EXPLICIT = {"prompt": [user("2+2")], "chosen": [assistant("4")], "rejected": [assistant("five")]}
IMPLICIT = {name: [user("2+2"), *EXPLICIT[name]] for name in ("chosen", "rejected")}
TEXT_PROMPT = {**EXPLICIT, "prompt": "2+2"}
REPEATED = {**IMPLICIT, "prompt": "2+2"}  # as in ultrafeedback_binarized


@pytest.mark.parametrize(
    ("row", "fields", "begins"),
    [
        (TEXTS, {}, "2+2="),
        (EXPLICIT, {"chat_template": TEMPLATE}, "u:2+2<|endoftext|>a:"),
        (IMPLICIT, {"chat_template": TEMPLATE}, "u:2+2<|endoftext|>a:"),
        (TEXT_PROMPT, {"chat_template": TEMPLATE}, "u:2+2<|endoftext|>a:"),
        (REPEATED, {"chat_template": TEMPLATE}, "u:2+2<|endoftext|>a:"),
        (
            {**IMPLICIT, "prompt": [user("2+2")]},
            {"chat_template": TEMPLATE},
            "u:2+2<|endoftext|>a:",
        ),
    ],
    ids=[
        "texts",
        "messages",
        "messages without a prompt",
        "text and messages",
        "repeated text",
        "repeated",
    ],
)
def test_only_the_answers_are_learnt(row: dict[str, Any], fields: dict[str, Any], begins: str):
    results = examples(row, **fields)
    (pair,) = results.items
    assert [learnt(sequence) for sequence in pair.sequences] == [
        "4<|endoftext|>",
        "five<|endoftext|>",
    ]
    texts = [byte_tokenizer().decode(sequence.input_ids.tolist()) for sequence in pair.sequences]
    assert texts == [begins + "4<|endoftext|>", begins + "five<|endoftext|>"]
    lengths = [len(sequence.input_ids) for sequence in pair.sequences]
    assert (results.counts.tokens, results.counts.learnt) == (sum(lengths), 2 + 5)
    assert pair.lengths == (max(lengths),)


def test_t5_reads_the_prompt_twice():
    results = examples(TEXTS, model=ModelInfo(kind="seq2seq", vocab_size=258, context_length=16))
    chosen, rejected = results.items[0].sequences
    assert chosen.input_ids.tolist() == rejected.input_ids.tolist() == [*b"2+2=", 256]
    assert (chosen.labels.tolist(), rejected.labels.tolist()) == ([52, 256], [*b"five", 256])


def test_the_arrays_of_a_batch():
    rows = [TEXTS, {**TEXTS, "chosen": "four"}, TEXTS]
    config = DataConfig(format="preference", bucket=4, shuffle=False)
    batches = make_batches(config, byte_tokenizer(), model=MODEL, batch_size=2, rows=rows, epochs=1)
    first, last = batches
    assert {name: x.shape for name, x in first.items()} == dict.fromkeys(first, (2, 2, 16))
    assert set(first) == {"input_ids", "attention_mask", "labels"}
    assert (last["labels"][1] == -100).all()  # a row of padding
    logps = np.arange(6, dtype=np.float32).reshape(3, 2)
    state = batches.state()
    known = batches.with_examples(batches.examples.with_reference(logps))
    assert [b["reference_logps"].tolist() for b in known] == [[[0, 1], [2, 3]], [[4, 5], [0, 0]]]
    with pytest.raises(DataError, match=r"expected the fields .*reference"):
        known.restore(state)
    other = batches.with_examples(batches.examples.with_reference(logps + 1))
    with pytest.raises(DataError, match="reference was"):
        other.restore(known.state())
    # Tokens of the next batch over all processes, by which the FLOPs are counted.
    assert batches.padding == 1 - int(batches.examples.tokens.sum()) / (4 * 2 * 16)


def test_equal_answers_are_left_out():
    results = examples(TEXTS, {**TEXTS, "rejected": "4"})
    assert (results.counts.examples, results.counts.empty) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "prompt: no such field"),
        ({**TEXTS, "rejected": 4}, "rejected: expected str, found '4'"),
        ({**EXPLICIT, "rejected": "five"}, "rejected: not JSON"),
        ({"chosen": [user("a")], "rejected": [user("b")]}, "there is no common prompt"),
        ({**EXPLICIT, "chosen": [user("a")]}, "prompt and answer: no message of the assistant"),
        ({**REPEATED, "prompt": "3+3"}, "begins with another message of the user"),
    ],
)
def test_rows_that_are_no_preferences(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        examples(row, chat_template=TEMPLATE)


def test_settings_without_effect():
    with pytest.raises(ConfigError, match="packing: rows of format 'preference' are pairs"):
        DataConfig(format="preference", packing=True)
    with pytest.raises(ConfigError, match="max_target_length: has no effect on a causal model"):
        examples(TEXTS, max_target_length=4)
