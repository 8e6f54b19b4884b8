"""Helpers for tests of the batch engine: uneven rows, and the same row generated alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import jaxllm
from jaxllm.batch.rows import ROW_KEYS, BatchOutput

CLOSE = 1e-5
"""Scores closer than this may be ordered differently by programs of other shapes."""


def uneven_rows(
    count: int, *, prompts: int = 32, new: int = 32, seed: int = 0, vocab: int = 50
) -> list[dict[str, Any]]:
    """Rows of very uneven lengths: most are short, some as long as it goes."""
    rng = np.random.default_rng(seed)

    def length(most: int) -> int:
        return most if rng.random() < 0.1 else int(min(rng.geometric(4 / most), most))

    return [
        {
            "id": f"row-{i}",
            "input_ids": rng.integers(3, vocab, length(prompts)).tolist(),
            "max_new_tokens": length(new),
        }
        for i in range(count)
    ]


def alone(model: Any, row: Mapping[str, Any], index: int, *, seed: int = 0, **fields: Any) -> Any:
    """`generate` on that row only, with the key that the engine promises, and processed scores."""
    own = {name: value for name, value in row.items() if name not in ROW_KEYS}
    key = row.get("seed")
    where = {"key": seed, "row_ids": [index]} if key is None else {"key": key}
    settings = {**fields, **own, "output_scores": True}
    return jaxllm.generate(model, [row["input_ids"]], **where, **settings)


def new_tokens(model: Any, row: Mapping[str, Any], sequence: Any, eos: Sequence[int]) -> list[int]:
    """The new tokens of a sequence of `generate`, up to its end token."""
    start = 1 if model.is_encoder_decoder else len(row["input_ids"])
    tokens = np.asarray(sequence)[start:].tolist()
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def differences(
    model: Any,
    rows: Sequence[Any],
    outputs: Sequence[BatchOutput],
    wanted: Sequence[Any] | None = None,
    **fields: Any,
) -> tuple[list[str], int]:
    """Rows whose tokens are not those of the row alone, and how many of the decisions behind such a
    difference were closer than `CLOSE`, and so are none.

    Args:
        wanted: `alone` of every row, where it is known.
    """
    wrong, close = [], 0
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        assert output.index == index
        if output.error is not None:
            wrong.append(f"{index}: {output.error}")
            continue
        reference = alone(model, row, index, **fields) if wanted is None else wanted[index]
        scores = np.asarray(reference.scores)
        eos = tuple(row.get("eos_token_id", model.config.eos_token_ids) or ())
        for sample, actual in enumerate(output.output_ids):
            expected = new_tokens(model, row, reference.sequences[sample], eos)
            if actual == expected:
                continue
            step = next(
                i
                for i in range(max(len(actual), len(expected)))
                if actual[i : i + 1] != expected[i : i + 1]
            )
            pair = scores[step, sample, [actual[step], expected[step]]]
            if abs(pair[0] - pair[1]) < CLOSE:
                close += 1
            else:
                wrong.append(f"{index}, sample {sample}: {actual} is not {expected}")
    if close > 1 + len(rows) // 50:
        wrong.append(f"{close} decisions in {len(rows)} rows closer than {CLOSE}: too many")
    return wrong, close
