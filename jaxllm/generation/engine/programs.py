"""The two compiled programs: one reads prompts into slots, the other decodes all slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.cache import put_columns
from jaxllm.generation.engine.on_mesh import settled
from jaxllm.generation.engine.slots import Arrivals, Seen, SlotCache, Slots, Texts
from jaxllm.generation.processors.per_row import process_rows
from jaxllm.generation.sampling import choose_greedy, choose_sample
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.strategy import NEVER, faulty
from jaxllm.sharding import constrain


def admit(
    model: Any,
    slots: Slots,
    arrivals: Arrivals,
    at: Int[Array, " R"],
    stops: StoppingCriteriaList,
    *,
    sampling: bool,
) -> Slots:
    """Reads R prompts of one bucket, chooses their first tokens, and puts them into slots.

    Args:
        at: the slot of each; one that is no slot's number marks a prompt that only fills up.
    """
    arrivals = constrain(arrivals, "rows")
    texts = arrivals.texts
    rows, width = texts.tokens.shape
    mask = jnp.arange(width) < texts.start[:, None]
    fresh = SlotCache.of(model.start(rows, width, **arrivals.encoder))
    read = model.decode(texts.tokens, mask, fresh, fresh=True, at=texts.start - 1)
    texts = texts.replace(
        tokens=jnp.pad(texts.tokens, ((0, 0), (0, slots.cache.capacity - width))),
        keys=row_keys(arrivals.draws),
    )
    texts = choose(texts, read.logits[:, 0], stops, sampling)
    return slots.put(texts, read.cache.replace(length=texts.start), at)


def decode(
    model: Any,
    slots: Slots,
    stops: StoppingCriteriaList,
    wanted: Int[Array, ""],
    most: Int[Array, ""],
    *,
    sampling: bool,
) -> tuple[Slots, Seen]:
    """Decodes until `wanted` slots are free, no row is live, or `most` steps are done.

    What the host looks at is a copy: the slots themselves are overwritten by the next call, which
    need not wait for the host.
    """

    def going(carry):
        slots, steps, _ = carry
        live = jnp.sum(slots.texts.live)
        return (live > 0) & (slots.count - live < wanted) & (steps < most)

    def step(carry):
        slots, steps, busy = carry
        busy += jnp.sum(slots.texts.live, dtype=jnp.int32)
        return decode_step(model, slots, stops, sampling), steps + 1, busy

    slots, steps, busy = jax.lax.while_loop(going, step, (slots, jnp.int32(0), jnp.int32(0)))
    slots = settled(slots)
    texts = slots.texts
    seen = Seen(
        tokens=texts.tokens,
        start=texts.start,
        length=texts.length,
        live=texts.live,
        stopped=texts.stopped,
        broken_at=texts.broken_at,
        steps=steps,
        busy=busy,
    )
    return slots, seen


def decode_step(model: Any, slots: Slots, stops: StoppingCriteriaList, sampling: bool) -> Slots:
    """One more token for every live row."""
    texts = slots.texts
    newest = jnp.take_along_axis(texts.tokens, jnp.maximum(texts.length - 1, 0)[:, None], axis=1)
    read = model.decode(newest, texts.live[:, None], slots.cache)
    texts = choose(texts, read.logits[:, 0], stops, sampling)
    # The newest token is not in the cache yet. A free slot counts as empty, so that it does not
    # make the others read more of the cache.
    length = jnp.where(texts.live, texts.length - 1, 0)
    return Slots(texts=texts, cache=read.cache.replace(length=length))


def choose(
    texts: Texts, logits: Float[Array, "B V"], stops: StoppingCriteriaList, sampling: bool
) -> Texts:
    """From logits to the next token of each live row, and to which rows end with it."""
    settings, live, columns = texts.settings, texts.live, texts.tokens.shape[1]
    scores = process_rows(settings.processors, texts.tokens, logits, texts.length)
    step = texts.length - texts.start
    token = choose_greedy(scores)
    if sampling:
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(texts.keys), step)
        token = jnp.where(settings.sampled, choose_sample(keys, scores), token)
    broken = faulty(logits, scores) & live & ~settings.allow_nonfinite
    at = jnp.where(live, texts.length, columns)
    tokens = put_columns(texts.tokens, token[:, None], at[:, None])
    length = texts.length + live
    stopped = jnp.zeros_like(live)
    for number, criterion in enumerate(stops):
        stopped |= criterion(tokens, scores, length) & settings.watched[:, number]
    ends = jnp.any(token[:, None] == settings.eos, axis=1)
    over = ends | stopped | broken | (length >= settings.limit)
    return texts.replace(
        tokens=tokens,
        length=length,
        live=live & ~over,
        stopped=jnp.where(live, stopped & ~ends, texts.stopped),
        broken_at=jnp.where(broken & (texts.broken_at == NEVER), step, texts.broken_at),
    )


def row_keys(draws: Array) -> Array:
    """Data of the keys that `generate(..., key=seed, row_ids=[row])` gives its samples."""

    def one(seed, row, sample):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), sample)
        return jax.random.key_data(key)

    return jax.vmap(one)(draws[:, 0], draws[:, 1], draws[:, 2])


# The slots are donated: cache and texts are updated where they are.
admit_program = jax.jit(admit, static_argnames=("sampling",), donate_argnames=("slots",))
decode_program = jax.jit(decode, static_argnames=("sampling",), donate_argnames=("slots",))
