"""Planted bugs in quantize@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import CANONICAL, QuantTensor, grid
from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.spec import QuantSpec, spec_of

_NAN = {form.dtype: torch.tensor(torch.nan).to(form.dtype).view(torch.uint8).item() for form in FLOAT8.values()}


def _per_row(spec: QuantSpec) -> bool:
    """A scale that broadcasts against [N, K]."""
    return spec.group == 0


@mutant("QZ-01", origin="scale |w| / 8 for / 7.5, which leaves half a code unused (zoo 32)")
def divided_by_eight(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    with patch.dict("rlkernel_core.quant.grid._LARGEST", {"absmax/7.5": 8.0}):
        return reference(weight, format, **rest)


@mutant("QZ-01", "QZ-02", origin="power-of-two scales rounded down (zoo 33)")
def rounds_scales_down(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.scale_rule == "absmax/max_pow2":
        w.parts["scale"].div_(2)
    return w


@mutant("QZ-01", "QZ-03", "QZ-05", "QZ-10", origin="e8m0 scales rounded up where the rule is to round down (zoo 33)")
def other_power_of_two(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    spec = spec_of(format)
    if spec.scale_dtype != "e8m0" or spec.scale_rule != "floor" or rest.get("out") is not None:
        return reference(weight, format, **rest)
    w = reference(weight, replace(spec, scale_rule="rceil"), **rest)
    return replace(w, spec=spec)


@mutant(
    "QZ-02",
    "QZ-10",
    "QZ-13",
    origin="ties of e2m1 to the larger magnitude, as triton_kernels has them, for ties to even",
)
def ties_away(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    spec = spec_of(format)
    if spec.format != "mxfp4" or spec.rounding != "even" or rest.get("out") is not None:
        return reference(weight, format, **rest)
    w = reference(weight, replace(spec, rounding="away"), **rest)
    return replace(w, spec=spec)


@mutant(
    "QZ-02", "QZ-03", "QZ-05", origin="e2m1 codes in a table of bitsandbytes' fp4, whose codes are in another order"
)
def other_four_bit_float(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element == "fp4" and rest.get("out") is None:
        codes = w.parts["codes"]
        order = torch.tensor([0, 1, 6, 7, 4, 5, 2, 3], dtype=torch.uint8, device=codes.device)
        high, low = codes >> 4, codes & 15
        swap = [(x & 8) | order[(x & 7).long()] for x in (high, low)]
        codes.copy_(swap[0] << 4 | swap[1])
    return w


@mutant("QZ-01", "QZ-02", "QZ-03", "QZ-05", origin="a tensor's scale left out of the scales of nvfp4 blocks")
def forgets_the_scale_of_all(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if "global_scale" in w.parts:
        w.parts["global_scale"].mul_(448)
        w.parts["scale"].copy_(w.parts["scale"].float() / 448)
    return w


@mutant(
    "QZ-01",
    "QZ-02",
    "QZ-03",
    "QZ-05",
    origin="columns put into groups from the smallest, where act-order starts with the largest",
)
def ascending_order(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if "g_idx" in w.parts and w.layout == CANONICAL:
        w.parts["g_idx"].copy_(w.parts["g_idx"].amax() - w.parts["g_idx"])
    return w


@mutant("QZ-01", "QZ-02", origin="the largest magnitude without its sign: llama.cpp's -8 is never used")
def unsigned_extreme(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    with patch("rlkernel_core.quant.grid.signed_extreme", lambda x, group: grid.extremes(x.abs(), 1, group)[1]):
        return reference(weight, format, **rest)


@mutant("QZ-01", "QZ-02", "QZ-03", "QZ-05", origin="zero-points rounded down")
def zero_points_rounded_down(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if "zero" in w.parts and not w.spec.act_order and not w.spec.float_zero:
        low, _ = grid.extremes(weight.detach(), w.spec.rows, w.spec.group)
        ratio = -low.clamp(max=0) / w.parts["scale"].float()
        w.parts["zero"].copy_(ratio.nan_to_num(0.0).floor().clamp(0, 15))
    return w


@mutant("QZ-02", "QZ-03", "QZ-05", "QZ-10", origin="codes truncated towards zero")
def truncated(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element == "int8" and _per_row(w.spec) and w.layout == CANONICAL:
        w.parts["codes"].copy_((weight / w.parts["scale"].float()).nan_to_num(0.0, 0.0, 0.0).trunc())
    return w


@mutant("QZ-02", "QZ-03", "QZ-05", "QZ-10", origin="the other nibble first (zoo 31)")
def swapped_nibbles(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element == "nf4" and w.layout == CANONICAL:
        codes = w.parts["codes"]
        codes.copy_(codes >> 4 | codes << 4)
    return w


@mutant("QZ-02", "QZ-03", "QZ-05", origin="codes of e4m3fn in a weight of e4m3fnuz: twice as large (zoo 34)")
def other_exponent_bias(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element.endswith("fnuz") and w.layout == CANONICAL:
        sibling = FLOAT8[w.spec.element.removesuffix("uz") if "e4" in w.spec.element else "e5m2"].dtype
        w.parts["codes"].view(torch.uint8).copy_(w.parts["codes"].float().to(sibling).view(torch.uint8))
    return w


@mutant("QZ-03", "QZ-02", "QZ-05", "QZ-10", origin="the largest code is never written")
def narrow_range(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element == "int8":
        w.parts["codes"].clamp_(-125, 125)
    return w


@mutant(
    "QZ-04", "QZ-01", "QZ-02", "QZ-03", "QZ-05", "QZ-06", origin="an epsilon added to scales against division by zero"
)
def epsilon_in_the_scale(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.format.startswith(("int8", "fp8")):
        w.parts["scale"].add_(1e-5)
    return w


@mutant("QZ-05", "QZ-10", origin="tiles of 32 columns, the rest dropped")
def drops_the_tail(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    K = weight.shape[1]
    if w.spec.element == "int8" and K > 32 and w.layout == CANONICAL:
        w.parts["codes"][:, K // 32 * 32 :] = 0
    return w


@mutant("QZ-06", origin="0 / 0 in a group of zeros")
def divides_by_zero(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element in FLOAT8 and _per_row(w.spec) and w.layout == CANONICAL:
        w.parts["codes"].view(torch.uint8).masked_fill_(w.parts["scale"] == 0, _NAN[w.parts["codes"].dtype])
    return w


@mutant("QZ-07", origin="a maximum that skips NaN, as fmaxf does")
def maximum_skips_nan(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    return reference(torch.where(weight.isfinite(), weight, 0), format, **rest)


@mutant("QZ-08", "QZ-02", "QZ-06", origin="a cast that does not saturate: 448.00003 becomes NaN")
def overflowing_cast(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if w.spec.element in FLOAT8 and _per_row(w.spec) and w.layout == CANONICAL:
        scale = torch.where(w.parts["scale"] > 0, w.parts["scale"], torch.inf)
        beyond = (weight.float() / scale).abs() > FLOAT8[w.spec.element].max
        w.parts["codes"].view(torch.uint8).masked_fill_(beyond, _NAN[w.parts["codes"].dtype])
    return w


@mutant("QZ-09", origin="a weight read as if it were contiguous")
def ignores_strides(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    room = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    if weight.dim() == 2 and room >= weight.numel():
        weight = weight.as_strided(weight.shape, (weight.shape[1], 1))
    return reference(weight, format, **rest)


@mutant("QZ-10", origin="an update that makes new tensors, while graphs keep the old (zoo 15)")
def rebinds_parts(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    if rest.get("out") is not None:
        w.parts["codes"] = w.parts["codes"].clone()
    return w


@mutant("QZ-10", "QZ-13", origin="an update that keeps the old scales")
def stale_scales(reference: Any, weight: Tensor, format: Any, *, out: Any = None, **rest: Any) -> Any:
    if out is None:
        return reference(weight, format, **rest)
    name = "absmax" if "absmax" in out.parts else "scale"
    old = out.parts[name].clone()
    reference(weight, format, out=out, **rest)
    out.parts[name].copy_(old)
    return out


@mutant("QZ-11", "QZ-04", "QZ-09", "QZ-10", "QZ-13", "QZ-16", origin="the weight scaled in place")
def scales_in_place(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    w = reference(weight, format, **rest)
    with torch.no_grad():
        weight.mul_(1.0 + 2**-6)
    return w


@mutant(
    "QZ-12",
    "QZ-02",
    "QZ-03",
    "QZ-04",
    "QZ-05",
    "QZ-06",
    "QZ-07",
    "QZ-08",
    "QZ-09",
    "QZ-10",
    "QZ-13",
    "QZ-15",
    "QZ-16",
    origin="stochastic rounding that nobody asked for",
)
def differs_from_call_to_call(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    w = reference(weight, format, **rest)
    if w.layout == CANONICAL and differs_from_call_to_call.calls % 2:  # type: ignore[attr-defined]
        w.parts["codes"].view(torch.uint8).view(-1)[0] ^= 1
    return w


@mutant("QZ-13", "QZ-16", origin="a test for NaN that waits for the device")
def synchronises(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    weight.isnan().any().item()
    return reference(weight, format, **rest)


@mutant("QZ-14", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    try:
        return reference(weight, format, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error


@mutant("QZ-14", origin="an out of another shape taken for what it holds", unchecked=True)
def any_out_will_do(reference: Any, weight: Tensor, format: Any, *, out: QuantTensor | None = None, **rest: Any) -> Any:
    if out is not None and out.shape != tuple(weight.shape):
        return reference(weight, spec_of(format), **rest)
    return reference(weight, format, out=out, **rest)


@mutant("QZ-15", origin="a parameter is refused under no_grad as well")
def parameters_are_always_refused(reference: Any, weight: Tensor, format: Any, **rest: Any) -> Any:
    if weight.requires_grad:
        raise ArgumentError("weight", "a parameter", "requires grad", "Detach it.")
    return reference(weight, format, **rest)
