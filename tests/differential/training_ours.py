"""What jaxllm computes for a combination of `training_cases`, as arrays by name.

Gradients have the names and shapes of Hugging Face's or PEFT's tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training_cases import (
    ANSWER,
    IGNORED,
    PARITY,
    PROMPT,
    STEPS,
    T5,
    TARGET_WIDTH,
    VOCABULARY,
    WIDTH,
    Arrays,
    Combination,
    lora_batch,
    pairs,
    parameters_and_gradients,
    reference_noise,
    schedule_steps,
    token_batch,
    trained_tensor,
)

import jaxllm
from jaxllm.checkpoint.peft import MAGNITUDE, PREFIX, A, B, weight_entries
from jaxllm.models.lora import base_entries
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.training import (
    CausalLoss,
    DPOConfig,
    DPOLoss,
    OptimizerConfig,
    Seq2SeqLoss,
    TrainState,
    make_optimizer,
    make_schedule,
    make_train_step,
)
from jaxllm.training.dpo import METRICS, pair_logps
from jaxllm.training.lora import LoraConfig, add_lora, merge_lora, partition

ALL_LOGITS = 1 << 27
NO_DROPOUT = {
    "llama": {"attention_dropout": 0.0},
    "mistral": {"attention_dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def ours(combination: Combination, *model: Any) -> Arrays:
    """jaxllm's results for a combination, in float32; with LoRA, of a model that is given."""
    with jax.default_matmul_precision("highest"):
        results = OURS[combination["area"]](combination, *model)
    return {name: np.asarray(x) for name, x in results.items()}


@functools.cache
def load(
    name: str, attention: str = "eager", remat: bool = False, scan_layers: bool = False
) -> Any:
    """A model of tests/data/parity without dropout."""
    return jaxllm.load(
        PARITY / name,
        config=NO_DROPOUT[name.split("_")[0]],
        attn_implementation=attention,
        remat=remat,
        scan_layers=scan_layers,
    )[0]


def joined(model: Any, values: Mapping[str, Any]) -> Arrays:
    """Parameters, or arrays of the same paths, as Hugging Face's tensors."""
    return {
        entry.tensor: entry.join([np.asarray(values[path]) for path in entry.parameters])
        for entry in base_entries(model)
    }


def recorder() -> optax.GradientTransformation:
    """An optimizer that changes nothing; its state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
    )


@functools.cache
def recording_step(loss: Any, accumulation: int) -> Any:
    return make_train_step(recorder(), loss, accumulation=accumulation)


def recorded(model: Any, loss: Any, batch: Arrays, accumulation: int) -> tuple[Arrays, Arrays]:
    """Metrics and gradients of one training step."""
    state = TrainState.create(model, recorder())
    state, metrics = recording_step(loss, accumulation)(state, batch)
    return metrics, joined(model, state.opt_state)


def max_logits(combination: Combination, rows: int, width: int) -> int:
    """At most the logits of a third of the columns, if the loss is to be computed in chunks."""
    if not combination["chunked"]:
        return ALL_LOGITS
    return rows // combination["accumulation"] * VOCABULARY * (width // 3)


def gradients(combination: Combination) -> Arrays:
    """Loss, accuracy, number of tokens and gradients of a training step."""
    settings = [combination[key] for key in ("model", "attention", "remat", "scan_layers")]
    is_t5 = combination["model"] in T5
    width = TARGET_WIDTH if is_t5 else WIDTH
    loss = (Seq2SeqLoss if is_t5 else CausalLoss)(
        combination["label_smoothing"], combination["z_loss"], max_logits(combination, 4, width)
    )
    batch = token_batch(combination)
    metrics, grads = recorded(load(*settings), loss, batch, combination["accumulation"])
    named = {f"grad:{name}": x for name, x in grads.items()}
    return {name: metrics[name] for name in ("loss", "accuracy", "tokens")} | named


def lora_model(combination: Combination) -> Any:
    """The model with an adapter after some training."""
    config = LoraConfig(
        rank=combination["rank"],
        alpha=combination["alpha"],
        rslora=combination["rslora"],
        dora=combination["dora"],
        targets=tuple(combination["targets"]),
        modules_to_save=tuple(combination["modules_to_save"]),
    )
    model = add_lora(load(combination["model"]), config)
    values = {
        name: trained_tensor(combination["seed"], name, x)
        for name, x in peft_tensors(model, parameters(model)).items()
    }
    return with_peft_tensors(model, values)


def peft_tensors(model: Any, values: Mapping[str, Any]) -> Arrays:
    """What is trained of a model, or its gradients, as PEFT's tensors."""
    named: Arrays = {}
    saved = model.card.modules_to_save
    for name, entry in weight_entries(model).items():
        paths = entry.modules
        if f"{paths[0]}.lora_a" not in values:
            continue
        named[f"{name}.{A}"] = np.asarray(values[f"{paths[0]}.lora_a"])
        for ours, theirs in (("lora_b", B), ("lora_magnitude", MAGNITUDE)):
            if f"{paths[0]}.{ours}" in values:
                parts = [np.asarray(values[f"{path}.{ours}"]) for path in paths]
                named[f"{name}.{theirs}"] = np.concatenate(parts)
    for entry in base_entries(model):
        if entry.parameters[0].rpartition(".")[0] in saved:
            arrays = [np.asarray(values[path]) for path in entry.parameters]
            named[entry.tensor] = entry.join(arrays)
    return {PREFIX + name: x for name, x in named.items()}


def with_peft_tensors(model: Any, values: Arrays) -> Any:
    """The model with these values of what is trained."""
    changed: dict[str, Any] = {}
    for name, entry in weight_entries(model).items():
        paths = entry.modules
        for ours, theirs in (("lora_a", A), ("lora_b", B), ("lora_magnitude", MAGNITUDE)):
            if (x := values.get(f"{PREFIX}{name}.{theirs}")) is None:
                continue
            owners = paths[:1] if ours == "lora_a" else paths
            parts = np.split(x, len(owners))
            changed |= {
                f"{path}.{ours}": jnp.asarray(y) for path, y in zip(owners, parts, strict=True)
            }
    for entry in base_entries(model):
        if (x := values.get(PREFIX + entry.tensor)) is not None:
            changed |= dict(zip(entry.parameters, map(jnp.asarray, entry.split(x)), strict=True))
    return with_parameters(model, changed)


def lora(combination: Combination, model: Any = None) -> Arrays:
    """Logits, merged logits, loss and gradients of a model with LoRA."""
    model = lora_model(combination) if model is None else model
    batch = lora_batch(combination)
    trained, frozen = partition(model)

    def run(trained: Any, frozen: Any) -> tuple[Any, Any]:
        out = with_parameters(model, {**trained, **frozen})(**batch)
        return out.loss, out.logits

    def both(trained: Any, frozen: Any) -> Any:
        results = jax.value_and_grad(run, has_aux=True)(trained, frozen)
        whole = merge_lora(with_parameters(model, {**trained, **frozen}))
        return results, whole(**batch).logits

    ((loss, logits), grads), merged = jax.jit(both)(trained, frozen)
    named = peft_tensors(model, {**frozen, **grads})
    return {"loss": loss, "logits": logits, "merged": merged} | {
        f"grad:{name}": x for name, x in named.items()
    }


def pair_batch(combination: Combination) -> Arrays:
    """The batch [B, 2, T] of jaxllm for the pairs of a combination."""
    drawn = pairs(combination)
    rows, is_t5 = len(drawn["prompts"]), combination["model"] in T5
    width = PROMPT if is_t5 else PROMPT + ANSWER
    ids, mask = (np.zeros((rows, 2, width), np.int32) for _ in range(2))
    labels = np.full((rows, 2, ANSWER if is_t5 else width), IGNORED, np.int32)
    for row in range(rows):
        start = drawn["prompt_lengths"][row]
        for side in range(2):
            answer = drawn["answers"][row, side, : drawn["lengths"][row, side]]
            prompt = drawn["prompts"][row, :start]
            tokens = prompt if is_t5 else np.concatenate([prompt, answer])
            ids[row, side, : len(tokens)], mask[row, side, : len(tokens)] = tokens, 1
            first = 0 if is_t5 else start
            labels[row, side, first : first + len(answer)] = answer
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@jax.jit
def log_probabilities(model: Any, batch: Arrays) -> Any:
    return pair_logps(model, batch)[0]


def dpo(combination: Combination) -> Arrays:
    """Reference log-probabilities, loss, metrics and gradients of a step of DPO."""
    model, seed = load(combination["model"]), combination["seed"]
    noise = {
        path: part
        for entry in base_entries(model)
        for path, part in zip(
            entry.parameters,
            entry.split(reference_noise(seed, entry.tensor, tensor_shape(model, entry))),
            strict=True,
        )
    }
    reference = with_parameters(
        model, {path: x + noise[path] for path, x in parameters(model).items()}
    )
    batch = pair_batch(combination)
    logps = log_probabilities(reference, batch)
    settings = {key: combination[key] for key in ("loss_type", "beta", "label_smoothing")}
    # Rows of a batch are pairs of two sequences.
    limit = max_logits(combination, 2 * len(logps), batch["labels"].shape[-1])
    loss = DPOLoss(DPOConfig(**settings), limit)
    batch["reference_logps"] = np.asarray(logps)
    metrics, grads = recorded(model, loss, batch, combination["accumulation"])
    results = {name: metrics[name] for name in ("loss", *METRICS)}
    return {"reference": logps} | results | {f"grad:{name}": x for name, x in grads.items()}


def tensor_shape(model: Any, entry: Any) -> tuple[int, ...]:
    """Shape of Hugging Face's tensor."""
    return entry.join([np.asarray(parameters(model)[path]) for path in entry.parameters]).shape


def optimizer_config(settings: Combination) -> OptimizerConfig:
    lists = {name: tuple(x) for name, x in settings.items() if isinstance(x, list)}
    return OptimizerConfig(**{**settings, **lists})


def optimizers(combination: Combination) -> Arrays:
    """Changes of the parameters after the first and after the last step."""
    optimizer = make_optimizer(optimizer_config(combination["settings"]))
    start, grads = parameters_and_gradients(combination)
    params: Any = start

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, results = optimizer.init(params), {}
    for number, gradient in enumerate(grads):
        params, state = step(params, state, gradient)
        if number in (0, STEPS - 1):
            results |= {
                f"{number + 1}:{path}": np.asarray(x, np.float64) - start[path]
                for path, x in params.items()
            }
    return results


def schedules(combination: Combination) -> Arrays:
    """Learning rates as shares of the peak."""
    peak = combination["settings"]["learning_rate"]
    schedule = make_schedule(OptimizerConfig(**combination["settings"]))
    rates = jax.jit(jax.vmap(schedule))(jnp.asarray(schedule_steps(combination)))
    return {"rates": np.asarray(rates, np.float64) / peak}


def averages(combination: Combination) -> Arrays:
    """Changes of the parameters and of their moving average by a few steps of training."""
    model = load(combination["model"])
    optimizer = make_optimizer(optimizer_config(combination["optimizer"]))
    state = TrainState.create(model, optimizer, ema=True)
    step = make_train_step(
        optimizer,
        (Seq2SeqLoss if combination["model"] in T5 else CausalLoss)(),
        accumulation=combination["accumulation"],
        ema_decay=combination["ema_decay"],
    )
    for number in range(combination["steps"]):
        batch = token_batch({**combination, "seed": combination["seed"] + number})
        state, _ = step(state, batch)
    start = joined(model, parameters(model))
    trained, average = (joined(model, x) for x in (state.params, state.ema))
    return {f"param:{name}": x - start[name].astype(float) for name, x in trained.items()} | {
        f"average:{name}": x - start[name].astype(float) for name, x in average.items()
    }


OURS = {
    "gradients": gradients,
    "lora": lora,
    "dpo": dpo,
    "optimizers": optimizers,
    "schedules": schedules,
    "averages": averages,
}
