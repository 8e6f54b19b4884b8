"""A training step of GPT-2 (124M, random weights) beside peers, in one run.

    python benchmarks/train.py [--hf PYTHON] [--flax PYTHON] [--rounds N]

4 rows of 256 tokens, AdamW, float32, with the config's dropout and without. Tokens/s is
batch x length / seconds of a whole step, the median. The peers stay loaded and take turns of some
steps, as a training makes one after the other; a turn's first step is left out, since the system
may have taken the memory that a step gives back and uses again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import jax
from flax import nnx
from protocol import Peer, Training
from rich.console import Console
from rich.table import Table
from runner import WORKERS

import jaxllm
from jaxllm.models.gpt2 import GPT2Config, GPT2LMHeadModel
from jaxllm.models.model import Card

WORKLOADS = {"dropout 0.1": Training(dropout=True), "no dropout": Training(dropout=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", metavar="PYTHON", help="environment with transformers and torch")
    parser.add_argument("--flax", metavar="PYTHON", help="environment with transformers 4.57 Flax")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are counted, in each turn")
    args = parser.parse_args()
    table = Table("workload", "peer", "tokens/s", "seconds", "first step s", "CPU/wall")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "gpt2"
        make = jax.jit(lambda: GPT2LMHeadModel(GPT2Config(), rngs=nnx.Rngs(0)))
        jaxllm.save_hf(folder, make().with_card(Card(GPT2Config())))
        pythons = {
            "jaxllm": (sys.executable, "jaxllm_train_worker.py"),
            "HF torch": (args.hf, "hf_train_worker.py"),
            "HF Flax": (args.flax, "flax_train_worker.py"),
        }
        peers = [
            Peer(name, python, str(WORKERS / worker), str(folder))
            for name, (python, worker) in pythons.items()
            if python
        ]
        for name, workload in WORKLOADS.items():
            first = [peer.measure(workload)["seconds"] for peer in peers]
            measured: list[list[dict]] = [[] for _ in peers]
            for _ in range(args.rounds):
                for peer, steps in zip(peers, measured, strict=True):
                    turn = [peer.measure(workload) for _ in range(1 + args.steps)]
                    steps += turn[1:]
            for i, peer in enumerate(peers):
                seconds = statistics.median(step["seconds"] for step in measured[i])
                busy = statistics.median(step["cpu_per_wall"] for step in measured[i])
                speed = workload.batch * workload.length / seconds
                cells = (f"{speed:.1f}", f"{seconds:.2f}", f"{first[i]:.1f}", f"{busy:.2f}")
                table.add_row(name, peer.name, *cells)
        for peer in peers:
            peer.close()
    console = Console(width=100)
    console.print(table)
    console.print(", ".join(f"{p.name} ({p.info['version']})" for p in peers))


if __name__ == "__main__":
    main()
