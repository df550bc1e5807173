"""Float64: arithmetic and conversions; comparisons and division stand with those of float32.

Semantics: CDNA3 ISA, chapter "Vector ALU operations". v_rcp_f64, v_rsq_f64 and v_sqrt_f64 are correctly rounded here;
hardware gives a first approximation that the instructions around them refine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Instruction
from cdna_simulator.formats import F32, F64, I32, U32, U64, fma64
from cdna_simulator.operands import Reader, Step, f32, f64, u32, unknown
from cdna_simulator.vector import BOTH, whole_number
from cdna_simulator.waves import Waves

Compute = Callable[..., Any]


def _mantissa(x: Any) -> Any:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def _exponent(x: Any) -> Any:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32).view(U32)


def _ldexp(x: Any, power: Any) -> Any:
    return np.ldexp(x, np.clip(np.asarray(power).view(I32), -3000, 3000))


# name -> (function, how each source is read); the result has the type that the function gives it
TABLE: Final[Mapping[str, tuple[Compute, tuple[Callable[..., Reader], ...]]]] = {
    **{f"v_{name}_f64": (compute, (f64, f64)) for name, compute in BOTH.items()},
    "v_fma_f64": (fma64, (f64, f64, f64)),
    "v_ldexp_f64": (_ldexp, (f64, u32)),
    "v_frexp_mant_f64": (_mantissa, (f64,)),
    "v_frexp_exp_i32_f64": (_exponent, (f64,)),
    "v_cvt_f64_f32": (lambda x: np.asarray(x, F64), (f32,)),
    "v_cvt_f64_i32": (lambda x: np.asarray(x, U32).view(I32).astype(F64), (u32,)),
    "v_cvt_f64_u32": (lambda x: np.asarray(x, F64), (u32,)),
    "v_cvt_f32_f64": (lambda x: np.asarray(x).astype(F32).view(U32), (f64,)),
    "v_cvt_i32_f64": (whole_number(-(2**31), 2**31 - 1, I32), (f64,)),
    "v_cvt_u32_f64": (whole_number(0, 2**32 - 1, U32), (f64,)),
}


def bind(ins: Instruction) -> Step | None:
    """The function that executes an instruction of this module; None for any other."""
    if ins.name == "v_fmac_f64":
        compute, kinds = TABLE["v_fma_f64"]
        sources = (*ins.operands[1:], ins.operands[0])
    elif ins.name in TABLE:
        (compute, kinds), sources = TABLE[ins.name], ins.operands[1:]
    else:
        return None
    if ins.modifiers or ins.encoding in {"dpp", "sdwa"}:
        raise unknown(ins)
    reads, to = [kind(op) for kind, op in zip(kinds, sources, strict=False)], ins.operands[0].index

    def step(w: Waves) -> None:
        found = np.asarray(compute(*[read(w) for read in reads]))
        if found.dtype == F64:
            w.put64(to, found.view(U64))
        else:
            w.put(to, found)

    return step
