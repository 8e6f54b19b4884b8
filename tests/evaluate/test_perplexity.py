"""The perplexity of a text: every token once, with the context that its window has."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.evaluate import perplexity
from jaxllm.evaluate.perplexity import windows

TOKENIZER = small_tokenizer("llama.model")
MODEL = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))
TEXT = "The sea was calm, and a small boat came home: é, 1234.\n" * 3


def test_windows_predict_every_token_once_with_enough_before_it():
    ids = list(range(50))
    for context, stride in [(8, 8), (8, 4), (8, 3), (8, 1), (64, 32), (50, 50)]:
        pairs = list(windows(ids, context, stride))
        assert [token for _, new in pairs for token in new] == ids[1:]
        for number, (before, new) in enumerate(pairs):
            assert before[-1] + 1 == new[0]
            assert len(before) + len(new) - 1 <= context
            assert number in (0, len(pairs) - 1) or len(before) >= max(context - stride, 1)


def test_log_likelihood_is_that_of_the_models_logits():
    ids = np.array(TOKENIZER.encode(TEXT))
    context, stride = 32, 8
    expected, done = 0.0, 1
    for start in range(0, len(ids), stride):  # as transformers' documentation computes it
        end = min(start + context, len(ids))
        if end <= done:
            break
        logits = np.asarray(MODEL(ids[None, start:end]).logits, np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected += sum(log_probs[i - start - 1, ids[i]] for i in range(done, end))
        done = end
    output = perplexity(MODEL, TOKENIZER, TEXT, context=context, stride=stride, batch_size=4)
    assert output.tokens == len(ids) - 1
    assert output.log_likelihood == pytest.approx(expected, rel=1e-5)
    assert output.perplexity == pytest.approx(np.exp(-expected / output.tokens), rel=1e-5)
    bits = -expected / np.log(2) / len(TEXT.encode())
    assert output.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_wrong_arguments_are_named():
    for arguments, error in [
        ({"context": 1}, "context: expected 2 to 64"),
        ({"context": 65}, "context: expected 2 to 64"),
        ({"context": "x"}, "context: expected 2 to 64"),
        ({"context": 8, "stride": 9}, "stride: expected 1 to context"),
        ({"text": 3}, "text: expected a text, found 3"),
        ({"tokenizer": None}, "tokenizer: expected the model's tokenizer, found None"),
        ({"model": 3}, "perplexity: int has no language-model head"),
    ]:
        with pytest.raises(jaxllm.JaxLLMError, match=error):
            perplexity(**{"model": MODEL, "tokenizer": TOKENIZER, "text": TEXT, **arguments})
    with pytest.raises(jaxllm.JaxLLMError, match="needs two or more"):
        perplexity(MODEL, TOKENIZER, "")
    with pytest.raises(jaxllm.JaxLLMError, match="encoder-decoder"):
        perplexity(tiny.make("t5", num_layers=1), TOKENIZER, TEXT)
