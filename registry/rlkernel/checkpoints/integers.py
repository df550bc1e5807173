"""Schemes of 4-bit integers: GPTQ (v1, v2, act-order), AWQ, compressed-tensors, HQQ.

Readers take tensors by suffix and return QuantTensors; writers do the reverse and raise ArgumentError where the scheme
cannot hold a weight. Legend: N outputs, K inputs, G groups along K.
Imports torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkernel.checkpoints import packing
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]


def read_gptq(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Words qweight [K/8, N], qzeros [G, N/8], scales [G, N], g_idx [K]; v1 (the default) stores zeros less 1."""
    import torch

    groups, outputs = t[".scales"].shape
    columns = t[".qweight"].shape[0] * 8
    packing.sized(f"{name}.qweight", t[".qweight"], (columns // 8, outputs), "[K / 8, N] of scales")
    packing.sized(f"{name}.qzeros", t[".qzeros"], (groups, outputs // 8), "[groups, N / 8] of scales")
    codes = packing.of_words(t[".qweight"].t())  # [N, K]
    zero = packing.of_words(t[".qzeros"]).t() + (config.get("checkpoint_format") != "gptq_v2")  # [N, G]
    order = ".g_idx" in t and packing.grouped_columns(f"{name}.g_idx", t[".g_idx"], groups, columns)
    parts = {"codes": packing.to_bytes(codes), "scale": t[".scales"].t()}
    if order:
        parts["g_idx"] = t[".g_idx"].to(torch.int32)
    return [_integers(name, parts, zero, (outputs, columns), act_order=order)]


def write_gptq(name: str, w: QuantTensor, *, v2: bool = False) -> dict[str, Tensor]:
    """Inverse of `read_gptq`."""
    import torch

    codes, zero = _codes_and_zeros(name, w, "GPTQ")
    outputs, columns = w.shape
    _multiple(name, "K", columns, 8)
    _multiple(name, "N", outputs, 8)
    low, high = (0, 15) if v2 else (1, 16)
    if int(zero.min()) < low or int(zero.max()) > high:
        got, form = f"{int(zero.min())}..{int(zero.max())}", "gptq_v2" if v2 else "gptq"
        raise ArgumentError(f"{name}: zero", got, f"{form} holds {low}..{high}", "Write gptq_v2, or quantize anew.")
    groups = zero.shape[1]
    g_idx = w.parts.get("g_idx", torch.arange(columns, device=codes.device) // (w.spec.group or columns))
    return {
        ".qweight": packing.to_words(codes).t().contiguous(),
        ".qzeros": packing.to_words((zero - low).t().contiguous()),
        ".scales": w.parts["scale"].t().contiguous().view(groups, outputs),
        ".g_idx": g_idx.to(torch.int32),
    }


def read_awq(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Words qweight [K, N/8] and qzeros [G, N/8], columns of a word interleaved, scales [G, N]."""
    del config
    groups, outputs = t[".scales"].shape
    columns = t[".qweight"].shape[0]
    packing.sized(f"{name}.qweight", t[".qweight"], (columns, outputs // 8), "[K, N / 8] of scales")
    packing.sized(f"{name}.qzeros", t[".qzeros"], (groups, outputs // 8), "[groups, N / 8] of scales")
    codes = packing.of_words(t[".qweight"], packing.AWQ).t()
    zero = packing.of_words(t[".qzeros"], packing.AWQ).t()
    parts = {"codes": packing.to_bytes(codes.contiguous()), "scale": t[".scales"].t()}
    return [_integers(name, parts, zero, (outputs, columns), always_zero=True)]


def write_awq(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_awq`."""
    codes, zero = _codes_and_zeros(name, w, "AWQ")
    if w.spec.act_order:
        raise ArgumentError(name, w.spec, "AWQ has no act-order", "Write gptq or compressed-tensors.")
    if int(zero.max()) > 15:
        raise ArgumentError(f"{name}: zero", int(zero.max()), "AWQ holds 0..15", "Quantize the weight anew.")
    _multiple(name, "N", w.shape[0], 8)
    return {
        ".qweight": packing.to_words(codes.t().contiguous(), packing.AWQ),
        ".qzeros": packing.to_words(zero.t().contiguous(), packing.AWQ),
        ".scales": w.parts["scale"].t().contiguous(),
    }


def read_compressed(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """weight_packed [N, ceil(K/8)], q + 8; weight_scale [N, G]; weight_zero_point [ceil(N/8), G], z + 8; g_idx [K]."""
    import torch

    del config
    outputs, columns = (int(x) for x in t[".weight_shape"].tolist())
    words = t[".weight_packed"]
    packing.sized(f"{name}.weight_packed", words, (outputs, -(-columns // 8)), "[N, ceil(K / 8)] of weight_shape")
    scale = t[".weight_scale"]
    groups = scale.shape[1]
    codes = packing.of_words(words)[:, :columns]
    parts = {"codes": packing.to_bytes(codes), "scale": scale}
    order = ".weight_g_idx" in t and packing.grouped_columns(
        f"{name}.weight_g_idx", t[".weight_g_idx"], groups, columns
    )
    if order:
        parts["g_idx"] = t[".weight_g_idx"].to(torch.int32)
    zero = None
    if ".weight_zero_point" in t:
        packed = t[".weight_zero_point"]
        packing.sized(f"{name}.weight_zero_point", packed, (-(-outputs // 8), groups), "[ceil(N / 8), groups]")
        zero = packing.of_words(packed.t().contiguous()).t()[:outputs]
    return [_integers(name, parts, zero, (outputs, columns), act_order=order, always_zero=zero is not None)]


def write_compressed(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_compressed`."""
    import torch

    codes, zero = _codes_and_zeros(name, w, "compressed-tensors")
    if int(zero.max()) > 15:
        raise ArgumentError(f"{name}: zero", int(zero.max()), "pack-quantized holds 0..15", "Quantize it anew.")
    pad = torch.nn.functional.pad
    found = {
        ".weight_packed": packing.to_words(pad(codes, (0, -w.shape[1] % 8))),
        ".weight_scale": w.parts["scale"],
        ".weight_shape": torch.tensor(w.shape),
    }
    if not w.spec.symmetric:
        padded = pad(zero.t().contiguous(), (0, -w.shape[0] % 8))
        found[".weight_zero_point"] = packing.to_words(padded).t().contiguous()
    if w.spec.act_order:
        found[".weight_g_idx"] = w.parts["g_idx"]
    return found


def read_hqq(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """W_q uint8 [R/2, g]: row r in the high nibble, row r + R/2 in the low one; scale and zero [R, 1]; R = N K / g."""
    del config
    outputs, columns = (int(x) for x in t[".shape"].tolist())
    for key, want in ((".nbits", 4), (".axis", 1)):
        if key in t and int(t[key]) != want:
            raise ArgumentError(
                f"{name}{key}", int(t[key]), f"is read where it is {want}", "Quantize with that setting."
            )
    half, group = t[".W_q"].shape
    name_of = {64: "hqq4", 32: "hqq4_g32", 128: "hqq4_g128"}
    if group not in name_of or columns % group or 2 * half * group != outputs * columns:
        problem = f"of {list(t['.W_q'].shape)} is no 4-bit weight of {outputs} x {columns} in groups of 32, 64 or 128"
        raise ArgumentError(f"{name}.W_q", list(t[".W_q"].shape), problem, "Quantize with axis=1 and such a group.")
    import torch

    codes = torch.cat((t[".W_q"] >> 4, t[".W_q"] & 15)).view(outputs, columns)
    shape = (outputs, columns // group)
    parts = {
        "codes": packing.to_bytes(codes),
        "scale": t[".scale"].reshape(shape),
        "zero": t[".zero"].to(t[".scale"].dtype).reshape(shape),
    }
    dtype = t[".scale"].dtype
    return [packing.weight_of(name, name_of[group], (outputs, columns), dtype, parts, scale_dtype=_named(dtype))]


def write_hqq(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_hqq`."""
    import torch

    if not w.spec.float_zero or w.shape[1] % w.spec.group or w.shape[0] * w.shape[1] // w.spec.group % 2:
        raise ArgumentError(name, w, "is no weight that HQQ stores", "Quantize it to hqq4, K a multiple of the group.")
    rows = packing.of_bytes(w.parts["codes"], w.shape[1]).reshape(-1, w.spec.group)
    half = rows.shape[0] // 2
    return {
        ".W_q": (rows[:half] << 4) | rows[half:],
        ".scale": w.parts["scale"].reshape(-1, 1),
        ".zero": w.parts["zero"].reshape(-1, 1),
        ".shape": torch.tensor(w.shape),
        ".nbits": torch.tensor(4),
        ".axis": torch.tensor(1),
        ".group_size": torch.tensor(w.spec.group),
    }


def _integers(
    name: str,
    parts: dict[str, Tensor],
    zero: Tensor | None,
    shape: tuple[int, int],
    *,
    act_order: bool = False,
    always_zero: bool = False,
) -> QuantTensor:
    """int4 of some group, symmetric where every zero-point is 8 and the scheme does not always have one."""
    suffix = packing.group_of(name, shape[1], parts["scale"].shape[1])
    if zero is not None and (always_zero or not bool((zero == 8).all())):
        parts, suffix = {**parts, "zero": zero}, f"{suffix}_asym"
    dtype = parts["scale"].dtype
    options = {"scale_dtype": _named(dtype), **({"act_order": True} if act_order else {})}
    return packing.weight_of(name, f"int4_{suffix}", shape, dtype, parts, **options)


def _codes_and_zeros(name: str, w: QuantTensor, scheme: str) -> tuple[Tensor, Tensor]:  # uint8 [N, K], [N, G]
    import torch

    if w.spec.element != "int4" or not w.spec.format.startswith("int4"):
        raise ArgumentError(name, w, f"{scheme} holds int4 formats", "Quantize it to one, or choose another scheme.")
    codes = packing.of_bytes(w.parts["codes"], w.shape[1])
    return codes, w.parts.get("zero", torch.full_like(w.parts["scale"], 8, dtype=torch.uint8))


def _multiple(name: str, axis: str, size: int, of: int) -> None:
    if size % of:
        raise ArgumentError(name, f"{axis} = {size}", f"must be a multiple of {of} here", "Choose another scheme.")


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
