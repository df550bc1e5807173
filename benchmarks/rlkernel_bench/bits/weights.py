"""Calls of the operators on quantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.bits.inputs import Given, Size, Table, draw, larger

FORMATS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {  # format -> option -> the values it has by no default
    **{
        key: {"scale_dtype": ("float32",), "scale_rule": ("absmax/7",), "act_order": (True,)}
        for key in ("int4_g128", "int4_g32")
    },
    **{key: {"scale_dtype": ("float16",)} for key in ("int4_g64", "int4_channel", "int4_channel_asym")},
    **{key: {"act_order": (True,)} for key in ("int4_g128_asym", "int4_g64_asym", "int4_g32_asym")},
    **{key: {"double_quant": (True,)} for key in ("nf4", "nf4_g128", "fp4", "fp4_g128")},
    **{key: {"scale_dtype": ("float32",)} for key in ("hqq4", "hqq4_g32", "hqq4_g128")},
    "mxfp4": {"scale_rule": ("rceil", "even"), "rounding": ("away",)},
    "mxfp8": {"scale_rule": ("rceil", "even"), "element": ("e5m2",)},
    "nvfp4": {"rounding": ("away",)},
    **{key: {} for key in ("q4l", "gguf_q4_0", "gguf_q8_0", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k")},
    **{key: {"scale_dtype": ("bfloat16",)} for key in ("int8_channel", "int8_w8a8")},
    "fp8_tensor": {"element": ("e5m2", "e4m3fnuz"), "act": ("token_fp8",)},
    "fp8_channel": {"element": ("e5m2",), "scale_rule": ("absmax/max_pow2",), "act": ("token_fp8",)},
    "fp8_block128": {"element": ("e5m2",), "act": ("block128_fp8",)},
}
ACTIVATIONS: Final = ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu_tanh")


def specs(s: Size) -> Iterator[tuple[str, rlk.QuantSpec]]:
    """Every format, and every option at a value that is not its default, with a name for each."""
    for name in FORMATS if not s.small else ("int4_g32", "nf4", "mxfp4"):
        yield name, rlk.QuantSpec.named(name)
        for option, values in FORMATS[name].items():
            yield from ((f"{name} {option}={v}", rlk.QuantSpec.named(name, **{option: v})) for v in values)


def stored(weight: Tensor, spec: Any) -> rlk.QuantTensor:
    """A weight quantized by the definition on the CPU, so that products do not depend on who quantizes."""
    with rlk.use("reference"):
        return rlk.quantize(weight, spec)


def quantize(s: Size) -> Table:
    """Every format of one weight, then a layer's."""

    def weight(dtype: torch.dtype = torch.float32) -> Tensor:
        return draw(s.V, s.D, dtype=dtype)

    found: Table = {name: lambda f=spec: {"weight": weight(), "format": f} for name, spec in specs(s)}
    found["bfloat16"] = lambda: {"weight": weight(torch.bfloat16), "format": "int4_g32"}
    found["to bfloat16"] = lambda: {"weight": weight(), "format": "nf4", "dtype": torch.bfloat16}
    for name in ("int4_g128", "nf4", "mxfp4", "fp8_block128", "int8_channel"):
        found |= larger(
            s,
            f"2048 x 2048 bfloat16 {name}",
            lambda f=name: {"weight": draw(2048, 2048, dtype=torch.bfloat16), "format": f},
        )
    return found


def dequantize(s: Size) -> Table:
    """Every format."""
    found: Table = {name: lambda f=spec: {"w": stored(draw(s.V, s.D), f)} for name, spec in specs(s)}
    return found | {"bfloat16": lambda: {"w": stored(draw(s.V, s.D), "int4_g32"), "dtype": torch.bfloat16}}


def prepack(s: Size) -> Table:
    """Formats that backends rearrange."""
    names = (
        ("int4_g32", "nf4")
        if s.small
        else ("int4_g128", "int4_g32_asym", "nf4", "mxfp4", "int8_channel", "fp8_channel")
    )
    return {name: lambda f=name: {"w": stored(draw(s.V, s.D), f)} for name in names}


def qmatmul(s: Size) -> Table:
    """Every format, every end of a product, rows of a decode step and of a prefill."""
    B, V, D = s.B, s.V - s.V % 2, s.D

    def product(spec: Any, dtype: torch.dtype = torch.bfloat16, rows: int = B) -> Given:
        return {"x": draw(rows, D, dtype=dtype), "w": stored(draw(V, D, seed=1), spec)}

    dtype = torch.float32 if s.small else torch.bfloat16
    found: Table = {name: lambda f=spec: product(f, dtype) for name, spec in specs(s)}
    found |= {
        "float32": lambda: product("int4_g32", torch.float32),
        "float16": lambda: product("int4_g32", torch.float16),
        "bias": lambda: {**product("int4_g32", dtype), "bias": draw(V)},
        "lora": lambda: {**product("int4_g32", dtype), "lora": rlk.LoRA(draw(2, D), draw(V, 2))},
        "residual": lambda: {**product("int4_g32", dtype), "residual": draw(B, V, dtype=dtype)},
        "weights of the dtype": lambda: {**product("int4_g32"), "weight_rounding": "dtype"},
        "weights of fp32": lambda: {**product("int4_g32", dtype), "weight_rounding": "none"},
        "experts": lambda: {**product("int4_g32", dtype), "ends": torch.tensor([3, 5], dtype=torch.int32)},
        **{a: lambda a=a: {**product("int4_g32", dtype), "activation": a} for a in ACTIVATIONS},
    }
    for rows in (1, 17, 64, 300):
        for name in ("int4_g128", "nf4", "fp8_channel"):
            found |= larger(s, f"{rows} rows, {name}", lambda r=rows, f=name: product(f, rows=r))
    return found
