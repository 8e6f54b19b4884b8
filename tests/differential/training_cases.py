"""Random combinations for the comparison of training, and the inputs that follow from them.

A combination is a JSON object with an area, settings and a seed. jaxllm's side (`training_ours.py`)
and the reference's side (`training_reference.py`) make the same inputs from it, in numpy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Combination = dict[str, Any]
Arrays = dict[str, np.ndarray]

DATA = Path(__file__).resolve().parents[1] / "data"
PARITY = DATA / "parity"
IGNORED = -100

ADJUSTED = "adjusted"
"""Field of a combination: names of documented differences that the reference is to follow."""

T5 = ("t5_v11", "t5_relu")
CAUSAL = ("llama_bias", "llama_linear_v4", "mistral_window", "gpt2_base", "gpt2_untied")
CLASSIFIERS = ("llama_cls_single", "gpt2_cls_single")
FIRST_ID = 5
"""Ids below are special tokens of the small models."""
VOCABULARY = 51
ROWS, WIDTH, TARGET_WIDTH = 4, 12, 9
STEPS = 10
"""Optimizer steps."""


def generator(seed: int, *names: str) -> np.random.Generator:
    """A random generator of its own for each name, so that inputs do not depend on the order."""
    return np.random.default_rng([seed, *"/".join(names).encode()])


def thinned(arrays: Arrays, limit: int = 200) -> Arrays:
    """At most `limit` elements of each array, at places that its name and size determine."""
    kept: Arrays = {}
    for name, x in arrays.items():
        if x.size > limit:
            places = generator(x.size, name).choice(x.size, limit, replace=False)
            x = x.ravel()[np.sort(places)]
        kept[name] = x
    return kept


# Gradients -------------------------------------------------------------------------------------


def draw_gradients(rng: random.Random) -> Combination:
    model = rng.choice(CAUSAL + T5 * 2)
    return {
        "model": model,
        "kind": rng.choice(("plain", "right", "left", "packed", "packed")),
        "remat": rng.random() < 0.5,
        "scan_layers": rng.random() < 0.3,
        "attention": rng.choice(("eager", "eager", "blockwise", "xla")),
        "accumulation": rng.choice((1, 2, 4)),
        "label_smoothing": rng.choice((0.0, 0.0, 0.1)),
        "z_loss": rng.choice((0.0, 0.0, 0.01)),
        "chunked": rng.random() < 0.3,
    }


def token_batch(combination: Combination) -> Arrays:
    """A batch [4, T] of ids and labels, with a mask or with segments of packed documents."""
    rng = generator(combination["seed"], "batch")
    kind, is_t5 = combination["kind"], combination["model"] in T5
    ids = rng.integers(FIRST_ID, VOCABULARY, (ROWS, WIDTH))
    targets = rng.integers(FIRST_ID, VOCABULARY, (ROWS, TARGET_WIDTH)) if is_t5 else ids
    batch = {"input_ids": ids}
    if kind == "packed":
        documents = rng.integers(1, 4, ROWS)
        batch["segment_ids"] = segments(rng, documents, WIDTH)
        real = batch["segment_ids"] > 0
        if is_t5:
            batch["decoder_segment_ids"] = segments(rng, documents, TARGET_WIDTH)
            real = batch["decoder_segment_ids"] > 0
    else:
        mask = lengths_mask(rng, WIDTH, kind)
        real = lengths_mask(rng, TARGET_WIDTH, "right") if is_t5 else mask
        if kind != "plain":
            batch["attention_mask"] = mask.astype(int)
    # A third of the labels is not counted, and sometimes a whole row.
    counted = real & (rng.random(targets.shape) > 0.3)
    counted[0] &= rng.random() < 0.7
    batch["labels"] = np.where(counted, targets, IGNORED)
    if "segment_ids" in batch:
        batch["input_ids"] = np.where(batch["segment_ids"] > 0, ids, 0)
    return {name: x.astype(np.int32) for name, x in batch.items()}


def lengths_mask(rng: np.random.Generator, width: int, side: str) -> np.ndarray:
    """True at the tokens of rows with 2 to `width` tokens, padded on a side; all for "plain"."""
    lengths = rng.integers(2, width + 1, (ROWS, 1))
    lengths[0] = 2  # so that micro-batches have very different numbers of tokens
    columns = np.arange(width)[None]
    if side == "plain":
        return np.ones((ROWS, width), bool)
    return columns >= width - lengths if side == "left" else columns < lengths


def segments(rng: np.random.Generator, documents: np.ndarray, width: int) -> np.ndarray:
    """Numbers [4, width] of consecutive documents from 1 on, 0 at the pads behind them."""
    rows = []
    for count in documents:
        cuts = np.sort(rng.choice(np.arange(1, width), count, replace=False))
        end = width if rng.random() < 0.5 else cuts[-1]
        starts = np.concatenate([[0], cuts[:-1]])
        numbers = (np.arange(width)[:, None] >= starts).sum(1)
        rows.append(np.where(np.arange(width) < end, numbers, 0))
    return np.array(rows)


# LoRA ------------------------------------------------------------------------------------------

LORA_MODULES = {
    "llama": (
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("input_layernorm", "post_attention_layernorm", "model.norm"),
    ),
    "gpt2": (("c_attn", "c_proj", "c_fc", "attn.c_proj"), ("ln_1", "ln_2", "ln_f")),
    "t5": (
        ("q", "k", "v", "o", "wo", "EncDecAttention.q", "SelfAttention.v"),
        ("encoder.final_layer_norm", "decoder.final_layer_norm"),
    ),
}
"""Targets, and modules to save, of each family."""
UNTIED = {
    "mistral_window": ("lm_head", "embed_tokens"),
    "gpt2_untied": ("lm_head", "wte"),
    "t5_v11": ("lm_head",),
}


def family_of(model: str) -> str:
    family = model.split("_")[0]
    return "llama" if family == "mistral" else family


def draw_lora(rng: random.Random) -> Combination:
    model = rng.choice(CAUSAL + T5 + CLASSIFIERS)
    targets, saved = LORA_MODULES[family_of(model)]
    heads = UNTIED.get(model, ())
    chosen = ["all-linear"] if rng.random() < 0.3 else rng.sample(targets, rng.randint(1, 3))
    kept = rng.sample(saved, rng.choice((0, 0, 1, 2)))
    if heads and rng.random() < 0.4:
        kept.append(rng.choice(heads))
    elif heads and chosen != ["all-linear"] and rng.random() < 0.4:
        chosen.append("lm_head")
    return {
        "model": model,
        "rank": rng.choice((1, 2, 3, 5, 8)),
        "alpha": rng.choice((1, 2.5, 8, 16)),
        "rslora": rng.random() < 0.4,
        "dora": rng.random() < 0.4,
        "targets": chosen,
        "modules_to_save": kept,
        "route": rng.choice(("made", "saved", "loaded")),
    }


def lora_batch(combination: Combination) -> Arrays:
    rng = generator(combination["seed"], "batch")
    batch = {"input_ids": rng.integers(FIRST_ID, VOCABULARY, (2, 7))}
    if combination["model"] in CLASSIFIERS:
        batch["labels"] = np.array([2, 0])
    elif combination["model"] in T5:
        batch["labels"] = rng.integers(FIRST_ID, VOCABULARY, (2, 5))
    else:
        batch["labels"] = batch["input_ids"]
    return {name: x.astype(np.int32) for name, x in batch.items()}


def trained_tensor(seed: int, name: str, start: np.ndarray) -> np.ndarray:
    """Value of a tensor of the adapter after some training, from its value at the start."""
    rng = generator(seed, name.removeprefix("base_model.model."))
    if "magnitude" in name:
        return (start * (1 + 0.3 * rng.random(start.shape))).astype(np.float32)
    if "lora_" in name:
        return (0.15 * rng.standard_normal(start.shape)).astype(np.float32)
    return (start + 0.1 * rng.standard_normal(start.shape)).astype(np.float32)


# DPO -------------------------------------------------------------------------------------------

PAIRS, PROMPT, ANSWER = 4, 5, 6


def draw_dpo(rng: random.Random) -> Combination:
    loss_type = rng.choice(("sigmoid", "sigmoid", "ipo"))
    smoothing = rng.choice((0.0, 0.1, 0.3)) if loss_type == "sigmoid" else 0.0
    return {
        "model": rng.choice(("llama_bias", "mistral_window", "gpt2_base", *T5)),
        "loss_type": loss_type,
        "beta": rng.choice((0.05, 0.1, 0.5)),
        "label_smoothing": smoothing,
        "accumulation": rng.choice((1, 2)),
        "chunked": rng.random() < 0.3,
        "spare_column": rng.random() < 0.6,
    }


def pairs(combination: Combination) -> Arrays:
    """Prompts and two answers to each, right-padded, with their lengths."""
    rng = generator(combination["seed"], "pairs")
    widest = ANSWER - 1 if combination["spare_column"] else ANSWER
    lengths = rng.integers(1, widest + 1, (PAIRS, 2))
    lengths[0, 0] = widest
    return {
        "prompts": rng.integers(FIRST_ID, VOCABULARY, (PAIRS, PROMPT)),
        "prompt_lengths": rng.integers(1, PROMPT + 1, PAIRS),
        "answers": rng.integers(FIRST_ID, VOCABULARY, (PAIRS, 2, ANSWER)),
        "lengths": lengths,
    }


def reference_noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Difference between the reference model's tensor and the trained model's."""
    return (0.05 * generator(seed, "reference", name).standard_normal(shape)).astype(np.float32)


# Optimizers ------------------------------------------------------------------------------------

PARAMETERS = {
    "backbone.embed.weight": (6, 4),
    "backbone.stack.blocks.0.mlp.up.weight": (130, 129),
    "backbone.stack.blocks.1.mlp.up.weight": (129, 200),
    "backbone.stack.blocks.0.attn.q.weight": (5, 4),
    "backbone.stack.blocks.0.attn_norm.weight": (4,),
    "backbone.stack.blocks.0.attn.q.bias": (150,),
    "decoder.position_bias.0.table.weight": (8, 2),
}
"""Shapes of the parameters by path; two matrices are large enough for Adafactor's factors."""
FACTORED = 128


def draw_optimizers(rng: random.Random) -> Combination:
    name = rng.choice(("adamw", "adamw", "adafactor", "adafactor", "sgd"))
    settings: Combination = {"name": name, "learning_rate": 10 ** rng.uniform(-4, -1.3)}
    if name == "adamw":
        settings |= {
            "b1": rng.choice((None, 0.0, 0.8, 0.95)),
            "b2": rng.choice((None, 0.9, 0.95, 0.9999)),
            "eps": rng.choice((None, 1e-10, 1e-6, 1e-3)),
        }
    else:
        settings["momentum"] = rng.choice((None, 0.5, 0.9))
    settings["weight_decay"] = rng.choice((None, 0.01, 0.3))
    settings["clip_norm"] = rng.choice((None, 0.1, 1.0, 100.0))
    if settings["weight_decay"] is not None and rng.random() < 0.4:
        settings["no_decay"] = rng.choice(([], ["embed"], ["attn", "table"]))
    return {
        "settings": {key: x for key, x in settings.items() if x is not None or key == "clip_norm"},
        "parameter_scale": 10 ** rng.uniform(-3, 0),
        "gradient_scale": 10 ** rng.uniform(-3, 1),
    }


def parameters_and_gradients(combination: Combination) -> tuple[Arrays, list[Arrays]]:
    """Parameters at the start, and gradients of each step, which become smaller."""

    def drawn(kind: str, scale: float) -> Arrays:
        return {
            path: (
                scale * generator(combination["seed"], kind, path).standard_normal(shape)
            ).astype(np.float32)
            for path, shape in PARAMETERS.items()
        }

    scale = combination["gradient_scale"]
    gradients = [drawn(str(step), scale * 2.0**-step) for step in range(STEPS)]
    return drawn("start", combination["parameter_scale"]), gradients


# Schedules -------------------------------------------------------------------------------------


def draw_schedules(rng: random.Random) -> Combination:
    schedule = rng.choice(("constant", "linear", "cosine", "inverse_sqrt"))
    warmup = rng.choice((0, 0, 1, 7, 100))
    settings: Combination = {
        "schedule": schedule,
        "learning_rate": 10 ** rng.uniform(-5, 0),
        "warmup_steps": warmup,
    }
    if schedule in ("linear", "cosine"):
        settings["schedule_steps"] = warmup + rng.choice((1, 2, 33, 1000))
        settings["final_factor"] = rng.choice((None, 0.0, 0.1, 0.5, 1.0))
    return {"settings": settings}


def schedule_steps(combination: Combination) -> np.ndarray:
    """Steps at which rates are compared: the first 130, the end, and far beyond it."""
    end = combination["settings"].get("schedule_steps", 20_000)
    near = np.concatenate([np.arange(130), np.arange(max(end - 5, 0), end + 6)])
    return np.unique(np.concatenate([near, [2 * end, 3 * end + 1]]))


# Whole runs with a moving average ----------------------------------------------------------------


def draw_averages(rng: random.Random) -> Combination:
    return {
        "model": rng.choice(("llama_bias", "gpt2_base", "t5_relu")),
        "kind": rng.choice(("right", "packed")),
        "ema_decay": rng.choice((0.0, 0.5, 0.9, 0.999)),
        "accumulation": rng.choice((1, 2)),
        "optimizer": {
            "name": "sgd",
            "learning_rate": rng.choice((0.003, 0.01, 0.03)),
            "momentum": rng.choice((0.5, 0.9)),
            "clip_norm": rng.choice((0.5, 2.0)),
            "schedule": "linear",
            "schedule_steps": 8,
            "warmup_steps": rng.choice((0, 2)),
        },
        "steps": 5,
    }


DRAWS: dict[str, Callable[[random.Random], Combination]] = {
    "gradients": draw_gradients,
    "lora": draw_lora,
    "dpo": draw_dpo,
    "optimizers": draw_optimizers,
    "schedules": draw_schedules,
    "averages": draw_averages,
}
AREAS = list(DRAWS)


def combinations(area: str, count: int, seed: int) -> list[Combination]:
    """The first `count` combinations of an area that follow from a seed."""
    rng = random.Random(f"{area} {seed}")
    return [
        {"area": area, **DRAWS[area](rng), "seed": rng.randrange(1 << 30)} for _ in range(count)
    ]
