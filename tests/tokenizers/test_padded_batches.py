"""Padding: buckets, masks, and invalid prompts."""

import numpy as np
import pytest

from jaxllm.common.errors import InputError
from jaxllm.tokenizers import bucket_length

PROMPTS = ["Hello", "Nice to meet you.", "a"]


@pytest.fixture(scope="module")
def tokenizer(load_fast):
    return load_fast("metaspace")  # has BOS, EOS and a pad token of its own


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bucket", [None, 16, "power_of_two"])
def test_rows_are_padded_and_masked(tokenizer, side, bucket):
    batch = tokenizer(PROMPTS, padding=True, padding_side=side, bucket=bucket, return_tensors="np")
    rows = [tokenizer.encode(prompt) for prompt in PROMPTS]
    length = bucket_length(max(map(len, rows)), bucket)
    assert batch.input_ids.shape == batch.attention_mask.shape == (3, length)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int32
    for row, ids, mask in zip(rows, batch.input_ids, batch.attention_mask, strict=True):
        pads = length - len(row)
        assert ids[mask == 1].tolist() == row
        assert ids[mask == 0].tolist() == [tokenizer.pad_token_id] * pads
        assert mask.tolist() == (
            [0] * pads + [1] * len(row) if side == "left" else [1] * len(row) + [0] * pads
        )


@pytest.mark.parametrize(
    ("length", "bucket", "expected"),
    [(5, None, 5), (5, 8, 8), (8, 8, 8), (9, 8, 16), (1, 1, 1), (17, 20, 20)]
    + [(n, "power_of_two", p) for n, p in ((1, 1), (2, 2), (3, 4), (8, 8), (9, 16))],
)
def test_bucket_length(length, bucket, expected):
    assert bucket_length(length, bucket) == expected


@pytest.mark.parametrize("bucket", [0, -8, 2.0, True, "big"])
def test_invalid_buckets(tokenizer, bucket):
    with pytest.raises(InputError, match="bucket, pad_to_multiple_of: expected"):
        tokenizer(PROMPTS, bucket=bucket)


def test_one_string_is_a_batch_of_one(tokenizer):
    batch = tokenizer("Hello", return_tensors="np")
    assert batch.input_ids.tolist() == [tokenizer.encode("Hello")]


def test_padding_side_of_the_tokenizer_is_the_default(load_fast):
    left = load_fast("metaspace", padding_side="left")
    assert left(PROMPTS, padding=True).attention_mask[2][0] == 0
    assert left(PROMPTS, padding=True, padding_side="right").attention_mask[2][0] == 1


def test_eos_pads_without_a_pad_token(load_fast):
    gpt2 = load_fast("gpt2")
    assert gpt2.pad_token_id is None
    batch = gpt2(["<|endoftext|>", "Hello there"], padding=True, return_tensors="np")
    assert batch.attention_mask[0].tolist() == [1] + [0] * (batch.input_ids.shape[1] - 1)
    assert set(batch.input_ids[0].tolist()) == {gpt2.eos_token_id}


def test_empty_prompt_becomes_bos(load_fast):
    gpt2 = load_fast("gpt2")
    assert gpt2.encode("") == []
    assert gpt2("", return_tensors="np").input_ids.tolist() == [[gpt2.bos_token_id]]
    t5 = load_fast("t5")
    assert t5("", return_tensors="np").input_ids.tolist() == [[t5.eos_token_id]]
    with pytest.raises(InputError, match="prompt 1 is empty, and the tokenizer has no BOS"):
        t5(["a", ""], padding=True, add_special_tokens=False, return_tensors="np")


def test_refused_batches(tokenizer):
    with pytest.raises(InputError, match="the batch is empty"):
        tokenizer([])
    assert len(tokenizer.encode("b c d")) == 7
    tokenizer(["a", "b c d"], max_length=7)
    with pytest.raises(InputError, match="prompt 1 has 7 tokens, but max_length is 6"):
        tokenizer(["a", "b c d"], max_length=6)
    with pytest.raises(InputError, match="padding_side is 'middle'"):
        tokenizer(PROMPTS, padding_side="middle")
    with pytest.raises(InputError, match="must be a str, not int"):
        tokenizer(["a", 7])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "rows: expected lists of token ids, found None"),
        ([None], r"rows: expected lists of token ids, found \[None\]"),
        ([[5], [None]], r"row 1 is \[None\]"),
        ([[1.5]], "row 0 is .* expected a list of token ids"),
        (["ab"], "row 0 is ab"),
        ([[[1], [2, 3]]], "row 0 is"),
        ([[5, -100]], "row 0 has ids from -100 to 5"),
        ([[2**40]], "expected 0 or more"),
    ],
)
def test_rows_that_are_no_ids(tokenizer, rows, message):
    with pytest.raises(InputError, match=message):
        tokenizer.pad(rows)


def test_tokens_outside_the_vocabulary(tokenizer):
    assert tokenizer.id_to_token(-1) is tokenizer.id_to_token(len(tokenizer)) is None
    assert tokenizer.convert_ids_to_tokens([len(tokenizer)]) == [None]
    for call in (tokenizer.convert_ids_to_tokens, tokenizer.convert_tokens_to_ids):
        with pytest.raises(InputError, match=r"found (None|NoneType) \("):
            call(None)
        with pytest.raises(InputError, match=r"found (None|NoneType) \("):
            call([None])


def test_split_special_tokens(tokenizer):
    ids = tokenizer("x</s>y", split_special_tokens=True, add_special_tokens=False).input_ids
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.eos_token_id in tokenizer("x</s>y", add_special_tokens=False).input_ids
