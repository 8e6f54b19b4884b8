"""Instructions and array types in the text of optimized HLO.

XLA's own description of the text: https://openxla.org/xla/operation_semantics. On a TPU every
operation carries the compiler's estimate of its cycles.
"""

from __future__ import annotations

import dataclasses
import math
import re

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
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")

HLO_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8"}
"""HLO's names of the dtypes that a KV cache can have."""


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
