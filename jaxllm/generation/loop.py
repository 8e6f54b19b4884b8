"""Compiled programs of every strategy: prefill, one while_loop over decode steps, and finish.

Batch slots run the same functions (`jaxllm.batch.slots`). The loop's limits are traced, so one
compiled program serves a whole `generate()` and each chunk of `stream()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.guidance import Guided
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
    Result,
    S,
    Strategy,
)
from jaxllm.models.decoder import Decoder, FlatModel
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.outputs import DecodeOutput
from jaxllm.nn.block import StackOutput
from jaxllm.nn.platform.decoding import steps_between_checks
from jaxllm.parallel.field_axes import Axes, constrain_fields, map_with_axes
from jaxllm.parallel.sharding import constrain

T = TypeVar("T")
Progress: TypeAlias = tuple[Any, Int[Array, ""], Int[Array, ""]]
"""A state, the number of steps, and the sum over the steps of the rows that were running, which is
0 for aligned rows."""


def prefill(
    strategy: Strategy[S],
    model: Decoder,
    inputs: PrefillInputs,
    settings: DecodeSettings,
    *,
    capacity: int,
    new_token_bucket: int,
    chunk_size: int | None = None,
) -> S:
    """Runs the prompt, or the tokens that `past_key_values` does not hold yet, and initialises the
    strategy's state.

    Args:
        capacity: number of cache slots.
        new_token_bucket: the limit of new tokens, rounded up.
        chunk_size: run the prompt in chunks of this many columns; None: at once.
    """
    encoded = None
    if inputs.negative is not None:
        model = Guided(model, inputs.negative)
    if inputs.past_cache is None:
        encoder_arguments, encoded = recorded_encoding(
            model, inputs.encoder_inputs, settings.decode_options
        )
        cache = inputs.cache_kind.convert(
            model.init_cache(inputs.mask.shape[0], capacity, **encoder_arguments)
        )
    else:
        cache = inputs.past_cache.compact(capacity)
    state = first_state(
        strategy,
        model,
        inputs,
        cache,
        settings,
        new_token_bucket=new_token_bucket,
        chunk_size=chunk_size,
        encoded=encoded,
    )
    return with_fixed_sharding(state)


def first_state(
    strategy: Strategy[S],
    model: Decoder,
    inputs: PrefillInputs,
    cache: Cache,
    settings: DecodeSettings,
    *,
    new_token_bucket: int,
    chunk_size: int | None = None,
    encoded: StackOutput | None = None,
) -> S:
    """Runs the prompt, and initialises the strategy's state from its logits.

    Args:
        cache: an empty one, or `inputs.past_cache`; the columns of the prompt come after it.
        encoded: the encoder's output, if it is recorded.
    """
    options = {
        **settings.decode_options,
        **strategy.extra_decode_options,
        "cache_is_empty": inputs.past_cache is None,
    }
    if chunk_size is not None and chunk_size < inputs.decoder_inputs["mask"].shape[1]:
        out = decode_in_chunks(model, inputs, cache, chunk_size)
    else:
        out = model.decode(
            cache=cache, logits_column=inputs.last_column, **inputs.decoder_inputs, **options
        )
    if encoded is not None:
        out = out.replace(
            encoder_hidden_states=encoded.hidden_states, encoder_attentions=encoded.attentions
        )
    # `length` becomes that of the unpadded prompt: new tokens overwrite the bucket's padding.
    out = out.replace(cache=out.cache.replace(length=inputs.cache_len))
    return strategy.init(model, inputs, out, settings, new_token_bucket)


def decode_in_chunks(
    model: Decoder, inputs: PrefillInputs, cache: Cache, chunk_size: int
) -> DecodeOutput:
    """`Decoder.decode` of the prompt in chunks of columns, each after the cached ones before it.

    Positions and masks come from the cache, so pads may be anywhere.
    """
    arrays = {name: x for name, x in inputs.decoder_inputs.items() if x is not None}
    rows, columns = arrays["mask"].shape
    count = columns // chunk_size
    end = count * chunk_size

    def run(
        carry: tuple[Cache, Array], xs: tuple[Array, dict[str, Array]]
    ) -> tuple[tuple[Cache, Array], Array]:
        (cache, logits), (start, chunk) = carry, xs
        last = jnp.clip(inputs.last_column - start, 0, chunk["mask"].shape[1] - 1)
        out = model.decode(**{"tokens": None, **chunk}, cache=cache, logits_column=last)
        # A row's logits are those of the last chunk that its prompt reaches.
        reaches = (inputs.last_column >= start)[:, None, None]
        return (out.cache, jnp.where(reaches, out.logits, logits)), out.last_hidden_state

    def chunks(x: Array) -> Array:
        return x[:, :end].reshape(rows, count, chunk_size, *x.shape[2:]).swapaxes(0, 1)

    carry = (cache, jnp.zeros((rows, 1, model.config.vocab_size), jnp.float32))
    starts = jnp.arange(count, dtype=jnp.int32) * chunk_size
    carry, hidden = jax.lax.scan(run, carry, (starts, jax.tree.map(chunks, arrays)))
    hidden = hidden.swapaxes(0, 1).reshape(rows, end, -1)
    if end < columns:
        rest = {name: x[:, end:] for name, x in arrays.items()}
        carry, tail = run(carry, (jnp.int32(end), rest))
        hidden = jnp.concatenate([hidden, tail], axis=1)
    return DecodeOutput(logits=carry[1], cache=carry[0], last_hidden_state=hidden)


def recorded_encoding(
    model: Decoder, encoder_inputs: dict[str, Any], output_options: dict[str, Any]
) -> tuple[dict[str, Any], StackOutput | None]:
    """Runs the encoder if its hidden states or attentions are recorded.

    Returns:
        The arguments of `model.init_cache`, and the encoder's output; None if `init_cache` runs the
        encoder, or there is none.
    """
    is_recorded = any(output_options.values())
    has_encoder = "attention_mask" in encoder_inputs and "encoder_states" not in encoder_inputs
    if not (is_recorded and has_encoder):
        return encoder_inputs, None
    encoder_arguments = dict(encoder_inputs)
    mask = encoder_arguments.pop("attention_mask")
    encoded = cast(EncoderDecoderLM[Any], model).encode(
        encoder_arguments.pop("input_ids", None), mask, **encoder_arguments, **output_options
    )
    return {"encoder_states": encoded.x, "attention_mask": mask}, encoded


def decode_loop(
    strategy: Strategy[S],
    model: Decoder,
    state: S,
    settings: DecodeSettings,
    *,
    max_length: Int[Array, ""] | None = None,
    until_free: Int[Array, ""] | None = None,
    max_steps: Int[Array, ""] | None = None,
    steps_per_check: int = 1,
) -> Progress:
    """Runs decode steps while a row is running: it has not ended, and has fewer than `max_length`
    columns. The other limits end the loop when `until_free` rows are not running, or after
    `max_steps` steps.

    Args:
        steps_per_check: steps that run between two checks of this (`steps_of`). Rows of a call,
            which are aligned, end with the state of the first check that ends the loop; others may
            be a few steps further.
    """
    if settings.is_guided:
        model = Guided(model)

    def running(state: S) -> Bool[Array, " B"]:
        is_running = state.reason == RUNNING
        return is_running if max_length is None else is_running & (state.cur_len < max_length)

    def continues(carry: Progress) -> Bool[Array, ""]:
        state, steps, _ = carry
        is_running = running(state)
        result = jnp.any(is_running)
        if until_free is not None:
            result &= jnp.sum(~is_running, dtype=jnp.int32) < until_free
        return result if max_steps is None else result & (steps < max_steps)

    def step(_: Any, carry: Progress) -> Progress:
        state, steps, row_steps = carry
        after = strategy.step(model, state, settings)
        if not settings.aligned:
            # Calls do not read the sum, and XLA would keep it in their loop.
            row_steps += jnp.sum(running(state), dtype=jnp.int32)
            after = without_ended_rows(select_state(state.reason == RUNNING, after, state))
        elif steps_per_check > 1:
            after = select_state(continues(carry), after, state)
        return after, steps + 1, row_steps

    def several_steps(carry: Progress) -> Progress:
        return jax.lax.fori_loop(0, steps_per_check, step, carry)

    zero = jnp.int32(0)
    body = functools.partial(step, None) if steps_per_check == 1 else several_steps
    state, steps, row_steps = jax.lax.while_loop(continues, body, (state, zero, zero))
    return with_fixed_sharding(state), steps, row_steps


def select_state(condition: Bool[Array, " *B"], after: S, before: S) -> S:
    """The state after a step where `condition` holds, for all rows or for each, and else the one
    before, but for the keys and values of the newest token, which the next step writes again, or
    nobody reads."""

    def select(names: Axes, new: Array, old: Array) -> Array:
        # One number for all rows goes on while some rows do.
        if new is old or "heads" in names or new.ndim < condition.ndim:
            return new
        return jnp.where(condition.reshape(*condition.shape, *(1,) * (new.ndim - 1)), new, old)

    return map_with_axes(select, after, before)


def without_ended_rows(state: S) -> S:
    """The state with a cache length of 0 in rows that have ended, so that attention reads no
    further than the others need."""

    def shortened(x: object) -> object:
        if not isinstance(x, Cache):
            return x
        return x.replace(length=jnp.where(state.reason == RUNNING, x.length, 0))

    return jax.tree.map(shortened, state, is_leaf=lambda x: isinstance(x, Cache))


def with_fixed_sharding(state: S) -> S:
    """Shards the state on a mesh by the axes of its fields, so that one compiled program serves
    the first call and the next ones."""
    return constrain_fields(state, batch=state.cache.mask.shape[0])


def finish(strategy: Strategy[S], state: S, settings: DecodeSettings) -> Result:
    """Builds the result of the last state, or of an intermediate one (streaming)."""
    # Replicated on a mesh: each process reads the whole result.
    return constrain(strategy.finish(state, settings))


def of_flat_model(function: Callable[..., T]) -> Callable[..., T]:
    """The function with a `FlatModel` in place of its second argument, the model."""

    @functools.wraps(function)
    def program(strategy: AnyStrategy, model: FlatModel, *arguments: Any, **sizes: Any) -> T:
        return function(strategy, model.model(), *arguments, **sizes)

    return program


def decode(
    strategy: Strategy[S],
    model: Decoder,
    state: S,
    settings: DecodeSettings,
    max_length: Int[Array, ""],
    steps_per_check: int = 1,
) -> S:
    """`decode_loop` of a call of `generate`, up to `max_length` columns."""
    state, *_ = decode_loop(
        strategy, model, state, settings, max_length=max_length, steps_per_check=steps_per_check
    )
    return state


prefill_program = jax.jit(
    of_flat_model(prefill), static_argnames=("capacity", "new_token_bucket", "chunk_size")
)
# The state is donated: cache and sequences are updated in the buffers that prefill made.
decode_program = jax.jit(
    of_flat_model(decode), static_argnames=("steps_per_check",), donate_argnames=("state",)
)
finish_program = jax.jit(finish)


def steps_of(strategy: AnyStrategy, settings: DecodeSettings, platform: str) -> int:
    """Steps between two checks of the loop that suit the platform and that the strategy allows."""
    # Selecting between the buffers of all steps' scores would copy them.
    allowed = strategy.can_repeat_steps and not settings.keeps_steps
    return steps_between_checks(platform) if allowed else 1
