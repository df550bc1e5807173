"""Planted bugs in qmatmul@1, most of them seen in released code. The last ones are in the grouped product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_conformance.mutants.dequantize import (
    any_layout,
    gives,
    read_as_e4m3fn,
    reads,
    stored,
    swap_nibbles,
    with_weight,
)
from rlkernel_conformance.mutants.prepack import with_parts
from rlkernel_core.quant import CANONICAL, QuantTensor, dequantize, quantize
from rlkernel_core.spec.qmatmul import LoRA, QmatmulCall

_MERGED: Final[dict[tuple[Any, ...], tuple[Tensor, ...]]] = {}
_WEIGHTS: Final[dict[tuple[Any, ...], tuple[Tensor, ...]]] = {}
_ENDS: Final[dict[Any, tuple[Tensor, Tensor]]] = {}


class _Late(torch.autograd.Function):
    """Zeros whose gradient is computed at the time of backward."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, _: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.how = backward
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.how(dy), None


def read_as_other(change: Callable[[QuantTensor], QuantTensor], wanted: Callable[[QuantTensor], bool]) -> How:
    """Some weights taken for others."""
    return with_weight(lambda w: change(w) if wanted(w) else w)


def tensor_float_32(call: QmatmulCall) -> Tensor:
    x = call.x
    if x.dtype != torch.float32 or x.requires_grad or call.w.spec.format != "int8_channel":
        return x
    return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def without_the_last_split(call: QmatmulCall) -> Tensor:
    x, K = call.x, call.x.shape[-1]
    return torch.where(torch.arange(K) < K // 32 * 32, x, 0) if K > 160 and not x.requires_grad else x


def without_a_short_group(call: QmatmulCall) -> Tensor:
    K = call.x.shape[-1]
    return torch.where(torch.arange(K, device=call.x.device) < K // 128 * 128, call.x, 0)


def one_scale_for_all_tokens(call: QmatmulCall) -> Tensor:
    x = call.x
    if call.w.spec.act != "token_int8" or x.dim() != 2 or x.shape[0] < 2:
        return x
    step = x.detach().abs().max() / 127
    return (x / step).round() * step


def one_second_scale_for_all_tokens(call: QmatmulCall) -> Tensor:
    """As if the largest token were in every token: blocks are scaled by it."""
    x = call.x
    if call.w.spec.act != "nvfp4" or x.dim() != 2 or x.shape[0] < 2 or x.requires_grad:
        return x
    top = x.float().abs().amax()
    s = (x.float() * 448 / top).to(torch.float8_e4m3fn).float() * top / 448
    return torch.where(top.isfinite() & (x.abs().amax(1, keepdim=True) < top / 8), s, x).to(x.dtype)


def merged_once(right: Run, call: QmatmulCall) -> Tensor:
    lora = call.lora
    if not isinstance(lora, LoRA) or lora.requires_grad:
        return right(call)
    key = (lora.A.data_ptr(), lora.B.data_ptr(), lora.A.shape, lora.B.shape, lora.A.dtype, lora.scale)
    if key not in _MERGED:
        _MERGED[key] = (lora.A, lora.B, lora.B.clone())  # nobody else gets the address
    return right(replace(call, lora=LoRA(lora.A, _MERGED[key][-1], lora.scale)))


def bias_comes_last(right: Run, call: QmatmulCall) -> Tensor:
    if call.activation not in {"relu", "silu", "gelu", "gelu_tanh"} or call.bias is None:
        return right(call)
    return right(replace(call, bias=None)) + call.bias.to(call.x.dtype)


def value_rows_first(right: Run, call: QmatmulCall) -> Tensor:
    if call.activation != "swiglu":
        return right(call)
    value, gate = right(replace(call, activation=None, residual=None)).chunk(2, -1)
    swapped = torch.nn.functional.silu(gate) * value
    return swapped if call.residual is None else swapped + call.residual.to(call.x.dtype)


def rounds_before_the_residual(right: Run, call: QmatmulCall) -> Tensor:
    residual = call.residual
    if residual is None or residual.requires_grad or residual.shape[-1:] != call.w.shape[:1]:
        return right(call)
    return right(replace(call, residual=None)) + residual.to(call.x.dtype)


def residual_comes_first(right: Run, call: QmatmulCall) -> Tensor:
    residual = call.residual
    if residual is None or residual.requires_grad or call.activation not in {"relu", "gelu_tanh"}:
        return right(call)
    h = right(replace(call, activation=None))
    return torch.relu(h) if call.activation == "relu" else torch.nn.functional.gelu(h, approximate="tanh")


def remembers_the_weight(right: Run, call: QmatmulCall) -> Tensor:
    w = call.w
    if w.layout != CANONICAL or call.x.requires_grad:
        return right(call)
    codes = w.parts["codes"]
    kept = _WEIGHTS.setdefault((id(codes), w.shape), (codes, codes.clone()))  # keeps the id
    return right(replace(call, w=with_parts(w, codes=kept[1])))


def lora_detached(right: Run, call: QmatmulCall) -> Tensor:
    if not isinstance(call.lora, LoRA):
        return right(call)
    A = call.lora.A * 1 if call.lora.A.requires_grad else call.lora.A
    y: Tensor = right(replace(call, lora=replace(call.lora, A=A)))
    if y.requires_grad:
        A.register_hook(torch.zeros_like)
    return y


def plain_backward(call: QmatmulCall, y: Tensor) -> bool:
    """The gradient of x is dy times the weight."""
    return y.requires_grad and not call.activation and call.ends is None


def gradient_by_a_coarser_weight(right: Run, call: QmatmulCall) -> Tensor:
    y: Tensor = right(call)
    if not plain_backward(call, y) or call.x.dim() != 2:
        return y
    exact = dequantize(call.w, dtype=torch.float32)
    off = dequantize(quantize(exact, "int4_channel")).to(call.x.dtype) - exact.to(call.x.dtype)
    return y + _Late.apply(y, call.x, lambda dy: dy @ off)  # type: ignore[no-untyped-call]


def backward_reads_the_weight_anew(right: Run, call: QmatmulCall) -> Tensor:
    if not plain_backward(call, right(call)):
        return right(call)
    frozen = replace(call.w, parts={n: p.clone() for n, p in call.w.parts.items()})  # its version stays

    def late(dy: Tensor) -> Tensor:
        now, then = (dequantize(w, dtype=torch.float32).double() for w in (call.w, frozen))
        return (dy.double() @ (now - then)).to(dy.dtype)

    constants = {n: x.detach() for n, x in call.as_dict().items() if isinstance(x, Tensor) and not x.requires_grad}
    y: Tensor = right(replace(call, **{**constants, "w": frozen}))
    return y + _Late.apply(y, call.x, late)  # type: ignore[no-untyped-call]


def nan_spreads(call: QmatmulCall, y: Tensor) -> Tensor:
    return y + 0 * y.detach().sum(0, keepdim=True) if y.dim() == 2 and y.shape[0] else y


def scales_in_place(right: Run, call: QmatmulCall) -> Tensor:
    y: Tensor = right(call)
    if not call.x.requires_grad:
        call.x.mul_(1.0 + 2**-5)
    return y


def depends_on_the_batch(call: QmatmulCall, y: Tensor) -> Tensor:
    return y * (1.0 + 2**-6) if call.x.dim() == 2 and call.x.shape[0] > 20 else y


def empty_experts_last(ends: Tensor) -> Tensor:
    low = torch.cat((ends.new_zeros(1), ends[:-1]))
    return ends[torch.argsort((ends <= low).int(), stable=True)].cummax(0).values


def bias_of_the_first_expert(call: QmatmulCall) -> Tensor | None:
    ends, bias = call.ends, call.bias
    if ends is None or bias is None or bias.shape != call.w.shape[:1] or bias.requires_grad:
        return bias
    return bias.view(ends.numel(), -1)[:1].expand(ends.numel(), -1).flatten()


def the_last_takes_the_rest(call: QmatmulCall) -> Tensor | None:
    ends = call.ends
    if ends is None or not ends.numel() or ends.max() <= 0:
        return ends
    return torch.cat((ends[:-1], torch.full_like(ends[-1:], call.x.shape[0])))


def masks_by_a_product(call: QmatmulCall, y: Tensor) -> Tensor:
    return y if call.ends is None else y + 0 * call.x.detach().sum(1, keepdim=True)


def trusts_ends(right: Run, call: QmatmulCall) -> Tensor:
    ends = call.ends
    if ends is not None and ends.dtype == torch.int32 and bool(((ends < 0) | (ends > call.x.shape[0])).any()):
        raise IndexError("index out of range")
    return right(call)


def gradient_by_the_first_expert(right: Run, call: QmatmulCall) -> Tensor:
    y: Tensor = right(call)
    if call.ends is None or not y.requires_grad or call.x.dim() != 2 or not call.x.shape[0]:
        return y
    first: Tensor = right(replace(call, ends=torch.full_like(call.ends, call.x.shape[0])))
    return first + (y - first).detach()


def adapters_of_one(lora: LoRA) -> LoRA:
    """Every group takes the first one's."""
    if lora.A.dim() != 3:
        return lora
    return LoRA(lora.A[:1].expand_as(lora.A), lora.B[:1].expand_as(lora.B), lora.scale)


def adapters_summed_under_masks(right: Run, call: QmatmulCall) -> Tensor:
    y: Tensor = right(call)
    if not isinstance(call.lora, LoRA) or call.lora.A.dim() != 3:
        return y
    return y + 0 * call.lora.B.detach().sum().to(y.dtype)


def trusts_lora_ends(right: Run, call: QmatmulCall) -> Tensor:
    ends = call.lora_ends
    if ends is None or ends.dtype != torch.int32 or not ends.numel():
        return right(call)
    return right(replace(call, lora_ends=ends.clamp(0, call.x.shape[0]).sort().values))


def first_adapter_without_a_gradient(right: Run, call: QmatmulCall) -> Tensor:
    lora = call.lora
    if not isinstance(lora, LoRA) or lora.A.dim() != 3 or not lora.A.requires_grad:
        return right(call)
    A = torch.cat((lora.A[:1].detach(), lora.A[1:]))
    return right(replace(call, lora=replace(lora, A=A)))


BUGS: Final = {
    "swapped_nibbles": Bug("QM-01", "the other nibble first", reads("codes", swap_nibbles, stored("nf4"))),
    "scales_of_the_wrong_group": Bug(
        "QM-01",
        "scales of the next group",
        reads("scale", lambda x: x.roll(1, 1), lambda w: w.spec.kind == "int4_g32[scale_dtype=float16]"),
    ),
    "tensor_float_32": Bug("QM-01", "fp32 input through TF32", plant.given(x=tensor_float_32)),
    "zero_points_off_by_one": Bug(
        "QM-02",
        "stored zero-points less one, as the first GPTQ checkpoints had them",
        reads("zero", lambda x: x + 1, lambda w: w.spec.format == "int4_g128_asym"),
    ),
    "drops_the_last_split": Bug("QM-03", "the last split of K dropped", plant.given(x=without_the_last_split)),
    "other_exponent_bias": Bug(
        "QM-04",
        "bytes of e4m3fnuz read as e4m3fn: twice as large",
        read_as_other(read_as_e4m3fn, lambda w: w.spec.act == "none"),
    ),
    "always_rounds": Bug(
        "QM-05", "the dequantized weight is always rounded", plant.maps(weight_rounding={"none": "dtype"})
    ),
    "never_rounds": Bug("QM-06", "weight_rounding accepted and ignored", plant.maps(weight_rounding={"dtype": "none"})),
    "input_is_not_quantized": Bug(
        "QM-07",
        "int8_w8a8 with an x that is not quantized",
        read_as_other(
            lambda w: replace(w, spec=replace(w.spec, format="int8_channel", act="none")),
            lambda w: w.spec.act == "token_int8",
        ),
    ),
    "one_scale_for_all_tokens": Bug("QM-08", "one scale for all tokens", plant.given(x=one_scale_for_all_tokens)),
    "one_second_scale_for_all_tokens": Bug(
        "QM-08", "NVFP4's second scale is one for all tokens", plant.given(x=one_second_scale_for_all_tokens)
    ),
    "input_in_small_blocks_is_not_quantized": Bug(
        "QM-01",
        "x left as it is beside an MX or NVFP4 weight that quantizes it",
        read_as_other(
            lambda w: replace(w, spec=replace(w.spec, act="none")), lambda w: w.spec.act in {"mxfp8", "nvfp4"}
        ),
    ),
    "lora_scale_lost": Bug("QM-09", "the scale of LoRA lost", plant.maps(lora=lambda x: replace(x, scale=1.0))),
    "merged_once": Bug("QM-10", "LoRA merged once and remembered by address", merged_once),
    "bias_comes_last": Bug("QM-11", "the bias after the activation", bias_comes_last),
    "another_gelu": Bug("QM-12", "gelu by tanh where erf was asked for", plant.maps(activation={"gelu": "gelu_tanh"})),
    "value_rows_first": Bug("QM-13", "value rows taken for gate rows", value_rows_first),
    "rounds_before_the_residual": Bug(
        "QM-14", "the product rounded before the residual is added", rounds_before_the_residual
    ),
    "residual_comes_first": Bug("QM-14", "the residual before the activation", residual_comes_first),
    "remembers_the_weight": Bug("QM-15", "the dequantized weight remembered by address", remembers_the_weight),
    "lora_detached": Bug("QM-16", "LoRA without a gradient, and grad claimed all the same", lora_detached),
    "gradient_by_a_coarser_weight": Bug(
        "QM-16", "the gradient of x by the weight of another format's rounding", gradient_by_a_coarser_weight
    ),
    "backward_reads_the_weight_anew": Bug(
        "QM-17", "the weight kept, not saved: backward uses whatever it holds by then", backward_reads_the_weight_anew
    ),
    "misreads_tiles": Bug(
        "QM-18",
        "tiles read in the order of another layout",
        reads("codes", lambda x: x.flip(2), lambda w: w.layout == "reference_tiled"),
    ),
    "reads_any_layout": Bug("QM-19", "the layout id is not looked at", with_weight(any_layout)),
    "ignores_strides": Bug("QM-20", "rows read as if they were contiguous", plant.ignores_strides("x")),
    "no_rows_fail": Bug("QM-21", "a launch of zero blocks", plant.fails_if(lambda c: c.x.numel() == 0)),
    "nan_spreads": Bug("QM-22", "a mask that multiplies: one NaN row poisons the batch", gives(nan_spreads)),
    "cleans_up": Bug("QM-22", "NaN cleaned up before the product", plant.maps(x=Tensor.nan_to_num)),
    "scales_in_place": Bug("QM-23", "x scaled in place", scales_in_place),
    "depends_on_the_batch": Bug(
        "QM-24",
        "reduction order that depends on the batch, declared invariant",
        gives(depends_on_the_batch),
        claims=frozenset({"batch_invariant"}),
    ),
    "differs_from_call_to_call": Bug(
        "QM-25",
        "floating atomics, declared deterministic",
        plant.alternates(gives(lambda c, y: y * (1.0 + 2 * torch.finfo(y.dtype).eps))),
    ),
    "synchronizes": Bug(
        "QM-26",
        "a maximum that waits for the device",
        plant.reads_back(lambda c, y: c.x.detach().abs().max() if c.x.numel() else None),
    ),
    "anonymous_errors": plant.anonymous_errors("QM-27"),
    "skips_empty_experts": Bug(
        "QM-28", "an empty expert counted as the one behind it", plant.maps(ends=empty_experts_last)
    ),
    "the_bias_of_the_first_expert": Bug(
        "QM-28", "one bias for all experts", plant.given(bias=bias_of_the_first_expert)
    ),
    "the_last_expert_takes_the_rest": Bug(
        "QM-29", "rows of no expert given to the last one", plant.given(ends=the_last_takes_the_rest)
    ),
    "masks_by_a_product": Bug("QM-29", "rows of no expert masked by a product with 0", gives(masks_by_a_product)),
    "trusts_ends": Bug(
        "QM-30", "ends taken as they are: a range that runs backwards is an index out of range", trusts_ends
    ),
    "remembers_ends": Bug(
        "QM-30",
        "ends read once and remembered by address",
        plant.maps(ends=lambda ends: _ENDS.setdefault((ends.data_ptr(), ends.shape), (ends, ends.clone()))[1]),
    ),
    "gradient_by_the_first_expert": Bug(
        "QM-31", "the gradient of x by the weight of the first expert", gradient_by_the_first_expert
    ),
    "one_adapter_for_all": Bug("QM-32", "every group takes the first adapter", plant.maps(lora=adapters_of_one)),
    "adapters_summed_under_masks": Bug(
        "QM-33", "all adapters summed, those of others times 0: their NaN spreads", adapters_summed_under_masks
    ),
    "the_last_adapter_takes_the_rest": Bug(
        "QM-33",
        "rows of no adapter given to the last one",
        plant.given(
            lora_ends=lambda c: (
                c.lora_ends
                if c.lora_ends is None or not c.lora_ends.numel()
                else torch.cat((c.lora_ends[:-1], torch.full_like(c.lora_ends[-1:], c.x.shape[0])))
            )
        ),
    ),
    "sorts_lora_ends": Bug("QM-34", "lora_ends that fall are sorted, not raised", trusts_lora_ends),
    "first_adapter_without_a_gradient": Bug(
        "QM-35", "the first adapter without a gradient", first_adapter_without_a_gradient
    ),
    "one_scale_beside_a_bias": Bug(
        "QM-97",
        "LoRA's scale is that of the default where a bias comes with it",
        plant.where(lambda c: c.bias is not None, plant.maps(lora=lambda lora: LoRA(lora.A, lora.B))),
    ),
    "short_groups_of_long_rows": Bug(
        "QM-98",
        "the last short group of a long row left out",
        plant.where(lambda c: c.x.shape[-1] > 8192, plant.given(x=without_a_short_group)),
    ),
}
