"""Runs many items in batches of one size: sorted by length, in less memory where it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from jaxllm.generation.inputs.values import bucket

T = TypeVar("T")
R = TypeVar("R")


def run_in_batches(
    run: Callable[[list[T]], Sequence[R]],
    items: Sequence[T],
    batch_size: int,
    *,
    length: Callable[[T], int],
    on_halving: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, R]]:
    """The result of each item, with its place among the items, as soon as its batch has run.

    The longest items run first: neighbours are of about one length, and memory is used most at
    once. Every batch has the same number of items, so that one length compiles one program; the
    last batch repeats an item. Where the device's memory runs out, half as many items at once
    go on.

    Args:
        run: computes a batch; its first results are those of the items given.
        batch_size: items at once, at most.
        length: of an item.
        on_halving: called when memory ran out.

    Raises:
        jax.errors.JaxRuntimeError: memory ran out with a single item.

    >>> list(run_in_batches(lambda items: [x * x for x in items], [1, 3, 2], 2, length=int))
    [(1, 9), (2, 4), (0, 1)]
    """
    waiting = sorted(range(len(items)), key=lambda i: length(items[i]), reverse=True)
    size = min(batch_size, bucket(len(items), 1))
    while waiting:
        chosen = waiting[:size]
        filled = chosen + chosen[:1] * (size - len(chosen))
        try:
            results = run([items[i] for i in filled])
        except jax.errors.JaxRuntimeError as error:
            if size == 1 or not is_exhausted(error):
                raise
            size //= 2
            on_halving()
            continue
        yield from zip(chosen, results, strict=False)
        waiting = waiting[size:]


def is_exhausted(error: BaseException) -> bool:
    """Whether the device had too little memory for a program."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
