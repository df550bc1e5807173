"""The assembly that LLVM writes for CDNA, read into instructions: what `triton.compile(...).asm["amdgcn"]` holds.

Syntax: LLVM's AMDGPU user guide. Registers of the two vector files share one numbering: a0 is 256.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple

from cdna_simulator.errors import UnsupportedKernelError

MANY: Final = 1 << 16  # lines that are read once; kernels have most of theirs in common
ACC: Final = 256  # number of the first accumulation register
# Scalar registers with names (CDNA3 ISA, table "SGPR operands").
NAMED: Final = {
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2),
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}  # fmt: skip
_TTMP: Final = 108
# Constants that are written as decimals and stand for their bits.
_FLOATS: Final = {
    text: struct.unpack("<I", struct.pack("<f", float(text)))[0]
    for text in ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532")
}
_REGISTER: Final = re.compile(r"(v|a|s|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")
_NUMBER: Final = re.compile(r"-?(0x[0-9a-f]+|\d+)$")
_ENCODING: Final = re.compile(r"_(e32|e64|dpp|sdwa)$")
_LABEL: Final = re.compile(r"([.\w$]+):")
# Instructions whose arguments are no operands.
_WORDS: Final = ("s_waitcnt", "s_setreg", "s_getreg", "s_set_gpr", "s_sendmsg", "s_delay_alu", "s_clause")


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: `kind` is v (vector file), s (scalar file), k (constant), scc, none, or symbol."""

    kind: str
    index: int = 0  # first register
    count: int = 1  # registers
    negate: bool = False
    absolute: bool = False
    extend: bool = False  # sext(...)
    value: int = 0  # of a constant, 64 bits
    floating: bool = False  # the constant was written as a decimal
    name: str = ""  # of a symbol


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line."""

    opcode: str  # as written: "v_add_f32_dpp"
    name: str  # without its encoding: "v_add_f32"
    encoding: str  # "e32", "e64", "dpp", "sdwa" or ""
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, str]  # "offset" -> "16"; a flag maps to ""
    text: str

    def number(self, modifier: str, default: int = 0) -> int:
        """A modifier's integer."""
        text = self.modifiers.get(modifier)
        return int(text, 0) if text else default

    def bits(self, modifier: str, count: int, default: int) -> list[int]:
        """A modifier such as `op_sel:[0,1]`."""
        text = self.modifiers.get(modifier)
        found = [default] * count if text is None else [int(x) for x in text.strip("[]").split(",")]
        return (found + [default] * count)[:count]


class Argument(NamedTuple):
    """Where one argument of the kernel lies in its argument segment."""

    offset: int
    size: int
    kind: str  # as the metadata calls it: "by_value", "global_buffer", "hidden_block_count_x"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, read."""

    name: str
    arch: str  # "gfx942"
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]  # label -> position in `code`
    facts: Mapping[str, int]  # .amdhsa_ directives without their prefix
    arguments: tuple[Argument, ...]
    registers: int  # vector registers used, accumulation registers counted from ACC


def read(assembly: str, name: str) -> Kernel:
    """Read one kernel of an assembly file.

    Raises:
        UnsupportedKernelError: the file has no such kernel, or it is not for waves of 64.
    """
    start = assembly.find(f"\n{name}:")
    arch = re.search(r"\.amdgcn_target \"[^\"]*-(gfx\w+)", assembly)
    if start < 0 or arch is None:
        raise UnsupportedKernelError(f"no kernel {name!r} in this assembly; pass asm['amdgcn'] and metadata.name")
    body = assembly[start : assembly.index(".Lfunc_end", start)]
    facts = {k: int(v, 0) for k, v in re.findall(r"\.amdhsa_(\w+) (\d+)", assembly)}
    width = re.search(r"\.wavefront_size: (\d+)", assembly)
    if width is None or width[1] != "64":
        raise UnsupportedKernelError(f"{name} is compiled for {arch[1]}; only waves of 64 lanes (gfx9) are simulated")
    found = re.findall(r"\.offset: +(\d+)\n +\.size: +(\d+)\n +\.value_kind: +(\w+)", assembly)
    code, labels = _code(body)
    used = [o.index + o.count for i in code for o in i.operands if o.kind == "v"]
    arguments = tuple(Argument(int(offset), int(size), kind) for offset, size, kind in found)
    return Kernel(name, arch[1], code, labels, facts, arguments, max(used, default=1))


def _code(body: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in body.splitlines():
        line = raw.partition(";")[0].partition("//")[0].strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif line and not line.startswith("."):
            code.append(instruction(line))
    return tuple(code), labels


@lru_cache(MANY)
def instruction(line: str) -> Instruction:
    """Read one line."""
    opcode, _, rest = line.partition(" ")
    encoding = _ENCODING.search(opcode)
    name = opcode[: encoding.start()] if encoding else opcode
    if opcode.startswith(_WORDS):
        return Instruction(opcode, name, "", (), {}, line)
    operands, modifiers = _arguments(rest)
    return Instruction(opcode, name, encoding[1] if encoding else "", operands, modifiers, line)


def _arguments(text: str) -> tuple[tuple[Operand, ...], dict[str, str]]:
    """Operands are separated by commas; modifiers follow the last of them, separated by blanks."""
    parts = re.split(r",(?![^\[(]*[\])])", text)
    words = re.findall(r"[\w:]+:\[[^\]]*\]|\S+", parts[-1])
    modifiers = {}
    for word in words[1:] if words and not _is_modifier(words[0]) else words:
        key, _, value = word.partition(":")
        modifiers[key] = value
    first = words[:1] if words and not _is_modifier(words[0]) else []
    return tuple(operand(p.strip()) for p in [*parts[:-1], *first]), modifiers


def _is_modifier(word: str) -> bool:
    key, colon, _ = word.partition(":")
    return (bool(colon) and not key.startswith("|") and "[" not in key) or word in {"sc0", "sc1", "nt", "glc", "lds"}


def operand(text: str) -> Operand:
    """Read one operand with its sign (of a number: neg()), its bars and its sext()."""
    extend, negative = text.startswith("sext("), text.startswith("neg(")
    text = text.partition("(")[2][:-1] if extend or negative else text
    negate = negative or (text.startswith("-") and not _NUMBER.match(text) and text not in _FLOATS)
    text = text[1:] if negate and not negative else text
    absolute = text.startswith("|")
    text = text.strip("|")
    marked = partial(Operand, negate=negate, absolute=absolute, extend=extend)
    if found := _REGISTER.match(text):
        first = int(found[2] or found[3])
        count = int(found[4]) - first + 1 if found[4] else 1
        offset = {"a": ACC, "ttmp": _TTMP}.get(found[1], 0)
        return marked("v" if found[1] in "va" else "s", first + offset, count)
    if text in NAMED:
        index, count = NAMED[text]
        return marked("s", index, count)
    if text in {"scc", "vccz", "execz"}:
        return Operand(text)
    if text in {"off", "null"}:
        return Operand("none")
    if text in _FLOATS:
        return marked("k", value=_FLOATS[text], floating=True)
    if _NUMBER.match(text):
        return marked("k", value=int(text, 0) & 0xFFFFFFFFFFFFFFFF)
    return Operand("symbol", name=text)
