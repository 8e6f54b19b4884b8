"""What a traced program reads of its arguments: all of an array, the rows that it gathers, or none.

A program's arguments are more than it reads: a decode step has the whole of T5 among them, encoder
and projections of the cross-attention's keys, and of an embedding that is not the head as well it
takes the rows of a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

PARTS = frozenset(("gather", "dynamic_slice", "slice"))
"""Operations that read as many elements of their first operand as they return."""
VIEWS = frozenset(
    (
        "convert_element_type",
        "copy",
        "expand_dims",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "transpose",
    )
)
"""Operations whose results are read in place of their operands."""


def is_used(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """True if an operation of the program has the variable among its operands.

    Others are no arguments of the compiled program.
    """
    return any(variable is operand for eqn in jaxpr.eqns for operand in eqn.invars)


def read_shares(jaxpr: core.Jaxpr, variables: Sequence[Any]) -> list[float]:
    """Shares of the arrays' elements, 0 to 1, that one run of a program reads.

    Loops count as one iteration, since the step of a decode loop is one, and of a conditional's
    branches counts the one that reads most.

    >>> import jax, jax.numpy as jnp
    >>> def step(table, matrix, other, ids):
    ...     return jax.jit(lambda table, other, x: table[ids] @ x)(table, other, matrix)
    >>> arrays = jnp.ones((100, 4)), jnp.ones((4, 8)), jnp.ones((4, 8)), jnp.array([3, 5])
    >>> jaxpr = jax.make_jaxpr(step)(*arrays).jaxpr
    >>> read_shares(jaxpr, jaxpr.invars[:3])
    [0.02, 1.0, 0.0]
    """
    shares = dict.fromkeys(variables, 0.0)
    # Of a result that is a view: the variable that it shows. None: the array itself.
    shown = {variable: variable for variable in variables}
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(x, core.Literal) else shown.get(x) for x in eqn.invars]
        if not any(operand is not None for operand in operands):
            continue
        if eqn.primitive.name in VIEWS:
            outputs = zip(eqn.outvars, operands, strict=True)
            shown |= {out: x for out, x in outputs if x is not None}
            continue
        for operand, share in zip(operands, operand_shares(eqn), strict=True):
            if operand is not None:
                shares[operand] = min(1.0, shares[operand] + share)
    return [shares[variable] for variable in variables]


def with_experts(shares: Iterable[float], used: Iterable[float]) -> list[float]:
    """The shares of parameters that a program reads, of which experts are read where they are used.

    Args:
        used: share that the program's tokens use (`jaxllm.models.expert_use`).
    """
    return [part if share and part < 1 else share for share, part in zip(shares, used, strict=True)]


def operand_shares(eqn: core.JaxprEqn) -> list[float]:
    """Share of each operand that an operation reads."""
    count, parameters = len(eqn.invars), eqn.params
    if eqn.primitive.name in PARTS:
        result: Any = eqn.outvars[0].aval
        operand: Any = eqn.invars[0].aval
        return [min(1.0, result.size / max(operand.size, 1))] + [1.0] * (count - 1)
    if eqn.primitive.name == "while":
        first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
        condition = _all_shares(parameters["cond_jaxpr"])
        body = _all_shares(parameters["body_jaxpr"])
        carried = _combined(min_sum, condition[first:], body[second:])
        return condition[:first] + body[:second] + carried
    if eqn.primitive.name == "cond":
        branches = [_all_shares(branch) for branch in parameters["branches"]]
        return [1.0, *_combined(max, *branches)]
    inner = [x for x in parameters.values() if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
    if len(inner) == 1 and len(_jaxpr(inner[0]).invars) == count:
        return _all_shares(inner[0])
    return [1.0] * count


def min_sum(*shares: float) -> float:
    """Sum of the shares that several operations read, which may be the same elements; at most 1."""
    return min(1.0, sum(shares))


def _combined(combine: Callable[..., float], *shares: list[float]) -> list[float]:
    return [combine(*of_operand) for of_operand in zip(*shares, strict=True)]


def _all_shares(jaxpr: Any) -> list[float]:
    return read_shares(_jaxpr(jaxpr), _jaxpr(jaxpr).invars)


def _jaxpr(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
