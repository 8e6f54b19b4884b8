"""What jaxllm leaves alone in the caller's process, and where its warnings point to."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import tiny
from paths import DATA

import jaxllm
from jaxllm.common.errors import InputError, warn

LLAMA = DATA / "reference" / "tiny-llama"


def test_the_garbage_collector_stays_on(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    model, _ = jaxllm.load(LLAMA)
    jaxllm.generate(model, [[5, 6]], max_new_tokens=2)
    assert calls == []


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(each.filename, each.lineno) for each in caught]


def test_a_warning_names_the_line_of_the_caller():
    model, _ = jaxllm.load(LLAMA)
    both = {"max_new_tokens": 2, "max_length": 9}
    calls = [
        lambda: jaxllm.generate(model, [[5]], **both),
        lambda: model.generate([[5]], **both),
        lambda: jaxllm.generate(model, [[5]], max_new_tokens=2, do_sample=False, top_k=3),
        lambda: jaxllm.generate(model, [[5]], max_new_tokens=2, decoder_start_token_id=1),
        lambda: list(jaxllm.stream(model, [[5]], **both)),
    ]
    for call in calls:
        assert warned(call) == [(__file__, call.__code__.co_firstlineno)]


def test_a_warning_without_a_caller_names_the_outermost_line():
    names = {"__name__": "jaxllm.somewhere", "warn": warn}
    exec(compile("def call():\n    warn('x')", "inner.py", "exec"), names)
    [(file, line)] = warned(names["call"])
    assert file == __file__
    assert line > 0


@pytest.mark.parametrize(
    "text", ["Once", ["Once upon a time"], [["Once", "upon"]], np.array("Once")]
)
def test_text_in_place_of_ids_names_the_tokenizer(text):
    model = tiny.cached("llama")
    hint = r"expected token ids, found the text 'Once.*tokenizer\(texts.*jaxllm\.generate_texts"
    for call in (lambda: jaxllm.generate(model, text), lambda: model(text)):
        with pytest.raises(InputError, match=f"^input_ids: {hint}"):
            call()


def test_text_in_place_of_ids_in_scores():
    with pytest.raises(InputError, match=r"^prompts: texts need a tokenizer: score\(model"):
        jaxllm.score(tiny.cached("llama"), ["Once"], [[5]])
