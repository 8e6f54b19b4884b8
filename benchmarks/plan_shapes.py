"""What the programs of large models cost on TPUs and GPUs, by the devices' compilers.

    JAX_PLATFORMS=cpu python benchmarks/plan_shapes.py OUT.jsonl [--only NAME] [--platform tpu]

Compiles programs for the models of `shapes/` on the meshes of `RUNS`, and writes one line of JSON
for each; lines that are there already are kept, so that a run can go on. Programs that generate are
compiled with all layers. Training takes minutes for each layer: it comes last, with 1 and with 2
layers, and the table prints the figures for all layers from those two, marked with a tilde: times
grow linearly with the number of equal layers, memory nearly so. The compilers for TPU and GPU
(`pip install 'jaxllm[plan-tpu]'`, `'jaxllm[plan-gpu]'`) are in environments of their own, so that
there is a run for each.

    python benchmarks/plan_shapes.py OUT.jsonl --table
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes"
TRAINING_DEPTHS = (1, 2)
LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer")
FIGURES = (
    "weight_bytes",
    "cache_bytes",
    "peak_bytes",
    "estimated_step_us",
    "floor_step_us",
    "collectives",
    "collective_bytes",
    "collective_us",
    "series_step_us",
    "overlapped_step_us",
    "kernels",
)
"""Figures of a program that are extrapolated."""
TENSOR8, TENSOR4, DATA8, FSDP8, FSDP4 = (
    {"tensor": 8},
    {"tensor": 4},
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4},
)
RUNS: Mapping[str, Sequence[tuple[str, Mapping[str, int] | None, Mapping[str, int] | None]]] = {
    "gpt2-xl": (("v5e:2x4", DATA8, FSDP8), ("v6e:2x4", DATA8, FSDP8), ("h100", None, None)),
    "llama8b": (
        ("v5e:2x4", TENSOR8, FSDP8),
        ("v5e:2x4", {"data": 4, "tensor": 2}, None),
        ("v6e:2x4", TENSOR8, FSDP8),
        ("h100", None, None),
        ("h100:4", TENSOR4, FSDP4),
    ),
    "mistral7b": (
        ("v5e:2x4", TENSOR8, FSDP8),
        ("v6e:2x4", TENSOR8, FSDP8),
        ("h100", None, None),
    ),
    "qwen3-8b": (
        ("v5e:2x4", TENSOR8, FSDP8),
        ("v6e:2x4", TENSOR8, FSDP8),
        ("h100", None, None),
    ),
    "qwen3-32b": (
        ("v5e:2x4", TENSOR8, FSDP8),
        ("v6e:2x4", TENSOR8, FSDP8),
        ("h100:4", TENSOR4, FSDP4),
    ),
    "llama70b": (("v6e:2x4", TENSOR8, FSDP8), ("h100:8", TENSOR8, FSDP8)),
    "flan-t5-xl": (
        ("v5e:2x2", TENSOR4, FSDP4),
        ("v6e:2x2", TENSOR4, FSDP4),
        ("h100", None, None),
    ),
    "t5xxl": (("v5e:2x4", TENSOR8, FSDP8), ("v6e:2x2", TENSOR4, FSDP4), ("h100", None, None)),
}
"""Topologies for each shape, with the mesh for generation and the one for training."""


def workloads(config: Mapping[str, Any]) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, whether it trains, and arguments of `plan` for what is compiled for a model."""
    is_t5, is_gpt2 = config["model_type"] == "t5", config["model_type"] == "gpt2"
    prompt = 512 if is_t5 else 896
    long = 512 if is_t5 else 1008 if is_gpt2 else 8176
    row = 512 if is_t5 else 1024 if is_gpt2 else 4096
    decode = {"prompt": prompt, "new": 128}
    yield "decode, 8 rows", False, {"program": "decode", "batch": 8, **decode}
    yield "batch, 64 slots", False, {"program": "batch", "slots": 64, **decode}
    yield (
        f"prefill, 1 x {long}",
        False,
        {"program": "prefill", "batch": 1, "prompt": long, "new": 16},
    )
    train = {"program": "train", "batch": 8, "prompt": row, "remat": True}
    yield f"train, 8 x {row}", True, train
    yield f"LoRA, 8 x {row}", True, {**train, "lora_rank": 16}


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The config with fewer layers, in the encoder and the decoder."""
    return {**config, **{name: count for name in LAYERS if config.get(name) is not None}}


def compiled(out: Path, platform: str, only: str | None) -> None:
    """Compiles what is not in the file yet, and appends it."""
    from jaxllm.planning import plan

    known = set(inspect.signature(plan).parameters)
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = {key_of(json.loads(line)) for line in lines}
    for training, shape in itertools.product((False, True), RUNS):
        config = json.loads((SHAPES / f"{shape}.json").read_text(encoding="utf-8"))
        for topology, mesh, training_mesh in RUNS[shape]:
            if topology.startswith("h100") != (platform == "gpu") or only not in (None, shape):
                continue
            for name, trains, arguments in workloads(config):
                axes = training_mesh if trains else mesh
                if trains != training or (trains and axes is None and topology.endswith("x4")):
                    continue  # the second mesh of a topology is for generation only
                layers = max(config.get(x) or 0 for x in LAYERS)
                for depth in TRAINING_DEPTHS if trains else (layers,):
                    line = {"shape": shape, "topology": topology, "mesh": axes, "workload": name}
                    line |= {"layers": depth, "of": layers}
                    if key_of(line) in done or not arguments.keys() <= known:
                        continue
                    line |= planned(with_layers(config, depth), topology, axes, arguments)
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    print(line, flush=True)


def planned(
    config: Mapping[str, Any], topology: str, mesh: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of the programs, or the error with which planning ended."""
    from jaxllm.planning import plan

    try:
        result = plan(config, topology, mesh=mesh, **arguments)
    except Exception as error:  # each is a finding of its own
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"programs": result.to_dict()["programs"]}


def key_of(line: Mapping[str, Any]) -> str:
    """What a line is about."""
    return json.dumps([line[x] for x in ("shape", "topology", "mesh", "workload", "layers")])


def rows(out: Path) -> Iterator[dict[str, Any]]:
    """The figures of each program for all layers, from those with fewer."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for text in out.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found.setdefault(key_of(line | {"layers": 0}), {})[line["layers"]] = line
    for lines in found.values():
        low, *others = (lines[depth] for depth in sorted(lines))
        whole = low["layers"] == low["of"]
        if not whole and not others:
            continue
        high = low if whole else others[0]
        name = {x: low[x] for x in ("shape", "topology", "mesh", "workload")}
        if "error" in low or "error" in high:
            yield {**name, "error": low.get("error") or high.get("error")}
            continue
        for a, b in zip(low["programs"], high["programs"], strict=True):
            figures = a if whole else extrapolated(a, b, low["of"])
            yield {**name, "program": a["name"], "extrapolated": not whole, **figures}


def extrapolated(low: Mapping[str, Any], high: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Figures for all layers, from those of two depths."""
    few, more = TRAINING_DEPTHS
    figures = {}
    for name in FIGURES:
        a, b = low.get(name), high.get(name)
        figures[name] = (
            None if a is None or b is None else a + (b - a) * (layers - few) / (more - few)
        )
    # The peak grows linearly only where the same arrays are alive at it.
    if (figures["peak_bytes"] or 0) < (figures["weight_bytes"] or 0):
        figures["peak_bytes"] = None
    if low.get("mfu") and high.get("mfu"):
        ideal = [x["mfu"] * x["series_step_us"] for x in (low, high)]
        model_us = ideal[0] + (ideal[1] - ideal[0]) * (layers - few) / (more - few)
        figures["mfu"] = model_us / figures["series_step_us"]
        figures["overlapped_mfu"] = model_us / figures["overlapped_step_us"]
    return figures


def table(out: Path) -> Iterator[str]:
    """The rows as a table in Markdown; figures from fewer layers are marked with a tilde."""
    heads = ("shape", "topology", "mesh", "program", "peak GB", "estimate ms", "floor ms")
    heads += ("collectives ms", "in series ms", "overlapped ms", "MFU", "kernels")
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows(out):
        mesh = ",".join(f"{axis}={size}" for axis, size in (row["mesh"] or {}).items() if size > 1)
        mesh = mesh or "1"
        program = row.get("program", "")
        workload = row["workload"]
        name = f"{program}: {workload}" if program.startswith("batch") else workload
        name = f"~ {name}" if row.get("extrapolated") else name
        cells = [row["shape"], row["topology"], mesh, name]
        if "error" in row:
            yield "| " + " | ".join([*cells, row["error"]]) + " |"
            continue
        times = ("estimated_step_us", "floor_step_us", "collective_us", "series_step_us")
        cells.append(number(row["peak_bytes"], 1e9))
        cells += [number(row.get(x), 1e3) for x in (*times, "overlapped_step_us")]
        mfu = row.get("mfu")
        cells.append("" if mfu is None else f"{mfu:.0%} / {row['overlapped_mfu']:.0%}")
        cells.append(number(row["kernels"], 1).removesuffix(".00"))
        yield "| " + " | ".join(cells) + " |"


def number(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--platform", choices=("tpu", "gpu"), default="tpu")
    parser.add_argument("--only", metavar="NAME", choices=tuple(RUNS))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(arguments.out)))
    else:
        compiled(arguments.out, arguments.platform, arguments.only)


if __name__ == "__main__":
    main()
