"""What the kernels are told of a format: its constants, the parts of a weight in the order of parameters, its scales.

Legend: N rows · K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_triton.quant import code_tiles

# No product is ever contracted with the sum that follows it: codecs promise bits.
EXACT: Final = {"enable_fp_fusion": False}
W4: Final = "triton_w4"  # layouts, see layouts.py
E2M1: Final = "triton_e2m1"
BLOCK_FORMATS: Final = {
    "mxfp4": code_tiles.MXFP4,
    "mxfp8": code_tiles.MXFP8,
    "nvfp4": code_tiles.NVFP4,
    "gguf_q4_k": code_tiles.Q4_K,
    "gguf_q5_k": code_tiles.Q5_K,
    "gguf_q6_k": code_tiles.Q6_K,
}
_BIAS: Final = {"e4m3fn": 7, "e5m2": 15, "e4m3fnuz": 8, "e5m2fnuz": 16}
_INTEGERS_AND_TABLES: Final = {
    "int4": code_tiles.INT4, "int8": code_tiles.INT8, "nf4": code_tiles.NF4, "fp4": code_tiles.FP4,
}  # fmt: skip
_GROUP_PARTS: Final = ("zero", "table", "nested_table", "nested_absmax", "nested_offset")
_BLOCK_PARTS: Final = ("codes", "high", "scale", "d", "min", "dmin", "global_scale")


@dataclass(frozen=True)
class Element:
    """A stored element, as the kernels' constants say it."""

    ELEMENT: int
    MANTISSA: int = 0
    BIAS: int = 0
    FNUZ: bool = False

    @staticmethod
    def of(spec: QuantSpec) -> Element:
        """The element of a format."""
        if spec.element in FLOAT8:
            mantissa, fnuz = FLOAT8[spec.element].mantissa, spec.element.endswith("fnuz")
            return Element(code_tiles.FLOAT8.value, mantissa, _BIAS[spec.element], fnuz)
        return Element(_INTEGERS_AND_TABLES[spec.element].value)

    @property
    def constants(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"ELEMENT": self.ELEMENT, "MANTISSA": self.MANTISSA, "BIAS": self.BIAS, "FNUZ": self.FNUZ}


def is_four_bits(spec: QuantSpec) -> bool:
    """Two codes a byte."""
    return spec.element in {"int4", "nf4"}


def is_of_blocks(spec: QuantSpec) -> bool:
    """The format is one of blocks: MX, NVFP4, or a k-quant."""
    return spec.format in BLOCK_FORMATS


def block_constants(spec: QuantSpec) -> dict[str, int]:
    """The constants of a format of blocks."""
    mantissa, bias = (2, 15) if spec.element == "e5m2" else (3, 7)
    return {"FORMAT": BLOCK_FORMATS[spec.format].value, "MANTISSA": mantissa, "BIAS": bias}


def block_parts(w: QuantTensor) -> tuple[Tensor, ...]:
    """The parts of a canonical weight of blocks in the kernels' order; what a format lacks is any tensor."""
    raw = {name: as_bytes(part.contiguous()) for name, part in w.parts.items()}
    return tuple(raw.get(name, raw["codes"]) for name in _BLOCK_PARTS)


def as_bytes(part: Tensor) -> Tensor:
    """A part as the kernels read it: 8-bit floats as uint8."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 and part.dtype != torch.int8 else part


def as_nf4(w: QuantTensor) -> QuantTensor:
    """A weight of fp4 as one of nf4 with another table, which is all that tells them apart; others as they are."""
    return replace(w, spec=replace(w.spec, element="nf4")) if w.spec.element == "fp4" else w


def scale_name(spec: QuantSpec) -> str:
    """The part that holds the scales of groups."""
    return "absmax" if spec.element in {"nf4", "fp4"} else "scale"


def scale_grid(w: QuantTensor) -> dict[str, Any]:
    """Where the scale of a row and a group stands: strides of both, and how many rows share one."""
    spec, (rows, columns) = w.spec, w.shape
    if w.layout == W4:
        return {"scale_row": 1, "scale_group": rows, "SCALE_ROWS": 1, "GROUP": spec.group}
    groups = -(-columns // spec.group) if spec.group else 1
    return {"scale_row": groups, "scale_group": 1, "SCALE_ROWS": spec.rows, "GROUP": spec.group}


def part_names(w: QuantTensor) -> tuple[str, ...]:
    """Parts as kernels are passed them: codes, scales, zero-points, tables; the scales for what a format lacks."""
    scale = scale_name(w.spec)
    return "codes", scale, *(n if n in w.parts else scale for n in _GROUP_PARTS)


def codes_of(w: QuantTensor) -> Tensor:
    """The codes as the kernels read them: float8 as bytes."""
    return as_bytes(w.parts["codes"].contiguous())
