"""Packing and plans: every example once, whatever the seed, and little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.training.data.plan import MIN_BUCKET, Planner, pack

LIMITS = (40, 24)


@st.composite
def some_lengths(draw, sides: int = 2):
    rows = st.tuples(*(st.integers(1, limit) for limit in LIMITS[:sides]))
    return np.asarray(draw(st.lists(rows, min_size=1, max_size=60)), np.int64)


@given(some_lengths(), st.integers(1, 70))
def test_rows_hold_every_example_once_and_never_too_much(lengths, window):
    order = np.random.default_rng(0).permutation(len(lengths))
    rows = pack(lengths, order, LIMITS, window)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    for row in rows:
        assert (lengths[row].sum(axis=0) <= LIMITS).all()


@given(some_lengths(sides=1))
def test_within_a_window_no_two_rows_fit_into_one(lengths):
    rows = pack(lengths, np.arange(len(lengths)), LIMITS[:1])
    filled = [int(lengths[row].sum()) for row in rows]
    assert all(a + b > LIMITS[0] for n, a in enumerate(filled) for b in filled[:n])


def test_padding_is_little():
    lengths = np.random.default_rng(1).integers(5, 300, (8000, 1))
    planner = Planner(batch_size=8, limits=(512,), packing=True)
    assert planner.plan(lengths, 0).padding(lengths) < 0.02
    short = np.minimum(lengths, 12)
    assert planner.plan(short, 0).padding(short) < 0.05
    single = Planner(batch_size=8, limits=(512,), bucket=None)
    assert single.plan(lengths, 0).padding(lengths) > 0.6
    assert Planner(batch_size=8, limits=(512,)).plan(lengths, 0).padding(lengths) < 0.35


@settings(max_examples=60)
@given(
    some_lengths(),
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 8, "power_of_two"]),
    st.integers(0, 2**40),
)
def test_plans_hold_every_example_once(lengths, batch_size, packing, shuffle, bucket, seed):
    planner = Planner(batch_size, LIMITS, packing, bucket, shuffle, seed)
    plan = planner.plan(lengths, epoch=seed % 5)
    assert sorted(plan.members.tolist()) == list(range(len(lengths)))
    actual = []
    for batch in range(len(plan)):
        for number in range(batch_size):
            row = plan.row(batch, number)
            assert len(row) <= 1 or packing
            assert (lengths[row].sum(axis=0) <= plan.shapes[batch]).all()
            actual += row.tolist()
    assert actual == plan.members.tolist()
    assert plan.batch_size == batch_size
    assert 0 <= plan.padding(lengths) < 1
    if not packing:
        assert len(plan) == -(-len(lengths) // batch_size)


@settings(max_examples=60)
@given(some_lengths(), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 5))
def test_batches_of_a_window_are_full_if_others_follow(lengths, batch_size, packing, shuffle, seed):
    """What is left over is less than a batch, and of the rows with the most padding."""
    planner = Planner(batch_size, LIMITS, packing, shuffle=shuffle, seed=seed)
    plan = planner.plan(lengths, 0, is_last=False)
    assert sorted([*plan.members, *plan.rest]) == list(range(len(lengths)))
    rows = [[plan.row(batch, n) for n in range(batch_size)] for batch in range(len(plan))]
    assert all(len(row) for batch in rows for row in batch)
    if not packing:
        assert len(plan.rest) == len(lengths) % batch_size
        return
    packed = pack(lengths, np.arange(len(lengths)), LIMITS)
    if shuffle:  # packed in another order
        return
    assert len(plan) == len(packed) // batch_size
    fill = [(lengths[row].sum(axis=0) / LIMITS).max() for row in packed]
    kept = {tuple(row) for batch in rows for row in batch}
    left = [each for row, each in zip(packed, fill, strict=True) if tuple(row) not in kept]
    assert sorted(left) == sorted(fill)[: len(left)]


@settings(max_examples=60)
@given(
    some_lengths(),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([None, 8, "power_of_two"]),
    st.booleans(),
)
def test_batches_without_groups_are_in_order(lengths, batch_size, packing, bucket, is_last):
    planner = Planner(batch_size, LIMITS, packing, bucket, shuffle=False, group_by_length=False)
    plan = planner.plan(lengths, 3, is_last=is_last)
    assert [*plan.members, *plan.rest] == list(range(len(lengths)))
    assert is_last <= (len(plan.rest) == 0)
    rows = [plan.row(batch, n) for batch in range(len(plan)) for n in range(batch_size)]
    assert all((lengths[row].sum(axis=0) <= LIMITS).all() for row in rows)
    full = [len(row) for row in rows if len(row)]
    assert len(full) > (len(plan) - 1) * batch_size
    assert packing or {*full} <= {1}


def test_shapes_come_from_few_buckets():
    lengths = np.arange(1, 101)[:, None]
    planner = Planner(batch_size=4, limits=(100,))
    assert {*planner.plan(lengths, 0).shapes.ravel().tolist()} == {MIN_BUCKET, 32, 64, 100}
    by_ten = Planner(batch_size=4, limits=(100,), bucket=30)
    assert {*by_ten.plan(lengths, 0).shapes.ravel().tolist()} == {30, 60, 90, 100}
    assert {*Planner(4, (100,), bucket=None).plan(lengths, 0).shapes.ravel().tolist()} == {100}


@pytest.mark.parametrize("packing", [False, True])
def test_a_plan_is_a_function_of_seed_and_epoch(packing):
    lengths = np.random.default_rng(0).integers(1, 40, (300, 1))

    def members(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        planner = Planner(8, (64,), packing, shuffle=shuffle, seed=seed)
        return planner.plan(lengths, epoch).members.tolist()

    assert members(0, 3) == members(0, 3)
    orders = [members(0, 0), members(0, 1), members(1, 0), members(1, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert members(0, 0, shuffle=False) == members(5, 9, shuffle=False)


def test_the_order_is_the_one_of_earlier_versions():
    """A run that is resumed years later must find the same order."""
    plan = Planner(batch_size=3, limits=(64,), seed=7).plan(np.full((12, 1), 5), epoch=2)
    assert plan.members.tolist() == [2, 6, 7, 1, 8, 11, 0, 3, 5, 4, 10, 9]
