"""How many kernels a layer takes in a decode step on a GPU, and how many bytes they move.

    JAX_PLATFORMS=cpu python benchmarks/gpu_kernels.py [--only TEXT] [--show] [--apart]

No GPU is needed: XLA compiles for an H100 (`pip install 'jaxllm[plan-gpu]'`). Each case of `CASES`
is compiled with 2 and with 4 layers, and the figures of a layer are half of the difference. On a
GPU, XLA also measures the kernels of each product, and may choose others than it does here.

    --show   also lists the kernels of a step with 2 layers
    --apart  leaves projections apart, which `jaxllm.models.join_projections` joins otherwise
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from plan_shapes import SHAPES, with_layers

from jaxllm.models import join_projections
from jaxllm.planning import abstract_model, find_topology, hlo, lower

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama-8B, 1 row": ("llama8b", {"batch": 1}),
    "Llama-8B, 64 rows": ("llama8b", {"batch": 64}),
    "Llama-8B, 256 rows": ("llama8b", {"batch": 256}),
    "Flan-T5-XL, 8 rows": ("flan-t5-xl", {"batch": 8}),
    "Flan-T5-XL, 64 rows": ("flan-t5-xl", {"batch": 64}),
    "Flan-T5-XL, 8 rows, 4 beams": ("flan-t5-xl", {"batch": 8, "num_beams": 4}),
    "GPT-2-XL, 1 row": ("gpt2-xl", {"batch": 1}),
    "GPT-2-XL, 8 rows": ("gpt2-xl", {"batch": 8}),
}
"""Name -> shape, and arguments of `jaxllm.planning.lower`."""
SIZES = {"prompt": 512, "new": 128}


def step_of(
    shape: str, layers: int, arguments: Mapping[str, Any], *, apart: bool
) -> tuple[hlo.Module, str]:
    """The compiled program of a model with so many layers, and the name of its decode step."""
    config = json.loads((SHAPES / f"{shape}.json").read_text(encoding="utf-8"))
    device = find_topology("h100").devices[0]
    model = abstract_model(with_layers(config, layers), device=device)
    model = model if apart else join_projections(model)
    (program,) = lower(model, "decode", **SIZES, **arguments)
    module = hlo.Module.parse(program.compile().as_text() or "")
    return module, module.main_loop(program.loops)


def moved_bytes(module: hlo.Module, step: str) -> int:
    """Bytes that the kernels of a step read and write, each array once for each kernel.

    Of an array that a kernel only slices or updates, the part that it reads or writes counts.
    """
    types = {x.name: x.type for own in module.computations.values() for x in own}

    def nbytes(name: str) -> int:
        return sum(x.nbytes for x in hlo.array_types(types.get(name, "")))

    def read(fused: tuple[hlo.Instruction, ...], parameter: str) -> int:
        users = [x for x in fused if parameter in x.operands]
        if users and all(x.opcode in ("bitcast", "copy") for x in users):
            return max(read(fused, x.name) for x in users)
        if users and all(x.opcode in ("slice", "dynamic-slice", "gather") for x in users):
            return min(nbytes(parameter), sum(nbytes(x.name) for x in users))
        updated = all(
            x.opcode == "dynamic-update-slice" and x.operands[0] == parameter for x in users
        )
        return 0 if users and updated else nbytes(parameter)

    def moved(x: hlo.Instruction) -> int:
        if x.opcode in hlo.NO_KERNEL or x.opcode.endswith("-done"):
            return 0
        (name,) = x.called("calls") or [""]
        fused = module.computations.get(name, ())
        if not fused:
            return sum(map(nbytes, x.operands)) + nbytes(x.name)
        updates = [y for y in fused if y.opcode == "dynamic-update-slice"]
        written = sum(nbytes(y.operands[1]) for y in updates) if updates else nbytes(x.name)
        return written + sum(read(fused, y.name) for y in fused if y.opcode == "parameter")

    return module.total(step, moved)


def listed(module: hlo.Module, step: str) -> Iterator[str]:
    """Each kernel of a step: its name and the arrays that it writes."""
    for x in module.computations[step]:
        if x.opcode not in hlo.NO_KERNEL and not x.opcode.endswith("-done"):
            arrays = (f"{y.dtype}{list(y.shape)}" for y in hlo.array_types(x.type))
            yield f"    {x.name:40} {', '.join(arrays)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--show", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--apart", action="store_true", help="leave projections apart")
    options = parser.parse_args()
    for name, (shape, arguments) in CASES.items():
        if options.only not in name:
            continue
        small, large = (step_of(shape, n, arguments, apart=options.apart) for n in (2, 4))
        kernels, moved = (
            (count(*large) - count(*small)) / 2 for count in (hlo.kernels, moved_bytes)
        )
        print(f"{name}: {kernels:g} kernels and {moved / 1e6:,.1f} MB a layer", flush=True)
        if options.show:
            print("\n".join(listed(*small)))


if __name__ == "__main__":
    main()
