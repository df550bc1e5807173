"""Planted bugs in quantize@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import CANONICAL, QuantTensor, grid
from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.spec.quantize import QuantizeCall

NAN: Final = {form.dtype: torch.tensor(torch.nan).to(form.dtype).view(torch.uint8).item() for form in FLOAT8.values()}
# Codes of e2m1 in the order of bitsandbytes' fp4.
FP4_ORDER: Final = (0, 1, 6, 7, 4, 5, 2, 3)


def stores(
    wanted: Callable[[QuantTensor], bool], change: Callable[[Any, dict[str, Tensor], QuantTensor], object]
) -> How:
    """Parts of some results changed in place, by a function of the record, the parts and the result."""

    def how(right: Run, call: Any) -> QuantTensor:
        w: QuantTensor = right(call)
        if wanted(w):
            change(call, w.parts, w)
        return w

    return how


def under_other_rules(wanted: Callable[[QuantSpec], bool], **rules: str) -> How:
    """Some formats quantized by other rules than their own, which the result then claims."""

    def how(right: Run, call: QuantizeCall) -> QuantTensor:
        spec = spec_of(call.format)
        if not wanted(spec) or call.out is not None:
            return right(call)
        return replace(right(replace(call, format=replace(spec, **rules))), spec=spec)  # type: ignore[arg-type]

    return how


def element(*names: str) -> Callable[[QuantTensor], bool]:
    """Weights of these elements as they are stored."""
    return lambda w: w.spec.element in names and w.layout == CANONICAL


def float8_rows(w: QuantTensor) -> bool:
    """8-bit floats whose scales broadcast against [N, K]."""
    return w.spec.element in FLOAT8 and w.spec.group == 0 and w.layout == CANONICAL


def divided_by_eight(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    parts["scale"].copy_(parts["scale"].float() * (7.5 / 8))


def permuted_fp4(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    codes = parts["codes"]
    order = torch.tensor(FP4_ORDER, dtype=torch.uint8, device=codes.device)
    high, low = ((x & 8) | order[(x & 7).long()] for x in (codes >> 4, codes & 15))
    codes.copy_(high << 4 | low)


def without_the_global_scale(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    parts["global_scale"].mul_(448)
    parts["scale"].copy_(parts["scale"].float() / 448)


def rounded_down(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    low, _ = grid.extremes(call.weight.detach(), w.spec.rows, w.spec.group)
    ratio = -low.clamp(max=0) / parts["scale"].float()
    parts["zero"].copy_(ratio.nan_to_num(0.0).floor().clamp(0, 15))


def truncated(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    parts["codes"].copy_((call.weight / parts["scale"].float()).nan_to_num(0.0, 0.0, 0.0).trunc())


def swapped_nibbles(call: Any, parts: dict[str, Tensor], w: QuantTensor) -> None:
    parts["codes"].copy_(parts["codes"] >> 4 | parts["codes"] << 4)


def of_the_sibling(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    sibling = FLOAT8[w.spec.element.removesuffix("uz") if "e4" in w.spec.element else "e5m2"].dtype
    parts["codes"].view(torch.uint8).copy_(parts["codes"].float().to(sibling).view(torch.uint8))


def without_the_tail(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    K = call.weight.shape[1]
    if K > 32:
        parts["codes"][:, K // 32 * 32 :] = 0


def nan_where(parts: dict[str, Tensor], wanted: Tensor) -> None:
    codes = parts["codes"]
    codes.view(torch.uint8).masked_fill_(wanted, NAN[codes.dtype])


def overflowing_cast(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    scale = torch.where(parts["scale"] > 0, parts["scale"], torch.inf)
    nan_where(parts, (call.weight.float() / scale).abs() > FLOAT8[w.spec.element].max)


def read_as_contiguous(weight: Tensor) -> Tensor:
    room = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    fits = weight.dim() == 2 and room >= weight.numel()
    return weight.as_strided(weight.shape, (weight.shape[1], 1)) if fits else weight


def rebinds_parts(right: Run, call: QuantizeCall) -> QuantTensor:
    w: QuantTensor = right(call)
    if call.out is not None:
        w.parts["codes"] = w.parts["codes"].clone()
    return w


def stale_scales(right: Run, call: QuantizeCall) -> QuantTensor:
    out = call.out
    if out is None:
        return right(call)
    name = "absmax" if "absmax" in out.parts else "scale"
    old = out.parts[name].clone()
    right(call)
    out.parts[name].copy_(old)
    return out


def flips_a_bit(call: Any, parts: dict[str, Tensor], w: QuantTensor) -> None:
    parts["codes"].view(torch.uint8).view(-1)[0] ^= 1


def without_a_foreign_out(call: QuantizeCall) -> QuantizeCall:
    foreign = call.out is not None and call.out.shape != tuple(call.weight.shape)
    return replace(call, format=spec_of(call.format), out=None) if foreign else call


def parameters_are_refused(right: Run, call: QuantizeCall) -> QuantTensor:
    if call.weight.requires_grad:
        raise ArgumentError("weight", "a parameter", "requires grad", "Detach it.")
    return right(call)


def away_from_zero(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    if w.spec.element == "int8" and w.spec.rounding == "even":
        scale = parts["scale"].float()
        usable = scale.isfinite() & (scale != 0)
        ratio = torch.where(usable, call.weight.detach().float() / torch.where(usable, scale, 1.0), 0.0)
        parts["codes"].copy_((ratio + 0.5 * ratio.sign()).trunc().clamp(-127, 127).to(torch.int8))


def scale_of_the_group_before(call: QuantizeCall, parts: dict[str, Tensor], w: QuantTensor) -> None:
    if "scale" in parts and parts["scale"].shape[1] > 1:
        parts["scale"][:, -1] = parts["scale"][:, -2]


BUGS: Final = {
    "divided_by_eight": Bug(
        "QZ-01",
        "scale |w| / 8 for / 7.5, which leaves half a code unused",
        stores(lambda w: w.spec.scale_rule == "absmax/7.5", divided_by_eight),
    ),
    "rounds_scales_down": Bug(
        "QZ-01",
        "power-of-two scales rounded down",
        stores(lambda w: w.spec.scale_rule == "absmax/max_pow2", lambda c, parts, w: parts["scale"].div_(2)),
    ),
    "other_power_of_two": Bug(
        "QZ-01",
        "e8m0 scales rounded up where the rule is to round down",
        under_other_rules(lambda s: s.scale_dtype == "e8m0" and s.scale_rule == "floor", scale_rule="rceil"),
    ),
    "ties_away": Bug(
        "QZ-02",
        "ties of e2m1 to the larger magnitude, as triton_kernels has them, for ties to even",
        under_other_rules(lambda s: s.format == "mxfp4" and s.rounding == "even", rounding="away"),
    ),
    "other_four_bit_float": Bug(
        "QZ-02",
        "e2m1 codes in a table of bitsandbytes' fp4, whose codes are in another order",
        stores(lambda w: w.spec.element == "fp4", permuted_fp4),
    ),
    "forgets_the_scale_of_all": Bug(
        "QZ-01",
        "a tensor's scale left out of the scales of nvfp4 blocks",
        stores(lambda w: "global_scale" in w.parts, without_the_global_scale),
    ),
    "ascending_order": Bug(
        "QZ-01",
        "columns put into groups from the smallest, where act-order starts with the largest",
        stores(
            lambda w: "g_idx" in w.parts and w.layout == CANONICAL,
            lambda c, parts, w: parts["g_idx"].copy_(parts["g_idx"].amax() - parts["g_idx"]),
        ),
    ),
    "unsigned_extreme": Bug(
        "QZ-01",
        "the largest magnitude without its sign: llama.cpp's -8 is never used",
        stores(
            lambda w: w.spec.scale_rule.startswith("signed_max"),
            lambda c, parts, w: parts["scale"].copy_(-parts["scale"].abs()),
        ),
    ),
    "zero_points_rounded_down": Bug(
        "QZ-01",
        "zero-points rounded down",
        stores(lambda w: "zero" in w.parts and not w.spec.act_order and not w.spec.float_zero, rounded_down),
    ),
    "truncated": Bug(
        "QZ-02", "codes truncated towards zero", stores(lambda w: element("int8")(w) and w.spec.group == 0, truncated)
    ),
    "swapped_nibbles": Bug("QZ-02", "the other nibble first", stores(element("nf4"), swapped_nibbles)),
    "other_exponent_bias": Bug(
        "QZ-02",
        "codes of e4m3fn in a weight of e4m3fnuz: twice as large",
        stores(lambda w: w.spec.element.endswith("fnuz") and w.layout == CANONICAL, of_the_sibling),
    ),
    "narrow_range": Bug(
        "QZ-03",
        "the largest code is never written",
        stores(lambda w: w.spec.element == "int8", lambda c, parts, w: parts["codes"].clamp_(-125, 125)),
    ),
    "epsilon_in_the_scale": Bug(
        "QZ-04",
        "an epsilon added to scales against division by zero",
        stores(lambda w: w.spec.format.startswith(("int8", "fp8")), lambda c, parts, w: parts["scale"].add_(1e-5)),
    ),
    "drops_the_tail": Bug("QZ-05", "tiles of 32 columns, the rest dropped", stores(element("int8"), without_the_tail)),
    "divides_by_zero": Bug(
        "QZ-06",
        "0 / 0 in a group of zeros",
        stores(float8_rows, lambda c, parts, w: nan_where(parts, parts["scale"] == 0)),
    ),
    "maximum_skips_nan": Bug(
        "QZ-07", "a maximum that skips NaN, as fmaxf does", plant.maps(weight=lambda x: torch.where(x.isfinite(), x, 0))
    ),
    "overflowing_cast": Bug(
        "QZ-08", "a cast that does not saturate: 448.00003 becomes NaN", stores(float8_rows, overflowing_cast)
    ),
    "ignores_strides": Bug("QZ-09", "a weight read as if it were contiguous", plant.maps(weight=read_as_contiguous)),
    "rebinds_parts": Bug("QZ-10", "an update that makes new tensors, while graphs keep the old", rebinds_parts),
    "stale_scales": Bug("QZ-10", "an update that keeps the old scales", stale_scales),
    "scales_in_place": Bug("QZ-11", "the weight scaled in place", plant.writes(lambda c: c.weight.mul_(1.0 + 2**-6))),
    "differs_from_call_to_call": Bug(
        "QZ-12",
        "stochastic rounding that nobody asked for",
        plant.alternates(stores(lambda w: w.layout == CANONICAL, flips_a_bit)),
    ),
    "synchronizes": Bug(
        "QZ-13", "a test for NaN that waits for the device", plant.reads_back(lambda c, o: c.weight.isnan().any())
    ),
    "anonymous_errors": plant.anonymous_errors("QZ-14"),
    "any_out_will_do": plant.lenient("QZ-14", "an out of another shape taken for what it holds", without_a_foreign_out),
    "parameters_are_always_refused": Bug(
        "QZ-15", "a parameter is refused under no_grad as well", parameters_are_refused
    ),
    "asks_the_host": plant.reads_a_value("QZ-16", lambda c: c.weight),
    "rounds_away_from_zero": Bug(
        "QZ-98", "codes of 8 bits by a cast of x + 1/2", stores(lambda w: w.layout == CANONICAL, away_from_zero)
    ),
    "last_group_of_long_rows": Bug(
        "QZ-98",
        "the last group of a long row with the scale of the one before it",
        stores(lambda w: w.shape[1] > 8192 and w.spec.group > 0, scale_of_the_group_before),
    ),
}
