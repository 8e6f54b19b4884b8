"""Stop strings: transformers' own answers, brute force over bytes, padding, and recompilation."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import program_count
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA
from small_tokenizers import small_tokenizer as tokenizer

from jaxllm.common.errors import InputError
from jaxllm.generation.stopping import StopStringCriteria, token_automaton
from jaxllm.tokenizers import load_tokenizer, tokenizer_from_gguf

CASES = json.loads((DATA / "stopping" / "stop_strings.json").read_text(encoding="utf-8"))["cases"]
SIZE = 64


@jax.jit
def run(criterion, ids, cur_len, mask):
    return criterion(ids, jnp.zeros((ids.shape[0], 3)), cur_len, mask=mask)


def done(criterion, rows: list[list[int]]) -> list[bool]:
    """The answer for each row, all rows at once, side by side in a buffer with garbage."""
    lengths = np.array([len(row) for row in rows])
    width = -(-lengths.max() // SIZE) * SIZE
    batch = -(-len(rows) // SIZE) * SIZE
    ids = np.random.default_rng(0).integers(0, 99, (batch, width)).astype(np.int32)
    for line, row in zip(ids, rows, strict=False):
        line[: len(row)] = row
    lengths = np.pad(lengths, (0, batch - len(rows)))
    return run(criterion, ids, lengths, None)[: len(rows)].tolist()


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_transformers_answers(name):
    for case in CASES[name]:
        if "impossible" in case:
            with pytest.raises(InputError, match="no token of the vocabulary can complete"):
                StopStringCriteria(tokenizer(name), case["stop_strings"])
            continue
        beginnings, expected = [], []
        for row, answers in case["rows"]:
            expected += [answer == "1" for answer in answers]
            ends = range(len(row) - len(answers) + 1, len(row) + 1)
            beginnings += [row[:end] for end in ends]
        criterion = StopStringCriteria(tokenizer(name), case["stop_strings"])
        assert done(criterion, beginnings) == expected, case["stop_strings"]


def text_of(token_bytes, row: list[int]) -> bytes:
    return b"".join(token_bytes[index] for index in row)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "t5", "llama.model", "t5.model"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_against_a_search_in_the_text(name, data):
    """The string is in the text, but not in the text without the last token and its own bytes."""
    token_bytes = tokenizer(name).token_bytes()
    ids = st.integers(0, len(token_bytes) - 1)
    rows = data.draw(st.lists(st.lists(ids, min_size=1, max_size=8), min_size=1, max_size=8))
    texts = [text_of(token_bytes, row).decode("utf-8", "ignore") for row in rows]
    cuts = [t[i : i + n] for t in texts for i in range(len(t)) for n in (1, 2, 3, 7)]
    chosen = st.sampled_from(cuts) if cuts else st.just("a")
    strings = data.draw(st.lists(chosen | st.text("ab é", min_size=1), min_size=1, max_size=4))
    try:
        criterion = StopStringCriteria(tokenizer(name), strings)
    except InputError:
        assert not any(s in t for s in strings for t in texts)
        return
    beginnings = [row[:end] for row in rows for end in range(1, len(row) + 1)]
    expected = []
    for row in beginnings:
        text, last = text_of(token_bytes, row), len(token_bytes[row[-1]])
        patterns = [s.encode() for s in strings]
        tails = [text[max(0, len(text) - last - len(p) + 1) :] for p in patterns]
        expected.append(last > 0 and any(p in t for p, t in zip(patterns, tails, strict=True)))
    assert done(criterion, beginnings) == expected


def test_gguf_vocabulary():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "b", "▁"]
    gguf = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    newline = 3 + ord("\n")
    criterion = StopStringCriteria(gguf, ["b a", "\nb"])
    rows = [[260, 259], [newline, 260], [newline, 259], [260, 261, 259], [1, 260, 261, 3 + 97]]
    assert done(criterion, rows) == [True, True, False, False, True]


def test_the_conformance_case():
    case = next(
        case
        for case in json.loads((DATA / "conformance" / "cases.json").read_text())["cases"]
        if case["id"] == "s-stop-strings"
    )
    llama = load_tokenizer(DATA / "conformance" / "models" / case["tokenizer"])
    assert llama is not None
    criterion = StopStringCriteria(llama, case["generate_kwargs"]["stop_strings"])
    prompt = len(case["inputs"]["input_ids"][0])
    ids = np.array(case["expected"]["sequences"], np.int32)
    mask = np.ones_like(ids, bool)
    ended = np.zeros(len(ids), bool)
    for length in range(prompt + 1, ids.shape[1] + 1):
        # After its end a row is padding, until the last row is full.
        assert (ids[ended, length - 1] == 0).all()
        assert (ids[~ended, length - 1] != 0).all()
        ended |= np.asarray(run(criterion, ids, length, mask))
    assert ended.tolist() == [True, True, False]


@pytest.mark.by_default("-1")
@pytest.mark.parametrize("where", [0, -1])
def test_padding_is_as_if_it_were_not_there(where):
    gpt2 = tokenizer("gpt2")
    row = gpt2.encode("to be or no", add_special_tokens=False)
    where %= len(row)
    pad = gpt2.encode("x", add_special_tokens=False) * 40
    ids = np.array([[*row[:where], *pad, *row[where:]], [*row, *row, *pad][: len(row) + 40]])
    mask = np.ones_like(ids, bool)
    mask[0, where : where + 40] = False
    criterion = StopStringCriteria(gpt2, ["be or no", "xxx"])
    assert run(criterion, ids, ids.shape[1], mask).tolist() == [True, True]
    assert run(criterion, ids, ids.shape[1], None).tolist() == [where == 0, True]


def test_the_newest_token_must_take_part():
    gpt2 = tokenizer("gpt2")
    row = gpt2.encode("a stop sign", add_special_tokens=False)
    criterion = StopStringCriteria(gpt2, "stop")
    actual = done(criterion, [row[: n + 1] for n in range(len(row))])
    assert sum(actual) == 1
    assert "stop" in gpt2.decode(row[: actual.index(True) + 1])
    unknown = len(gpt2)
    parts = gpt2.encode("st", add_special_tokens=False), gpt2.encode("op", add_special_tokens=False)
    rows = [[*parts[0], *parts[1]], [*parts[0], unknown, *parts[1]], [*parts[0], -1, *parts[1]]]
    assert done(criterion, rows) == [True, False, False]


def test_other_strings_compile_nothing():
    count = jax.jit(lambda criterion, ids: criterion(ids, jnp.zeros((1, 3)), 4))
    gpt2 = tokenizer("gpt2")
    ids = np.array([gpt2.encode("a stop sign", add_special_tokens=False)[:4]])
    for strings in ("stop", ["\nUser:", "Observation:", "<|endoftext|>"], ["e"], ["x", "y"] * 9):
        count(StopStringCriteria(gpt2, strings), ids)
    assert program_count(count) == 1
    count(StopStringCriteria(gpt2, "a string of more than sixteen bytes"), ids)
    assert program_count(count) == 2


def test_in_a_program_that_closes_over_it():
    gpt2 = tokenizer("gpt2")
    row = gpt2.encode("stop", add_special_tokens=False)
    ids = jnp.array([row, row[::-1]])
    criterion = StopStringCriteria(gpt2, "stop")
    actual = jax.jit(lambda ids: criterion(ids, jnp.zeros((2, 3)), len(row)))(ids)
    assert actual.tolist() == [True, False]


@pytest.mark.ci
def test_a_table_stays_small_and_is_made_in_time():
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b" etaoinshrdlu\n", np.uint8)
    tokens = [rng.choice(letters, rng.integers(1, 9)).tobytes() for _ in range(50_000)]
    start = time.process_time()
    classes, table = token_automaton(tokens, [b"\nhuman:", b"the end", b"lord"])
    assert time.process_time() - start < 2
    assert classes.shape == (50_001,)
    assert table.shape[1] <= 256


@pytest.mark.parametrize("strings", [[], "", ["a", ""], [3], None, ["\ud800"], {"a": 1}])
def test_wrong_strings(strings):
    with pytest.raises(InputError, match="`stop_strings` must be"):
        StopStringCriteria(tokenizer("gpt2"), strings)


@pytest.mark.ci
def test_a_tokenizer_is_needed():
    with pytest.raises(InputError, match="tokenizer: expected a tokenizer of jaxllm, found None"):
        StopStringCriteria(None, ["a"])  # pyright: ignore[reportArgumentType]
