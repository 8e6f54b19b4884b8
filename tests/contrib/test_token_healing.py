"""Token healing: transformers' own prompts and continuations, and what differs from it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from paths import DATA

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.contrib.token_healing import extension_bias, heal_tokens
from jaxllm.tokenizers import Tokenizer, load_tokenizer

MODEL = DATA / "conformance" / "models" / "s_llama_tok"
VARIANTS = json.loads((DATA / "stopping" / "healing.json").read_text(encoding="utf-8"))["variants"]


@functools.cache
def model():
    return jaxllm.load(MODEL)[0]


def variant(folder: Path, spec: dict, config: dict) -> Tokenizer:
    for file, changes in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
        content = json.loads((MODEL / file).read_text(encoding="utf-8")) | changes
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def plain(tmp_path) -> Tokenizer:
    return variant(tmp_path, {}, {})


def left_padded(rows, width=8) -> np.ndarray:
    return np.array([[0] * (width - len(row)) + list(row) for row in rows], np.int32)


@jax.jit
def next_scores(model, ids, mask):
    return model(ids, mask, logits_to_keep=1).logits[0, -1]


def generate_one(row, sequence_bias) -> int:
    """Tokens that generate() chooses greedily, by one program for all prompts and biases."""
    scores = np.array(next_scores(model(), left_padded([row]), left_padded([row]) != 0))
    for (token,), bias in sequence_bias.items():
        scores[token] += bias
    return int(scores.argmax())


def healed(tokenizer, input_ids, mask=None):
    ids = np.array(input_ids)
    mask = ids != tokenizer.pad_token_id if mask is None else np.array(mask, bool)
    return heal_tokens(ids, mask, tokenizer, generate_one)


@pytest.mark.ci
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_transformers_prompts_and_continuations(number, tmp_path):
    tokenizer = variant(tmp_path, VARIANTS[number]["spec"], VARIANTS[number]["config"])
    changed, prompts, masks, continued = 0, [], [], []
    for case in VARIANTS[number]["cases"]:
        ids, mask = healed(tokenizer, case["input_ids"], case["attention_mask"])
        if "key_error" in case:
            continue
        assert ids.tolist() == case["healed"], case
        assert ids.dtype == np.int32
        assert mask.dtype == bool
        assert mask.shape == ids.shape
        changed += case["healed"] != case["input_ids"]
        if case["generated"] is not None:
            prompts += ids.tolist()
            masks += mask.astype(int).tolist()
            continued += [row[ids.shape[1] :] for row in case["generated"]]
    assert changed > 5
    assert len(prompts) >= 10
    spare = [[1]] * (40 - len(prompts))
    prompts, masks = left_padded(prompts + spare), left_padded(masks + spare)
    out = jaxllm.generate(model(), prompts, masks, max_new_tokens=4, pad_token_id=0)
    for row, expected in zip(out.sequences[:, 8:].tolist(), continued, strict=False):
        # The reference's batch may have ended before the fourth token.
        assert row[: len(expected)] == expected


def test_the_conformance_case(plain):
    case = next(
        case
        for case in json.loads((DATA / "conformance" / "cases.json").read_text())["cases"]
        if case["id"] == "s-token-healing"
    )

    def generate_one(row, sequence_bias) -> int:
        bias = {"sequence_bias": sequence_bias, "pad_token_id": plain.pad_token_id}
        out = jaxllm.generate(model(), row[None], max_new_tokens=1, **bias)
        return int(out.sequences[0, -1])

    ids = np.array(case["inputs"]["input_ids"])
    ids, mask = heal_tokens(ids, np.ones_like(ids, bool), plain, generate_one)
    out = jaxllm.generate(model(), ids, mask, max_new_tokens=8)
    assert out.sequences.tolist() == case["expected"]["sequences"]


def test_extensions_of_a_text_and_of_a_spelling(plain):
    vocabulary = {plain.id_to_token(i): i for i in range(len(plain))}

    def extensions(token):
        bias = extension_bias(vocabulary[token], plain, vocabulary)
        return {plain.id_to_token(index): value for (index,), value in bias.items()}

    assert extensions("at") == {"at": 11.0, "ater": 10.0}
    assert extensions("▁the") == {"▁the": 10.0}
    # "st" begins one token, itself; "l" begins "l" and "le", but not the spelling of "▁l".
    assert extensions("▁st") == {"▁st": 10.0}
    words = ("ight", "ight.", "ink", "i", "ist", "ist.", "isten", "isten.", "istening")
    assert extensions("▁l") == {"▁l": 11.0, **{f"▁l{word}": 10.0 for word in words}}


def test_where_transformers_has_a_key_error_the_spelling_counts(plain):
    seen = []

    def record(row, bias):
        seen.append((row.tolist(), {plain.id_to_token(index) for (index,) in bias}))
        return 7

    prompt = np.array([plain.encode("the w")])
    ids, _ = heal_tokens(prompt, prompt > 0, plain, record)
    assert ids.tolist() == [[*prompt[0, :-1], 7]]
    (row, extensions), *others = seen
    assert row == prompt[0, :-1].tolist()
    assert not others
    assert "▁water" in extensions
    assert all(token.startswith("▁w") for token in extensions)


def test_padding_does_not_change_a_row(plain):
    single, mask = healed(plain, [[154, 158, 56, 53]])
    assert single.tolist() == [[154, 158, 56, 164]]
    assert mask.all()
    for row in ([7, 7, 154, 158, 56, 53], [154, 158, 56, 53, 7, 7]):
        ids, mask = healed(plain, [row], np.array([row]) != 7)
        assert ids.tolist() == single.tolist()
        assert mask.all()
    ids, mask = healed(plain, [[0, 0, 0, 158], [154, 158, 56, 53]])
    assert ids.tolist() == [[0, 0, 0, 158], [154, 158, 56, 164]]
    assert mask.tolist() == [[False, False, False, True], [True] * 4]


def test_errors(plain, tmp_path):
    ids = np.array([[154, 158]])
    with pytest.raises(InputError, match="token_healing: pass the model's tokenizer"):
        heal_tokens(ids, ids > 0, None, generate_one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="nothing is left of the prompts"):
        healed(plain, [[1, 45, 45, 2]])
    with pytest.raises(InputError, match=r"on the host, outside jax\.jit"):
        jax.jit(lambda ids: heal_tokens(ids, ids > 0, plain, generate_one))(ids)
    without_pad = variant(tmp_path, {}, {"pad_token": None})
    with pytest.raises(InputError, match="the tokenizer has no pad token"):
        heal_tokens(ids, ids > 0, without_pad, generate_one)
    without_bos = variant(tmp_path, {}, {"bos_token": None})
    assert healed(without_bos, [[154, 158, 56, 53]])[0].tolist() == [[154, 158, 56, 164]]
