"""How many kernels a layer takes on a GPU, how many bytes they move, and what is outside of layers.

    JAX_PLATFORMS=cpu python benchmarks/gpu_kernels.py [--only TEXT] [--show] [--apart] [--mosaic]

No GPU is needed: XLA compiles for an H100 (`pip install 'jaxllm[plan-gpu]'`). Each case of `CASES`
is compiled with 2 and with 4 layers. The figures of a layer are half of the difference. The rest of
the program is outside of layers: the embedding, the head, and in training the loss and the update
of the head. A step of decoding is one iteration of the loop. On a GPU, XLA also measures the
kernels of each product, and may choose others than it does here.

    --show   also lists the kernels of a step with 2 layers
    --apart  leaves projections apart, which `jaxllm.models.join_projections` joins otherwise
    --mosaic attends in a kernel of jaxllm's own (jaxllm/nn/platform/mosaic.py)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping

from plan_shapes import SHAPES, with_layers

from jaxllm.models import join_projections
from jaxllm.planning import abstract_model, find_topology, hlo, lower
from jaxllm.planning.abstract import with_lora


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of a model; all computation is in bfloat16."""

    shape: str
    """Name of a file in `shapes`."""
    sizes: Mapping[str, int]
    """Arguments of `jaxllm.planning.lower`."""
    program: str = "decode"
    param_dtype: str = "bfloat16"
    lora_rank: int | None = None


CASES = {
    "Llama-8B, 1 row": Case("llama8b", {"batch": 1}),
    "Llama-8B, 64 rows": Case("llama8b", {"batch": 64}),
    "Llama-8B, 256 rows": Case("llama8b", {"batch": 256}),
    "Flan-T5-XL, 8 rows": Case("flan-t5-xl", {"batch": 8}),
    "Flan-T5-XL, 64 rows": Case("flan-t5-xl", {"batch": 64}),
    "Flan-T5-XL, 8 rows, 4 beams": Case("flan-t5-xl", {"batch": 8, "num_beams": 4}),
    "GPT-2-XL, 1 row": Case("gpt2-xl", {"batch": 1}),
    "GPT-2-XL, 8 rows": Case("gpt2-xl", {"batch": 8}),
    "Llama-8B, prefill of 8 x 2,048": Case("llama8b", {"batch": 8, "prompt": 2048}, "prefill"),
    "Llama-1B, training, 8 x 1,024, float32 weights": Case(
        "llama1b", {"batch": 8, "prompt": 1024}, "train", "float32"
    ),
    "Llama-8B, LoRA, 4 x 1,024": Case(
        "llama8b", {"batch": 4, "prompt": 1024}, "train", lora_rank=16
    ),
}
SIZES = {"prompt": 512, "new": 128}
PASSED_ON = ("bitcast", "convert", "copy")
"""Operations of a fused kernel that read no more of an array than their users do."""
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write a part of their first operand, and which operand they write there."""


def step_of(case: Case, layers: int, *, apart: bool, attention: str) -> tuple[hlo.Module, str, int]:
    """The compiled program of a model with so many layers, the name of the computation that is a
    step, and the bytes of its temporary memory."""
    config = json.loads((SHAPES / f"{case.shape}.json").read_text(encoding="utf-8"))
    device = find_topology("h100").devices[0]
    config = with_layers(config, layers)
    options = {"param_dtype": case.param_dtype, "attn_implementation": attention}
    model = abstract_model(config, device=device, **options)
    if case.lora_rank is not None:
        model = with_lora(model, case.lora_rank)
    if case.program != "train" and not apart:
        model = join_projections(model)
    (program,) = lower(model, case.program, **{**SIZES, **case.sizes})
    compiled = program.compile()
    module = hlo.Module.parse(compiled.as_text() or "")
    step = module.main_loop(program.loops) if program.loops else module.entry
    memory = compiled.memory_analysis()
    return module, step, 0 if memory is None else memory.temp_size_in_bytes


def moved_bytes(module: hlo.Module, step: str) -> int:
    """Bytes that the kernels of a step read and write, each array once for each kernel.

    Of an array that a kernel only slices or updates, the part that it reads or writes counts.
    """
    types = {x.name: x.type for own in module.computations.values() for x in own}

    def nbytes(name: str) -> int:
        return sum(x.nbytes for x in hlo.array_types(types.get(name, "")))

    def size(name: str) -> int:
        return sum(x.size for x in hlo.array_types(types.get(name, "")))

    def share(fused: tuple[hlo.Instruction, ...], name: str) -> float:
        """The share of an array that a kernel reads."""
        users = [x for x in fused if name in x.operands]
        if users and all(x.opcode in PASSED_ON for x in users):
            return max(share(fused, x.name) for x in users)
        if users and all(x.opcode in ("slice", "dynamic-slice", "gather") for x in users):
            return min(1.0, sum(size(x.name) for x in users) / size(name))
        updated = all(x.opcode in UPDATES and x.operands[0] == name for x in users)
        return 0.0 if users and updated else 1.0

    def moved(x: hlo.Instruction) -> int:
        if x.opcode in hlo.NO_KERNEL or x.opcode.endswith("-done"):
            return 0
        (name,) = x.called("calls") or [""]
        fused = module.computations.get(name, ())
        if not fused:
            outputs = hlo.array_types(x.type)
            # The other outputs of the kernel of attention are the cache, to which it writes a
            # column.
            outputs = outputs[:1] if "output_to_operand_aliasing" in x.attributes else outputs
            return sum(map(nbytes, x.operands)) + sum(y.nbytes for y in outputs)
        updates = [y.operands[UPDATES[y.opcode]] for y in fused if y.opcode in UPDATES]
        written = sum(map(nbytes, updates)) if updates else nbytes(x.name)
        parameters = [y.name for y in fused if y.opcode == "parameter"]
        return written + round(sum(share(fused, y) * nbytes(y) for y in parameters))

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
    parser.add_argument("--mosaic", action="store_true", help="attend in jaxllm's own kernel")
    options = parser.parse_args()
    for name, case in CASES.items():
        if options.only not in name:
            continue
        form = {"apart": options.apart, "attention": "mosaic" if options.mosaic else "auto"}
        small, large = (step_of(case, n, **form) for n in (2, 4))
        few, many = (
            [count(*program[:2]) for count in (hlo.kernels, moved_bytes)]
            for program in (small, large)
        )
        layer = [(b - a) / 2 for a, b in zip(few, many, strict=True)]
        outside = [a - 2 * x for a, x in zip(few, layer, strict=True)]
        for where, (kernels, moved) in (("a layer", layer), ("outside of layers", outside)):
            print(f"{name}: {kernels:g} kernels and {moved / 1e6:,.1f} MB {where}")
        print(f"{name}: {small[2] / 1e9:.2f} GB of temporary memory with 2 layers", flush=True)
        if options.show:
            print("\n".join(listed(*small[:2])))


if __name__ == "__main__":
    main()
