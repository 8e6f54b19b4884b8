"""A training step: sums over micro-batches, bad batches, donation, precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from generation_tools import compilations

from jaxllm.common.errors import InputError
from jaxllm.models.build_options import Options
from jaxllm.models.weights import parameters
from jaxllm.nn.platform.training import updated_by_select
from jaxllm.training import TrainState, loss_for, make_train_step
from jaxllm.training.optimizers import clip_by_norm
from jaxllm.training.step import real_tokens

SGD = optax.sgd(0.1)
NO_DROPOUT = {
    "llama": {},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def batch_for(model, rows: int = 8, width: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of uneven lengths, right-padded."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, model.config.vocab_size, (rows, width)).astype(np.int32)
    mask = (np.arange(width) < rng.integers(2, width + 1, rows)[:, None]).astype(np.int32)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": np.where(mask, ids, -100).astype(np.int32),
    }


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("t5"))
def test_accumulated_steps_equal_one_step(family):
    model = tiny.make(family, **NO_DROPOUT[family])
    batch, results = batch_for(model), []
    for accumulation in (1, 2, 8):
        state = TrainState.create(model, SGD)
        step = make_train_step(SGD, loss_for(model), accumulation=accumulation)
        state, metrics = step(state, batch)
        results.append((state.params, metrics))
    full, first = results[0]
    before = parameters(model)
    for params, metrics in results[1:]:
        for name in ("loss", "tokens", "accuracy"):
            np.testing.assert_allclose(metrics[name], first[name], rtol=1e-6)
        for path, x in params.items():
            change = float(jnp.abs(full[path] - before[path]).max())
            # A bias of the keys adds one number to all scores of a query, which softmax ignores.
            assert change > 0 or path.endswith("attn.k.bias"), path
            # Gradients are summed in another order; weights are rounded to 2**-24 of their size.
            rounding = 2**-16 * change + 2**-23 * float(jnp.abs(x).max())
            np.testing.assert_allclose(x, full[path], rtol=0, atol=rounding, err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("gpt2"))
def test_gradients_are_finite_differences(family):
    """Gradients of the mean loss agree with them along a random direction, in float64."""
    with jax.enable_x64(True):
        model = tiny.make(family, options=Options(dtype=jnp.float64, param_dtype=jnp.float64))
        model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
        batch, loss = batch_for(model), loss_for(model)

        def mean(m):
            sums = loss(m, batch)
            return sums.loss / sums.count

        gradient = jax.grad(mean)(model)
        rng = np.random.default_rng(0)
        way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), model)
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, way)))
        small = 1e-4

        def moved(by):
            return mean(jax.tree.map(lambda x, w: x + by * w, model, way))

        measured = (moved(small) - moved(-small)) / (2 * small)
        # Norms and softmax are in float32 whatever the model's dtype, so the difference is, too.
        np.testing.assert_allclose(measured, slope, rtol=5e-3)


@pytest.mark.ci
def test_remat_changes_nothing():
    results = []
    for remat in (False, True):
        model = tiny.make("llama", options=Options(remat=remat))
        step = make_train_step(SGD, loss_for(model))
        results.append(step(TrainState.create(model, SGD), batch_for(model))[0].params)
    for path, x in results[0].items():
        np.testing.assert_allclose(x, results[1][path], atol=1e-6, err_msg=path)


def by_embedding(params):
    return {path: "embed" in path for path in params}


@pytest.mark.ci
@pytest.mark.parametrize(
    "compose",
    [
        lambda clip: clip,
        lambda clip: optax.chain(optax.scale(0.5), clip),
        lambda clip: optax.apply_if_finite(clip, 3),
        lambda clip: optax.partition({True: clip, False: clip}, by_embedding),
    ],
    ids=["alone", "after another", "in another", "each its part"],
)
def test_clipping_is_that_of_optax(compose):
    """The step's own norm is used for its own gradients only, not for what others make of them."""
    model = tiny.make("llama")
    ends = []
    for clip in (clip_by_norm(0.1), optax.clip_by_global_norm(0.1)):
        optimizer = optax.chain(compose(clip), optax.sgd(1.0))
        state = TrainState.create(model, optimizer)
        step = make_train_step(optimizer, loss_for(model))
        for seed in (0, 1):
            state, metrics = step(state, batch_for(model, seed=seed))
            assert metrics["grad_norm"] > 0.2
        ends.append(state.params)
    for path, x in ends[0].items():
        assert float(jnp.abs(x - parameters(model)[path]).max()) > 0, path
        np.testing.assert_allclose(x, ends[1][path], atol=1e-6, err_msg=path)


@pytest.mark.in_ci("loop")
@pytest.mark.parametrize("way", ["loop", "select"])
def test_a_batch_of_nan_is_skipped_and_counted(way, monkeypatch):
    if way == "select":  # a GPU's own way, on a CPU

        def updated_if(condition, update, state):
            return updated_by_select(condition, state, update=update)

        monkeypatch.setattr("jaxllm.training.step.updated_if", updated_if)
    optimizer = optax.adam(0.1)
    model = tiny.make("gpt2")
    step = make_train_step(optimizer, with_nans, ema_decay=0.5)
    state = TrainState.create(model, optimizer, ema=True)
    batch = batch_for(model)
    bad = {**batch, "poison": np.full(8, np.nan, np.float32)}
    good = {**batch, "poison": np.zeros(8, np.float32)}
    state, metrics = step(state, good)
    before = changing(state)
    for times in (1, 2):
        state, metrics = step(state, bad)
        assert metrics["skipped"] == 1
        assert metrics["skipped_in_a_row"] == times
    jax.tree.map(np.testing.assert_array_equal, changing(state), before)
    assert (int(state.step), int(state.skipped)) == (3, 2)
    state, metrics = step(state, good)
    assert (metrics["skipped"], metrics["skipped_in_a_row"], int(state.skipped)) == (0, 0, 2)
    for path, x in state.params.items():
        assert (np.asarray(x) != before[0][path]).any()


def changing(state: TrainState):
    """Copies of what a step changes beside its counters."""
    return jax.tree.map(np.array, (state.params, state.opt_state, state.ema))


def with_nans(model, batch, key=None):
    """A causal loss whose value is as finite as the batch's `poison`."""
    plain = {name: x for name, x in batch.items() if name != "poison"}
    sums = loss_for(model)(model, plain, key)
    return jax.tree.map(lambda x: x + batch["poison"].sum(), sums)


@pytest.mark.ci
def test_only_what_is_trainable_changes():
    model = tiny.make("llama")
    state = TrainState.create(model, SGD, trainable=lambda path: "mlp.up" in path)
    assert set(state.params) == {f"backbone.stack.blocks.{i}.mlp.up.weight" for i in (0, 1)}
    state, _ = make_train_step(SGD, loss_for(model))(state, batch_for(model))
    for path, x in parameters(state.model).items():
        changed = bool((x != parameters(model)[path]).any())
        assert changed == ("mlp.up" in path), path
    with pytest.raises(InputError, match="trainable: matches none"):
        TrainState.create(model, SGD, trainable=lambda path: False)


@pytest.mark.ci
def test_the_state_is_given_away_but_not_the_model():
    model = tiny.make("llama")
    state = TrainState.create(model, SGD)
    old = state.params["backbone.embed.weight"]
    new, _ = make_train_step(SGD, loss_for(model))(state, batch_for(model))
    assert old.is_deleted()
    assert not any(x.is_deleted() for x in parameters(model).values())
    assert new.params.keys() == state.params.keys()


@pytest.mark.ci
def test_master_weights_keep_what_bfloat16_would_round_away():
    options = Options(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = tiny.make("llama", options=options)
    tiny_steps = optax.sgd(1e-5)
    state = TrainState.create(model, tiny_steps)
    step = make_train_step(tiny_steps, loss_for(model))
    state, metrics = step(state, batch_for(model))
    path = "backbone.stack.blocks.0.mlp.up.weight"
    before, after = parameters(model)[path], state.params[path]
    assert after.dtype == jnp.float32
    assert (after != before.astype(jnp.float32)).mean() > 0.9
    assert (after.astype(jnp.bfloat16) == before).mean() > 0.9  # it would have been lost
    assert np.isfinite(metrics["loss"])


def test_the_average_follows():
    model = tiny.make("gpt2", n_layer=1)
    state = TrainState.create(model, SGD, ema=True)
    start = jax.tree.map(np.array, state.params)
    step = make_train_step(SGD, loss_for(model), ema_decay=0.75)
    state, _ = step(state, batch_for(model))
    for path, average in parameters(state.averaged_model).items():
        expected = 0.75 * start[path] + 0.25 * np.asarray(state.params[path])
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)
    assert state.model.card is state.averaged_model.card is model.card
    assert jax.tree.map(lambda x: x, state).model.card is None
    with pytest.raises(InputError, match="ema_decay"):
        make_train_step(SGD, loss_for(model))(state, batch_for(model))
    with pytest.raises(InputError, match="ema: this state keeps no"):
        _ = TrainState.create(model, SGD).averaged_model


def test_dropout_follows_from_the_key_and_the_step():
    model = tiny.make("gpt2", n_layer=1, embd_pdrop=0.3, resid_pdrop=0.3, attn_pdrop=0.3)
    step = make_train_step(SGD, loss_for(model))
    batch = batch_for(model)
    runs = {}
    for name, key in (("a", 0), ("same", 0), ("other", 1)):
        state, losses = TrainState.create(model, SGD, key=key), []
        for _ in range(2):
            state = state.replace(params=jax.tree.map(jnp.array, parameters(model)))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        runs[name] = losses
    assert runs["a"] == runs["same"] != runs["other"]
    assert runs["a"][0] != runs["a"][1]  # the same batch and weights, another step


@pytest.mark.ci
def test_the_second_step_compiles_nothing():
    model = tiny.make("llama")
    state, step = TrainState.create(model, SGD), make_train_step(SGD, loss_for(model))
    for seed in (0, 1):
        state, _ = step(state, batch_for(model, seed=seed))
    assert not compilations(lambda: step(state, batch_for(model, seed=2)))


def test_batches_that_cannot_be():
    model = tiny.make("llama")
    state, batch = TrainState.create(model, SGD), batch_for(model)
    with pytest.raises(InputError, match="8 rows cannot be split into 3"):
        make_train_step(SGD, loss_for(model), accumulation=3)(state, batch)
    with pytest.raises(InputError, match="expected one number of rows"):
        make_train_step(SGD, loss_for(model))(state, {**batch, "labels": batch["labels"][:4]})
    with pytest.raises(InputError, match="accumulation: expected 1"):
        make_train_step(SGD, loss_for(model), accumulation=0)
    del batch["labels"]
    with pytest.raises(InputError, match="labels: missing in the batch"):
        make_train_step(SGD, loss_for(model))(state, batch)


@pytest.mark.in_ci("t5-True")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_tokens_without_padding_are_counted(family, packed):
    rng = np.random.default_rng(0)
    real = np.arange(9) < rng.integers(1, 9, (4, 1))
    masks = {"segment_ids": real * rng.integers(1, 3, (4, 9))} if packed else {}
    batch = {"input_ids": tiny.ids(4), "labels": np.where(real[::-1], tiny.ids(4), -100)}
    batch |= masks or {"attention_mask": real.astype(np.int32)}
    if packed and family == "t5":
        batch["decoder_segment_ids"] = real[::-1] * 1
    model = tiny.cached(family)
    read = batch.get("segment_ids", batch.get("attention_mask"))
    counted = np.count_nonzero(read) + np.count_nonzero(real) * (family == "t5")
    assert int(real_tokens(model, batch)) == counted
    assert real_tokens(model, {"x": np.ones(3)}) is None
    assert int(real_tokens(tiny.cached("llama"), {"input_ids": tiny.ids(4)})) == 36
