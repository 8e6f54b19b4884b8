"""Optimized HLO as a program: instructions, loops and their trips, counts of operations.

XLA's own description of the text: https://openxla.org/xla/operation_semantics. On a TPU every
operation carries the compiler's estimate of its cycles.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

N = TypeVar("N", int, float)
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)([^}]*)\})?")
_BRACKETS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPERAND = re.compile(r"(?:^|[\s,])%?([\w.\-]+)\s*(?=,|$)")
_GROUP_COUNT = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_NAMED_GROUP = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")

HLO_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8"}
"""HLO's names of the dtypes that a KV cache can have."""
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
NO_KERNEL = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "while",
    "conditional",
    "call",
)
"""Operations that launch nothing by themselves. Neither do those that end in ``-done``."""
UNCOSTED = ("custom-call", "scatter", "sort", "topk")
NO_WORK = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "Sharding",
    "ZeroCrop",
)
"""Custom calls that compute nothing, or are counted as collectives."""
RELAYOUTS = ("copy", "transpose", "copy-start")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Dtype, shape and place of an array."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    """Order of the dimensions in memory, the fastest first, as ``"2,1,0"``."""
    space: str
    """Number of the memory space, "0" if it is the device's main memory."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes; two entries of int4 share one."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (8 if bits is None else int(bits[0])) // 8


def array_types(text: str) -> list[ArrayType]:
    """The array types in the text of an instruction's type, which may be a tuple.

    >>> array_types("(bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, s32[])")[0]
    ArrayType(dtype='bfloat16', shape=(8, 64), layout='1,0', space='1')
    """
    types = []
    for dtype, shape, layout, tiling in _ARRAY.findall(text):
        sizes = tuple(int(size) for size in shape.split(",") if size)
        space = _MEMORY_SPACE.search(tiling)
        name = HLO_DTYPES.get(dtype) or dtype
        types.append(ArrayType(name, sizes, layout, space[1] if space else "0"))
    return types


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it gives none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    def called(self, *kinds: str) -> list[str]:
        """Names of the computations that it calls, all or those of some attributes."""
        names = []
        for kind, name, branches in _CALLED.findall(self.attributes):
            if kind and (not kinds or kind in kinds):
                names.append(name)
            elif branches and (not kinds or "branch_computations" in kinds):
                names += [branch.strip().lstrip("%") for branch in branches.split(",")]
        return names


def read_instruction(line: str) -> Instruction | None:
    """Reads ``%name = type opcode(operands), attributes``; None for other lines."""
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    end = _end_of_type(line, head.end())
    opcode, bracket, _ = line[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    if not bracket or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        return None
    close = _closing(line, start)
    return Instruction(
        name=head[2],
        type=line[head.end() : end],
        opcode=opcode,
        operands=_operands(line[start + 1 : close]),
        attributes=line[close + 1 :],
        is_root=head[1] is not None,
    )


def _end_of_type(line: str, start: int) -> int:
    """Index of the first space outside brackets, after a type."""
    if line[start] == "(":
        return _closing(line, start) + 1
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(line: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for found in _BRACKETS.finditer(line, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(line)


def _operands(text: str) -> tuple[str, ...]:
    """Names of the operands, or the value of a constant."""
    return tuple(_OPERAND.findall(_COMMENT.sub("", text)))


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the name of the one that runs first."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @staticmethod
    def parse(text: str) -> Module:
        """Reads what `jax.stages.Compiled.as_text` returns."""
        computations: dict[str, list[Instruction]] = {}
        entry, lines = "", None
        for line in text.split("\n"):
            # Attributes of a Pallas kernel have lines of their own, which may begin with "}".
            if line.rstrip() == "}":
                lines = None
            elif lines is not None:
                if (instruction := read_instruction(line)) is not None:
                    lines.append(instruction)
            elif (header := _HEADER.match(line)) is not None:
                lines = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        if not entry:
            raise ValueError("not the text of an HLO module: it has no ENTRY computation")
        return Module({name: tuple(found) for name, found in computations.items()}, entry)

    def reachable(self, start: str) -> Iterator[Instruction]:
        """All instructions of a computation and of those it calls, once for each call."""
        for instruction in self.computations.get(start, ()):
            yield instruction
            for name in instruction.called():
                yield from self.reachable(name)

    def main_loop(self, depth: int = 1) -> str:
        """Body of the outermost loop with the most instructions; the entry if there is no loop.

        Args:
            depth: 2 for the body of such a loop inside that one, and so on.
        """

        def length(body: str) -> int:
            return sum(1 for _ in self.reachable(body))

        step = self.entry
        for _ in range(depth):
            bodies = [body for loop in self.outer_loops(step) for body in loop.called("body")]
            step = max(bodies, key=length, default=step)
        return step

    def outer_loops(self, start: str) -> Iterator[Instruction]:
        """The loops of a computation that are not inside of another loop."""
        for instruction in self.computations.get(start, ()):
            if instruction.opcode == "while":
                yield instruction
            else:
                for name in instruction.called():
                    yield from self.outer_loops(name)

    def trips(self, loop: Instruction) -> int | None:
        """Number of iterations of a loop, if it is a constant of the program.

        XLA states it for some backends; otherwise the condition is read, if it compares a counter
        that starts at 0 with a constant.
        """
        if (known := _KNOWN_TRIPS.search(loop.attributes)) is not None:
            return int(known[1])
        (condition,) = loop.called("condition")
        instructions = {x.name: x for x in self.computations.get(condition, ())}
        root = next((x for x in instructions.values() if x.is_root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, limit = (instructions.get(name) for name in root.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element":
            return None
        value = re.fullmatch(r"-?\d+", limit.operands[0]) if limit.operands else None
        return int(value[0]) if limit.opcode == "constant" and value is not None else None

    def total(self, start: str, value: Callable[[Instruction], N]) -> N:
        """Sum of a value over what one run of a computation executes: bodies of loops times their
        trips (1 where they are unknown), and of the branches of a conditional the largest."""
        result: Any = 0
        for instruction in self.computations.get(start, ()):
            result += value(instruction)
            if instruction.opcode == "while":
                (body,) = instruction.called("body")
                trips = self.trips(instruction)
                result += (1 if trips is None else trips) * self.total(body, value)
            elif instruction.opcode == "conditional":
                result += max((self.total(x, value) for x in instruction.called()), default=0)
            elif instruction.opcode == "call":
                result += sum(self.total(x, value) for x in instruction.called())
        return result


def cycles(module: Module, step: str) -> int:
    """The compiler's estimate of the cycles of one step; TPU only."""
    return module.total(step, lambda instruction: instruction.cycles)


def kernels(module: Module, step: str) -> int:
    """Operations that one step launches on the device; those in loops count once for each trip."""

    def one(instruction: Instruction) -> int:
        opcode = instruction.opcode
        return 0 if opcode in NO_KERNEL or opcode.endswith("-done") else 1

    return module.total(step, one)


def inner_loops(module: Module, step: str) -> int:
    """Number of while loops in a step."""
    return sum(instruction.opcode == "while" for instruction in module.reachable(step))


def collectives(module: Module, step: str) -> int:
    """Number of collective operations in a step; one that starts and ends counts once."""
    return sum(
        1 for instruction in _unfused(module, step) for _ in collectives_of(module, instruction)
    )


def _unfused(module: Module, start: str) -> Iterator[Instruction]:
    """All instructions of a computation and of those that it calls, but not of fusions."""
    for instruction in module.computations.get(start, ()):
        yield instruction
        if instruction.opcode not in ("fusion", "call-start", "async-start"):
            for name in instruction.called():
                yield from _unfused(module, name)


def collectives_of(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, bool]]:
    """Collective operations that an instruction begins, and whether others run meanwhile.

    A TPU's compiler puts collectives into calls, which its sparse cores run, or into fusions:
    asynchronous ones into one that starts them, one that ends them, and fusions of products between
    the two, which move them on.
    """
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        yield instruction, instruction.opcode.endswith("-start")
    elif instruction.opcode in ("call-start", "async-start"):
        for name in instruction.called():
            for x in module.computations.get(name, ()):
                if x.opcode in COLLECTIVES:
                    yield x, True
    elif instruction.opcode == "fusion":
        for name in instruction.called():
            inner = module.computations.get(name, ())
            found = (_TARGET.search(x.attributes) for x in inner if x.opcode == "custom-call")
            targets = {target[1] for target in found if target is not None}
            if name.startswith("async_collective_fusion") or "AsyncCollectiveDone" in targets:
                continue
            for x in inner:
                if name.startswith("all-reduce-scatter") and x.opcode == "all-reduce":
                    yield replace(x, opcode="reduce-scatter", type=instruction.type), False
                elif x.opcode in COLLECTIVES:
                    yield x, "AsyncCollectiveStart" in targets


def transferred_bytes(instruction: Instruction, devices: int) -> float:
    """Bytes that a device sends in a collective operation, in the ring algorithm; 0 for others.

    An all-gather of arrays that are B bytes in the end sends ``B * (n - 1) / n`` between n devices,
    an all-reduce twice as many.

    Args:
        devices: number of devices of the program.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in COLLECTIVES:
        return 0.0
    size = sum(x.nbytes for x in array_types(instruction.type))
    n = group_size(instruction, devices)
    if instruction.opcode.endswith("-start") and opcode != "all-reduce":
        # The type lists operands and results.
        size = size / 2 if opcode == "collective-permute" else size * n / (n + 1)
    elif opcode == "reduce-scatter":
        size *= n
    if opcode in ("collective-permute", "collective-broadcast"):
        return float(size)
    return (2.0 if opcode == "all-reduce" else 1.0) * size * (n - 1) / n


def group_size(instruction: Instruction, devices: int) -> int:
    """Number of devices that take part in a collective operation together."""
    if "collective-permute" in instruction.opcode:
        return 2
    named = _NAMED_GROUP.search(instruction.attributes)
    if named is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    counted = _GROUP_COUNT.search(instruction.attributes)
    if counted is not None:
        return int(counted[1])
    listed = _GROUP.search(instruction.attributes)
    return devices if listed is None else listed[1].count(",") + 1


def uncosted(module: Module, step: str) -> dict[str, tuple[int, int]]:
    """Operations of a step for which the compiler estimates no cycles although they take some, by
    name: Pallas kernels, scatters, sorts. Collectives are counted elsewhere.

    Returns:
        For each name how many operations there are, and the bytes that they read and write at
        least. A scatter writes its updates into an array that it does not read.
    """
    found: dict[str, tuple[int, int]] = {}
    types = {x.name: x.type for instructions in module.computations.values() for x in instructions}
    for instruction in module.reachable(step):
        opcode = instruction.opcode
        if opcode not in UNCOSTED or instruction.cycles:
            continue
        target = _TARGET.search(instruction.attributes)
        name = target[1] if opcode == "custom-call" and target is not None else opcode
        if name not in NO_WORK:
            read = [_nbytes(types.get(operand, "")) for operand in instruction.operands]
            written = read[-1] if opcode == "scatter" else _nbytes(instruction.type)
            moved = sum(read[len(read) // 3 :] if opcode == "scatter" else read) + written
            count, nbytes = found.get(name, (0, 0))
            found[name] = (count + 1, nbytes + moved)
    return found


def _nbytes(text: str) -> int:
    """Bytes of the arrays in the text of a type."""
    return sum(x.nbytes for x in array_types(text))


def branch_cycles(module: Module, step: str) -> list[list[int]]:
    """The compiler's estimates of the branches of each conditional of a step; TPU only."""
    return [
        [cycles(module, branch) for branch in instruction.called()]
        for instruction in _unfused(module, step)
        if instruction.opcode == "conditional"
    ]


def array_copies(module: Module, arrays: Iterable[tuple[str, int]]) -> int:
    """Number of copies of certain arrays anywhere in the program, in a fusion or not.

    The source of such a copy is an array in memory: inside a fusion, an operand of the fusion, or
    a result of the fusion's operations on a whole operand. A value that the fusion computes from
    other arrays is written once, in the layout of the result. This is how a GPU's prefill writes
    keys and values into the cache, and it is not a copy. A move between the memory spaces of a chip
    in the same layout is not counted either: the compiler fetches small arrays ahead of their use.

    Args:
        arrays: dtype and number of elements of each array.
    """
    counted = set(arrays)
    every = (x for instructions in module.computations.values() for x in instructions)
    fused = {name for x in every if x.opcode == "fusion" for name in x.called("calls")}
    count = 0
    for name, instructions in module.computations.items():
        stored: dict[str, ArrayType] = {}
        for x in instructions:
            result = next(iter(array_types(x.type)), None)
            if result is None or (result.dtype, result.size) not in counted:
                continue
            source = next((stored[operand] for operand in x.operands if operand in stored), None)
            if source is not None or name not in fused or x.opcode == "parameter":
                stored[x.name] = result
            if source is not None and x.opcode in RELAYOUTS:
                count += result.space == source.space or result.layout != source.layout
    return count
