"""Vector instructions that compute lane by lane, as data: integers and float32.

Semantics: CDNA3 ISA, chapter "Vector ALU operations". v_exp, v_log, v_rcp, v_rsq and v_sqrt are correctly rounded
here; hardware may be one unit off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator import integers as ints
from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.formats import F32, F64, I32, U32, U64, Array, fma
from cdna_simulator.integers import Compute
from cdna_simulator.lanes import dpp, sdwa, sdwa_store
from cdna_simulator.operands import Reader, Step, bits32, broadcast, f32, u32, u64, unknown
from cdna_simulator.waves import Waves

_H: Final = U32(0xFFFF)


def _shift(x: Any, width: int = 31) -> Any:
    return x & U32(width)


def _short(x: Any) -> Any:
    return np.asarray(x, U32).astype(np.uint16).view(np.int16)


def _low24(x: Any) -> Any:
    return x & U32(0xFFFFFF)


def _high24(x: Any) -> Any:
    return (((np.asarray(x, U32) << U32(8)).view(I32)) >> I32(8)).view(U32)


def _joined(a: Any, b: Any) -> Any:
    return (np.asarray(a).astype(U64) << U64(32)) | b


def three(operate: Compute) -> Compute:
    """An operation of two, over three."""
    return lambda a, b, c: operate(operate(a, b), c)


def _median_of_integers(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def largest(a: Any, b: Any) -> Any:
    """The larger of two floats; the other one where one is NaN, and +0 where one zero is +0."""
    most = np.fmax(a, b)
    return most if np.all(most) else np.where((most == 0) & (a == b), a + b, most)


def smallest(a: Any, b: Any) -> Any:
    """The smaller of two floats; the other one where one is NaN, and -0 where one zero is -0."""
    return -largest(-a, -b)


def median(a: Any, b: Any, c: Any) -> Any:
    """The median of three floats; where one is NaN, the smallest of the others."""
    most = three(largest)(a, b, c)
    second = np.where(most == a, largest(b, c), np.where(most == b, largest(a, c), largest(a, b)))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), three(smallest)(a, b, c), second)


INTEGER: Final[Mapping[str, Compute]] = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": np.invert,
    "v_bfrev_b32": ints.bit_reversed,
    "v_ffbh_u32": ints.leading_zeros,
    "v_ffbh_i32": ints.leading_signs,
    "v_ffbl_b32": ints.first_set,
    "v_and_b32": np.bitwise_and,
    "v_or_b32": np.bitwise_or,
    "v_xor_b32": np.bitwise_xor,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_add_u32": np.add,
    "v_sub_u32": np.subtract,
    "v_subrev_u32": lambda a, b: b - a,
    "v_lshlrev_b32": lambda a, b: ints.shift_left(b, a),
    "v_lshrrev_b32": lambda a, b: ints.shift_right(b, a),
    "v_ashrrev_i32": lambda a, b: ints.shift_right_signed(b, a),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": ints.signed(np.minimum),
    "v_max_i32": ints.signed(np.maximum),
    "v_mul_lo_u32": np.multiply,
    "v_mul_hi_u32": ints.high_product,
    "v_mul_hi_i32": ints.high_product_signed,
    "v_mul_u32_u24": lambda a, b: _low24(a) * _low24(b),
    "v_mul_i32_i24": lambda a, b: _high24(a) * _high24(b),
    "v_mad_u32_u24": lambda a, b, c: _low24(a) * _low24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: _high24(a) * _high24(b) + c,
    "v_lshlrev_b16": lambda a, b: (b << _shift(a, 15)) & _H,
    "v_lshrrev_b16": lambda a, b: (b & _H) >> _shift(a, 15),
    "v_add_u16": lambda a, b: (a + b) & _H,
    "v_sub_u16": lambda a, b: (a - b) & _H,
    "v_mul_lo_u16": lambda a, b: (a * b) & _H,
    "v_max_u16": lambda a, b: np.maximum(a & _H, b & _H),
    "v_min_u16": lambda a, b: np.minimum(a & _H, b & _H),
    "v_ashrrev_i16": lambda a, b: (_short(b) >> _shift(a, 15).astype(np.int16)).view(np.uint16).astype(U32),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_lshl_or_b32": lambda a, b, c: (a << _shift(b)) | c,
    "v_lshl_add_u32": lambda a, b, c: (a << _shift(b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << _shift(c),
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, b, c: ints.field(a, _shift(b), _shift(c)),
    "v_bfe_i32": lambda a, b, c: ints.signed_field(a, _shift(b), _shift(c)),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_alignbit_b32": lambda a, b, c: (_joined(a, b) >> _shift(c).astype(U64)).astype(U32),
    "v_alignbyte_b32": lambda a, b, c: (_joined(a, b) >> (U64(8) * (c & U32(3)).astype(U64))).astype(U32),
    "v_bcnt_u32_b32": lambda a, b: ints.count(a) + b,
    "v_max3_u32": three(np.maximum),
    "v_min3_u32": three(np.minimum),
    "v_max3_i32": ints.signed(three(np.maximum)),
    "v_min3_i32": ints.signed(three(np.minimum)),
    "v_med3_u32": _median_of_integers,
    "v_med3_i32": ints.signed(_median_of_integers),
    "v_pack_b32_f16": lambda a, b: (a & _H) | (b << U32(16)),
}


def whole_number(low: int, high: int, kind: Any) -> Compute:
    """Rounding towards zero that stops at the ends of a type; NaN is 0."""
    return lambda x: np.clip(np.where(np.isnan(x), 0, np.trunc(np.asarray(x, F64))), low, high).astype(kind).view(U32)


def _exact(compute: Compute) -> Compute:
    """A function of one float, computed in float64 and rounded to its type."""
    return lambda a: compute(np.asarray(a, F64)).astype(a.dtype)


# v_<name>_f32 and v_<name>_f64
BOTH: Final[Mapping[str, Compute]] = {
    "add": np.add,
    "mul": np.multiply,
    "max": largest,
    "min": smallest,
    "rcp": _exact(lambda x: 1 / x),
    "rsq": _exact(lambda x: 1 / np.sqrt(x)),
    "sqrt": _exact(np.sqrt),
    "rndne": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "fract": lambda a: np.minimum(a - np.floor(a), 1 - np.finfo(a.dtype).epsneg),
}
FLOAT: Final[Mapping[str, Compute]] = {
    **{f"v_{name}_f32": compute for name, compute in BOTH.items()},
    "v_sub_f32": np.subtract,
    "v_subrev_f32": lambda a, b: b - a,
    "v_max3_f32": three(largest),
    "v_min3_f32": three(smallest),
    "v_med3_f32": median,
    "v_maximum3_f32": three(np.maximum),
    "v_minimum3_f32": three(np.minimum),
    "v_fma_f32": fma,
    "v_exp_f32": _exact(np.exp2),
    "v_log_f32": _exact(np.log2),
    "v_rcp_iflag_f32": BOTH["rcp"],
}


def _ldexp(a: Any, b: Any) -> Any:
    return np.ldexp(np.asarray(a, F64), np.clip(b.view(I32), -400, 400)).astype(F32)


# Accumulating into the destination: name -> where the constant of the k forms stands among (a, b, c).
MULTIPLY_ADD: Final[Mapping[str, tuple[int, ...]]] = {
    "v_fmac_f32": (1, 2, 0),
    "v_mac_f32": (1, 2, 0),
    "v_fmaak_f32": (1, 2, 3),
    "v_madak_f32": (1, 2, 3),
    "v_fmamk_f32": (1, 2, 3),
    "v_madmk_f32": (1, 2, 3),
}
# 64-bit: name -> (function, operands that are 32 bits wide)
WIDE: Final[Mapping[str, tuple[Compute, tuple[int, ...]]]] = {
    "v_mov_b64": (lambda a: a, ()),
    "v_lshlrev_b64": (lambda a, b: ints.shift_left(b, a), (0,)),
    "v_lshrrev_b64": (lambda a, b: ints.shift_right(b, a), (0,)),
    "v_ashrrev_i64": (lambda a, b: ints.shift_right_signed(b, a), (0,)),
    "v_lshl_add_u64": (lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c, (1,)),
}


class Destination:
    """Where a result goes: a register, through output modifiers, DPP's write mask and SDWA's part of a word."""

    def __init__(self, ins: Instruction) -> None:
        self.to = ins.operands[0].index
        self._scale = F32(int(ins.modifiers.get("mul", 1))) / F32(int(ins.modifiers.get("div", 1)))
        self._clamp = "clamp" in ins.modifiers
        self._part = sdwa_store(ins) if ins.encoding == "sdwa" else None
        self._plain = self._part is None and not self._clamp and self._scale == 1

    def put(self, w: Waves, value: Any, enable: Array | None = None) -> None:
        """Store float32 or uint32."""
        value = np.asarray(value)
        if not self._plain and value.dtype == F32:
            value = value * self._scale
            value = np.clip(np.where(np.isnan(value), F32(0), value), F32(0), F32(1)) if self._clamp else value
        value = value.view(U32) if value.dtype == F32 else value
        if self._part is not None:
            value = self._part(value, w.v[self.to])
        w.put(self.to, value, enable)


def bind(ins: Instruction) -> Step | None:
    """The function that executes an instruction of these tables; None for one of none of them."""
    name, ops = ins.name, ins.operands
    if name in WIDE:
        compute, narrow = WIDE[name]
        reads = [u32(o) if i in narrow else u64(o) for i, o in enumerate(ops[1:])]
        return lambda w: w.put64(ops[0].index, np.broadcast_to(compute(*[r(w) for r in reads]), (w.W, 64)))
    if name in MULTIPLY_ADD:
        return _elementwise(ins, fma, [ops[i] for i in MULTIPLY_ADD[name]], f32)
    if name in FLOAT:
        return _elementwise(ins, FLOAT[name], list(ops[1:]), f32)
    if name == "v_ldexp_f32":
        return _elementwise(ins, _ldexp, list(ops[1:]), f32, integers=(1,))
    if name in INTEGER:
        compute = INTEGER[name]
        if "clamp" in ins.modifiers:
            if name not in _CLAMPED:
                raise unknown(ins)
            compute = _CLAMPED[name]
        if "op_sel" in ins.modifiers:
            return _halves(ins, compute)
        return _elementwise(ins, compute, list(ops[1:]), u32)
    return None


# Sums that stop at the ends of their range instead of wrapping.
_CLAMPED: Final[Mapping[str, Compute]] = {
    "v_add_u32": lambda a, b: np.minimum(np.asarray(a).astype(U64) + b, U64(0xFFFFFFFF)).astype(U32),
    "v_sub_u32": lambda a, b: np.where(a < b, U32(0), a - b),
}


def _halves(ins: Instruction, compute: Compute) -> Step:
    """A 16-bit operation whose op_sel names the half of each source."""
    if ins.name != "v_pack_b32_f16":
        raise unknown(ins)
    sel = ins.bits("op_sel", len(ins.operands), 0)
    reads = [u32(o) for o in ins.operands[1:]]
    shift = [U32(16 * s) for s in sel]
    return lambda w: w.put(ins.operands[0].index, compute(*[r(w) >> s for r, s in zip(reads, shift, strict=False)]))


def _elementwise(
    ins: Instruction, compute: Compute, ops: list[Operand], read: Callable[..., Reader], integers: tuple[int, ...] = ()
) -> Step:
    known = {"mul", "div", "clamp"} | {m for m in ins.modifiers if ins.encoding in {"dpp", "sdwa"}}
    if set(ins.modifiers) - known:
        raise unknown(ins)
    destination = Destination(ins)
    reads = [(u32 if i in integers else read)(o) for i, o in enumerate(ops)]
    if ins.encoding == "sdwa":
        if read is f32 and {ins.modifiers.get(f"src{i}_sel", "DWORD") for i in range(2)} != {"DWORD"}:
            raise unknown(ins)
        reads = [sdwa(ins, i, r) for i, r in enumerate(reads)]
    if ins.encoding == "dpp":
        return _moved(ins, compute, ops, read, reads, destination)
    if len(reads) == 2:  # most instructions
        first, second = reads
        return lambda w: destination.put(w, compute(first(w), second(w)))
    return lambda w: destination.put(w, compute(*[r(w) for r in reads]))


def _moved(
    ins: Instruction,
    compute: Compute,
    ops: list[Operand],
    read: Callable[..., Reader],
    reads: list[Reader],
    destination: Destination,
) -> Step:
    op = ops[0]
    first = dpp(ins, broadcast(bits32(op)))

    def step(w: Waves) -> None:
        value, enable = first(w)
        if read is f32:
            value = value.view(F32)
            value = np.abs(value) if op.absolute else value
            value = -value if op.negate else value
        destination.put(w, compute(value, *[r(w) for r in reads[1:]]), enable)

    return step
