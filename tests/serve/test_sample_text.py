"""Text of a sample up to a stop string, stop strings on the host, and tool calls."""

from __future__ import annotations

import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_tokenizers import small_tokenizer

from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.generation.stopping.stop_strings import StopStringMatcher
from jaxllm.serve import AsyncEngine
from jaxllm.serve.http.answers import ChatAnswer, Usage
from jaxllm.serve.http.api_types import ChatRequest, read_body
from jaxllm.serve.http.pieces import Choice, Piece, SampleText
from jaxllm.serve.http.state import ServerState
from jaxllm.serve.http.tool_calls import split_tool_calls

TOKENIZER = small_tokenizer("llama.model")


def test_pieces_are_the_text_before_the_stop_string_that_is_complete_first():
    rng = random.Random(0)
    stopped = 0
    for _ in range(200):
        text = "".join(rng.choices("ab é", k=20))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
        sample, pieces = SampleText(TOKENIZER, stops), []
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            pieces.append(sample.put(token))
            if sample.stopped:
                break
        pieces.append(sample.end())
        decoded = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False))
        matches = [(decoded.find(s) + len(s), decoded.find(s)) for s in stops if s in decoded]
        assert "".join(pieces) == decoded[: min(matches)[1] if matches else None]
        assert sample.stopped == bool(matches)
        stopped += sample.stopped
    assert 20 < stopped < 200


@pytest.mark.ci
def test_the_host_finds_stop_strings_where_generate_does():
    rng, stops = np.random.default_rng(0), ["ab", "e", "th"]
    criteria = StopStringCriteria(TOKENIZER, stops)
    count = len(TOKENIZER)
    ascii_tokens = [i for i, b in enumerate(TOKENIZER.token_bytes()) if b and b.isascii()]
    actual = 0
    for _ in range(40):
        ids = rng.choice([*ascii_tokens, count + 5], 40).tolist()
        matcher = StopStringMatcher(TOKENIZER, stops, ids[:3])
        ours = [matcher.completes(token) for token in ids[3:]]
        columns = jnp.arange(4, 41)
        rows = jnp.asarray([ids] * 37)
        theirs = np.asarray(criteria(rows, None, columns)).tolist()
        assert ours == theirs
        actual += sum(ours)
    assert actual > 10


def test_a_long_stop_string_over_several_tokens_is_found_beside_a_short_one():
    ids = TOKENIZER.encode("then comes the very end", add_special_tokens=False)
    matcher = StopStringMatcher(TOKENIZER, ["q", "the very end"], ids[:2])
    assert [matcher.completes(token) for token in ids[2:]] == [False] * (len(ids) - 3) + [True]


def test_only_calls_of_known_functions_are_tool_calls():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    content, calls = split_tool_calls(f"Hm.{call}\n{call}", ["f"])
    assert content == "Hm."
    assert [(c.name, c.arguments) for c in calls] == [("f", '{"x": "é"}')] * 2
    assert calls[0].id != calls[1].id
    for text in (
        call,  # of a function that the request does not have
        '<tool_call>{"name": "g", "arguments": []}</tool_call>',
        '<tool_call>{"name": </tool_call>',
        '{"name": "other"}',
        "[" * 100_000,
    ):
        assert split_tool_calls(text, ["g"]) == (text, [])


@pytest.mark.parametrize(
    ("parallel", "names"), [(True, "look see"), (False, "look"), (None, "look see")]
)
def test_only_the_first_tool_call_is_answered_without_parallel_calls(parallel, names):
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "see")]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    body["parallel_tool_calls"] = parallel
    request = read_body(ChatRequest, json.dumps(body).encode())
    calls = [
        f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in ("look", "see")
    ]
    text = "Well.\n" + "\n".join(calls)
    model = tiny.make("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER))
    state = ServerState(AsyncEngine(model, TOKENIZER, slots=1, context=64), TOKENIZER, "tiny")
    answer = ChatAnswer(state, request, Usage())
    whole = answer.choice(Choice(text, finish_reason="stop"))
    assert whole["message"]["content"] == "Well."
    assert whole["finish_reason"] == "tool_calls"
    pieces = [Piece(0, part, (), None, None) for part in (text[:20], text[20:90], text[90:])]
    ended = [*pieces, Piece(0, "", (), None, "stop")]
    deltas = [choice["delta"] for piece in ended for choice in answer.piece_choices(piece)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well.\n"
    for found in (whole["message"]["tool_calls"], deltas[-1]["tool_calls"]):
        assert " ".join(call["function"]["name"] for call in found) == names
