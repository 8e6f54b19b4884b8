"""Compares bfloat16 and float16 with transformers in the same dtype.

SmolLM2-135M's perplexity over thousands of tokens of Python's own documentation must lie within
0.1% of the reference in the same dtype. Tiny models of random weights must be as exact as the
reference: both are compared with the reference in float32, and jaxllm's error may be at most twice
that of the reference. T5 with activations that float16 cannot hold must stay finite.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import numpy as np
from half_precision import CASES, CONTEXT, TOKENS, draw_config, inputs, token_losses
from report import Report, arguments

import jaxllm
from jaxllm.checkpoint import smollm2

HALF = ("bfloat16", "float16")
AREAS = ["smollm2", "tiny-models", "t5-finite"]
CLOSE = 1e-3
"""Largest relative difference of two perplexities."""
FACTOR, LEAST = 2.0, 1e-4
"""Largest ratio of the errors, and a share of the largest logit that counts as none."""
BOTH = "infinite in both"
DOCUMENTED = {
    BOTH: "as in transformers, T5's `wo` and its residual stream are float32, but the layers "
    "before `wo` compute in float16: where their output exceeds 65504, both give infinity or NaN",
}


def long_text() -> str:
    """Python's documentation of its own language, which every installation has."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def reference(folder: Path, dtype: str, kind: str = "AutoModelForCausalLM") -> Any:
    import torch
    import transformers

    cls: Any = getattr(transformers, kind)
    # GPT-2's `scale_attn_by_inverse_layer_idx` has no effect on the reference's default attention.
    own = {"attn_implementation": "eager"} if kind.startswith("GPT2") else {}
    return cls.from_pretrained(folder, dtype=getattr(torch, dtype), **own).eval()


def reference_losses(model: Any, windows: Sequence[np.ndarray]) -> np.ndarray:
    """Negative log-likelihood of every token of the windows but the first of each."""
    import torch

    losses = []
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor(window[None])
            logits = model(ids).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return torch.cat(losses).double().numpy()


def compare_smollm2(report: Report, windows: int) -> dict[str, Any]:
    """Perplexities of both in each dtype; returns the stored sample."""
    model, tokenizer = jaxllm.load(smollm2())
    ids = np.array(tokenizer.encode(long_text(), max_bytes=10**7)[: windows * CONTEXT], np.int64)
    parts = np.split(ids, windows)
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jaxllm.save_hf(folder, model, dtype="float32")
        del model
        for dtype in ("float32", *HALF):
            theirs = reference_losses(reference(folder, dtype), parts)
            ours_model = jaxllm.load(folder, dtype=dtype, param_dtype=dtype)[0]
            ours = np.concatenate([token_losses(ours_model, part) for part in parts])
            found, expected = math.exp(ours.mean()), math.exp(theirs.mean())
            off = found / expected - 1
            line = f"perplexity {found:.4f}, reference {expected:.4f} ({off:+.4%})"
            spread = float(np.abs(ours - theirs).mean())
            print(f"{dtype}: {line}, {ours.size} tokens, mean difference {spread:.5f}", flush=True)
            if abs(off) <= CLOSE:
                report.equal("smollm2")
            else:
                report.differs("smollm2", dtype, line)
            samples[dtype] = theirs[: TOKENS - 1].round(5).tolist()
    return {"ids": ids[:TOKENS].tolist(), "losses": samples}


def tiny_reference(folder: Path, case: str, config: dict[str, Any], seed: int) -> None:
    """Writes a model of the reference with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind, config_class = CASES[case][:2]
    made: Any = getattr(transformers, config_class)(**config)
    model = getattr(transformers, kind)(made)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name or "ln_" in name:
                x += 0.2 * torch.randn_like(x)
            else:
                x.copy_(torch.randn_like(x) * (0.5 if x.dim() == 1 else 1.2 / x.shape[-1] ** 0.5))
    model.save_pretrained(folder)


def reference_logits(folder: Path, case: str, dtype: str, given: dict[str, Any]) -> np.ndarray:
    import torch

    with torch.no_grad():
        model = reference(folder, dtype, CASES[case][0])
        return model(**{k: torch.tensor(x) for k, x in given.items()}).logits.float().numpy()


def compare_tiny(report: Report, count: int, seed: int) -> None:
    """Errors of both against the reference in float32."""
    worst: dict[str, float] = {}
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        case = list(CASES)[number % len(CASES)]
        config, given = draw_config(rng, case), inputs(rng, case)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_reference(folder, case, config, seed * 1000 + number)
            exact = reference_logits(folder, case, "float32", given)
            for dtype in HALF:
                theirs = reference_logits(folder, case, dtype, given)
                model = jaxllm.load(folder, dtype=dtype, param_dtype=dtype)[0]
                ours = np.asarray(model(**given).logits, np.float32)
                errors = [float(np.sqrt(np.mean((x - exact) ** 2))) for x in (ours, theirs)]
                limit = FACTOR * errors[1] + LEAST * float(np.abs(exact).max())
                worst[dtype] = max(worst.get(dtype, 0), errors[0] / max(errors[1], 1e-9))
                if errors[0] <= limit:  # False for NaN
                    report.equal("tiny-models")
                else:
                    what = f"error {errors[0]:.5f}, the reference's {errors[1]:.5f}"
                    report.differs("tiny-models", (dtype, case, config), what)
    print(f"largest ratio of errors: {worst}", flush=True)


def compare_finite(report: Report, count: int, seed: int) -> None:
    """T5 with weights that make activations beyond float16's largest number.

    As in the models of the Hub, it is the output of `wo` that overflows; in every second model the
    input of `wo` may overflow as well.
    """
    import torch
    import transformers

    names = [name for name in CASES if CASES[name][1].endswith("T5Config")]
    outcomes: dict[str, int] = {}
    for number in range(count):
        rng = np.random.default_rng([seed, 7, number])
        case = names[number % len(names)]
        config, given = draw_config(rng, case), inputs(rng, case)
        scale = float(10 ** rng.uniform(1.5, 4.5))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_reference(folder, case, config, seed * 1000 + number)
            model = getattr(transformers, CASES[case][0]).from_pretrained(folder)
            with torch.no_grad():
                for path, x in model.named_parameters():
                    if ".wo." in path or (number % 2 and ".wi" in path):
                        x *= scale
            model.save_pretrained(folder)
            exact = reference_logits(folder, case, "float32", given)
            for dtype in HALF:
                theirs = reference_logits(folder, case, dtype, given)
                net = jaxllm.load(folder, dtype=dtype)[0]
                ours = np.asarray(net(**given).logits, np.float32)
                finite = [bool(np.isfinite(x).all()) for x in (ours, theirs)]
                key = f"{dtype}: jaxllm {finite[0]}, reference {finite[1]}"
                outcomes[key] = outcomes.get(key, 0) + 1
                size = float(np.abs(exact).max())
                if finite[0]:
                    report.equal("t5-finite")
                elif not finite[1] and number % 2:
                    report.explained("t5-finite", BOTH)
                else:
                    what = f"not finite (reference: {finite[1]}), scale {scale:.0f}, logits {size}"
                    report.differs("t5-finite", (dtype, case, config), what)
    print(f"finite: {outcomes}", flush=True)


def main() -> int:
    options = arguments(__doc__ or "", AREAS)
    report = Report(DOCUMENTED)
    if "smollm2" in options.area:
        samples = compare_smollm2(report, options.count or 12)
        if options.store:
            helpers.SAMPLES.mkdir(parents=True, exist_ok=True)
            (helpers.SAMPLES / "precision.json").write_text(json.dumps(samples) + "\n")
    if "tiny-models" in options.area:
        compare_tiny(report, options.count or 40, options.seed)
    if "t5-finite" in options.area:
        compare_finite(report, options.count or 30, options.seed)
    return report.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
