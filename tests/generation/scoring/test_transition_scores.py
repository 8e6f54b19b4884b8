"""compute_transition_scores() against that of the reference."""

from __future__ import annotations

import jax
import numpy as np
import paths
import pytest
import tiny

import jaxllm
from jaxllm.common.errors import InputError

DATA = np.load(paths.DATA / "transition_scores" / "reference.npz")


@pytest.mark.by_default("normalized-beams", "normalized-greedy", "normalized-t5_beams")
@pytest.mark.parametrize("case", ["greedy", "beams", "t5_beams"])
@pytest.mark.parametrize("kind", ["plain", "normalized"])
def test_equals_the_reference(case, kind):
    beams = DATA.get(f"{case}/beam_indices")
    scores = tuple(DATA[f"{case}/scores"])
    actual = jaxllm.generation.compute_transition_scores(
        DATA[f"{case}/sequences"], scores, beams, normalize_logits=kind == "normalized"
    )
    np.testing.assert_allclose(actual, DATA[f"{case}/{kind}"], atol=1e-5)


def test_the_data_have_beams_that_end_early():
    for case in ("beams", "t5_beams"):
        assert (DATA[f"{case}/beam_indices"] == -1).any()


@pytest.mark.ci
def test_cut_to_the_longest_beam():
    sequences, scores = np.array([[9, 1, 0], [9, 1, 1]]), np.arange(12.0).reshape(3, 2, 2)
    beams = np.array([[1, -1, -1], [0, 1, -1]])
    actual = jaxllm.generation.compute_transition_scores(sequences, tuple(scores), beams)
    np.testing.assert_array_equal(actual, [[3.0, 0.0], [1.0, 7.0]])


@pytest.mark.ci
def test_scores_of_a_generate_call():
    """Greedy scores of generate() are the best of each step; the same inside jit."""
    out = jaxllm.generate(tiny.cached("llama"), tiny.ids(), max_new_tokens=4, output_scores=True)
    assert out.scores is not None
    actual = jaxllm.generation.compute_transition_scores(out.sequences, out.scores)
    np.testing.assert_array_equal(actual, np.max(np.stack(out.scores, axis=1), axis=-1))
    inside = jax.jit(jaxllm.generation.compute_transition_scores)(out.sequences, out.scores)
    np.testing.assert_array_equal(inside, actual)


def test_errors():
    sequences, scores = np.zeros((2, 3), int), (np.zeros((4, 5)),) * 2
    with pytest.raises(InputError, match="beam_indices: 4 rows for 2 sequences"):
        jaxllm.generation.compute_transition_scores(sequences, scores)
    with pytest.raises(InputError, match="output_scores=True"):
        jaxllm.generation.compute_transition_scores(sequences, ())
    with pytest.raises(InputError, match="3 tokens, but there are 2 steps"):
        jaxllm.generation.compute_transition_scores(sequences, scores, np.zeros((2, 3), int))
    with pytest.raises(
        InputError, match=r"beam_indices: expected numbers below 4, .* found 4 to 4"
    ):
        jaxllm.generation.compute_transition_scores(sequences, scores, np.full((2, 2), 4))
    with pytest.raises(InputError, match=r"sequences: expected numbers below 5, .* found 5 to 5"):
        jaxllm.generation.compute_transition_scores(np.full((4, 3), 5), scores)
