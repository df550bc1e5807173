"""PTX text to instructions (PTX ISA, chapter "Syntax"): what Triton and LLVM write, one kernel a file."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rlkernel_triton.orders.errors import UnknownPtxError

_WIDTHS: Final = {"pred": 1, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64, "u32": 32, "s32": 32, "u64": 64}
_WIDTHS_OF_PARAMETERS: Final = {"8": 1, "16": 2, "32": 4, "64": 8}


class Operand(NamedTuple):
    """One operand."""

    kind: str  # "register", "number", "special", "symbol", "place", "box", "vector", "pair"
    name: str = ""  # of a register, a special register, a symbol, the base of a place or the descriptor of a box
    value: int = 0  # the bits of a number, or the offset of a place
    parts: tuple[Operand, ...] = ()  # of a vector or of a pair "p|q"; the coordinates of a box


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    text: str
    name: str  # "add", first part of the opcode
    parts: tuple[str, ...]  # what follows it: ("rn", "f32")
    operands: tuple[Operand, ...]
    guard: str = ""  # predicate register; "" for none
    unless: bool = False  # whether it runs where the guard is false

    @property
    def kind(self) -> str:
        """The last type that the opcode names."""
        return self.parts[-1]


@dataclass(frozen=True)
class PtxKernel:
    """A kernel's code."""

    name: str
    target: str  # "sm_90a"
    parameters: tuple[tuple[str, int, int], ...]  # (name, offset, bytes)
    threads: int  # of a block
    widths: dict[str, int]  # bits of registers, by name; 1 for a predicate
    code: tuple[Instruction, ...]
    labels: dict[str, int]  # name -> position in the code
    shared: dict[str, int]  # variables in shared memory -> address
    fusable: int  # additions that ptxas may fuse with the product that they add


def _number(text: str) -> int | None:
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return int(found[1], 16)
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return int(found[1], 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    if re.fullmatch(r"-?\d+\.\d+", text):
        return int(struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return None


def _split(text: str) -> Iterator[str]:
    """Operands at the commas outside brackets and braces."""
    depth, start = 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def operand(text: str) -> Operand:
    """One operand.

    Raises:
        UnknownPtxError: it is nothing that is known.
    """
    text = text.strip()
    if text.startswith("{"):
        return Operand("vector", parts=tuple(operand(t) for t in _split(text.strip("{} "))))
    if text.startswith("["):
        if box := re.fullmatch(r"\[\s*(%\w+)\s*,\s*(\{.*\})\s*\]", text):
            return Operand("box", box[1], parts=operand(box[2]).parts)
        found = re.fullmatch(r"\[\s*([\w$%.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if not found:
            raise UnknownPtxError(f"the address {text} is not modeled")
        return Operand("place", found[1], int(found[2] or "0", 0))
    if "|" in text:
        return Operand("pair", parts=tuple(operand(t) for t in text.split("|")))
    value = _number(text)
    if value is not None:
        return Operand("number", value=value)
    if re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.[xyz]|%(laneid|warpid)", text):
        return Operand("special", text[1:])
    return Operand("register" if text.startswith("%") else "symbol", text)


def instruction(text: str) -> Instruction:
    """One instruction, without its semicolon."""
    found = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
    if not found:
        raise UnknownPtxError(f"`{text}` is not modeled")
    unless, guard, opcode, rest = found.groups()
    name, *parts = opcode.replace("::", "__").split(".")
    return Instruction(text, name, tuple(parts), tuple(map(operand, _split(rest))), guard or "", bool(unless))


def read_ptx(text: str) -> PtxKernel:
    """The kernel of a file.

    Raises:
        UnknownPtxError: there is none, or it has what is not modeled.
    """
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", text, re.DOTALL)
    if not entry:
        raise UnknownPtxError("the PTX holds no kernel")
    target = re.search(r"\.target\s+(\w+)", text)
    parameters, offset = [], 0
    for declared in re.finditer(
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](8|16|32|64)[^,]*?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)",
        entry[2].strip() + ",",
    ):
        size = _WIDTHS_OF_PARAMETERS[declared[2]] * int(declared[4] or 1)
        step = int(declared[1] or size)
        offset = -(-offset // step) * step
        parameters.append((declared[3], offset, size))
        offset += size
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[3])
    if not threads:
        raise UnknownPtxError(f"{entry[1]} does not say how many threads a block has")
    shared: dict[str, int] = {}
    at = 0
    for align, name, size in re.findall(
        r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d*)\]", text[: entry.start()]
    ):
        step = int(align or 1)
        at = -(-at // step) * step
        shared[name], at = at, at + int(size or 0)
    widths: dict[str, int] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in _statements(text[entry.end() :]):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line.startswith(".reg"):
            _declare(line, widths)
        elif not line.startswith("."):
            code.append(instruction(line))
    return PtxKernel(
        entry[1], target[1] if target else "", tuple(parameters), int(threads[1]), widths, tuple(code), labels, shared,
        _fusable(code),
    )  # fmt: skip


def _statements(body: str) -> Iterator[str]:
    """Labels, directives and instructions up to the brace that closes the kernel."""
    depth, pending = 1, ""
    for line in map(str.strip, body.split("\n")):
        if not pending:
            if not line or line.startswith((".loc", ".pragma", ".file")):
                continue
            if line in "{}":
                depth += 1 if line == "{" else -1
                if not depth:
                    return
                continue
        pending = f"{pending} {line}".strip()
        while pending:
            if found := re.match(r"([\w$]+:)\s*", pending):
                yield found[1]
                pending = pending[found.end() :]
            elif ";" in pending:
                statement, pending = (part.strip() for part in pending.split(";", 1))
                if statement:
                    yield statement
            else:
                break


def _declare(line: str, widths: dict[str, int]) -> None:
    found = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", line)
    if not found or found[1] not in _WIDTHS:
        raise UnknownPtxError(f"the registers `{line}` are not modeled")
    for name in found[2].split(","):
        many = re.fullmatch(r"\s*([%\w$]+)<(\d+)>\s*", name)
        if many:
            widths.update({f"{many[1]}{i}": _WIDTHS[found[1]] for i in range(int(many[2]))})
        else:
            widths[name.strip()] = _WIDTHS[found[1]]


def _fusable(code: list[Instruction]) -> int:
    """Additions without a rounding of their own of such a product: PTX ISA, "add", "mul"."""
    products = {
        ins.operands[0].name for ins in code if ins.name == "mul" and ins.parts in {("f32",), ("ftz", "f32"), ("f64",)}
    }
    sums = [ins for ins in code if ins.name in {"add", "sub"} and ins.parts in {("f32",), ("ftz", "f32"), ("f64",)}]
    return sum(any(op.name in products for op in ins.operands[1:]) for ins in sums)
