"""Every peer alone on the machine, with the threads that suit it best: one table of all workloads.

    python benchmarks/models.py FOLDER --ct2 PYTHON --llamacpp PYTHON
    python benchmarks/fair.py run FOLDER --peers jaxllm,hf,ct2 --python hf=PYTHON ct2=PYTHON
    python benchmarks/fair.py table FOLDER [--plot FILE.png]

`run` starts one process a peer and model, makes a warm-up call and `--rounds` more of each workload
and appends a line for each to FOLDER/results.jsonl; what stands there already is left out, so a
run that was stopped goes on. Run jaxllm first and last (`--tag last`), which shows how far the
machine drifted. The bandwidth read is measured before each process, by a sum over 256 MB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from protocol import Peer, Training, Workload
from rich.console import Console
from rich.table import Table

WORKERS = Path(__file__).parent / "workers"
PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "{0},{1}"}
"""Idle OpenMP threads spin on a core of their own. Not for CTranslate2, which it slows down."""

COLUMNS: dict[str, tuple[str, Workload | Training]] = {
    "SmolLM2 b1": ("smollm2", Workload(1)),
    "SmolLM2 b8": ("smollm2", Workload(8)),
    "SmolLM2 b32": ("smollm2", Workload(32)),
    "sample b8": ("smollm2", Workload(8, sample=True)),
    "beam": ("smollm2", Workload(4, new=64, beams=4)),
    "prefill 512": ("smollm2", Workload(1, prompt=512, new=1)),
    "T5-small b8": ("t5-small", Workload(8)),
    "T5-small beam": ("t5-small", Workload(8, beams=4)),
    "GPT-2 b1": ("gpt2", Workload(1)),
    "GPT-2 b8": ("gpt2", Workload(8)),
    "train": ("gpt2", Training(dropout=False)),
    "train dropout": ("gpt2", Training(dropout=True)),
}
DECODING, SMOLLM2 = tuple(COLUMNS)[:-2], tuple(COLUMNS)[:6]


@dataclasses.dataclass(frozen=True)
class PeerSpec:
    """How a peer is started, and what it can do."""

    name: str
    worker: str
    columns: tuple[str, ...]
    folder: str = "{model}"
    """The model's place in FOLDER."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


LLAMACPP = tuple(name for name in SMOLLM2 if name != "beam")
FLAX = ("T5-small b8", "T5-small beam", "GPT-2 b1", "GPT-2 b8", "train", "train dropout")
PEERS = {
    "jaxllm": PeerSpec("jaxllm", "jaxllm_worker.py", tuple(COLUMNS)),
    "jaxllm-xla": PeerSpec(
        "jaxllm without kernels",
        "jaxllm_worker.py",
        DECODING,
        environment={"JAXLLM_CPU_KERNELS": "0"},
    ),
    "jaxllm-int8": PeerSpec(
        "jaxllm int8", "jaxllm_worker.py", SMOLLM2, environment={"QUANTIZE": "int8"}
    ),
    "jaxllm-int4": PeerSpec(
        "jaxllm int4", "jaxllm_worker.py", SMOLLM2, environment={"QUANTIZE": "int4"}
    ),
    "hf": PeerSpec("HF torch", "hf_worker.py", tuple(COLUMNS), environment=PINNED),
    "flax": PeerSpec("HF Flax", "flax_worker.py", FLAX),
    "ct2": PeerSpec("CTranslate2", "ct2_worker.py", DECODING, "ct2/{model}"),
    "ct2-int8": PeerSpec(
        "CTranslate2 int8", "ct2_worker.py", DECODING, "ct2/{model}", {"COMPUTE_TYPE": "int8"}
    ),
    **{
        f"llamacpp-{name}": PeerSpec(
            f"llama.cpp {name}", "llamacpp_worker.py", LLAMACPP, f"gguf/smollm2-{name}.gguf", PINNED
        )
        for name in ("F32", "Q8_0", "Q4_0", "Q4_1")
    },
}
BANDWIDTH = """
import time, jax, jax.numpy as jnp
x, total, best = jnp.ones(2**26, jnp.float32), jax.jit(jnp.sum), float("inf")
for _ in range(8):
    start = time.perf_counter()
    total(x).block_until_ready()
    best = min(best, time.perf_counter() - start)
print(x.nbytes / best / 1e9)
"""


def bandwidth() -> float:
    """GB/s that a sum over 256 MB reads, in a process of its own; the best of 8."""
    out = subprocess.run(
        [sys.executable, "-c", BANDWIDTH], check=True, capture_output=True, text=True
    )
    return float(out.stdout)


def run(args: argparse.Namespace) -> None:
    results = args.folder / "results.jsonl"
    done = {(line["peer"], line["tag"], line["column"]) for line in lines_of(results)}
    pythons = dict(item.split("=", 1) for item in args.python)
    selected = args.only.split(",") if args.only else list(COLUMNS)
    for key in args.peers.split(","):
        spec = PEERS[key]
        columns = [
            c for c in selected if c in spec.columns and (spec.name, args.tag, c) not in done
        ]
        groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for column in columns:
            model, workload = COLUMNS[column]
            groups[model, isinstance(workload, Training)].append(column)
        python = pythons.get(key.partition("-")[0], sys.executable)
        for (model, trains), names in groups.items():
            worker = spec.worker.replace("_worker", "_train_worker") if trains else spec.worker
            path = args.folder / spec.folder.format(model=model)
            gb = bandwidth()
            peer = Peer(
                spec.name, python, str(WORKERS / worker), str(path), alone=True, **spec.environment
            )
            for name in names:
                line = measure(peer, name, args.rounds) | {"tag": args.tag, "bandwidth": gb}
                print(line, flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            peer.close()


def measure(peer: Peer, column: str, rounds: int) -> dict[str, Any]:
    """One line of the results: tokens/s of the best call after the warm-up."""
    workload = COLUMNS[column][1]
    first = peer.measure(workload)["seconds"]
    best = min(
        (peer.measure(workload) for _ in range(rounds)), key=lambda answer: answer["seconds"]
    )
    if isinstance(workload, Training):
        tokens = workload.batch * workload.length
    else:
        tokens = workload.batch * (workload.prompt if workload.new == 1 else workload.new)
    return {
        "peer": peer.name,
        "column": column,
        "tokens_per_s": round(tokens / best["seconds"], 1),
        "cpu_per_wall": round(best["cpu_per_wall"], 2),
        "first_call_s": round(first, 1),
        "load": round(os.getloadavg()[0], 1),
        "version": peer.info["version"],
    }


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none if there is no file yet."""
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def table(args: argparse.Namespace) -> None:
    lines = lines_of(args.folder / "results.jsonl")
    cells = {(f"{x['peer']}{x['tag'] and ', '}{x['tag']}", x["column"]): x for x in lines}
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    rows = list(dict.fromkeys(row for row, _ in cells))
    shown = Table("peer", *columns)
    print(f"| peer | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for row in rows:
        entries = []
        for column in columns:
            cell = cells.get((row, column))
            entries.append(
                "" if cell is None else f"{cell['tokens_per_s']:g} ({cell['cpu_per_wall']})"
            )
        shown.add_row(row, *entries)
        print(f"| {row} | {' | '.join(entries)} |")
    Console(width=200).print(shown)
    speeds = [line["bandwidth"] for line in lines]
    print(f"bandwidth read: {min(speeds):.1f} to {max(speeds):.1f} GB/s")
    if args.plot:
        plot(args.plot, rows, columns, cells)


def plot(
    path: Path, rows: list[str], columns: list[str], cells: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """A bar for each peer and column, relative to jaxllm's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.3 * len(columns) + 2, 4), layout="constrained")
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        places = [
            j + i * width
            for j, c in enumerate(columns)
            if (row, c) in cells and ("jaxllm", c) in cells
        ]
        shares = [
            cells[row, c]["tokens_per_s"] / cells["jaxllm", c]["tokens_per_s"]
            for c in columns
            if (row, c) in cells and ("jaxllm", c) in cells
        ]
        axes.bar(places, shares, width, label=row)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks([j + 0.4 for j in range(len(columns))], columns, rotation=20)
    axes.set_ylabel("tokens/s, relative to jaxllm")
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("folder", type=Path)
    runs.add_argument("--peers", default="jaxllm", help=", ".join(PEERS))
    runs.add_argument("--python", nargs="*", default=[], metavar="hf=PYTHON")
    runs.add_argument("--only", help="columns: " + ", ".join(COLUMNS))
    runs.add_argument("--rounds", type=int, default=2)
    runs.add_argument("--tag", default="", help="of these results, such as 'last'")
    runs.set_defaults(command=run)
    tables = commands.add_parser("table")
    tables.add_argument("folder", type=Path)
    tables.add_argument("--plot", type=Path)
    tables.set_defaults(command=table)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
