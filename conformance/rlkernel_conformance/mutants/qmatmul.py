"""Planted bugs in qmatmul@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import CANONICAL, QuantTensor, dequantize, quantize
from rlkernel_core.spec.qmatmul import LoRA

_MERGED: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
_WEIGHTS: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}


def _with(w: QuantTensor, **parts: Tensor) -> QuantTensor:
    return replace(w, parts={**w.parts, **parts})


class _Value(torch.autograd.Function):
    """One tensor's values with another's gradient, or with one that is computed at the time of backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor, backward: Any) -> Tensor:
        ctx.how = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.how(dy) if ctx.how else dy, None


@mutant("QM-01", "QM-03", "QM-04", "QM-05", "QM-06", origin="the other nibble first (zoo 31)")
def swapped_nibbles(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.element == "nf4" and w.layout == CANONICAL:
        w = _with(w, codes=w.parts["codes"] >> 4 | w.parts["codes"] << 4)
    return reference(x, w, **rest)


@mutant("QM-01", "QM-04", origin="scales of the next group")
def scales_of_the_wrong_group(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.kind == "int4_g32[scale_dtype=float16]":
        w = _with(w, scale=w.parts["scale"].roll(1, 1))
    return reference(x, w, **rest)


@mutant(
    "QM-01",
    "QM-03",
    "QM-05",
    "QM-06",
    "QM-09",
    "QM-10",
    "QM-11",
    "QM-12",
    "QM-13",
    "QM-14",
    "QM-15",
    "QM-18",
    origin="fp32 input through TF32",
)
def tensor_float_32(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if x.dtype == torch.float32 and not x.requires_grad and w.spec.format == "int8_channel":
        x = (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    return reference(x, w, **rest)


@mutant(
    "QM-02",
    "QM-01",
    "QM-04",
    "QM-09",
    "QM-10",
    "QM-11",
    "QM-12",
    "QM-13",
    "QM-14",
    "QM-15",
    "QM-16",
    "QM-18",
    origin="stored zero-points less one, as the first GPTQ checkpoints had them",
)
def zero_points_off_by_one(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.format == "int4_g128_asym":
        w = _with(w, zero=w.parts["zero"] + 1)
    return reference(x, w, **rest)


@mutant("QM-03", "QM-01", "QM-02", "QM-05", "QM-06", "QM-07", "QM-08", origin="the last split of K dropped")
def drops_the_last_split(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    K = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 0
    if K > 160 and not x.requires_grad:
        x = torch.where(torch.arange(K) < K // 32 * 32, x, 0)
    return reference(x, w, **rest)


@mutant(
    "QM-04",
    "QM-01",
    "QM-02",
    "QM-09",
    "QM-10",
    "QM-11",
    "QM-12",
    "QM-13",
    "QM-14",
    "QM-15",
    "QM-16",
    "QM-22",
    origin="bytes of e4m3fnuz read as e4m3fn: twice as large (zoo 34)",
)
def other_exponent_bias(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.element == "e4m3fnuz" and w.spec.act == "none" and w.layout == CANONICAL:
        codes = w.parts["codes"].view(torch.uint8).view(torch.float8_e4m3fn)
        w = replace(_with(w, codes=codes), spec=replace(w.spec, element="e4m3fn"))
    return reference(x, w, **rest)


@mutant("QM-05", "QM-11", "QM-12", "QM-13", "QM-14", "QM-28", origin="the dequantised weight is always rounded")
def always_rounds(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    pinned = rest.get("weight_rounding") == "none"
    return reference(x, w, **{**rest, "weight_rounding": "dtype"} if pinned else rest)


@mutant("QM-06", origin="weight_rounding accepted and ignored")
def never_rounds(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    pinned = rest.get("weight_rounding") == "dtype"
    return reference(x, w, **{**rest, "weight_rounding": "none"} if pinned else rest)


@mutant(
    "QM-07",
    "QM-01",
    "QM-03",
    "QM-05",
    "QM-06",
    "QM-08",
    "QM-09",
    "QM-10",
    "QM-11",
    "QM-12",
    "QM-13",
    "QM-14",
    "QM-15",
    "QM-16",
    "QM-18",
    origin="int8_w8a8 with an x that is not quantised",
)
def input_is_not_quantised(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.spec.act == "token_int8":
        w = replace(w, spec=replace(w.spec, format="int8_channel", act="none"))
    return reference(x, w, **rest)


@mutant("QM-08", "QM-01", "QM-03", "QM-07", origin="one scale for all tokens")
def one_scale_for_all_tokens(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if not isinstance(w, QuantTensor) or w.spec.act != "token_int8" or x.dim() != 2 or x.shape[0] < 2:
        return reference(x, w, **rest)
    step = x.detach().abs().max() / 127
    return reference((x / step).round() * step, w, **rest)


@mutant("QM-09", "QM-10", "QM-16", "QM-27", origin="the scale of LoRA lost")
def lora_scale_lost(reference: Any, x: Tensor, w: QuantTensor, *, lora: Any = None, **rest: Any) -> Any:
    return reference(x, w, lora=replace(lora, scale=1.0) if isinstance(lora, LoRA) else lora, **rest)


@mutant("QM-10", origin="LoRA merged once and remembered by address")
def merged_once(reference: Any, x: Tensor, w: QuantTensor, *, lora: Any = None, **rest: Any) -> Any:
    if not isinstance(lora, LoRA) or lora.requires_grad:
        return reference(x, w, lora=lora, **rest)
    key = (lora.A.data_ptr(), lora.B.data_ptr(), lora.A.shape, lora.B.shape, lora.A.dtype, lora.scale)
    if key not in _MERGED:
        _MERGED[key] = (lora.A, lora.B, lora.B.clone())  # nobody else gets the address
    return reference(x, w, lora=LoRA(lora.A, _MERGED[key][-1], lora.scale), **rest)


@mutant("QM-11", "QM-16", "QM-28", "QM-29", "QM-31", origin="the bias after the activation")
def bias_comes_last(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    bias = rest.get("bias")
    if rest.get("activation") not in {"relu", "silu", "gelu", "gelu_tanh"} or bias is None:
        return reference(x, w, **rest)
    return reference(x, w, **{**rest, "bias": None}) + bias.to(x.dtype)


@mutant("QM-12", "QM-16", origin="gelu by tanh where erf was asked for")
def another_gelu(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    return reference(x, w, **{**rest, "activation": "gelu_tanh"} if rest.get("activation") == "gelu" else rest)


@mutant("QM-13", "QM-16", "QM-28", "QM-31", origin="value rows taken for gate rows")
def value_rows_first(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    out = reference(x, w, **rest)
    if rest.get("activation") != "swiglu":
        return out
    more = {k: v for k, v in rest.items() if k not in {"activation", "residual"}}
    value, gate = reference(x, w, **more).chunk(2, -1)
    swapped = torch.nn.functional.silu(gate) * value
    return swapped if rest.get("residual") is None else swapped + rest["residual"].to(x.dtype)


@mutant("QM-14", "QM-27", origin="the product rounded before the residual is added")
def rounds_before_the_residual(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    residual = rest.get("residual")
    if residual is None or residual.requires_grad or residual.shape[-1:] != w.shape[:1]:
        return reference(x, w, **rest)
    return reference(x, w, **{**rest, "residual": None}) + residual.to(x.dtype)


@mutant("QM-14", "QM-28", "QM-31", origin="the residual before the activation")
def residual_comes_first(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    residual, activation = rest.get("residual"), rest.get("activation")
    if residual is None or activation not in {"relu", "gelu_tanh"} or residual.requires_grad:
        return reference(x, w, **rest)
    h = reference(x, w, **{**rest, "activation": None})
    return torch.relu(h) if activation == "relu" else torch.nn.functional.gelu(h, approximate="tanh")


@mutant("QM-15", origin="the dequantised weight remembered by address")
def remembers_the_weight(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if not isinstance(w, QuantTensor) or w.layout != CANONICAL:
        return reference(x, w, **rest)
    if getattr(x, "requires_grad", True):
        return reference(x, w, **rest)
    key = (id(w.parts["codes"]), w.shape)
    if key not in _WEIGHTS:
        _WEIGHTS[key] = (w.parts["codes"], w.parts["codes"].clone())  # keeps the id
    return reference(x, _with(w, codes=_WEIGHTS[key][1]), **rest)


@mutant("QM-16", "QM-17", "QM-21", "QM-25", origin="LoRA without a gradient, and grad claimed all the same")
def lora_detached(reference: Any, x: Tensor, w: QuantTensor, *, lora: Any = None, **rest: Any) -> Any:
    if isinstance(lora, LoRA):
        lora = LoRA(lora.A * 1 if lora.A.requires_grad else lora.A, lora.B, lora.scale)
        y = reference(x, w, lora=lora, **rest)
        if y.requires_grad:
            A = lora.A
            A.register_hook(torch.zeros_like)
        return y
    return reference(x, w, lora=lora, **rest)


@mutant("QM-16", origin="the gradient of x by the weight of another format's rounding")
def gradient_by_a_coarser_weight(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    if not y.requires_grad or rest.get("activation") or rest.get("ends") is not None or x.dim() != 2:
        return y
    right = dequantize(w, dtype=torch.float32)
    coarse = dequantize(quantize(right, "int4_channel")).to(x.dtype)
    more = _Value.apply(torch.zeros_like(y), x, lambda dy: dy @ (coarse - right.to(x.dtype)))  # type: ignore[no-untyped-call]
    return y + more


@mutant("QM-17", origin="the weight kept, not saved: backward uses whatever it holds by then")
def backward_reads_the_weight_anew(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    if not y.requires_grad or rest.get("activation") or rest.get("ends") is not None:
        return y
    frozen = replace(w, parts={n: p.clone() for n, p in w.parts.items()})  # its version stays
    rest = {k: v.detach() if isinstance(v, Tensor) and not v.requires_grad else v for k, v in rest.items()}
    old = reference(x, frozen, **rest)
    late = _Value.apply(torch.zeros_like(y), x, lambda dy: _late(dy, w, frozen))  # type: ignore[no-untyped-call]
    return old + late


def _late(dy: Tensor, w: QuantTensor, frozen: QuantTensor) -> Tensor:
    now, then = dequantize(w, dtype=torch.float32).double(), dequantize(frozen, dtype=torch.float32).double()
    return (dy.double() @ (now - then)).to(dy.dtype)


@mutant("QM-18", "QM-15", origin="tiles read in the order of another layout")
def misreads_tiles(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if isinstance(w, QuantTensor) and w.layout == "reference_tiled":
        w = _with(w, codes=w.parts["codes"].flip(2))
    return reference(x, w, **rest)


@mutant("QM-19", origin="the layout id is not looked at")
def reads_any_layout(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    known = not isinstance(w, QuantTensor) or w.layout in {CANONICAL, "reference_tiled"}
    return reference(x, w if known else replace(w, layout=CANONICAL), **rest)


@mutant("QM-20", origin="rows read as if they were contiguous")
def ignores_strides(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if x.dim() == 2 and not x.is_contiguous() and not x.requires_grad:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return reference(x, w, **rest)


@mutant("QM-21", origin="a launch of zero blocks")
def no_rows_fail(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if x.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(x, w, **rest)


@mutant("QM-22", "QM-08", origin="a mask that multiplies: one NaN row poisons the batch")
def nan_spreads(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    return y + 0 * y.detach().sum(0, keepdim=True) if y.dim() == 2 and y.shape[0] else y


@mutant("QM-22", origin="NaN cleaned up before the product")
def cleans_up(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    return reference(x.nan_to_num(), w, **rest)


@mutant(
    *("QM-23", "QM-03", "QM-07", "QM-08", "QM-20", "QM-21", "QM-26", "QM-28", "QM-29", "QM-30"),
    origin="x scaled in place",
)
def scales_in_place(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    if not x.requires_grad:
        x.mul_(1.0 + 2**-5)
    return y


@mutant(
    "QM-24",
    "QM-04",
    origin="reduction order that depends on the batch, declared invariant (zoo 38)",
    claims=frozenset({"batch_invariant"}),
)
def depends_on_the_batch(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    return y * (1.0 + 2**-6) if x.dim() == 2 and x.shape[0] > 20 else y


@mutant(
    "QM-25",
    "QM-01",
    "QM-02",
    "QM-03",
    "QM-04",
    "QM-05",
    "QM-06",
    "QM-07",
    "QM-08",
    "QM-09",
    "QM-10",
    "QM-11",
    "QM-12",
    "QM-13",
    "QM-14",
    "QM-15",
    "QM-16",
    "QM-17",
    "QM-18",
    "QM-20",
    "QM-26",
    "QM-28",
    "QM-29",
    "QM-30",
    "QM-31",
    origin="floating atomics, declared deterministic (zoo 26)",
)
def differs_from_call_to_call(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    y = reference(x, w, **rest)
    if differs_from_call_to_call.calls % 2:  # type: ignore[attr-defined]
        return y
    return y * (1.0 + 2 * torch.finfo(y.dtype).eps)


@mutant("QM-26", origin="a maximum that waits for the device")
def synchronises(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    if x.numel():
        x.detach().abs().max().item()
    return reference(x, w, **rest)


@mutant("QM-27", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    try:
        return reference(x, w, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error
