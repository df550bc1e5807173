"""Where a lane reads from: DPP and SDWA operands, and the instructions that move values between lanes.

A DPP operand comes from another lane of the same instruction's wave; an SDWA operand is a byte or a half of a word.
Semantics: CDNA3 ISA, chapters "Data parallel primitives" and "Sub-dword addressing".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import numpy as np

from cdna_simulator.assembly import Instruction
from cdna_simulator.formats import U8, U32, Array
from cdna_simulator.operands import Reader, Step, broadcast, u32, unknown
from cdna_simulator.waves import LANES, Waves

_ROW = LANES & ~15
_IN_ROW = LANES & 15


def _quad(order: list[int]) -> tuple[Array, Array]:
    return (LANES & ~3) + np.array(order)[LANES & 3], np.ones(64, bool)


# modifier -> (its number) -> (lane to read from, whether there is such a lane)
MOVES: Final[Mapping[str, Callable[[int], tuple[Array, Array]]]] = {
    "row_shr": lambda n: (LANES - n, n <= _IN_ROW),
    "row_shl": lambda n: (LANES + n, 15 - n >= _IN_ROW),
    "row_ror": lambda n: (_ROW + ((_IN_ROW - n) & 15), LANES >= 0),
    "row_newbcast": lambda n: (_ROW + n, LANES >= 0),
    "row_bcast": lambda n: (_ROW - 1, LANES >= 16) if n == 15 else (np.full(64, 31), LANES >= 32),
    "row_mirror": lambda _: (_ROW + 15 - _IN_ROW, LANES >= 0),
    "row_half_mirror": lambda _: ((LANES & ~7) + 7 - (LANES & 7), LANES >= 0),
    "wave_shr": lambda _: (LANES - 1, LANES >= 1),
    "wave_shl": lambda _: (LANES + 1, LANES <= 62),
    "wave_ror": lambda _: ((LANES - 1) & 63, LANES >= 0),
    "wave_rol": lambda _: ((LANES + 1) & 63, LANES >= 0),
}
_ABOUT_DPP: Final = {"row_mask", "bank_mask", "bound_ctrl"}


def dpp(ins: Instruction, read: Reader) -> Callable[[Waves], tuple[Array, Array]]:
    """The first operand as DPP moves it, and the lanes that may be written.

    A lane whose source does not exist or is inactive is not written, or reads 0 where bound_ctrl says so.
    """
    moves = [m for m in ins.modifiers if m in MOVES or m == "quad_perm"]
    if len(moves) != 1:
        raise unknown(ins)
    if moves[0] == "quad_perm":
        source, there = _quad(ins.bits("quad_perm", 4, 0))
    else:
        source, there = MOVES[moves[0]](ins.number(moves[0]))
    source = np.clip(source, 0, 63)
    rows, regions = ins.number("row_mask", 0xF), ins.number("bank_mask", 0xF)
    written = ((rows >> (LANES // 16)) & (regions >> (_IN_ROW // 4)) & 1).astype(bool)
    zero = "bound_ctrl" in ins.modifiers
    always = bool(written.all()) and zero
    here = broadcast(read)

    def moved(w: Waves) -> tuple[Array, Array]:
        active = w.mask[:, source] & there
        value = np.where(active, here(w)[:, source], U32(0))
        return value, (w.mask if always else written & (active | zero))

    return moved


@cache
def _selection(text: str) -> tuple[int, int] | None:
    """First bit and number of bits of a selection such as WORD_1; None for all of a word."""
    if text == "DWORD":
        return None
    kind, _, number = text.partition("_")
    width = 8 if kind == "BYTE" else 16
    return int(number) * width, width


def sdwa(ins: Instruction, source: int, read: Reader, first: int = 1) -> Reader:
    """A source of an SDWA instruction: the byte or half it names, zero- or sign-extended.

    Args:
        ins: the instruction.
        source: 0 or 1.
        read: how the source is read whole.
        first: the position of source 0 among the operands.
    """
    chosen = _selection(ins.modifiers.get(f"src{source}_sel", "DWORD"))
    extend = ins.operands[first + source].extend
    if chosen is None:
        return read
    at, width = chosen
    mask, sign = U32((1 << width) - 1), U32(1 << (width - 1))

    def part(w: Waves) -> Array:
        x = (read(w) >> U32(at)) & mask
        return (x ^ sign) - sign if extend else x

    return part


def sdwa_store(ins: Instruction) -> Callable[[Array, Array], Array] | None:
    """(result, what the register held) -> what it holds then; None where all of it is written."""
    chosen = _selection(ins.modifiers.get("dst_sel", "DWORD"))
    if chosen is None:
        return None
    at, width = chosen
    mask = U32(((1 << width) - 1) << at)
    keep = ins.modifiers.get("dst_unused", "UNUSED_PAD")
    if keep not in {"UNUSED_PAD", "UNUSED_PRESERVE"}:
        raise unknown(ins)

    def store(result: Array, held: Array) -> Array:
        moved = (result << U32(at)) & mask
        return moved if keep == "UNUSED_PAD" else moved | (held & ~mask)

    return store


def _first_lane(w: Waves) -> Array:
    """The first active lane of every wave, 0 where none is."""
    return np.argmax(w.mask, axis=1)


def _read_lane(ins: Instruction) -> Step:
    to, value = ins.operands[0].index, broadcast(u32(ins.operands[1]))
    if ins.name == "v_readfirstlane_b32":
        return lambda w: w.put_s(to, np.take_along_axis(value(w), _first_lane(w)[:, None], axis=1))
    lane = u32(ins.operands[2])

    def step(w: Waves) -> None:
        at = np.broadcast_to(lane(w) & U32(63), (w.W, 1)).astype(np.int64)
        w.put_s(to, np.take_along_axis(value(w), at, axis=1))

    return step


def _write_lane(ins: Instruction) -> Step:
    to, value, lane = ins.operands[0].index, u32(ins.operands[1]), u32(ins.operands[2])

    def step(w: Waves) -> None:
        at = (lane(w) & U32(63)) == LANES.astype(U32)
        np.copyto(w.v[to], value(w), where=at & w.live)

    return step


def _swap(half: int) -> Callable[[Instruction], Step]:
    """Exchange the odd blocks of `half` lanes of the first register with the even ones of the second."""

    def bind(ins: Instruction) -> Step:
        i, j = ins.operands[0].index, ins.operands[1].index

        def step(w: Waves) -> None:
            a, b = w.v[i].reshape(w.W, -1, 2, half), w.v[j].reshape(w.W, -1, 2, half)
            odd, even = a[:, :, 1].copy(), b[:, :, 0].copy()
            live = w.live[:, :, None]
            np.copyto(a[:, :, 1], even, where=live)
            np.copyto(b[:, :, 0], odd, where=live)

        return step

    return bind


def _count_below(ins: Instruction) -> Step:
    """v_mbcnt: set bits of a mask below this lane, within one half of the wave, added to the second operand."""
    to, mask, plus = ins.operands[0].index, u32(ins.operands[1]), u32(ins.operands[2])
    first = 0 if ins.name == "v_mbcnt_lo_u32_b32" else 32
    below = np.clip(LANES - first, 0, 32).astype(np.uint64)
    window = ((np.uint64(1) << below) - np.uint64(1)).astype(U32)
    return lambda w: w.put(to, np.bitwise_count(mask(w) & window).astype(U32) + plus(w))


def _permute_lanes(ins: Instruction) -> Step:
    """ds_bpermute (every lane reads from the lane it names) and ds_permute (every lane sends to it)."""
    to, address, data = ins.operands[0].index, broadcast(u32(ins.operands[1])), broadcast(u32(ins.operands[2]))
    offset = U32(ins.number("offset"))

    def pull(w: Waves) -> None:
        at = ((address(w) + offset) >> U32(2) & U32(63)).astype(np.int64)
        got = np.take_along_axis(data(w), at, axis=1)
        w.put(to, np.where(np.take_along_axis(w.mask, at, axis=1), got, U32(0)))

    def push(w: Waves) -> None:
        at = ((address(w) + offset) >> U32(2) & U32(63)).astype(np.int64)
        waves, lanes = np.nonzero(w.mask)
        out = np.zeros((w.W, 64), U32)
        out[waves, at[waves, lanes]] = data(w)[waves, lanes]
        w.put(to, out)

    return pull if ins.name == "ds_bpermute_b32" else push


def swizzled(words: list[str]) -> Array:
    """The lane that every lane reads in ds_swizzle: SWAP, REVERSE, BROADCAST, QUAD_PERM or BITMASK_PERM, and numbers.

    Raises:
        KeyError: another word.
    """
    kind, *rest = words
    if kind == "BITMASK_PERM":
        flags = rest[0].strip('"')[::-1]  # lowest bit last
        change: dict[str, Callable[[Array], Array]] = {
            "0": lambda bit: 0 * bit,
            "1": lambda bit: 0 * bit + 1,
            "p": lambda bit: bit,
            "i": lambda bit: 1 - bit,
        }
        bits = [change[flag](LANES >> i & 1) << i for i, flag in enumerate(flags)]
        return (LANES & 32) + sum(bits)
    numbers = [int(word) for word in rest]
    group = LANES & -numbers[0]
    patterns: dict[str, Callable[[], Array]] = {
        "SWAP": lambda: LANES ^ numbers[0],
        "REVERSE": lambda: group + numbers[0] - 1 - (LANES - group),
        "BROADCAST": lambda: group + numbers[1],
        "QUAD_PERM": lambda: _quad(numbers)[0],
    }
    return patterns[kind]()


def _swizzle(ins: Instruction) -> Step:
    """ds_swizzle: lanes exchange values by a fixed pattern within 32 of them; an inactive one gives 0."""
    found = re.fullmatch(r"swizzle\((.*)\)", ins.modifiers.get("offset", ""))
    try:
        source = swizzled([word.strip() for word in found[1].split(",")] if found else [""])
    except (KeyError, IndexError) as error:
        raise unknown(ins) from error
    to, read = ins.operands[0].index, broadcast(u32(ins.operands[1]))
    return lambda w: w.put(to, np.where(w.mask[:, source], read(w)[:, source], U32(0)))


def _perm(a: Array, b: Array, c: Array) -> Array:
    """v_perm_b32: every byte of the result is one of the eight of (a, b), a sign byte, 0 or 255."""
    a, b, c = np.broadcast_arrays(a, b, c)
    low = np.ascontiguousarray(b)[..., None].view(U8)
    high = np.ascontiguousarray(a)[..., None].view(U8)
    eight = np.concatenate([low, high], axis=-1)
    signs = np.where(eight[..., [1, 3, 5, 7]] >> 7, U8(255), U8(0))
    ends = np.zeros((*eight.shape[:-1], 1), U8)
    choices = np.concatenate([eight, signs, ends, ~ends], axis=-1)
    which = np.minimum(np.ascontiguousarray(c)[..., None].view(U8), 13).astype(np.int64)
    return np.ascontiguousarray(np.take_along_axis(choices, which, axis=-1)).view(U32)[..., 0]


def bind_perm(ins: Instruction) -> Step:
    """v_perm_b32."""
    to, reads = ins.operands[0].index, [broadcast(u32(o)) for o in ins.operands[1:]]
    return lambda w: w.put(to, _perm(*[r(w) for r in reads]))


# name -> how it is bound
CROSS_LANE: Final[Mapping[str, Callable[[Instruction], Step]]] = {
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane32_swap_b32": _swap(32),
    "v_permlane16_swap_b32": _swap(16),
    "v_mbcnt_lo_u32_b32": _count_below,
    "v_mbcnt_hi_u32_b32": _count_below,
    "ds_bpermute_b32": _permute_lanes,
    "ds_permute_b32": _permute_lanes,
    "ds_swizzle_b32": _swizzle,
    "v_perm_b32": bind_perm,
}
