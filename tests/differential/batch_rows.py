"""Draws random rows for the batch engine, of every kind of settings that a row can have.

Most kinds set each of their fields, also to neutral values. A call of `generate` with the row's
settings then has the same logits processors as the next row's call, and one compilation serves all
rows of a kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB = 258
"""256 bytes, and two special tokens: the vocabulary of the byte tokenizer."""
FIRST = 3
"""Tokens from here on are in prompts; those before are special in the tiny models."""
MAX_NEW_TOKENS = 16

KINDS: dict[str, int] = {
    "sampling": 40,
    "greedy": 20,
    "stop strings": 12,
    "few fields": 7,
    "token lists": 6,
    "beams": 10,
    "beam sampling": 6,
    "early stopping": 6,
    "static": 4,
    "errors": 5,
}
"""Number of rows of each kind in one set; the rows of a set run in one call of the engine."""
FEW_KINDS: dict[str, int] = {"sampling": 50, "greedy": 30, "beams": 25, "errors": 5}
"""The same, where the weights or the windows are what matters: most time goes into compiling."""
STATIC_KINDS: dict[str, int] = {
    "set sampling": 45,
    "set greedy": 25,
    "equal beams": 35,
    "errors": 5,
}
"""The same for fields with which all rows run in static batches: beams of equal settings share a
batch. A static batch has no processors of neutral settings, so the rows have none."""

FEW_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"eos_token_id": None},
    {"max_length": 24, "max_new_tokens": None},
    {"min_length": 12},
    {"do_sample": True, "min_new_tokens": 3, "min_length": 30},
    {"use_cache": True, "cache_implementation": "static", "num_return_sequences": 1},
)
"""Rows that leave most settings to the defaults."""

STATIC: tuple[dict[str, Any], ...] = (
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
    {"prompt_lookup_num_tokens": 3, "do_sample": True},
    {"guidance_scale": 1.5},
    {"encoder_repetition_penalty": 1.3},
    {"encoder_no_repeat_ngram_size": 2},
    {"num_beams": 3, "force_words_ids": [[77, 78]]},
    {"num_beams": 3, "encoder_repetition_penalty": 1.3, "num_return_sequences": 2},
    {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}},
)
"""Settings that run in static batches."""

ERRORS: tuple[dict[str, Any], ...] = (
    {"suppress_tokens": [VOCAB]},
    {"top_p": 1.5, "do_sample": True},
    {"num_return_sequences": 2},
    {"max_new_tokens": 500},
    {"input_ids": [VOCAB]},
    {"num_beams": 2, "num_return_sequences": 3},
    {"forced_eos_token_id": 5, "suppress_tokens": [5]},
    {"no_such_field": 1},
    {"suppress_tokens": list(range(VOCAB))},
)
"""Rows that cannot be answered: `generate` raises, and the engine's output has the error."""


def draw_rows(seed: int, kinds: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """Rows of all kinds in random order. The key `kind` is a row's `id`, with its number."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for kind, count in (KINDS if kinds is None else kinds).items():
        draw = _DRAW[kind]
        rows += [{"id": f"{kind} {i}", **_common(rng, kind), **draw(rng, i)} for i in range(count)]
    order = rng.permutation(len(rows))
    return [rows[i] for i in order]


def _common(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """The prompt and the fields that rows of all kinds have."""
    longest = 30 if kind == "sampling" else 16
    row: dict[str, Any] = {
        "input_ids": _tokens(rng, int(rng.integers(1, longest + 1))),
        "max_new_tokens": int(rng.integers(1, MAX_NEW_TOKENS + 1)),
    }
    if kind != "few fields":
        row |= {"pad_token_id": 0, "eos_token_id": [2, *_tokens(rng, 1)]}
    if rng.random() < 0.5:
        row["seed"] = int(rng.integers(2**32))
    return row


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(FIRST, VOCAB, count).tolist()


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _penalties(rng: np.random.Generator) -> dict[str, Any]:
    """Fields that may differ between the rows of a program, whatever the strategy."""
    return {
        "repetition_penalty": _pick(rng, 1.0, float(rng.uniform(0.7, 1.8))),
        "presence_penalty": _pick(rng, 0.0, float(rng.uniform(-2, 2))),
        "frequency_penalty": _pick(rng, 0.0, float(rng.uniform(-2, 2))),
        "no_repeat_ngram_size": _pick(rng, 0, 1, 2, 3),
        "min_new_tokens": int(rng.integers(0, 5)),
        "logit_bias": {token: float(rng.uniform(-4, 4)) for token in _two(rng)},
    }


def _two(rng: np.random.Generator) -> list[int]:
    return rng.choice(np.arange(FIRST, VOCAB), 2, replace=False).tolist()


def _filters(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of sampling that may differ between the rows of a program."""
    return {
        "do_sample": True,
        "temperature": float(rng.uniform(0.2, 1.8)),
        "top_k": _pick(rng, 0, 1, 5, 50, 400),
        "top_p": _pick(rng, 1.0, 0.0, float(rng.uniform(0.3, 1))),
        "min_p": _pick(rng, 0.0, float(rng.uniform(0, 0.3))),
        "typical_p": _pick(rng, 1.0, float(rng.uniform(0.3, 1))),
        "epsilon_cutoff": _pick(rng, 0.0, float(rng.uniform(0, 0.02))),
        "eta_cutoff": _pick(rng, 0.0, float(rng.uniform(0, 0.02))),
    }


def _sampling(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {**_penalties(rng), **_filters(rng), "num_return_sequences": _pick(rng, 1, 1, 3)}


def _greedy(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {**_penalties(rng), "do_sample": False}


def _stop_strings(rng: np.random.Generator, index: int) -> dict[str, Any]:
    """Few or many characters that end a row, with every kind of strategy."""
    strategy = {"num_beams": 3} if index % 4 == 3 else _filters(rng) if index % 2 else {}
    characters = rng.choice(np.arange(32, 127), _pick(rng, 3, 20), replace=False)
    strings = [*map(chr, characters), "ab", "the end"]
    return {**_penalties(rng), **strategy, "stop_strings": strings}


def _few_fields(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return FEW_FIELDS[index % len(FEW_FIELDS)]


def _token_lists(rng: np.random.Generator, index: int) -> dict[str, Any]:
    """Fields that select a group of rows by being set."""
    words = [_two(rng), _tokens(rng, 1)]
    lists = {
        "suppress_tokens": _two(rng),
        "begin_suppress_tokens": _two(rng),
        "bad_words_ids": words,
        "sequence_bias": [[ids, float(rng.uniform(-3, 3))] for ids in (_tokens(rng, 1), _two(rng))],
        "forced_eos_token_id": 2,
        "exponential_decay_length_penalty": (int(rng.integers(0, 8)), float(rng.uniform(1, 1.3))),
    }
    if index % 2:
        return {**lists, "renormalize_logits": True, "remove_invalid_values": True}
    return {**lists, **_filters(rng), "top_h": float(rng.uniform(0.2, 1))}


def _beams(rng: np.random.Generator, index: int) -> dict[str, Any]:
    fields = {"num_beams": 3, "length_penalty": float(rng.uniform(-2, 2))}
    return {**_penalties(rng), **fields, "num_return_sequences": _pick(rng, 1, 3)}


def _set_sampling(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {
        **_set_greedy(rng, index),
        "do_sample": True,
        "temperature": float(rng.uniform(0.2, 1.8)),
        "top_k": int(rng.integers(1, 300)),
        "top_p": float(rng.uniform(0.3, 0.99)),
    }


def _set_greedy(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {
        "repetition_penalty": float(rng.uniform(1.05, 1.8)),
        "frequency_penalty": float(rng.uniform(0.1, 2)),
        "min_new_tokens": int(rng.integers(1, 5)),
    }


def _equal_beams(rng: np.random.Generator, index: int) -> dict[str, Any]:
    fields = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": [2, 3 + index % 2]}
    return {**fields, "max_new_tokens": (9, 16)[index % 2], "repetition_penalty": 1.2}


def _beam_sampling(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {**_penalties(rng), **_filters(rng), "num_beams": 2, "num_return_sequences": 2}


def _early_stopping(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {**_beams(rng, index), "early_stopping": (True, "never")[index % 2]}


def _static(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return _pick(rng, *STATIC)


def _errors(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return _pick(rng, *ERRORS)


_DRAW = {
    "sampling": _sampling,
    "greedy": _greedy,
    "stop strings": _stop_strings,
    "few fields": _few_fields,
    "token lists": _token_lists,
    "beams": _beams,
    "set sampling": _set_sampling,
    "set greedy": _set_greedy,
    "equal beams": _equal_beams,
    "beam sampling": _beam_sampling,
    "early stopping": _early_stopping,
    "static": _static,
    "errors": _errors,
}
