"""The instructions that LLVM divides with: operands are scaled, Newton's steps follow, the quotient is put right.

Semantics: CDNA3 ISA, V_DIV_SCALE, V_DIV_FMAS, V_DIV_FIXUP, for float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.formats import F32, F64, I64, U32, U64, Array, fma, fma64
from cdna_simulator.operands import Reader, Step, broadcast, f32, f64, lane_mask
from cdna_simulator.waves import VCC, Waves

_VCC: Final = Operand("s", VCC, 2)


class Format(NamedTuple):
    """What the instructions know of a format of floats; exponents are biased."""

    kind: Any
    word: Any
    read: Callable[[Operand], Reader]
    multiply_add: Callable[[Array, Array, Array], Array]
    mantissa: int  # bits
    top: int  # the exponent of infinities
    far: int  # between the exponents of numerator and denominator: the quotient overflows on the way
    up: int  # what is scaled by, as a power of two
    near: int  # the exponent of a numerator that is scaled up
    underflow: int  # between the exponents: the quotient is zero

    def exponent(self, x: Array) -> Array:
        """The exponent field."""
        bits = np.ascontiguousarray(x).view(self.word)
        return ((bits >> self.word(self.mantissa)) & self.word(self.top)).astype(I64)

    def scaled(self, x: Array, power: int) -> Array:
        """Times a power of two, rounded once."""
        return np.ldexp(x.astype(F64), power).astype(self.kind)


FORMATS: Final[Mapping[str, Format]] = {
    "f32": Format(F32, U32, f32, fma, 23, 255, 96, 64, 23, -150),
    "f64": Format(F64, U64, f64, fma64, 52, 2047, 768, 128, 53, -1075),
}


def _put(w: Waves, form: Format, index: int, value: Array) -> None:
    bits = np.ascontiguousarray(value.astype(form.kind)).view(form.word)
    if form.word is U64:
        w.put64(index, bits)
    else:
        w.put(index, bits)


def _scale(ins: Instruction, form: Format) -> Step:
    """v_div_scale: bring numerator and denominator where a division by Newton's method is exact.

    Of a denominator whose reciprocal and quotient are both denormal the ISA's text says 2 ** 64, which is infinite
    for each of them; 2 ** -64 gives the quotient that LLVM relies on.
    """
    to, out, *ops = ins.operands
    reads = [broadcast(form.read(o)) for o in ops]
    up, least = form.up, float(np.finfo(form.kind).tiny)

    def step(w: Waves) -> None:
        x, b, c = (r(w) for r in reads)  # x is the denominator b or the numerator c
        eb, ec = form.exponent(b), form.exponent(c)
        quotient = np.abs(c.astype(F64) / b.astype(F64))
        tiny_quotient = (quotient < least) & (c != 0) & np.isfinite(b)
        tiny_reciprocal = eb >= form.top - 2
        rules = [  # (when, result, mask)
            ((b == 0) | (c == 0), np.full_like(x, np.nan), False),
            (ec - eb >= form.far, np.where(x == b, form.scaled(x, up), x), True),
            (eb == 0, form.scaled(x, up), False),
            (tiny_reciprocal & tiny_quotient, np.where(x == b, form.scaled(x, -up), x), True),
            (tiny_reciprocal, form.scaled(x, -up), False),
            (tiny_quotient, np.where(x == c, form.scaled(x, up), x), True),
            (ec <= form.near, form.scaled(x, up), False),
        ]
        when = [r[0] for r in rules]
        _put(w, form, to.index, np.select(when, [r[1] for r in rules], x))
        w.put_lanes(out.index, np.select(when, [np.full(x.shape, r[2]) for r in rules], np.zeros(x.shape, bool)))

    return step


def _multiply_add(ins: Instruction, form: Format) -> Step:
    """v_div_fmas: a multiply-add, scaled back where VCC says so: up if the quotient is large, down if it is small.

    The ISA's text of the float32 one scales by 2 ** 32, which would undo neither scaling of v_div_scale.
    """
    to, *ops = ins.operands
    reads, mask = [form.read(o) for o in ops], lane_mask(_VCC)
    large, small = 2.0**form.up, 2.0**-form.up

    def step(w: Waves) -> None:
        a, b, c = np.broadcast_arrays(*[read(w) for read in reads])
        scaled, up = mask(w), form.exponent(c) > form.top // 2
        before, after = np.where(scaled & ~up, small, 1.0), np.where(scaled & up, large, 1.0)  # no step overflows
        _put(w, form, to.index, form.multiply_add(a * before, b, c * before) * after)

    return step


def _fixup(ins: Instruction, form: Format) -> Step:
    """v_div_fixup: the quotient's sign, and its value where an operand is zero, infinite or NaN, or it underflows."""
    to, *ops = ins.operands
    reads = [form.read(o) for o in ops]

    def step(w: Waves) -> None:
        q, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(*[read(w) for read in reads]))
        sign = np.where(np.signbit(b) ^ np.signbit(c), form.kind(-1), form.kind(1))
        bad = ((b == 0) & (c == 0)) | (np.isinf(b) & np.isinf(c)) | np.isnan(b) | np.isnan(c)
        beyond = (b == 0) | np.isinf(c)
        nothing = np.isinf(b) | (c == 0) | (form.exponent(c) - form.exponent(b) < form.underflow)
        overflowed = np.isnan(q)  # Newton's steps towards a quotient beyond the largest float end in NaN
        cases, inf = [bad, beyond, nothing, overflowed], form.kind(np.inf)
        r = np.select(cases, [form.kind(np.nan), inf, form.kind(0), inf], np.abs(q))
        _put(w, form, to.index, r.astype(form.kind) * sign)

    return step


_NAMED: Final = {"v_div_scale_": _scale, "v_div_fmas_": _multiply_add, "v_div_fixup_": _fixup}


def bind(ins: Instruction) -> Step | None:
    """The function that executes an instruction of this module; None for any other."""
    step, form = _NAMED.get(ins.name[:-3]), FORMATS.get(ins.name[-3:])
    return None if step is None or form is None else step(ins, form)
