"""The generation cases of tests/data/conformance, and how one is run and compared."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import paths

import jaxllm

DATA = paths.DATA / "conformance"
sys.path.insert(0, str(DATA))
import compare  # noqa: E402


@functools.cache
def model(name: str):
    return jaxllm.load(DATA / "models" / name)[0]


@functools.cache
def arrays():
    return dict(np.load(DATA / "arrays.npz"))


@functools.cache
def cases(kind: str = "generate") -> dict[str, dict]:
    """All cases of a kind, by id."""
    actual = json.loads((DATA / "cases.json").read_text())["cases"]
    return {case["id"]: case for case in actual if case["kind"] == kind}


def embeddings(case: dict) -> np.ndarray:
    rule = case["array_inputs"]["inputs_embeds"]
    table = np.asarray(model(case["model"]).backbone.embed.weight[...])
    base = table[np.array(rule["base_ids"])]
    row, column, channel = np.ogrid[: base.shape[0], : base.shape[1], : base.shape[2]]
    wave = np.cos(0.7 * column + 0.3 * channel + row)
    return (base + rule["amp"] * wave).astype(np.float32)


def run(case: dict, **more) -> jaxllm.generation.GenerateOutput:
    """`generate` with exactly what the case says, and `more`."""
    inputs = {name: np.array(value) for name, value in case["inputs"].items()}
    if "array_inputs" in case:
        inputs["inputs_embeds"] = embeddings(case)
    arguments = {**inputs, **case["generate_kwargs"], "key": 0, **more}
    return jaxllm.generate(model(case["model"]), **arguments)


def problems(case: dict, out: jaxllm.generation.GenerateOutput) -> list[str]:
    """Differences from the reference; scores agree within 1e-4."""
    actual = {"sequences": out.sequences.tolist()}
    if out.sequences_scores is not None:
        actual["sequences_scores"] = out.sequences_scores.tolist()
    elif out.scores is not None:
        scores = np.stack(out.scores, axis=1)
        new = out.sequences[:, -scores.shape[1] :]
        actual["first_step_scores"] = out.scores[0]
        chosen = np.take_along_axis(scores, new[..., None], 2)[..., 0]
        actual["step_token_scores"] = chosen.tolist()
    return compare.check(case, actual, arrays(), atol=1e-4)
