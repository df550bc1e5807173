"""Planted bugs in dequantize@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_conformance.mutants.prepack import with_parts
from rlkernel_core.quant import CANONICAL, QuantTensor
from rlkernel_core.spec.quantize import DequantizeCall

_KEPT: Final[dict[tuple[Any, ...], tuple[QuantTensor, Tensor]]] = {}


def reads(part: str, change: Callable[[Tensor], Tensor], wanted: Callable[[QuantTensor], Any] = lambda w: True) -> How:
    """A part of some weights read as another, where there is one."""

    def how(right: Run, call: Any) -> Tensor:
        w = call.w
        takes = part in w.parts and wanted(w)
        return right(replace(call, w=with_parts(w, **{part: change(w.parts[part])})) if takes else call)

    return how


def stored(*elements: str) -> Callable[[QuantTensor], bool]:
    """Weights of these elements that are not packed."""
    return lambda w: w.spec.element in elements and w.layout == CANONICAL


def gives(change: Callable[[DequantizeCall, Tensor], Tensor]) -> How:
    """Results replaced by a function of the record and the result."""
    return lambda right, call: change(call, right(call))


def swap_nibbles(codes: Tensor) -> Tensor:
    return codes >> 4 | codes << 4


def rows_start_at_bytes(call: DequantizeCall, out: Tensor) -> Tensor:
    N, K = call.w.shape
    return torch.cat((out[:1], out[1:].roll(-1, 1))) if call.w.spec.element == "nf4" and K % 2 and N > 1 else out


def read_as_e4m3fn(w: QuantTensor) -> QuantTensor:
    """Bytes of e4m3fnuz taken for those of e4m3fn."""
    if not stored("e4m3fnuz")(w):
        return w
    codes = w.parts["codes"].view(torch.uint8).view(torch.float8_e4m3fn)
    return replace(with_parts(w, codes=codes), spec=replace(w.spec, element="e4m3fn"))


def no_subnormal_scale(call: DequantizeCall, out: Tensor) -> Tensor:
    w = call.w
    if w.spec.scale_dtype != "e8m0":
        return out
    of_column = w.parts["scale"].repeat_interleave(w.spec.group, 1)[:, : w.shape[1]]
    return torch.where(of_column == 0, 0, out)


def other_four_bit_float(right: Run, call: DequantizeCall) -> Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=call.w.device) / 6
    table = torch.cat((magnitudes, -magnitudes))
    return right(replace(call, w=with_parts(call.w, table=table)) if call.w.spec.element == "fp4" else call)


def rounds_twice(call: DequantizeCall, out: Tensor) -> Tensor:
    return out.to(torch.bfloat16).to(out.dtype) if out.dtype == torch.float16 else out


def truncates_to_bfloat16(right: Run, call: DequantizeCall) -> Tensor:
    out: Tensor = right(call)
    if out.dtype != torch.bfloat16:
        return out
    wide: Tensor = right(replace(call, dtype=torch.float32))
    return (wide.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def flushes_subnormals(call: DequantizeCall, out: Tensor) -> Tensor:
    return torch.where(out.abs() < torch.finfo(torch.float32).smallest_normal, 0 * out.sign(), out)


def any_layout(w: QuantTensor) -> QuantTensor:
    """A weight whose layout is not looked at."""
    known = not isinstance(w, QuantTensor) or w.layout in {CANONICAL, "reference_tiled"}
    return w if known else replace(w, layout=CANONICAL)


def remembers_by_address(right: Run, call: DequantizeCall) -> Tensor:
    w = call.w
    key = (w.parts["codes"].data_ptr(), w.shape, w.spec.kind, w.layout, w.dtype, call.dtype)
    if key not in _KEPT:
        _KEPT[key] = (w, right(call))  # nobody else gets the address
    return _KEPT[key][1]


def with_weight(change: Callable[[QuantTensor], QuantTensor]) -> How:
    """Plain torch with another weight."""
    return lambda right, call: right(replace(call, w=change(call.w)))


def scale_of_the_group_before(scale: Tensor) -> Tensor:
    return torch.cat((scale[:, :-1], scale[:, -2:-1]), 1) if scale.shape[1] > 1 else scale


BUGS: Final = {
    "swapped_nibbles": Bug("DQ-04", "the other nibble first", reads("codes", swap_nibbles, stored("nf4", "int4"))),
    "rows_start_at_bytes": Bug("DQ-04", "rows of flat nf4 codes start at a byte", gives(rows_start_at_bytes)),
    "other_exponent_bias": Bug(
        "DQ-01", "bytes of e4m3fnuz read as e4m3fn: twice as large", with_weight(read_as_e4m3fn)
    ),
    "zero_points_off_by_one": Bug(
        "DQ-01", "stored zero-points less one, as the first GPTQ checkpoints had them", reads("zero", lambda x: x + 1)
    ),
    "ignores_g_idx": Bug(
        "DQ-01", "groups in the order of columns, g_idx not looked at", reads("g_idx", lambda x: x.sort().values)
    ),
    "no_nan_in_e8m0": Bug(
        "DQ-01",
        "an e8m0 byte of 255 taken for 2^128 instead of NaN",
        reads("scale", lambda x: x.clamp(max=254), lambda w: w.spec.scale_dtype == "e8m0"),
    ),
    "no_subnormal_scale": Bug("DQ-01", "an e8m0 byte of 0 taken for 0 instead of 2^-127", gives(no_subnormal_scale)),
    "other_four_bit_float": Bug("DQ-01", "bitsandbytes' fp4 read by the table of e2m1 over 6", other_four_bit_float),
    "shuffled_high_bits": Bug(
        "DQ-01", "the fifth and sixth bits of llama.cpp's codes in another order", reads("high", swap_nibbles)
    ),
    "masks_zero_points": Bug(
        "DQ-01",
        "a zero-point masked to 4 bits: 16 is 0",
        reads("zero", lambda x: x & 15, lambda w: w.parts["zero"].dtype == torch.uint8),
    ),
    "clamps_codes": Bug(
        "DQ-01", "int8 code -128 taken for -127", reads("codes", lambda x: x.clamp(min=-127), stored("int8"))
    ),
    "scales_of_the_wrong_group": Bug(
        "DQ-01", "scales of the next group", reads("scale", lambda x: x.roll(1, 1), lambda w: w.spec.group)
    ),
    "offset_lost": Bug(
        "DQ-01", "double-quantized scales without their offset", reads("nested_offset", torch.zeros_like)
    ),
    "loses_the_sign_of_zero": Bug(
        "DQ-01", "-0 lost: triton 3.6 negates by 0 - x", gives(lambda c, out: torch.where(out == 0, 0, out))
    ),
    "rounds_twice": Bug("DQ-02", "rounded to bfloat16 on the way to float16", gives(rounds_twice)),
    "truncates_to_bfloat16": Bug("DQ-02", "bfloat16 by cutting off bits", truncates_to_bfloat16),
    "flushes_subnormals": Bug("DQ-03", "subnormal results flushed to zero", gives(flushes_subnormals)),
    "cleans_up": Bug("DQ-03", "inf and NaN cleaned up", gives(lambda c, out: out.nan_to_num())),
    "misreads_tiles": Bug(
        "DQ-05",
        "tiles read in the order of another layout",
        reads("codes", lambda x: x.flip(-1), lambda w: w.layout != CANONICAL),
    ),
    "reads_any_layout": Bug("DQ-06", "the layout id is not looked at", with_weight(any_layout)),
    "unpacks_in_place": Bug(
        "DQ-07",
        "codes unpacked in place",
        plant.writes(lambda c: c.w.parts["codes"].view(torch.uint8).bitwise_and_(0x7F)),
    ),
    "remembers_by_address": Bug("DQ-07", "results remembered by address", remembers_by_address),
    "anonymous_errors": plant.anonymous_errors("DQ-08"),
    "differs_from_call_to_call": Bug(
        "DQ-10", "floating atomics, declared deterministic", plant.alternates(gives(lambda c, out: out * 2))
    ),
    "asks_the_host": plant.reads_a_value("DQ-09", lambda c: c.w.parts["codes"].view(torch.uint8)),
    "act_order_lost_beside_fp16_scales": Bug(
        "DQ-97",
        "groups by act order read in order where scales are fp16",
        reads("g_idx", lambda x: x.sort().values, lambda w: w.spec.scale_dtype == "float16"),
    ),
    "last_group_of_long_rows": Bug(
        "DQ-98",
        "the scale of the last group of a long row is that of the one before it",
        reads("scale", scale_of_the_group_before, lambda w: w.shape[1] > 8192),
    ),
}
