"""Stopping criteria: their rules, padding, lists, host functions, and no recompilation."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import program_count

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.processors import HostLogitsProcessor, LogitsProcessorList
from jaxllm.generation.stopping import (
    EosTokenCriteria,
    HostCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    stopping_criterion,
)

IDS = jnp.array([[3, 5, 7, 2], [4, 6, 2, 7]])
SCORES = jnp.zeros((2, 9))


@jax.jit
def run(criterion, ids, cur_len, kwargs):
    return criterion(ids, SCORES, cur_len, **kwargs)


def test_max_length():
    for cur_len, expected in ((2, [False, False]), (3, [True, True]), (jnp.array([2, 3]), [0, 1])):
        assert run(MaxLengthCriteria(3), IDS, cur_len, {}).tolist() == expected


def test_end_of_sequence_is_the_newest_token():
    assert run(EosTokenCriteria(7), IDS, 3, {}).tolist() == [True, False]
    assert run(EosTokenCriteria([2, 7]), IDS, 3, {}).tolist() == [True, True]
    assert run(EosTokenCriteria([2, 7]), IDS, jnp.array([2, 4]), {}).tolist() == [False, True]
    assert run(EosTokenCriteria([2, 7]), IDS, 2, {}).tolist() == [False, False]
    assert run(EosTokenCriteria([3, 4, 7]), IDS, 0, {}).tolist() == [False, False]
    masked = {"mask": np.array([[True, True, False, False]] * 2)}
    assert run(EosTokenCriteria([2, 7]), IDS, 3, masked).tolist() == [True, True]


@stopping_criterion()
class LastTwoAlike(StoppingCriteria):
    def __init__(self) -> None:
        pass

    def reached(self, history, scores):
        tokens, exists = history.last(2)
        return exists.all(axis=1) & (tokens[:, 0] == tokens[:, 1])


@pytest.mark.ci
def test_a_criterion_of_ones_own_sees_the_text_without_padding():
    ids = jnp.array([[5, 0, 5, 9], [5, 0, 0, 9]])
    mask = ids != 0
    assert run(LastTwoAlike(), ids, 3, {"mask": mask}).tolist() == [True, False]
    assert run(LastTwoAlike(), ids, 3, {}).tolist() == [False, True]
    with pytest.raises(NotImplementedError, match="neither reached nor __call__"):
        StoppingCriteria()(IDS, SCORES, 2)


def test_any_criterion_of_a_list_ends_a_row():
    def even(input_ids, scores, cur_len):
        return input_ids[:, cur_len - 1] % 2 == 0

    def never(input_ids, scores, cur_len, mask=None):
        assert mask is not None
        return False

    criteria = StoppingCriteriaList([EosTokenCriteria(3), even, never, MaxLengthCriteria(4)])
    mask = jnp.ones_like(IDS, bool)
    actual = [run(criteria, IDS, length, {"mask": mask}).tolist() for length in (1, 2, 3, 4)]
    assert actual == [[True, True], [False, True], [False, True], [True, True]]
    assert run(StoppingCriteriaList(), IDS, 2, {}).tolist() == [False, False]
    leaves, tree = jax.tree.flatten(criteria)
    assert isinstance(jax.tree.unflatten(tree, leaves), StoppingCriteriaList)


def test_other_numbers_compile_nothing():
    count = jax.jit(lambda criteria, length: criteria(IDS, SCORES, length))
    for eos, longest in ((7, 4), ([2, 7], 3), (range(8), 100)):
        count(StoppingCriteriaList([EosTokenCriteria(eos), MaxLengthCriteria(longest)]), 3)
    assert program_count(count) == 1


def test_time_is_the_hosts():
    assert not MaxTimeCriteria(60).expired()
    assert MaxTimeCriteria(60, initial_timestamp=time.time() - 61).expired()
    assert not MaxTimeCriteria(62.0, initial_timestamp=time.time() - 61).expired()
    assert StoppingCriteriaList([MaxTimeCriteria(60)])(IDS, None).tolist() == [False, False]
    late = MaxTimeCriteria(60, initial_timestamp=time.time() - 61)
    assert late(IDS, SCORES).tolist() == [True, True]
    with pytest.raises(UnsupportedError, match="no clock"):
        jax.jit(lambda ids: late(ids, SCORES, 2))(IDS)


def test_host_functions_see_the_tokens_so_far():
    seen = []

    def total(input_ids, scores):
        seen.append((type(input_ids), input_ids.tolist(), scores.shape))
        return [bool(row.sum() > 10) for row in input_ids]

    criterion = HostCriteria(total)
    assert run(criterion, IDS, 3, {"mask": IDS > 0}).tolist() == [True, True]
    assert run(criterion, IDS, 2, {"mask": IDS > 0}).tolist() == [False, False]
    assert seen[0] == (np.ndarray, [[3, 5, 7], [4, 6, 2]], (2, 9))
    assert seen[1][1] == [[3, 5], [4, 6]]

    def only_first(input_ids, scores):
        kept = np.full_like(scores, -np.inf)
        kept[np.arange(2), input_ids[:, 0]] = scores[np.arange(2), input_ids[:, 0]]
        return kept

    processors = LogitsProcessorList([HostLogitsProcessor(only_first)])
    scores = jax.jit(lambda p, length: p(IDS, SCORES, length, mask=IDS > 0))(processors, 2)
    assert np.isfinite(scores).nonzero()[1].tolist() == [3, 4]
    assert scores.dtype == jnp.float32


def test_host_functions_run_in_a_loop_and_compile_once():
    def stop_at_five(input_ids, scores):
        return np.full(2, input_ids.shape[1] >= 5)

    @jax.jit
    def loop(criterion, start):
        ids = jnp.zeros((2, 8), jnp.int32)
        return jax.lax.while_loop(
            lambda n: ~criterion(ids, SCORES, n).all(), lambda n: n + 1, start
        )

    assert [int(loop(HostCriteria(stop_at_five), start)) for start in (1, 2, 7)] == [5, 5, 7]
    assert program_count(loop) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MaxLengthCriteria(0), "`max_length` must be an integer of at least 1"),
        (lambda: EosTokenCriteria([-1]), "`eos_token_id` must hold token ids"),
        (lambda: MaxTimeCriteria("1"), "`max_time` must be a number"),  # pyright: ignore
        (lambda: MaxTimeCriteria(1.0, float("nan")), "`initial_timestamp` must be a number"),
        (lambda: HostCriteria(3), "fn: expected a function"),  # pyright: ignore
        (lambda: HostLogitsProcessor(None), "fn: expected a function"),  # pyright: ignore
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.in_ci("result3")
@pytest.mark.parametrize("result", [[True], [0.5, 0.5], None, [[True], [False]]])
def test_a_wrong_result_of_a_host_function_is_named(result):
    def bad(input_ids, scores):
        return result

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"bad: expected bool\[2\] as the result"):
        jax.block_until_ready(run(HostCriteria(bad), IDS, 2, {}))
