"""Optimizers against their update rules written out, and the checks of their settings."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.common.errors import ConfigError
from jaxllm.training.optimizers import OPTIMIZERS, OptimizerConfig, make_optimizer, make_schedule

PATHS = (
    "backbone.embed.weight",
    "backbone.stack.blocks.0.mlp.up.weight",
    "backbone.stack.blocks.0.attn_norm.weight",
    "decoder.position_bias.0.table.weight",
)


def params_and_grads(scale: float = 1e-3):
    rng = np.random.default_rng(0)
    shapes = dict(zip(PATHS, [(6, 4), (5, 4), (4,), (8, 2)], strict=True))
    params = {p: jnp.asarray(rng.normal(size=s), jnp.float32) for p, s in shapes.items()}
    grads = {p: jnp.asarray(rng.normal(size=s) * scale, jnp.float32) for p, s in shapes.items()}
    return params, grads


def updates(config: OptimizerConfig, steps: int = 1, scale: float = 1e-3):
    params, grads = params_and_grads(scale)
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    out = None
    for _ in range(steps):
        out, state = step(grads, state, params)
    return params, grads, out


@pytest.mark.ci
def test_adamw():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, b1=0.8, b2=0.9, eps=1e-6)
    params, grads, out = updates(config, steps=3)
    for path, g in grads.items():
        m = v = 0.0
        for _ in range(3):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        update = (m / (1 - 0.8**3)) / (jnp.sqrt(v / (1 - 0.9**3)) + 1e-6)
        if path in PATHS[:2]:  # a norm's weight and a position bias are not decayed
            update = update + 0.5 * params[path]
        np.testing.assert_allclose(out[path], -0.1 * update, rtol=1e-5, err_msg=path)


@pytest.mark.ci
def test_sgd_with_momentum_and_decay():
    config = OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.5, momentum=0.9)
    params, grads, out = updates(config, steps=2)
    for path, g in grads.items():
        trace = 0.9 * g + g
        decay = 0.5 * params[path] if path in PATHS[:2] else 0.0
        expected = -0.1 * (g + 0.9 * trace + decay)
        np.testing.assert_allclose(out[path], expected, rtol=1e-5, err_msg=path)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_state_of_sgd_is_a_chain_with_and_without_decay(decay):
    """Saved runs have this structure."""
    config = OptimizerConfig(name="sgd", momentum=0.9, warmup_steps=1, weight_decay=decay)
    _, (sgd, *_) = make_optimizer(config).init(params_and_grads()[0])
    assert [type(state) for state in sgd] == [optax.TraceState, optax.ScaleByScheduleState]


def test_lion():
    config = OptimizerConfig(name="lion", learning_rate=0.1, weight_decay=0.5)
    params, grads, out = updates(config)
    for path, g in grads.items():
        decay = 0.5 * params[path] if path in PATHS[:2] else 0.0
        np.testing.assert_allclose(out[path], -0.1 * (jnp.sign(g) + decay), rtol=1e-5)


@pytest.mark.in_ci("True")
@pytest.mark.parametrize("scale", [True, False])
def test_adafactor_scales_with_the_parameter_and_decays_by_the_learning_rate(scale):
    plain = OptimizerConfig(name="adafactor", learning_rate=0.1, scale_parameter=scale)
    params, grads, out = updates(plain)
    for path, g in grads.items():  # too small to be factored: one second moment an element
        update = g / jnp.sqrt(g**2 + 1e-30)
        clipped = update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))
        size = jnp.maximum(jnp.sqrt(jnp.mean(params[path] ** 2)), 1e-3) if scale else 1.0
        np.testing.assert_allclose(out[path], -0.1 * size * clipped, rtol=1e-4, err_msg=path)
    decayed = updates(dataclasses.replace(plain, weight_decay=0.5))[2]
    for path, x in params.items():
        expected = out[path] - (0.05 * x if path in PATHS[:2] else 0.0)
        np.testing.assert_allclose(decayed[path], expected, rtol=1e-4, err_msg=path)


def test_muon_orthogonalises_the_matrices_of_blocks():
    config = OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.5, clip_norm=None)
    params, grads, out = updates(config)
    block = PATHS[1]
    update = np.asarray(out[block] + 0.1 * 0.5 * params[block])
    singular = np.linalg.svd(update, compute_uv=False)
    # Newton-Schulz brings singular values near 1; they are then scaled to AdamW's size.
    scale = 0.1 * 0.2 * np.sqrt(max(update.shape))
    assert singular.min() > 0.6 * scale
    assert singular.max() < 1.3 * scale
    # The others get Adam with Nesterov's momentum, whose first step has one size everywhere.
    nesterov = 0.9 * (1 - 0.9) / (1 - 0.9**2) + (1 - 0.9) / (1 - 0.9)
    for path in (PATHS[0], PATHS[2], PATHS[3]):
        expected = -0.1 * nesterov * jnp.sign(grads[path])
        np.testing.assert_allclose(out[path], expected, rtol=1e-3, err_msg=path)


def test_muon_takes_the_matrix_of_each_expert_alone():
    config = OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=None, clip_norm=None)
    rng = np.random.default_rng(0)
    layer = "backbone.stack.blocks.0.mlp"
    stack = {f"{layer}.expert_up.weight": jnp.asarray(rng.normal(size=(3, 8, 4)), jnp.float32)}
    single = {f"{layer}.{i}.weight": x for i, x in enumerate(*stack.values())}
    outs = []
    for params in (stack, single):
        optimizer = make_optimizer(config)
        out, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        outs.append([*out.values()])
    np.testing.assert_allclose(outs[0][0], np.stack(outs[1]), atol=1e-6)


@pytest.mark.by_default("sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_quadratic(name):
    config = OptimizerConfig(name=name, learning_rate=0.03, clip_norm=None)
    params, _ = params_and_grads()
    optimizer = make_optimizer(config)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda x: 2 * x, params)
        change, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, change), state

    def value(params):
        return sum(float(jnp.sum(x**2)) for x in params.values())

    state, before = optimizer.init(params), value(params)
    for _ in range(30):
        params, state = step(params, state)
    assert value(params) < 0.7 * before


@pytest.mark.ci
def test_gradients_are_clipped_together():
    config = OptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=0.5)
    _, grads, out = updates(config, scale=10.0)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in grads.values()))
    for path, g in grads.items():
        np.testing.assert_allclose(out[path], -g * 0.5 / norm, rtol=1e-5)


@pytest.mark.ci
def test_schedules():
    def at(steps, **settings):
        schedule = make_schedule(OptimizerConfig(learning_rate=2.0, **settings))
        return [round(float(schedule(step)), 4) for step in steps]

    assert at([0, 7]) == [2.0, 2.0]
    assert at([0, 2, 4, 9], warmup_steps=4) == [0.0, 1.0, 2.0, 2.0]
    assert at([0, 5, 10, 99], schedule="linear", schedule_steps=10, final_factor=0.5) == [
        2.0,
        1.5,
        1.0,
        1.0,
    ]
    assert at([2, 6, 10], schedule="cosine", schedule_steps=10, warmup_steps=2) == [2.0, 1.0, 0.0]
    assert at([2, 4, 16, 64], schedule="inverse_sqrt", warmup_steps=4) == [1.0, 2.0, 1.0, 0.5]
    # Without warmup as transformers: from T5's 10,000 steps on.
    assert at([0, 1, 30_000], schedule="inverse_sqrt") == [2.0, 1.9999, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, "name: unknown 'adam'; known: adamw"),
        ({"schedule": "step"}, "schedule: unknown 'step'"),
        ({"name": "sgd", "b1": 0.9}, "b1: sgd has none; it has momentum"),
        ({"scale_parameter": False}, "scale_parameter: false has no effect on adamw"),
        ({"b1": 1.5}, "b1: expected 0 to 1"),
        ({"learning_rate": 0.0}, "learning_rate: expected more than 0"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"schedule": "cosine"}, "schedule_steps: needed by schedule 'cosine'"),
        ({"schedule_steps": 5}, "schedule_steps: has no effect on schedule 'constant'"),
        ({"schedule": "linear", "schedule_steps": 5, "warmup_steps": 5}, "do not go beyond"),
        ({"final_factor": 0.1}, "final_factor: .*with constant"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"weight_decay": 0.1, "no_decay": ("(",)}, "no_decay: .* is not a regex"),
        ({"no_decay": ("norm",)}, "no_decay: has no effect without weight_decay"),
        *(
            ({name: math.nan}, f"{name}: expected")
            for name in ("learning_rate", "b1", "eps", "weight_decay", "clip_norm")
        ),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.parametrize("steps", [3, 7, 49, 1000])
def test_a_linear_schedule_ends_at_its_end(steps):
    """To the bit, compiled too: a rounding below 0 would be a rate that climbs."""
    config = OptimizerConfig(learning_rate=0.01, schedule="linear", schedule_steps=steps)
    for schedule in (make_schedule(config), jax.jit(make_schedule(config))):
        assert [float(schedule(step)) for step in (steps, steps + 1, 9 * steps)] == [0.0, 0.0, 0.0]
        assert float(schedule(steps - 1)) > 0


def test_a_schedule_takes_plain_numbers():
    """In the warmup of inverse_sqrt, too, where the formula of what comes after has no value."""
    config = OptimizerConfig(learning_rate=1.0, schedule="inverse_sqrt", warmup_steps=4)
    schedule = make_schedule(config)
    actual = [float(schedule(step)) for step in (0, 2, 4, 16, 400)]
    assert actual == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.1])
    assert actual == [float(jax.jit(schedule)(step)) for step in (0, 2, 4, 16, 400)]
