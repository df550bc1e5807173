"""Schemes of small floats: bitsandbytes (nf4, fp4), gpt-oss and compressed-tensors MX, ModelOpt, fp8, int8 per row.

Readers take tensors by suffix and return QuantTensors, several where experts are stacked; writers do the reverse.
Legend: N outputs, K inputs, E experts. Imports torch inside functions only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkernel.checkpoints import packing
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantTensor
from rlkernel_core.quant.tensor import noted

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
STATE = ".weight.quant_state.bitsandbytes__"
_NESTED = 256
_STATE = {
    "quant_type": str,
    "blocksize": int,
    "dtype": str,
    "shape": [int],
    "nested_blocksize?": int,
    "nested_offset?": float,
}


def read_bitsandbytes(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Weight uint8 [N K / 2, 1], absmax, quant_map, and what they mean as JSON; the scales perhaps quantized again."""
    import torch

    from rlkernel_core.quant.codec import codec_of
    from rlkernel_core.quant.spec import QuantSpec

    del config
    key = next((key for key in t if key.startswith(STATE)), None)
    if key is None:
        raise ArgumentError(name, sorted(t), "has no quant_state", "Save it with bitsandbytes 0.41.1 or later.")
    state = noted(f"{name}.quant_state", t[key], _STATE)
    dtype = getattr(torch, state["dtype"], None)
    if not isinstance(dtype, torch.dtype) or len(state["shape"]) != 2 or min(state["shape"]) < 0:
        got = f"{state['dtype']}{state['shape']}"
        raise ArgumentError(f"{name}.quant_state", got, "must say a dtype and two sizes", "Check the file.")
    known = {("nf4", 64): "nf4", ("nf4", 128): "nf4_g128", ("fp4", 64): "fp4", ("fp4", 128): "fp4_g128"}
    kind = (state["quant_type"], state["blocksize"])
    if kind not in known or state.get("nested_blocksize", _NESTED) != _NESTED:
        problem = f"blocks of 64 or 128, nested ones of {_NESTED}, are read"
        raise ArgumentError(f"{name}.quant_state", kind, problem, "Quantize with blocksize=64.")
    nested = ".weight.nested_absmax" in t
    parts = {"codes": t[".weight"].view(torch.uint8).reshape(-1), "absmax": t[".weight.absmax"]}
    table = codec_of(QuantSpec.named(known[kind])).constants(QuantSpec.named(known[kind]))["table"]
    if not torch.equal(t[".weight.quant_map"].float().cpu(), table):
        raise ArgumentError(f"{name}.quant_map", "another table", f"must be that of {kind[0]}", "Check the file.")
    parts["table"] = t[".weight.quant_map"].float()
    if nested:
        parts["nested_absmax"] = t[".weight.nested_absmax"]
        parts["nested_table"] = t[".weight.nested_quant_map"]
        if "nested_offset" not in state:
            raise ArgumentError(f"{name}.quant_state", sorted(state), "has no nested_offset", "Check the file.")
        parts["nested_offset"] = torch.tensor([state["nested_offset"]], dtype=torch.float32)
    outputs, columns = state["shape"]
    options = {"double_quant": True} if nested else {}
    return [packing.weight_of(name, known[kind], (outputs, columns), dtype, parts, **options)]


def write_bitsandbytes(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_bitsandbytes`."""
    import torch

    if w.spec.element not in {"nf4", "fp4"}:
        raise ArgumentError(name, w, "bitsandbytes holds nf4 and fp4", "Quantize it to one of those.")
    state = {
        "quant_type": w.spec.element,
        "blocksize": w.spec.group,
        "dtype": str(w.dtype).removeprefix("torch."),
        "shape": list(w.shape),
    }
    found = {
        ".weight": w.parts["codes"].unsqueeze(1),
        ".weight.absmax": w.parts["absmax"],
        ".weight.quant_map": w.parts["table"],
    }
    if w.spec.double_quant:
        state |= {
            "nested_blocksize": _NESTED,
            "nested_dtype": "float32",
            "nested_offset": w.parts["nested_offset"].item(),
        }
        found |= {
            ".weight.nested_absmax": w.parts["nested_absmax"],
            ".weight.nested_quant_map": w.parts["nested_table"],
        }
    return {**found, STATE + w.spec.element: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def read_gpt_oss(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Blocks uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32]: an mxfp4 weight per expert."""
    import torch

    del config
    blocks, scales = t["_blocks"], t["_scales"]
    if blocks.dim() != 4 or blocks.shape[-1] != 16:
        raise ArgumentError(f"{name}_blocks", list(blocks.shape), "must be [E, N, K / 32, 16]", "Check the file.")
    packing.sized(f"{name}_scales", scales, blocks.shape[:-1], "as blocks")
    shape = (blocks.shape[1], blocks.shape[2] * 32)
    return [
        packing.weight_of(f"{name}.{i}", "mxfp4", shape, torch.bfloat16, {"codes": b.flatten(1), "scale": s})
        for i, (b, s) in enumerate(zip(blocks, scales, strict=True))
    ]


def write_gpt_oss(name: str, weights: list[QuantTensor]) -> dict[str, Tensor]:
    """Inverse of `read_gpt_oss`."""
    import torch

    first = weights[0]
    if any(w.format != "mxfp4" or w.shape != first.shape or w.shape[1] % 32 for w in weights):
        raise ArgumentError(name, weights, "must be mxfp4 of one shape, K a multiple of 32", "Quantize them anew.")
    rows, columns = first.shape
    blocks = torch.stack([w.parts["codes"].view(rows, columns // 32, 16) for w in weights])
    return {"_blocks": blocks, "_scales": torch.stack([w.parts["scale"] for w in weights])}


def read_packed_mx(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """compressed-tensors: weight_packed uint8 [N, K/2] or weight float8 [N, K], weight_scale uint8 [N, K/32]."""
    import torch

    del config
    if ".weight_packed" in t:
        codes, form = t[".weight_packed"], "mxfp4"
        shape = (codes.shape[0], 2 * codes.shape[1])
    else:
        codes, form = t[".weight"], "mxfp8"
        shape = (codes.shape[0], codes.shape[1])
    options = {"element": "e5m2"} if codes.dtype == torch.float8_e5m2 else {}
    return [
        packing.weight_of(name, form, shape, torch.bfloat16, {"codes": codes, "scale": t[".weight_scale"]}, **options)
    ]


def write_packed_mx(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_packed_mx`."""
    if w.spec.scale_dtype != "e8m0" or w.shape[1] % 32:
        raise ArgumentError(name, w, "must be mxfp4 or mxfp8, K a multiple of 32", "Quantize it to one of those.")
    codes = ".weight_packed" if w.spec.element == "e2m1" else ".weight"
    return {codes: w.parts["codes"], ".weight_scale": w.parts["scale"]}


def read_modelopt(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2 fp32, a factor: nvfp4."""
    import torch

    del config
    codes = t[".weight"]
    parts = {
        "codes": codes,
        "scale": t[".weight_scale"],
        "global_scale": t[".weight_scale_2"].float().reshape(-1),
    }
    shape = (codes.shape[0], 2 * codes.shape[1])
    return [packing.weight_of(name, "nvfp4", shape, torch.bfloat16, parts)]


def write_modelopt(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """Inverse of `read_modelopt`, and fp8 of one scale."""
    if w.format == "nvfp4" and w.shape[1] % 16 == 0:
        scale = w.parts["global_scale"].reshape(())
        return {".weight": w.parts["codes"], ".weight_scale": w.parts["scale"], ".weight_scale_2": scale}
    if w.format == "fp8_tensor":
        return {".weight": w.parts["codes"], ".weight_scale": w.parts["scale"].reshape(())}
    raise ArgumentError(name, w, "must be nvfp4 with K a multiple of 16, or fp8_tensor", "Quantize it to one of those.")


def read_scaled(name: str, t: Tensors, config: Mapping[str, Any]) -> list[QuantTensor]:
    """Weight float8 or int8 [N, K], weight_scale of one value, [N] or [N, 1], or blocks of 128 (weight_scale_inv)."""
    import torch

    del config
    codes = t[".weight"]
    scale = t.get(".weight_scale_inv", t.get(".weight_scale"))
    if scale is None:
        raise ArgumentError(name, sorted(t), "has no scale", "Check the file.")
    outputs, columns = codes.shape
    blocks = (-(-outputs // 128), -(-columns // 128))
    integers = codes.dtype == torch.int8
    if ".weight_scale_inv" in t or (scale.dim() == 2 and tuple(scale.shape) == blocks and scale.shape[1] > 1):
        packing.sized(f"{name}: scale", scale, blocks, "a value per 128 x 128 block")
        form = "fp8_block128"
    elif scale.numel() == 1 and not integers:
        form, scale = "fp8_tensor", scale.reshape(1, 1)
    else:
        if scale.numel() != outputs:
            raise ArgumentError(f"{name}: scale", list(scale.shape), f"must have {outputs} values", "Check the file.")
        form, scale = ("int8_channel" if integers else "fp8_channel"), scale.reshape(outputs, 1)
    element = str(codes.dtype).removeprefix("torch.float8_")
    options = {} if integers or element == "e4m3fn" else {"element": element}
    dtype = torch.bfloat16 if scale.dtype == torch.float32 else scale.dtype
    parts = {"codes": codes, "scale": scale.float()}  # exact
    return [packing.weight_of(name, form, (outputs, columns), dtype, parts, **options)]


def write_scaled(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """fp8 and int8 per row or for all as compressed-tensors has them."""
    if w.format not in {"fp8_tensor", "fp8_channel", "int8_channel", "int8_w8a8"}:
        raise ArgumentError(name, w, "must be fp8_tensor, fp8_channel or int8_channel", "Quantize it to one of those.")
    scale = w.parts["scale"]
    return {".weight": w.parts["codes"], ".weight_scale": scale.reshape(1) if w.format == "fp8_tensor" else scale}


def write_blocks(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """fp8 with a scale per 128 x 128 block as DeepSeek-V3 has it."""
    if w.format != "fp8_block128":
        raise ArgumentError(name, w, "must be fp8_block128", "Quantize it to that.")
    return {".weight": w.parts["codes"], ".weight_scale_inv": w.parts["scale"]}
