"""Hidden states and attentions of every strategy: those of transformers, and of a forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from conformance_runs import model, run

import jaxllm

BOTH = {"output_hidden_states": True, "output_attentions": True}
DATA = Path(__file__).parents[1] / "data" / "records" / "cases.json"
CASES = json.loads(DATA.read_text())
# Each case has a program of its own to compile; these stand for the rest.
FAST = ("beam-s_t5", "lookup-s_llama_loop")


def same(found, expected, where: str) -> int:
    """`expected` has the shape and three sums of each array; returns how many there were."""
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        pairs = enumerate(zip(found, expected, strict=True))
        return sum(same(part, wanted, f"{where}[{i}]") for i, (part, wanted) in pairs)
    x = np.asarray(found, np.float64)
    assert list(x.shape) == expected["shape"], where
    flat = x.reshape(-1)
    wave = np.cos(0.7 * np.arange(flat.size))
    sums = [flat.sum(), np.abs(flat).sum(), flat @ wave]
    np.testing.assert_allclose(sums, expected["sums"], atol=1e-3, rtol=1e-5, err_msg=where)
    return 1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case["id"], marks=[] if case["id"] in FAST else [pytest.mark.slow])
        for case in CASES
    ],
)
@pytest.mark.usefixtures("highest_precision")
def test_as_in_transformers(case):
    out = run(case, **BOTH)
    assert out.sequences.tolist() == case["expected"]["sequences"]
    fields = {k: v for k, v in case["expected"].items() if k != "sequences"}
    assert sum(same(getattr(out, name), wanted, name) for name, wanted in fields.items()) >= 20


def ragged(rows: int = 2) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = tiny.ids(rows, 5), np.ones((rows, 5), int)
    mask[1, :2] = 0
    return ids, mask


def test_beams_with_guidance_equal_a_forward_pass():
    """Row 1 is padded on the left, and the negative prompt is longer than the prompt.

    `beam_indices` say which beam of each step a text went through.
    """
    net, (ids, mask) = tiny.cached("gpt2"), ragged()
    out = jaxllm.generate(
        net,
        ids,
        mask,
        num_beams=3,
        num_return_sequences=2,
        guidance_scale=1.4,
        negative_prompt_ids=tiny.ids(2, 9),
        max_new_tokens=4,
        eos_token_id=None,
        **BOTH,
    )
    seen = np.repeat(np.concatenate([mask, np.ones((2, 3), int)], axis=1), 2, axis=0)
    whole = net(out.sequences[:, :-1], seen, **BOTH)
    for steps, layers in (
        (out.hidden_states, whole.hidden_states),
        (out.attentions, whole.attentions),
    ):
        assert len(steps) == 4
        for step, found in enumerate(steps):
            columns = slice(0, 5) if step == 0 else slice(4 + step, 5 + step)
            real = seen[:, columns]
            for got, wanted in zip(found, layers, strict=True):
                got = got[out.beam_indices[:, step]]
                wanted = np.asarray(wanted)[..., columns, : got.shape[-1]]
                weight = real[:, None, :, None] if got.ndim == 4 else real[..., None]
                np.testing.assert_allclose(got * weight, wanted * weight, atol=2e-5)


def test_drafts_of_a_batch_leave_those_of_greedy_search():
    """Rows accept different numbers of drafts; an accepted token has the record of its own pass."""
    net, (ids, mask) = model("s_llama_deep"), ragged(3)
    settings = {"max_new_tokens": 9, "eos_token_id": None, **BOTH}
    plain = jaxllm.generate(net, ids, mask, **settings)
    out = jaxllm.generate(net, ids, mask, assistant_early_exit=3, **settings)
    assert out.assisted is not None
    assert len(set(out.assisted.accepted.tolist())) > 1
    np.testing.assert_array_equal(out.sequences, plain.sequences)
    for got, wanted in (
        (out.hidden_states, plain.hidden_states),
        (out.attentions, plain.attentions),
    ):
        assert len(got) == 9
        for a, b in zip(got[1:], wanted[1:], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-4)
