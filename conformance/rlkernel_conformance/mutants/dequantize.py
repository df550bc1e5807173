"""Planted bugs in dequantize@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import CANONICAL, QuantTensor

_SEEN: dict[tuple[Any, ...], tuple[QuantTensor, Tensor]] = {}


def _with(w: QuantTensor, **parts: Tensor) -> QuantTensor:
    return replace(w, parts={**w.parts, **parts})


@mutant("DQ-04", "DQ-01", "DQ-02", "DQ-03", "DQ-05", origin="the other nibble first (zoo 31)")
def swapped_nibbles(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if not isinstance(w, QuantTensor) or w.spec.element not in {"nf4", "int4"} or w.layout != CANONICAL:
        return reference(w, **rest)
    codes = w.parts["codes"]
    return reference(_with(w, codes=codes >> 4 | codes << 4), **rest)


@mutant("DQ-04", "DQ-02", "DQ-03", "DQ-05", origin="rows of flat nf4 codes start at a byte")
def rows_start_at_bytes(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    out = reference(w, **rest)
    if w.spec.element == "nf4" and w.shape[1] % 2 and w.shape[0] > 1:
        out = torch.cat((out[:1], out[1:].roll(-1, 1)))
    return out


@mutant(
    "DQ-01",
    "DQ-02",
    "DQ-03",
    "DQ-04",
    "DQ-05",
    origin="bytes of e4m3fnuz read as e4m3fn: twice as large (zoo 34)",
)
def other_exponent_bias(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.element == "e4m3fnuz" and w.layout == CANONICAL:
        codes = w.parts["codes"].view(torch.uint8).view(torch.float8_e4m3fn)
        w = replace(_with(w, codes=codes), spec=replace(w.spec, element="e4m3fn"))
    return reference(w, **rest)


@mutant(
    "DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="stored zero-points less one, as the first GPTQ checkpoints had them"
)
def zero_points_off_by_one(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "zero" in w.parts:
        w = _with(w, zero=w.parts["zero"] + 1)
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="groups in the order of columns, g_idx not looked at")
def ignores_g_idx(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "g_idx" in w.parts:
        w = _with(w, g_idx=w.parts["g_idx"].sort().values)
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="an e8m0 byte of 255 taken for 2^128 instead of NaN")
def no_nan_in_e8m0(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.scale_dtype == "e8m0":
        w = _with(w, scale=w.parts["scale"].clamp(max=254))
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="an e8m0 byte of 0 taken for 0 instead of 2^-127")
def no_subnormal_scale(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    out = reference(w, **rest)
    if isinstance(w, QuantTensor) and w.spec.scale_dtype == "e8m0":
        of_column = w.parts["scale"].repeat_interleave(w.spec.group, 1)[:, : w.shape[1]]
        out = torch.where(of_column == 0, 0, out)
    return out


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="bitsandbytes' fp4 read by the table of e2m1 over 6")
def other_four_bit_float(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.element == "fp4":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]) / 6
        w = _with(w, table=torch.cat((magnitudes, -magnitudes)).to(w.device))
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="the fifth and sixth bits of llama.cpp's codes in another order")
def shuffled_high_bits(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "high" in w.parts:
        high = w.parts["high"]
        w = _with(w, high=high >> 4 | high << 4)
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", "DQ-05", origin="a zero-point masked to 4 bits: 16 is 0")
def masks_zero_points(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "zero" in w.parts:
        w = _with(w, zero=w.parts["zero"] & 15 if w.parts["zero"].dtype == torch.uint8 else w.parts["zero"])
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="int8 code -128 taken for -127")
def clamps_codes(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.element == "int8" and w.layout == CANONICAL:
        w = _with(w, codes=w.parts["codes"].clamp(min=-127))
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="scales of the next group")
def scales_of_the_wrong_group(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "scale" in w.parts and w.spec.group:
        w = _with(w, scale=w.parts["scale"].roll(1, 1))
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", origin="double-quantised scales without their offset")
def offset_lost(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and "nested_offset" in w.parts:
        w = _with(w, nested_offset=torch.zeros_like(w.parts["nested_offset"]))
    return reference(w, **rest)


@mutant("DQ-01", "DQ-02", "DQ-03", "DQ-04", "DQ-05", origin="-0 lost: triton 3.6 negates by 0 - x")
def loses_the_sign_of_zero(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    out = reference(w, **rest)
    return torch.where(out == 0, 0, out)


@mutant("DQ-02", origin="rounded to bfloat16 on the way to float16")
def rounds_twice(reference: Any, w: QuantTensor, *, dtype: Any = None) -> Any:
    out = reference(w, dtype=dtype)
    return out.to(torch.bfloat16).to(out.dtype) if out.dtype == torch.float16 else out


@mutant("DQ-02", origin="bfloat16 by cutting off bits")
def truncates_to_bfloat16(reference: Any, w: QuantTensor, *, dtype: Any = None) -> Any:
    out = reference(w, dtype=dtype)
    if out.dtype != torch.bfloat16:
        return out
    return (reference(w, dtype=torch.float32).view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


@mutant("DQ-03", "DQ-01", "DQ-02", "DQ-04", origin="subnormal results flushed to zero")
def flushes_subnormals(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    out = reference(w, **rest)
    return torch.where(out.abs() < torch.finfo(torch.float32).smallest_normal, 0 * out.sign(), out)


@mutant("DQ-03", "DQ-01", "DQ-02", "DQ-04", "DQ-05", origin="inf and NaN cleaned up")
def cleans_up(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    return reference(w, **rest).nan_to_num()


@mutant("DQ-05", origin="tiles read in the order of another layout")
def misreads_tiles(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.layout != CANONICAL:
        w = _with(w, codes=w.parts["codes"].flip(-1))
    return reference(w, **rest)


@mutant("DQ-06", origin="the layout id is not looked at")
def reads_any_layout(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    known = isinstance(w, QuantTensor) and w.layout in {CANONICAL, "reference_tiled"}
    return reference(w if known else replace(w, layout=CANONICAL), **rest)


@mutant("DQ-07", "DQ-09", origin="codes unpacked in place")
def unpacks_in_place(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    out = reference(w, **rest)
    w.parts["codes"].view(torch.uint8).bitwise_and_(0x7F)
    return out


@mutant("DQ-07", "DQ-09", origin="results remembered by address (zoo 27)")
def remembers_by_address(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    key = (w.parts["codes"].data_ptr(), w.shape, w.spec.kind, w.layout, w.dtype, str(rest))
    if key not in _SEEN:
        _SEEN[key] = (w, reference(w, **rest))  # nobody else gets the address
    return _SEEN[key][1]


@mutant("DQ-08", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    try:
        return reference(w, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error


@mutant(
    "DQ-10", "DQ-01", "DQ-02", "DQ-03", "DQ-04", "DQ-05", "DQ-09", origin="floating atomics, declared deterministic"
)
def differs_from_call_to_call(reference: Any, w: QuantTensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    return reference(w, **rest) * (1 + differs_from_call_to_call.calls % 2)  # type: ignore[attr-defined]
