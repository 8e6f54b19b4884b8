"""Shapes and dtypes of annotations are checked while tests run."""

from __future__ import annotations

import dataclasses

import jaxtyping
import numpy as np
import pytest
import shape_checks
from jaxtyping import Array, Float, Int, TypeCheckError

from jaxllm.nn import rope

Row = Float[Array, " V"]


def add(left: Row, right: Float[Array, " V"], times: int) -> Float[Array, " V"]:
    return left[:times] + right[:times]


def count(names: list[str], scale: float = 1.0) -> float:
    return len(names) * scale


@dataclasses.dataclass(frozen=True)
class Rows:
    ids: Int[Array, "B T"]
    mask: Int[Array, "B T"]


def decorate(target):
    return jaxtyping.jaxtyped(target, typechecker=shape_checks.check)


def test_arguments_and_results():
    checked = decorate(add)
    row = np.ones(3, np.float32)
    np.testing.assert_array_equal(checked(row, row, 3), row + row)
    with pytest.raises(TypeCheckError, match="parameters"):
        checked(row, np.ones(4, np.float32), 3)
    with pytest.raises(TypeCheckError, match="parameters"):
        checked(np.ones(3, np.int32), row, 3)
    with pytest.raises(TypeCheckError, match="return value"):
        checked(row, row, 2)


def test_fields_of_a_dataclass():
    checked = decorate(Rows)
    ids = np.ones((2, 3), np.int32)
    rows = checked(ids, ids)
    dataclasses.replace(rows, mask=ids)
    with pytest.raises(TypeCheckError):
        dataclasses.replace(rows, mask=ids[:1])


def test_functions_without_a_shape_stay_as_they_are():
    assert decorate(count) is count


def test_the_package_is_checked(pytestconfig: pytest.Config):
    if not pytestconfig.option.jaxtyping_packages:
        pytest.skip("--jaxtyping-packages= switches the checks off")
    x = np.ones((1, 2, 1, 4), np.float32)
    angles = np.ones((1, 2, 1, 4), np.float32)
    rope.rotate(x, angles, angles)
    with pytest.raises(TypeCheckError):
        rope.rotate(x[0], angles, angles)
