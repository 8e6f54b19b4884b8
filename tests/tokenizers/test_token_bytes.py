"""token_bytes: the bytes of each token inside a text."""

from __future__ import annotations

import pytest
from small_tokenizers import small_tokenizer as tokenizer


@pytest.mark.parametrize("name", ["gpt2", "llama3", "smollm", "llama2", "t5", "llama.model"])
def test_token_bytes_concatenate_to_decoded_text(name):
    tokens = tokenizer(name)
    actual = tokens.token_bytes()
    for text in ("Hello, world! naïve 见到你 😀", " The  end\n", "a\tb"):
        row = tokens.encode("x" + text, add_special_tokens=False)
        if "<unk>" not in map(tokens.id_to_token, row):
            joined = b"".join(actual[index] for index in row).decode()
            assert joined.removeprefix(" ") == tokens.decode(row).removeprefix(" ")
    assert len(actual) == len(tokens)


def test_special_tokens_bytes_and_spaces():
    llama = tokenizer("llama.model")
    actual = llama.token_bytes()
    assert actual[1] == b"<s>"
    assert actual[3 + 0xE9] == b"\xe9"
    assert actual[llama.encode("the", add_special_tokens=False)[0]] == b" the"
    assert tokenizer("gpt2").token_bytes()[0] == b"<|endoftext|>"
    sentinel = tokenizer("t5.model").token_to_id("<extra_id_7>")
    assert sentinel
    assert tokenizer("t5.model").token_bytes()[sentinel] == b"<extra_id_7>"
