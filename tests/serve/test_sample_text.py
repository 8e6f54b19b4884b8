"""Text of a sample up to a stop string, stop strings on the host, and tool calls."""

from __future__ import annotations

import json
import os
import random

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_tokenizers import DATA, small_tokenizer

from jaxllm.batch.rows import TokenLogprob
from jaxllm.generation.stopping import StopStringCriteria, StopStringMatcher
from jaxllm.serve import AsyncEngine
from jaxllm.serve.http.answers import ChatAnswer, Usage, chat_logprobs, completion_logprobs
from jaxllm.serve.http.api_types import ChatRequest, read_body
from jaxllm.serve.http.pieces import Piece, SampleText, split_tool_calls
from jaxllm.serve.http.state import ServerState
from jaxllm.tokenizers import FastTokenizer
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.tokenizers.settings import TokenizerSettings

TOKENIZER = small_tokenizer("llama.model")
TOKENIZERS = {
    "llama.model": lambda: TOKENIZER,
    "t5.model": lambda: small_tokenizer("t5.model"),
    "bytes": byte_tokenizer,
    "clean-up": lambda: FastTokenizer(
        json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8")),
        TokenizerSettings(options={"clean_up_tokenization_spaces": True}),
    ),
}


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


@pytest.mark.parametrize("name", ["llama.model", "bytes", "clean-up"])
def test_stop_strings_of_special_tokens_stop_where_a_batch_row_does(name):
    """The text ends before what the stop string has of it, wherever the special token is."""
    tokenizer = TOKENIZERS[name]()
    rng, stopped = random.Random(1), 0
    special = next(i for i in sorted(tokenizer.special_ids) if tokenizer.token_bytes()[i])
    content = tokenizer.id_to_token(special)
    letters = [
        i for i, b in enumerate(tokenizer.token_bytes()) if b and len(b) == 1 and b.isalpha()
    ]
    letters = rng.sample(letters, 3)
    a, b, _ = (tokenizer.token_bytes()[i].decode() for i in letters)
    for stop in (
        content,
        f"{a}{content}",
        f"{content}{b}",
        f"{a}{b}{content}{content}{a}",
        f"{b}>",
    ):
        for _ in range(30):
            ids = rng.choices([*letters, special], k=25)
            matcher = StopStringMatcher(tokenizer, [stop])
            count = matcher.first_end(ids)
            sample, text, used = SampleText(tokenizer, [stop]), "", 0
            while used < len(ids) and not sample.stopped:
                text += sample.put(ids[used])
                used += 1
            text += sample.end()
            assert (sample.stopped, used) == (count is not None, count or len(ids))
            cut = stop.replace(content, "") if sample.stopped else ""
            whole = tokenizer.decode(ids[:used], skip_special_tokens=True)
            assert text + cut == whole
            stopped += sample.stopped
    assert stopped > 30


@pytest.mark.parametrize("name", ["llama.model", "t5.model", "bytes", "clean-up"])
@pytest.mark.parametrize("stops", [[], ["b"]], ids=["", "stop"])
def test_places_of_tokens_count_characters_of_the_text(name, stops):
    """Of parts of characters, invalid bytes, special tokens, and spaces that decoding removes."""
    tokenizer = TOKENIZERS[name]()
    rng = random.Random(2)
    for _ in range(60):
        ids = tokenizer.encode("".join(rng.choices("ab é😀.", k=6)), add_special_tokens=False)
        ids += rng.choices(range(len(tokenizer)), k=6)
        rng.shuffle(ids) if rng.random() < 0.5 else None
        sample, text, places, used = SampleText(tokenizer, stops), "", [], 0
        while used < len(ids) and not sample.stopped:
            text += sample.put(ids[used], place=True)
            places += sample.offsets(is_end=False)
            used += 1
        text += sample.end()
        places += sample.offsets(is_end=True)
        expected = []
        for count in range(used):
            before = tokenizer.decode(ids[:count], skip_special_tokens=True)
            expected.append(len(os.path.commonprefix([before, text])))  # noqa: RUF071
        if not sample.stopped:
            assert text == tokenizer.decode(ids, skip_special_tokens=True)
        assert places == expected


def test_parts_of_a_character_have_its_place():
    sample = SampleText(byte_tokenizer(), [])
    text = "aé😀\n"
    for byte in text.encode():
        sample.put(byte, place=True)
    sample.end()
    assert sample.offsets(is_end=True) == [0, 1, 1, 2, 2, 2, 2, 3]


def test_names_of_tokens_do_not_collide():
    """Byte tokens and pieces may be the same text; parts of characters are named by their bytes."""
    table = TOKENIZER.token_bytes()
    doubled = [i for i, content in enumerate(table) if content == b"a"]
    assert len(doubled) == 2
    halves = [next(i for i, b in enumerate(table) if b == part) for part in (b"\xc3", b"\xc4")]
    unknown = len(TOKENIZER) + 3
    top = tuple((token, -float(n)) for n, token in enumerate([*doubled, *halves, unknown, 2]))
    chosen = doubled[1]
    found = completion_logprobs(TOKENIZER, [(chosen, TokenLogprob(-1.0, top))], [0], 6)
    assert found["tokens"] == ["a"]
    assert found["top_logprobs"] == [
        {
            f"token_id:{doubled[0]}": 0.0,
            "a": -1.0,
            "bytes:\\xc3": -2.0,
            "bytes:\\xc4": -3.0,
            f"token_id:{unknown}": -4.0,
            "</s>": -5.0,
        }
    ]
    entries = chat_logprobs(TOKENIZER, [chosen], [TokenLogprob(-1.0, top)], 6)["content"]
    assert [x["bytes"] for x in entries[0]["top_logprobs"]] == [
        [97],
        [97],
        [0xC3],
        [0xC4],
        None,
        [*b"</s>"],
    ]


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
    engine = AsyncEngine(model, TOKENIZER, slots=1, context=64)
    state = ServerState(engine=engine, tokenizer=TOKENIZER, model_name="tiny")
    answer = ChatAnswer(state, request, Usage())
    whole = answer.choice(Piece(0, text, (), None, "stop"))
    assert whole["message"]["content"] == "Well."
    assert whole["finish_reason"] == "tool_calls"
    pieces = [Piece(0, part, (), None, None) for part in (text[:20], text[20:90], text[90:])]
    ended = [*pieces, Piece(0, "", (), None, "stop")]
    deltas = [choice["delta"] for piece in ended for choice in answer.piece_choices(piece)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well.\n"
    for found in (whole["message"]["tool_calls"], deltas[-1]["tool_calls"]):
        assert " ".join(call["function"]["name"] for call in found) == names
