"""Planted bugs in fake_quantize@1, most of them seen in released code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.spec.fake_quantize import FakeQuantizeCall


class _Backward(torch.autograd.Function):
    """As it is, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.change(grads[0]), None


def with_gradient(change: Callable[[FakeQuantizeCall, Tensor], Tensor]) -> How:
    """A gradient that is changed on its way to the weight, by a function of the record and itself."""

    def how(right: Run, call: FakeQuantizeCall) -> Any:
        fixed = replace(call, weight=call.weight.detach())
        weight: Any = _Backward.apply(call.weight, lambda g: change(fixed, g))  # type: ignore[no-untyped-call]
        return right(replace(call, weight=weight))

    return how


def under(wanted: Callable[[QuantSpec], bool], **options: Any) -> How:
    """Some formats by other options."""

    def how(right: Run, call: FakeQuantizeCall) -> Any:
        spec = spec_of(call.format)
        return right(replace(call, format=replace(spec, **options)) if wanted(spec) else call)

    return how


def rounded_first(right: Run, call: FakeQuantizeCall) -> Any:
    return right(replace(call, weight=call.weight.to(torch.bfloat16).to(call.weight.dtype)))


def rounded_twice(right: Run, call: FakeQuantizeCall) -> Any:
    y: Tensor = right(call)
    return y.to(torch.bfloat16).to(y.dtype) if y.dtype == torch.float16 else y


def in_the_dtype_of_a_float64(right: Run, call: FakeQuantizeCall) -> Any:
    y: Tensor = right(call)
    return y if call.dtype is not None else y.to(torch.bfloat16 if y.dtype == torch.float32 else torch.float32)


def stops_where_it_moved(call: FakeQuantizeCall, g: Tensor) -> Tensor:
    return torch.where(call.weight.abs() > call.weight.float().abs().amax() * 0.99, 0, g)


def beyond_eight_steps(call: FakeQuantizeCall, g: Tensor) -> Tensor:
    return g * 0.5 if call.clipped else g


class _HandedOn(torch.autograd.Function):
    """A result whose gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        del ctx, weight
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        del ctx
        return None, grads[0]


def hands_the_gradient_on(right: Run, call: FakeQuantizeCall) -> Any:
    y: Tensor = right(call)
    known = call.clipped or not y.requires_grad or y.dtype != call.weight.dtype
    return y if known else _HandedOn.apply(y.detach(), call.weight)  # type: ignore[no-untyped-call]


def never_clipped(right: Run, call: FakeQuantizeCall) -> Any:
    return right(replace(call, clipped=False))


def skips_nan(weight: Tensor) -> Tensor:
    return torch.where(weight.isfinite(), weight, 0)


def read_as_contiguous(weight: Tensor) -> Tensor:
    room = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    fits = weight.dim() == 2 and room >= weight.numel()
    return weight.as_strided(weight.shape, (weight.shape[1], 1)) if fits else weight


def flags_of_any_type(call: FakeQuantizeCall) -> FakeQuantizeCall:
    return replace(call, clipped=bool(call.clipped))


def lower(right: Run, call: FakeQuantizeCall) -> Any:
    return plant.lower(right(call))


BUGS: Final = {
    "another_backend_s_rule": Bug(
        "FQ-01",
        "power-of-two scales by another rule than the one that quantize takes",
        under(lambda s: s.scale_dtype == "e8m0" and s.scale_rule == "floor", scale_rule="rceil"),
    ),
    "of_a_rounded_master": Bug("FQ-02", "an fp32 weight rounded to bf16 before its scales are found", rounded_first),
    "rounded_twice": Bug("FQ-03", "fp16 results by way of bf16", rounded_twice),
    "in_another_dtype": Bug("FQ-03", "a dtype of its own where none is given", in_the_dtype_of_a_float64),
    "no_gradient_at_the_largest": Bug(
        "FQ-04", "the gradient of the largest weight goes to the scale", with_gradient(stops_where_it_moved)
    ),
    "clips_by_half": Bug("FQ-05", "half of a clipped gradient", with_gradient(beyond_eight_steps)),
    "never_clipped": Bug("FQ-05", "the argument clipped without effect", never_clipped),
    "maximum_skips_nan": Bug("FQ-06", "a maximum that skips NaN, as fmaxf does", plant.maps(weight=skips_nan)),
    "ignores_strides": Bug("FQ-07", "a weight read as if it were contiguous", plant.maps(weight=read_as_contiguous)),
    "scales_in_place": Bug("FQ-08", "the weight scaled in place", plant.writes(lambda c: c.weight.mul_(1.0 + 2**-6))),
    "hands_the_gradient_on": Bug("FQ-94", "the upstream gradient itself as the weight's", hands_the_gradient_on),
    "differs_from_call_to_call": Bug("FQ-09", "stochastic rounding that nobody asked for", plant.alternates(lower)),
    "asks_the_host": plant.reads_a_value("FQ-10", lambda c: c.weight),
    "anonymous_errors": plant.anonymous_errors("FQ-11"),
    "flags_of_any_type": plant.lenient("FQ-11", "a flag that is any number", flags_of_any_type),
}
