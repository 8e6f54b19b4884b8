"""The cases of the record of a device, which workers of all engines read.

Each case has an estimate of its seconds on an H200, building the model and compiling included, from
the figures of docs/performance.md. All cases of jaxllm take about six minutes there, the checks
about one and those of transformers about two.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = Path(__file__).parent / "shapes"
SMALL = {
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 128),
    **dict.fromkeys(("intermediate_size", "d_ff"), 256),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv"), 32),
}
"""Fields of a config.json in place of the shape's own, where it has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a worker is asked to measure."""

    name: str
    kind: str
    """"decode" (a step of `generate`), "prefill", "engine" (the batch engine on rows of many
    lengths), "train", or "checks" (numbers beside the CPU's)."""
    shape: str = ""
    """Name of a file in `shapes`."""
    rows: int = 1
    prompt: int = 512
    """Tokens of a prompt, of an encoder's input, or of a row of the training step."""
    new: int = 128
    beams: int = 1
    lora_rank: int | None = None
    param_dtype: str = "bfloat16"
    """Dtype of the weights. All computation is in bfloat16."""
    goal: float | None = None
    """Share of the floor that jaxllm should reach."""
    seconds: float = 0.0
    """About what jaxllm takes for the case on an H200."""
    peer_seconds: float | None = None
    """About what transformers takes. None: it is not measured."""
    families: tuple[str, ...] = ()
    """Families whose numbers are compared."""
    attn_implementation: str = "auto"
    small: bool = False

    def config(self) -> dict[str, Any]:
        """The config.json object of the model."""
        config = json.loads((SHAPES / f"{self.shape}.json").read_text(encoding="utf-8"))
        return config | {k: v for k, v in SMALL.items() if self.small and k in config}

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each row: of log-normal distributions with medians of 67
        and 148, and at most `prompt` and `new`."""
        random = np.random.default_rng(1)
        prompts, news = (
            np.clip(random.lognormal(mean, deviation, self.rows), 4, most).astype(int)
            for mean, deviation, most in ((4.2, 1.1, self.prompt), (5.0, 0.9, self.new))
        )
        return list(zip(prompts.tolist(), news.tolist(), strict=True))

    def smaller(self) -> Case:
        """The same with a model and sizes that a CPU runs in seconds."""
        sizes = {"rows": min(self.rows, 4), "prompt": self.prompt // 16, "new": min(self.new, 16)}
        peer_seconds = None if self.peer_seconds is None else 0.0
        seconds = {"seconds": 0.0, "peer_seconds": peer_seconds}
        return dataclasses.replace(
            self, name=f"{self.name} (small)", small=True, **seconds, **sizes
        )

    def with_attention(self, implementation: str) -> Case:
        """The same with one implementation of attention, and without a peer."""
        return dataclasses.replace(
            self,
            name=f"{self.name}, {implementation}",
            attn_implementation=implementation,
            peer_seconds=None,
        )


CASES = (
    Case(
        name="Llama-3.1-8B, batch 1, 512 + 128",
        kind="decode",
        shape="llama8b",
        goal=0.8,
        seconds=30,
        peer_seconds=35,
    ),
    Case(
        name="Llama-3.1-8B, batch 64, 512 + 128",
        kind="decode",
        shape="llama8b",
        rows=64,
        goal=0.8,
        seconds=25,
        peer_seconds=10,
    ),
    Case(
        name="Llama-3.1-8B, prefill of 8 x 2,048",
        kind="prefill",
        shape="llama8b",
        rows=8,
        prompt=2048,
        goal=0.7,
        seconds=10,
        peer_seconds=5,
    ),
    Case(
        name="Llama-3.1-8B, `BatchGenerator`, 512 rows",
        kind="engine",
        shape="llama8b",
        rows=512,
        new=512,
        goal=0.44,
        seconds=75,
    ),
    Case(
        name="Flan-T5-XL, batch 8, 512 + 128",
        kind="decode",
        shape="flan-t5-xl",
        rows=8,
        goal=0.66,
        seconds=40,
        peer_seconds=20,
    ),
    Case(
        name="Flan-T5-XL, batch 8, 4 beams, 512 + 128",
        kind="decode",
        shape="flan-t5-xl",
        rows=8,
        beams=4,
        goal=0.55,
        seconds=35,
        peer_seconds=15,
    ),
    Case(
        name="Flan-T5-XL, batch 64, 512 + 128",
        kind="decode",
        shape="flan-t5-xl",
        rows=64,
        goal=0.73,
        seconds=35,
        peer_seconds=15,
    ),
    Case(
        name="GPT-2-XL, batch 1, 512 + 128",
        kind="decode",
        shape="gpt2-xl",
        goal=0.53,
        seconds=25,
        peer_seconds=15,
    ),
    Case(
        name="Llama-3.2-1B, training, float32 weights, 8 x 1,024",
        kind="train",
        shape="llama1b",
        rows=8,
        prompt=1024,
        param_dtype="float32",
        goal=0.55,
        seconds=35,
    ),
    Case(
        name="Llama-3.1-8B, LoRA of rank 16, 4 x 1,024",
        kind="train",
        shape="llama8b",
        rows=4,
        prompt=1024,
        lora_rank=16,
        goal=0.55,
        seconds=50,
    ),
)
"""In the order of importance: what does not fit into the time is left out from the end. Shares of
the floor are those of 3.9 and 5.2 ms (Llama), 1.2, 1.6 and 3.0 ms (T5), 1.3 ms (GPT-2), and 14,000
tokens/s of the batch engine on an H200."""
