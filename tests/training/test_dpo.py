"""DPO against its definition written out, and what it does to a small model's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxllm import generate
from jaxllm.common.errors import ConfigError, InputError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training import DPOConfig, DPOLoss, TrainState, make_train_step
from jaxllm.training.data import DataConfig, ModelInfo, add_reference, make_batches
from jaxllm.training.dpo import pair_logps
from jaxllm.training.state import split_model

PROMPT, ANSWER = 4, 3


def batch_of(family: str, rows: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Random pairs of uneven answers to a common prompt; the last row is padding."""
    rng = np.random.default_rng(seed)
    length = ANSWER if family == "t5" else PROMPT + ANSWER
    labels = rng.integers(1, 50, (rows, 2, length)).astype(np.int32)
    labels[0, 0, -1] = -100
    ids = np.repeat(rng.integers(1, 50, (rows, 1, PROMPT)).astype(np.int32), 2, axis=1)
    mask = np.ones_like(ids)
    if family != "t5":
        ids = np.concatenate([ids, labels[..., PROMPT:]], axis=-1)
        mask = (ids != -100).astype(np.int32)
        ids, labels[..., :PROMPT] = np.where(ids == -100, 0, ids), -100
    labels[-1] = -100
    logps = rng.normal(-12, 2, (rows, 2)).astype(np.float32)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "reference_logps": logps}


def written_logps(model: Any, batch: dict[str, np.ndarray]) -> jax.Array:
    """Sums [B, 2] of log-softmax at the labels of each answer, token by token."""
    inputs = {name: jnp.asarray(x.reshape(-1, x.shape[-1])) for name, x in batch.items()}
    del inputs["reference_logps"]
    labels = inputs.pop("labels")
    if model.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.shift_right(labels)
    logps, shift = jax.nn.log_softmax(model(**inputs).logits), int(not model.is_encoder_decoder)
    answers = batch["labels"].reshape(-1, batch["labels"].shape[-1]).tolist()
    sums = [
        sum((logps[n, t - shift, y] for t, y in enumerate(row) if y != -100), jnp.zeros(()))
        for n, row in enumerate(answers)
    ]
    return jnp.stack(sums).reshape(-1, 2)


CONFIGS = (
    DPOConfig(beta=0.3),
    DPOConfig(beta=0.3, label_smoothing=0.1),
    DPOConfig(beta=0.3, loss_type="ipo"),
)


def written_loss(ratios: np.ndarray, config: DPOConfig) -> tuple[float, float]:
    """Loss of a pair from its two log-ratios, and its derivative by their difference."""
    beta, smoothing, margin = config.beta, config.label_smoothing, ratios[0] - ratios[1]
    if config.loss_type == "ipo":
        distance = margin - 1 / (2 * beta)
        return distance**2, 2 * distance
    sigmoid = 1 / (1 + np.exp(-beta * margin))
    loss = -(1 - smoothing) * np.log(sigmoid) - smoothing * np.log(1 - sigmoid)
    return loss, -beta * ((1 - smoothing) * (1 - sigmoid) - smoothing * sigmoid)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_loss_and_gradient_are_the_definition(family: str):
    """Equation 7 of the paper and the gradient that it gives there; smoothed; and IPO's."""
    model, batch = tiny.make(family), batch_of(family)
    structure, params = split_model(model)

    def logps(params: Any) -> jax.Array:
        return written_logps(structure.model(params), batch)[:2]

    def both(function: Callable[[Any], jax.Array]) -> Callable[[Any], tuple[jax.Array, Any]]:
        return lambda x: (function(x), jax.jacrev(function)(x))

    def losses(params: Any) -> jax.Array:
        return jnp.array([DPOLoss(c)(structure.model(params), batch).loss for c in CONFIGS])

    policy, slopes = jax.jit(both(logps))(params)
    # A reference at some distance: losses of the order of ln 2, so that 1e-5 is no rounding error.
    shift = np.random.default_rng(1).normal(0, 2, (2, 2)).astype(np.float32)
    batch["reference_logps"][:2] = np.asarray(policy) + shift
    values, gradients = jax.jit(both(losses))(params)
    lengths = (batch["labels"][:2] != -100).sum(-1)
    for number, config in enumerate(CONFIGS):
        scales = 1 / lengths if config.loss_type == "ipo" else np.ones((2, 2))
        ratios = (np.asarray(policy, np.float64) - batch["reference_logps"][:2]) * scales
        parts, weights = np.array([written_loss(pair, config) for pair in ratios]).T
        np.testing.assert_allclose(values[number], parts.sum(), rtol=1e-5)
        signed = weights[:, None] * scales * [1, -1]
        assert np.abs(signed).max() > 0.05
        for path, slope in slopes.items():
            expected = np.tensordot(signed, np.asarray(slope, np.float64), 2)
            atol = 1e-5 * max(np.abs(expected).max(), 1)
            np.testing.assert_allclose(gradients[path][number], expected, atol=atol, err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_chunks_of_the_vocabulary_change_nothing(family: str):
    model, batch = tiny.make(family), batch_of(family)
    structure, params = split_model(model)

    def run(max_logits: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = DPOLoss(max_logits=max_logits)
        return jax.jit(jax.value_and_grad(lambda p: loss(structure.model(p), batch).loss))(params)

    full, chunked = run(1 << 27), run(2 * 6 * model.config.vocab_size)
    np.testing.assert_allclose(full[0], chunked[0], rtol=1e-6)
    for path, expected in full[1].items():
        np.testing.assert_allclose(chunked[1][path], expected, atol=2e-5, err_msg=path)


@pytest.mark.ci
def test_the_rewards_are_those_of_the_answers_with_each_loss():
    """Beta times the log-ratio of the whole answer, as in TRL 1.16, though IPO's loss has means."""
    model, batch = tiny.cached("gpt2"), batch_of("gpt2")
    logps = np.asarray(written_logps(model, batch))[:2]
    rewards = 0.3 * (logps - batch["reference_logps"][:2])
    margins = rewards[:, 0] - rewards[:, 1]
    for config in CONFIGS:
        extra = {name: float(x) for name, x in DPOLoss(config)(model, batch).extra.items()}
        assert extra["rewards/margins"] == pytest.approx(margins.sum(), rel=1e-4)
        assert extra["rewards/chosen"] == pytest.approx(rewards[:, 0].sum(), rel=1e-4)
        assert extra["rewards/accuracies"] == (margins > 0).sum()


@pytest.mark.ci
def test_training_changes_the_answers():
    """A model comes to prefer other answers to its own, and then gives them."""
    model = tiny.make("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    prompts = np.random.default_rng(0).integers(1, 50, (4, PROMPT)).astype(np.int32)
    mask = np.ones_like(prompts)

    def answers(model: Any) -> np.ndarray:
        out = generate(model, prompts, mask, max_new_tokens=ANSWER, eos_token_id=None)
        return np.asarray(out.sequences)[:, PROMPT:]

    rejected = answers(model)
    chosen = (rejected + 7) % 49 + 1
    pairs = [np.concatenate([prompts, answer], axis=1) for answer in (chosen, rejected)]
    ids = np.stack(pairs, axis=1).astype(np.int32)
    labels = ids.copy()
    labels[..., :PROMPT] = -100
    batch = {"input_ids": ids, "labels": labels}
    batch["reference_logps"] = np.asarray(pair_logps(model, batch)[0])
    optimizer = optax.adam(0.01)
    state = TrainState.create(model, optimizer)
    step = make_train_step(optimizer, DPOLoss(), accumulation=2)
    first = last = {}
    for number in range(60):
        state, last = step(state, batch)
        first = first or last
        assert number or float(last["loss"]) == pytest.approx(np.log(2), abs=1e-5)
    assert abs(float(first["rewards/margins"])) < 1e-4
    assert float(last["rewards/accuracies"]) == 1.0
    assert float(last["rewards/margins"]) > 1
    assert (answers(state.model) == chosen).all()


@pytest.mark.ci
def test_rows_of_text_with_their_reference():
    """From rows to the loss: at the start it is ln 2, and no batch lacks its reference."""
    model, tokenizer = tiny.make("llama", vocab_size=258), byte_tokenizer()
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "none"} for n in range(5)]
    config = DataConfig(format="preference", max_length=16)
    batches = make_batches(
        config, tokenizer, model=ModelInfo.of(model), batch_size=2, rows=rows, epochs=1
    )
    with pytest.raises(InputError, match="reference_logps: missing in the batch"):
        DPOLoss()(model, next(batches))
    batches = add_reference(batches, model, batch_size=4)
    loss = jax.jit(DPOLoss())
    sums = [loss(model, batch) for batch in batches]
    assert sum(float(each.count) for each in sums) == 5
    assert sum(float(each.loss) for each in sums) == pytest.approx(5 * np.log(2), rel=1e-5)


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="beta: expected more than 0, found 0"):
        DPOConfig(beta=0)
    with pytest.raises(ConfigError, match="label_smoothing: has no effect with loss_type 'ipo'"):
        DPOConfig(loss_type="ipo", label_smoothing=0.1)
