"""Ten steps of recipes beside transformers' Trainer, PEFT and TRL, whose losses are stored.

tests/data/trainer/make.py ran them; `RECIPES` is how docs/migration.md says each here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.checkpoint.peft import PREFIX, A, save_adapter, weight_entries
from jaxllm.checkpoint.safetensors import SafetensorsFile
from jaxllm.models.build_options import Options
from jaxllm.models.lora import base_entries
from jaxllm.models.model import Card
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import Entry, parameters, with_parameters
from jaxllm.training import (
    DPOConfig,
    DPOLoss,
    OptimizerConfig,
    TrainState,
    loss_for,
    make_optimizer,
    make_train_step,
)
from jaxllm.training.dpo import pair_logps
from jaxllm.training.lora import LoraConfig, add_lora, is_trainable

DATA = Path(__file__).parents[2] / "data"
sys.path.insert(0, str(DATA / "trainer"))
from trainer_cases import (  # noqa: E402
    CASES,
    IGNORED,
    NO_DROPOUT,
    PREFERENCES,
    RATE,
    ROWS,
    STEPS,
    WIDE_T5,
    first_a,
    rows,
    weight,
)

STORED = json.loads((DATA / "trainer" / "losses.json").read_text())
RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.3},
    "linear": {
        "schedule": "linear",
        "schedule_steps": STEPS,
        "warmup_steps": 3,
        "clip_norm": 0.2,
    },
    "cosine": {"schedule": "cosine", "schedule_steps": STEPS, "warmup_steps": 2},
    "inverse_sqrt": {"schedule": "inverse_sqrt", "warmup_steps": 2},
    "label_smoothing": {"name": "sgd", "learning_rate": 5e-2},
    "adafactor": {"name": "adafactor", "learning_rate": 1e-3, "scale_parameter": False},
    "adafactor_scaled": {"name": "adafactor", "learning_rate": 1e-2},
    "nesterov": {"name": "sgd", "momentum": 0.9, "learning_rate": 5e-2},
    "dpo": {"learning_rate": PREFERENCES},
    "ipo": {"learning_rate": PREFERENCES},
}
"""Fields of the section `optimizer`; the learning rate is `RATE` elsewhere."""


def padded(values: list[list[int]], fill: int) -> np.ndarray:
    width = max(map(len, values))
    return np.array([[*row, *[fill] * (width - len(row))] for row in values], np.int32)


def batch_of(case: str, chunk: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays of some rows."""
    if "dpo" in CASES[case]:
        sides = [
            [(row["prompt_ids"], row[side]) for side in ("chosen_ids", "rejected_ids")]
            for row in chunk
        ]
        flat = [pair for row in sides for pair in row]
        arrays = {
            "input_ids": padded([prompt + answer for prompt, answer in flat], 1),
            "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in flat], 0),
            "labels": padded(
                [[IGNORED] * len(prompt) + answer for prompt, answer in flat], IGNORED
            ),
        }
        return {name: x.reshape(len(chunk), 2, -1) for name, x in arrays.items()}
    if case == "packing":
        lengths = [row["seq_lengths"] for row in chunk]
        segments = [np.repeat(np.arange(1, len(x) + 1), x).tolist() for x in lengths]
        ids = padded([row["input_ids"] for row in chunk], 1)
        labels = np.where(padded(segments, 0) > 0, ids, IGNORED)
        return {"input_ids": ids, "segment_ids": padded(segments, 0), "labels": labels}
    ids = padded([row["input_ids"] for row in chunk], 1)
    if case == "completions":
        learned = padded([row["completion_mask"] for row in chunk], 0)
        return {"input_ids": ids, "labels": np.where(learned, ids, IGNORED)}
    return {"input_ids": ids, "labels": padded([row["labels"] for row in chunk], IGNORED)}


def batches(case: str) -> Iterator[dict[str, np.ndarray]]:
    made, size = (STORED["packed rows"], 1) if case == "packing" else (rows(case), ROWS)
    for step in range(STEPS):
        yield batch_of(case, made[step * size : (step + 1) * size])


def tensor_shape(model: Any, entry: Entry) -> tuple[int, ...]:
    return entry.tensor_shape(parameters(model)[entry.parameters[0]].shape)


def start_of(case: str) -> Any:
    """The model, with PEFT's A at the start if it has LoRA."""
    name = CASES[case]["model"]
    if name == "wide_t5":
        spec = model_spec(WIDE_T5)
        model = spec.make(spec.config, Options(), rngs=None).with_card(Card(spec.config))
        return with_parameters(
            model,
            {
                path: jnp.asarray(part)
                for entry in base_entries(model)
                for path, part in zip(
                    entry.parameters,
                    entry.split(weight(entry.tensor, tensor_shape(model, entry))),
                    strict=True,
                )
            },
        )
    folder = DATA / "conformance" / "models" / name
    folder = folder if folder.exists() else DATA / "parity" / name
    model = jaxllm.load(folder, config=NO_DROPOUT.get(name, {}), attn_implementation="eager")[0]
    if "lora" not in CASES[case]:
        return model
    model = add_lora(model, LoraConfig(**CASES[case]["lora"]))
    values, entries = parameters(model), weight_entries(model)
    names = {entry.modules[0]: name for name, entry in entries.items()}
    first = {path: x for path, x in values.items() if path.endswith(".lora_a")}
    drawn = {p: first_a(names[p.removesuffix(".lora_a")], x.shape) for p, x in first.items()}
    return with_parameters(model, {path: jnp.asarray(x) for path, x in drawn.items()})


@pytest.mark.ci
@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_trainer(case: str, tmp_path: Path):
    model, args = start_of(case), CASES[case].get("args", {})
    optimizer = make_optimizer(OptimizerConfig(**{"learning_rate": RATE, **RECIPES.get(case, {})}))
    loss = loss_for(model, label_smoothing=args.get("label_smoothing_factor", 0.0))
    trainable = None
    if "dpo" in CASES[case]:
        loss = DPOLoss(DPOConfig(**CASES[case]["dpo"]))
    elif "lora" in CASES[case]:
        trainable = is_trainable
    elif model.is_encoder_decoder:
        trainable = lambda path: "position_bias" not in path  # noqa: E731
    step = make_train_step(optimizer, loss, accumulation=args.get("gradient_accumulation_steps", 1))
    state, losses = TrainState.create(model, optimizer, trainable=trainable), []
    for batch in batches(case):
        if "dpo" in CASES[case]:
            batch["reference_logps"] = np.asarray(pair_logps(model, batch)[0])
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, STORED[case], rtol=2e-5)
    if "lora" in CASES[case]:
        check_adapter(case, state.model, tmp_path)


def check_adapter(case: str, model: Any, folder: Path) -> None:
    """The saved adapter is PEFT's after ten steps, to a thousandth of the movement."""
    save_adapter(folder, model)
    with np.load(DATA / "trainer" / "adapters.npz") as stored:
        expected = {
            n.removeprefix(f"{case}/"): stored[n] for n in stored.files if n.startswith(f"{case}/")
        }
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        actual = {name: np.array(file.read(name)) for name in file.names() if ".1." in name}
    assert actual.keys() == expected.keys()
    assert sum(name.endswith(A) for name in actual) == 1 + (case == "lora_phi3")
    for name, x in actual.items():
        start = np.zeros_like(x)
        if name.endswith(A):
            start = first_a(name.removeprefix(PREFIX).removesuffix(f".{A}"), x.shape)
        assert np.abs(x - start).max() > 1e-3
        moved = np.linalg.norm(expected[name] - start)
        assert np.linalg.norm(x - expected[name]) < 1e-3 * moved, name
