"""Decoding speed beside peers and the machine's own memory bandwidth, in one run.

    python benchmarks/decode.py smollm2 [--hf PYTHON] [--ct2 PYTHON --ct2-model FOLDER]
    python benchmarks/decode.py t5-small ...

`smollm2` is the bundled model; `t5-small` a random one of T5-small's shape. PYTHON is the
interpreter of an environment that has the peer. Tokens/s is batch x new / seconds of the whole
call, prefill included; medians of `--rounds` rounds, peers taking turns within each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from protocol import Peer, Workload
from rich.console import Console
from rich.table import Table

import jaxllm
from jaxllm.cli.bundled import smollm2
from jaxllm.models.t5 import T5ForConditionalGeneration
from jaxllm.models.t5_config import T5Config

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


def make_model(name: str, folder: Path) -> Path:
    """The model as a Hugging Face folder, the same float32 weights for every peer."""
    if name == "smollm2":
        model, tokenizer = jaxllm.load(smollm2())
    else:
        config = T5Config(decoder_start_token_id=0)
        model, tokenizer = T5ForConditionalGeneration(config, rngs=nnx.Rngs(0)), None
    jaxllm.save_hf(folder, model, tokenizer)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["smollm2", "t5-small"])
    parser.add_argument("--hf", metavar="PYTHON", help="environment with transformers and torch")
    parser.add_argument("--ct2", metavar="PYTHON", help="environment with ctranslate2")
    parser.add_argument("--ct2-model", metavar="FOLDER", help="the converted model")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(args.model, Path(scratch) / args.model)
        peers = [Peer("jaxllm", sys.executable, str(WORKERS / "jaxllm_worker.py"), str(folder))]
        if args.hf:
            peers.append(Peer("HF torch", args.hf, str(WORKERS / "hf_worker.py"), str(folder)))
        if args.ct2:
            script = str(WORKERS / "ct2_worker.py")
            peers.append(Peer("CTranslate2", args.ct2, script, args.ct2_model))
        compare(args, peers)


def compare(args: argparse.Namespace, peers: list[Peer]) -> None:
    before = bandwidth()
    table = Table("batch", "peer", "tokens/s", "first call s", "CPU/wall", "share of bandwidth")
    weight_bytes = peers[0].info["weight_bytes"]
    for batch in map(int, args.batches.split(",")):
        workload = Workload(batch)
        first = [peer.measure(workload)["seconds"] for peer in peers]
        rounds = [[peer.measure(workload) for peer in peers] for _ in range(args.rounds)]
        for i, peer in enumerate(peers):
            seconds = statistics.median(r[i]["seconds"] for r in rounds)
            busy = statistics.median(r[i]["cpu_per_wall"] for r in rounds)
            share = weight_bytes * workload.new / seconds / 1e9 / before
            table.add_row(
                str(batch),
                peer.name,
                f"{batch * workload.new / seconds:.1f}",
                f"{first[i]:.1f}",
                f"{busy:.2f}",
                f"{share:.0%}" if batch == 1 and args.model == "smollm2" else "",
            )
    for peer in peers:
        peer.close()
    console = Console(width=100)
    console.print(table)
    versions = ", ".join(f"{p.name} ({p.info['version']})" for p in peers)
    console.print(f"bandwidth read {before:.1f} GB/s before, {bandwidth():.1f} after; {versions}")


if __name__ == "__main__":
    main()
