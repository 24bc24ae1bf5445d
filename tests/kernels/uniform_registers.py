"""Finds uniform registers that machine code reads and never wrote: ptxas 12.8 compiles such code where a kernel has many GEMMs.

A uniform register has one value for a warp, such as the address of a GEMM's operand in shared memory. On Hopper GPUs the operands of a
GEMM from shared memory are descriptors in four of them, `gdesc[UR4]` being UR4 to UR7; with its first operand in other registers only the
last two are read. What is in the first two then does not matter.

A read is reported if no path from the kernel's start to it writes the register, so a report is never wrong, but code may be wrong without
one: a register may be written on one path alone, or with another value. Both faults of ptxas that these kernels have had are found.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P[T\d]+\s+)?(?P<code>\S+)\s*(?P<operands>.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+)")
_UNIFORM_RESULT = re.compile(r"U|S2UR|R2UR|CS2UR|REDUX|VOTE")
_TWO_REGISTERS = re.compile(r"\.64\b|WIDE")
_REGISTER = re.compile(r"(?P<descriptor>g?desc)?\[?UR(?P<number>\d+)")
_BRANCHES, _ENDS = ("BRA", "CALL", "JMP"), ("BRA", "EXIT", "RET", "JMP")


class _Instruction(NamedTuple):
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    target: str | None
    falls_through: bool


def unwritten_reads(disassembly: str) -> list[str]:
    """Returns the instructions of a kernel, as nvdisasm prints it, that read a uniform register which nothing before them wrote."""
    instructions, labels = _parse(disassembly)
    assert instructions, "no instruction was recognized"
    written: list[frozenset[int] | None] = [None] * len(instructions)
    written[0] = frozenset()
    waiting = [0]
    while waiting:
        index = waiting.pop()
        instruction, before = instructions[index], written[index]
        assert before is not None
        followers = [index + 1] if instruction.falls_through else []
        followers += [] if instruction.target is None else [labels[instruction.target]]
        for follower in followers:
            if follower < len(instructions):
                known = written[follower]
                union = before | instruction.writes | (known or frozenset())
                if union != known:
                    written[follower] = union
                    waiting.append(follower)
    return [
        each.text
        for each, before in zip(instructions, written, strict=True)
        if before is not None and each.reads - before
    ]


def _parse(disassembly: str) -> tuple[list[_Instruction], dict[str, int]]:
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        if found := _INSTRUCTION.search(line):
            instructions.append(_instruction(found["guard"], found["code"], found["operands"]))
    return instructions, labels


def _instruction(guard: str | None, code: str, text: str) -> _Instruction:
    operands, writes = [each.strip() for each in text.split(",")], frozenset[int]()
    result = re.fullmatch(r"UR(\d+)", operands[0])
    if result and _UNIFORM_RESULT.match(code):
        writes, operands = _registers(int(result[1]), 2 if _TWO_REGISTERS.search(code) else 1), operands[1:]
    reads = frozenset[int]()
    for operand in operands:
        for register in _REGISTER.finditer(operand):
            first, width = int(register["number"]), 2 if register["descriptor"] == "desc" else 1
            if register["descriptor"] == "gdesc":
                first, width = (first + 2, 2) if re.match(r"R\d", operands[1]) else (first, 4)
            reads |= _registers(first, width)
    target = _LABEL.search(text) if code.startswith(_BRANCHES) else None
    conditional = guard is not None or re.search(r"\bU?P\d", text) is not None
    falls_through = conditional or not code.startswith(_ENDS)
    return _Instruction(f"{code} {text}", reads, writes, target[1] if target else None, falls_through)


def _registers(first: int, width: int) -> frozenset[int]:
    return frozenset(range(first, first + width))
