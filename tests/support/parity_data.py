"""Reads tests/data/parity: tiny models with what the reference implementation computed on them.

>>> case = load_case("llama_bias")
>>> case.architecture, case.calls["plain"].outputs["logits"].shape
('LlamaForCausalLM', (3, 11, 51))
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paths import DATA

ROOT = DATA / "parity"


@dataclass(frozen=True)
class Call:
    """One call of the reference; arrays by Hugging Face's argument and output names.

    Tuples are spread as `hidden_states/0`, `hidden_states/1`, ...; gradients as `grad/<parameter>`.
    Whole-number arguments (max_new_tokens, logits_to_keep) are arrays of shape ().
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def layers(self, name: str) -> list[np.ndarray]:
        """The arrays of a tuple such as `hidden_states`, first to last."""
        count = sum(key.startswith(f"{name}/") for key in self.outputs)
        return [self.outputs[f"{name}/{i}"] for i in range(count)]

    @property
    def real(self) -> np.ndarray | None:
        """Bool [B, T]: positions of the logits that are no padding; None: no mask was passed.

        At pads the reference's outputs mean nothing and differ between its own versions.
        """
        decoder = [k for k in self.inputs if k.startswith(("decoder_input", "labels"))]
        if "decoder_attention_mask" in self.inputs:
            return self.inputs["decoder_attention_mask"].astype(bool)
        if decoder and "encoder_last_hidden_state" in self.outputs:  # T5 without a decoder mask
            return None
        mask = self.inputs.get("attention_mask")
        return None if mask is None else mask.astype(bool)


@dataclass(frozen=True)
class Case:
    """A folder with config.json, *.safetensors and expected.npz ("tables" has only the latter)."""

    name: str
    folder: Path
    calls: dict[str, Call]
    meta: dict

    @property
    def architecture(self) -> str:
        """Hugging Face's class, e.g. `T5ForConditionalGeneration`; empty for "tables"."""
        return self.meta["architecture"]


def cases(prefix: str = "") -> list[str]:
    """Names of all cases that begin with `prefix`, sorted."""
    names = (path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("expected.npz"))
    return sorted(name for name in names if name.startswith(prefix))


def load_case(name: str) -> Case:
    """The case in folder `name`; see tests/data/parity/README.md for the list."""
    calls: dict[str, Call] = {}
    with np.load(ROOT / name / "expected.npz") as stored:
        meta = json.loads(str(stored["meta"]))
        for key in stored.files:
            if key == "meta":
                continue
            call, side, argument = key.split("/", 2)
            actual = calls.setdefault(call, Call({}, {}))
            (actual.inputs if side == "in" else actual.outputs)[argument] = stored[key]
    return Case(name, ROOT / name, calls, meta)
