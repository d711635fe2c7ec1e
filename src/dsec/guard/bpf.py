"""A small assembler for seccomp programs: a decision tree over system call numbers, and checks on arguments below it.

The kernel emulates a filter once per system call number when it is loaded, to learn which numbers are always allowed. A tree of ten
comparisons instead of a list of hundreds makes that, the JIT and every filtered call cheap; that is why the program is not libseccomp's
list.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

LD, JEQ, JGE, JSET, AND, RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NR, ARCH = 0, 4


def arg(index: int) -> int:
    """Offset of the low 32 bits of an argument (little endian)."""
    return 16 + 8 * index


@dataclass(frozen=True)
class Instruction:
    """One instruction; jump targets are labels until assembly."""

    code: int
    k: int = 0
    yes: str | None = None
    no: str | None = None
    label: str | None = None


class Program:
    """Instructions with labels, in order. Jumps go forward only, as the kernel demands."""

    def __init__(self) -> None:
        self._code: list[Instruction] = []
        self._pending: str | None = None
        self._count = 0

    def fresh(self, hint: str) -> str:
        """A label that is not used yet."""
        self._count += 1
        return f"{hint}#{self._count}"

    def mark(self, label: str) -> None:
        """The next instruction has this label."""
        if self._pending is not None:
            raise ValueError(f"labels {self._pending} and {label} on one instruction")
        self._pending = label

    def _add(self, code: int, k: int = 0, yes: str | None = None, no: str | None = None) -> None:
        self._code.append(Instruction(code, k, yes, no, self._pending))
        self._pending = None

    def load(self, offset: int) -> None:
        """A = 32 bits of struct seccomp_data."""
        self._add(LD, offset)

    def mask(self, k: int) -> None:
        """A &= k."""
        self._add(AND, k)

    def jump(self, code: int, k: int, yes: str | None = None, no: str | None = None) -> None:
        """Conditional jump; None goes on with the next instruction."""
        self._add(code, k, yes, no)

    def ret(self, action: int) -> None:
        """The answer."""
        self._add(RET, action)

    def assemble(self) -> bytes:
        """struct sock_filter[]. ValueError for a jump that is longer than its 8 bits, or backward: then the layout must change."""
        where = {instruction.label: at for at, instruction in enumerate(self._code) if instruction.label}
        out = b""
        for at, i in enumerate(self._code):
            yes, no = (where[label] - at - 1 if label else 0 for label in (i.yes, i.no))
            if not (0 <= yes <= 255 and 0 <= no <= 255):
                raise ValueError(f"instruction {at} jumps too far: {i}")
            out += struct.pack("<HBBI", i.code, yes, no, i.k)
        return out


def tree(program: Program, targets: Mapping[int, str], default: str, top: int) -> None:
    """Decide on A, a number in [0, top): numbers map to labels, all others to `default`. Neighbours with one target are one range."""
    starts: list[tuple[int, str]] = []
    for number in range(top):
        target = targets.get(number, default)
        if not starts or starts[-1][1] != target:
            starts.append((number, target))

    def emit(low: int, high: int) -> None:
        middle = (low + high + 1) // 2
        right = program.fresh("tree") if high - middle > 0 else starts[middle][1]
        left = program.fresh("tree") if middle - 1 - low > 0 else starts[low][1]
        program.jump(JGE, starts[middle][0], right, left)
        if middle - 1 - low > 0:
            program.mark(left)
            emit(low, middle - 1)
        if high - middle > 0:
            program.mark(right)
            emit(middle, high)

    if len(starts) == 1:
        program.jump(JGE, 0, starts[0][1], starts[0][1])
    else:
        emit(0, len(starts) - 1)
