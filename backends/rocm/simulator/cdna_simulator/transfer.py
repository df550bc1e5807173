"""Between memory and registers: how many bytes an instruction moves, and where in a register they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from cdna_simulator.assembly import Operand
from cdna_simulator.formats import I32, U8, U16, U32, Array
from cdna_simulator.waves import Waves

Lanes = tuple[Array, ...]  # waves [k], lanes [k]


class Width(NamedTuple):
    """What one lane moves."""

    size: int  # bytes
    signed: bool = False
    half: str = ""  # of the register: "low", "high"


WIDTHS: Final[Mapping[str, Width]] = {
    "dword": Width(4), "dwordx2": Width(8), "dwordx3": Width(12), "dwordx4": Width(16),
    "b32": Width(4), "b64": Width(8), "b96": Width(12), "b128": Width(16), "b8": Width(1), "b16": Width(2),
    "ubyte": Width(1), "sbyte": Width(1, signed=True), "byte": Width(1), "u8": Width(1), "i8": Width(1, signed=True),
    "ushort": Width(2), "sshort": Width(2, signed=True), "short": Width(2), "u16": Width(2),
    "i16": Width(2, signed=True), "short_d16": Width(2, half="low"), "short_d16_hi": Width(2, half="high"),
    "ubyte_d16": Width(1, half="low"), "ubyte_d16_hi": Width(1, half="high"),
    "sbyte_d16": Width(1, signed=True, half="low"), "sbyte_d16_hi": Width(1, signed=True, half="high"),
    "byte_d16_hi": Width(1, half="high"), "u8_d16": Width(1, half="low"), "u8_d16_hi": Width(1, half="high"),
    "u16_d16": Width(2, half="low"), "u16_d16_hi": Width(2, half="high"), "b16_d16_hi": Width(2, half="high"),
    "b8_d16_hi": Width(1, half="high"),
}  # fmt: skip


def put_loaded(w: Waves, op: Operand, lanes: Lanes, data: Array, width: Width) -> None:
    """Loaded bytes [k, size] into the registers of the lanes they are for."""
    size, signed, half = width
    if size >= 4:
        got = np.ascontiguousarray(data).view(U32)
        for r in range(size // 4):
            w.v[op.index + r][lanes] = got[:, r]
        return
    narrow = data[:, 0] if size == 1 else np.ascontiguousarray(data).view(U16)[:, 0]
    value = narrow.view(np.int8 if size == 1 else np.int16).astype(I32).view(U32) if signed else narrow.astype(U32)
    if half:
        held = w.v[op.index][lanes]
        value &= U32(0xFFFF)
        value = (held & U32(0xFFFF0000)) | value if half == "low" else (held & U32(0xFFFF)) | value << U32(16)
    w.v[op.index][lanes] = value


def stored_bytes(w: Waves, op: Operand, lanes: Lanes, width: Width) -> Array:
    """Bytes [k, size] to be stored."""
    size, _, half = width
    if size >= 4:
        held = [w.v[op.index + r][lanes] for r in range(size // 4)]
        return np.stack(held, axis=1).view(U8)
    value = w.v[op.index][lanes] >> U32(16 if half == "high" else 0)
    return np.ascontiguousarray(value)[:, None].view(U8)[:, :size]
