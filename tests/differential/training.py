"""Compares jaxllm's training with torch, transformers, PEFT and TRL on random combinations.

    python tests/differential/training.py --count 40 --seed 0

Areas: gradients of training steps (packed rows, padding, accumulation, chunked losses, remat),
LoRA (PEFT), DPO (TRL), optimizers (torch's AdamW and SGD, transformers' Adafactor), learning-rate
schedules (transformers), and whole runs with a moving average of the parameters (torch). The
reference computes in float64, jaxllm in float32; `training_compare.py` has the tolerances.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compiling

# Before jax is imported: programs that run once are compiled without optimizing them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", compiling.FAST)

import training_ours
import training_reference as reference
from report import Report, arguments, versions
from training_cases import (
    ADJUSTED,
    AREAS,
    DATA,
    T5,
    Arrays,
    Combination,
    combinations,
    thinned,
)
from training_compare import difference, errors
from training_ours import ours
from training_reference import theirs

from jaxllm.checkpoint.peft import load_adapter, save_adapter

COUNT = 40
DOCUMENTED = {
    reference.LEFT: "jaxllm counts no label that a pad would have to predict, so that the side of "
    "the padding does not change the loss; transformers predicts a row's first token from the pad "
    "on its left (jaxllm.models.losses.next_labels)",
    reference.LAST_COLUMN: "concatenated_forward of TRL 0.24 shifts the log-probabilities by one "
    "column and drops the first, which for an encoder-decoder is the last answer token of rows of "
    "full width; it is equal with one more column of padding",
    reference.IPO_REWARDS: "with loss_type ipo, rewards and log-probabilities among the metrics "
    "are those of whole answers, as in newer versions of TRL; TRL 0.24 gives means per token. The "
    "loss and its gradient are the same",
    reference.SMALL: "Adafactor factors second moments of matrices with both sides from 128 on, "
    "as T5X; transformers factors all matrices (jaxllm.training.optimizers)",
    reference.DECOUPLED: "weight_decay is multiplied by the learning rate alone for every "
    "optimizer; torch's SGD adds it to the gradient, transformers' Adafactor multiplies it by the "
    "parameter's size, too (OptimizerConfig.weight_decay)",
    reference.CLIP: "clip_grad_norm_ divides by the norm plus 1e-6; jaxllm by the norm, as optax",
    reference.COSINE: "after its last step a cosine stays at its final value; that of "
    "transformers rises again",
}


def applicable(combination: Combination) -> list[str]:
    """Documented differences that can show in a combination."""
    settings = combination.get("settings", {})
    conditions = {
        reference.LEFT: combination.get("kind") == "left" and combination["model"] not in T5,
        reference.LAST_COLUMN: combination["area"] == "dpo" and combination["model"] in T5,
        reference.IPO_REWARDS: combination.get("loss_type") == "ipo",
        reference.SMALL: settings.get("name") == "adafactor",
        reference.DECOUPLED: settings.get("name") != "adamw" and "weight_decay" in settings,
        reference.CLIP: settings.get("clip_norm") is not None,
        reference.COSINE: settings.get("schedule") == "cosine",
    }
    return [name for name, applies in conditions.items() if applies]


def results(combination: Combination) -> tuple[Arrays, Arrays]:
    """Results of both sides; an adapter of LoRA goes through a file on its route."""
    match combination.get("route"):
        case "saved":
            model = training_ours.lora_model(combination)
            with tempfile.TemporaryDirectory() as folder:
                save_adapter(folder, model)
                return ours(combination), reference.lora_from_file(combination, Path(folder))
        case "loaded":
            with reference.saved_adapter(combination) as folder:
                model = load_adapter(training_ours.load(combination["model"]), folder)
            return ours(combination, model), theirs(combination)
        case _:
            return ours(combination), theirs(combination)


def compare(combination: Combination, report: Report) -> tuple[float, str]:
    """Compares one combination; returns its largest error as a share of the tolerance, and where.

    New differences have no share.
    """
    area, names = combination["area"], applicable(combination)
    actual, expected = results(combination)
    plain = difference(combination, actual, expected)
    if plain is None:
        report.equal(area)
        return largest_error(combination, actual, expected)
    for size in range(1, len(names) + 1):
        for adjusted in itertools.combinations(names, size):
            expected = theirs({**combination, ADJUSTED: adjusted})
            if difference(combination, actual, expected) is None:
                report.explained(area, adjusted[0])
                report.known[area].update(adjusted[1:])
                return largest_error(combination, actual, expected)
    if names:
        plain += f"; adjusted: {difference(combination, actual, expected)}"
    report.differs(area, combination, plain)
    return 0.0, ""


def largest_error(combination: Combination, actual: Arrays, expected: Arrays) -> tuple[float, str]:
    """Largest error as a share of the tolerance, with the array and the combination."""
    shares = errors(combination, actual, expected)
    name = max(shares, key=shares.__getitem__)
    return shares[name], f"{name} of {combination}"


STORED: dict[str, tuple[Combination, ...]] = {
    "gradients": (
        {"model": "llama_bias", "kind": "packed", "accumulation": 2},
        {"model": "gpt2_base", "kind": "left", "accumulation": 4},
        {"model": "t5_v11", "kind": "packed", "remat": True},
    ),
    "lora": (
        {"model": "llama_cls_single", "dora": True},
        {"model": "gpt2_untied", "rslora": True, "dora": False},
    ),
    "dpo": (
        {"model": "mistral_window", "loss_type": "ipo", "chunked": True},
        {"model": "t5_relu", "loss_type": "sigmoid", "label_smoothing": 0.1},
    ),
    "optimizers": (
        {"name": "adamw"},
        {"name": "adafactor"},
        {"name": "adafactor"},
        {"name": "sgd", "momentum": 0.9},
    ),
    "schedules": tuple(
        {"schedule": x} for x in ("constant", "linear", "cosine", "inverse_sqrt") * 2
    ),
    "averages": ({"model": "gpt2_base", "ema_decay": 0.9},),
}
"""Settings of the combinations in tests/data: the first that were drawn with them."""


def stored_combinations(seed: int) -> Iterator[Combination]:
    for area, wanted in STORED.items():
        drawn = combinations(area, 2000, seed)
        for settings in wanted:
            found = next(
                x for x in drawn if settings.items() <= {**x, **x.get("settings", {})}.items()
            )
            drawn.remove(found)
            yield {**found, ADJUSTED: applicable(found)}


def store(seed: int) -> None:
    """Writes tests/data/differential/training.json and .npz."""
    folder = DATA / "differential"
    folder.mkdir(exist_ok=True)
    sample: list[Any] = list(stored_combinations(seed))
    arrays: Arrays = {}
    for number, combination in enumerate(sample):
        expected = theirs(combination)
        if (found := difference(combination, ours(combination), expected)) is not None:
            raise SystemExit(f"{combination}: not stored, for it differs: {found}")
        for name, x in thinned(expected).items():
            arrays[f"{number}/{name}"] = x.astype(np.float32)
    np.savez_compressed(folder / "training.npz", **arrays)
    facts = {"versions": versions(), "combinations": sample}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    args = arguments(__doc__.splitlines()[0], AREAS)
    warnings.filterwarnings("ignore")
    if args.store:
        store(args.seed)
        return 0
    report = Report(documented=DOCUMENTED)
    for area in args.area:
        worst = [
            compare(combination, report)
            for combination in combinations(area, args.count or COUNT, args.seed)
        ]
        share, where = max(worst)
        print(f"{area}: the largest error is {share:.2f} of its tolerance, in {where}", flush=True)
    return report.finish(args.out)


if __name__ == "__main__":
    raise SystemExit(main())
