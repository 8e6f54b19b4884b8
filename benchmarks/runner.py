"""What the benchmarks share: the models, the machine's bandwidth, peers taking turns, a table."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from protocol import Peer, Workload
from rich.console import Console
from rich.table import Table

WORKERS = Path(__file__).parent / "workers"


def bandwidth() -> float:
    """GB/s that a sum over 256 MB of float32 reads; the best of 7."""
    x = jnp.ones(2**26, jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        total(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return x.nbytes / best / 1e9


def parse(description: str) -> argparse.ArgumentParser:
    """Arguments that name the peers' interpreters."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", choices=["smollm2", "t5-small"])
    parser.add_argument("--hf", metavar="PYTHON", help="environment with transformers and torch")
    parser.add_argument("--flax", metavar="PYTHON", help="environment with transformers 4.57 Flax")
    parser.add_argument("--ct2", metavar="PYTHON", help="environment with ctranslate2")
    parser.add_argument("--ct2-model", metavar="FOLDER", help="the converted model")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def peers_of(args: argparse.Namespace, folder: Path) -> list[Peer]:
    """The peers that were asked for, each with the model loaded."""

    def peer(name: str, python: str, worker: str, model: str) -> Peer:
        return Peer(name, python, str(WORKERS / worker), model)

    peers = [peer("jaxllm", sys.executable, "jaxllm_worker.py", str(folder))]
    if args.hf:
        peers.append(peer("HF torch", args.hf, "hf_worker.py", str(folder)))
    if args.flax:
        peers.append(peer("HF Flax", args.flax, "flax_worker.py", str(folder)))
    if args.ct2:
        peers.append(peer("CTranslate2", args.ct2, "ct2_worker.py", args.ct2_model))
    return peers


def compare(peers: Sequence[Peer], workloads: dict[str, Workload], rounds: int) -> None:
    """Prints a row a workload and peer: medians of rounds in which the peers take turns."""
    before = bandwidth()
    table = Table("workload", "peer", "tokens/s", "first call s", "CPU/wall", "share of bandwidth")
    weight_bytes = peers[0].info["weight_bytes"]
    for name, workload in workloads.items():
        first = [peer.measure(workload)["seconds"] for peer in peers]
        measured = [[peer.measure(workload) for peer in peers] for _ in range(rounds)]
        for i, peer in enumerate(peers):
            seconds = statistics.median(r[i]["seconds"] for r in measured)
            busy = statistics.median(r[i]["cpu_per_wall"] for r in measured)
            share = weight_bytes * workload.new / seconds / 1e9 / before
            table.add_row(
                name,
                peer.name,
                f"{workload.batch * workload.new / seconds:.1f}",
                f"{first[i]:.1f}",
                f"{busy:.2f}",
                f"{share:.0%}" if workload.batch == workload.beams == 1 else "",
            )
    for peer in peers:
        peer.close()
    console = Console(width=100)
    console.print(table)
    versions = ", ".join(f"{p.name} ({p.info['version']})" for p in peers)
    console.print(f"bandwidth read {before:.1f} GB/s before, {bandwidth():.1f} after; {versions}")
