"""Runs items in equal batches, sorted by length; halves the batch when memory runs out."""

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
    """Yields the index and result of each item as soon as its batch has run.

    Items run longest first, so that a batch has items of similar length and the peak memory use
    comes first. Every batch has the same number of items, so each length compiles one program; the
    last batch repeats an item. If device memory runs out, the batch size is halved.

    Args:
        run: computes a batch; returns one result per item, in order.
        batch_size: maximum number of items per batch.
        length: length of an item.
        on_halving: called when memory ran out.

    Raises:
        jax.errors.JaxRuntimeError: memory ran out with a single item.

    >>> list(run_in_batches(lambda items: [x * x for x in items], [1, 3, 2], 2, length=int))
    [(1, 9), (2, 4), (0, 1)]
    """
    remaining = sorted(range(len(items)), key=lambda i: length(items[i]), reverse=True)
    size = min(batch_size, bucket(len(items), 1))
    while remaining:
        batch = remaining[:size]
        full_batch = batch + batch[:1] * (size - len(batch))
        try:
            results = run([items[i] for i in full_batch])
        except jax.errors.JaxRuntimeError as error:
            if size == 1 or not is_exhausted(error):
                raise
            size //= 2
            on_halving()
            continue
        yield from zip(batch, results, strict=False)
        remaining = remaining[size:]


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error means that the device ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
