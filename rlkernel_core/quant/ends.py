"""The least and the largest value that a quantizer's codes stand for, per element of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor, check_layout

# element -> the bytes of codes that stand for the least and the largest value, before a scale that is positive
_BYTES: Final[Mapping[str, tuple[int, int]]] = {
    "int4": (0x00, 0xFF),
    "int5": (0x00, 0xFF),
    "int6": (0x00, 0xFF),
    "int8": (0x81, 0x7F),
    "nf4": (0x00, 0xFF),
    "fp4": (0xBB, 0x33),  # code 3 stands for 1
    "e2m1": (0xFF, 0x77),
    "e4m3fn": (0xFE, 0x7E),
    "e5m2": (0xFB, 0x7B),
    "e4m3fnuz": (0xFF, 0x7F),
    "e5m2fnuz": (0xFF, 0x7F),
}


def end_bytes(spec: QuantSpec) -> tuple[int, int]:
    """Bytes of codes that stand for the least and the largest value which the quantizer writes, before the scale."""
    least, most = _BYTES[spec.element]
    return (0x11 if spec.scale_rule == "absmax/7" else least), most


def ends(w: QuantTensor) -> tuple[QuantTensor, QuantTensor]:
    """Two weights like `w`, with every code that of one end; the first is the larger where a scale is negative.

    Scales and zero-points are shared with `w`.

    Raises:
        LayoutError: `w` is not in the canonical layout.
    """
    check_layout("w", w, (CANONICAL,))
    return tuple(  # type: ignore[return-value]  # there are two
        replace(w, parts={n: _filled(p, byte) if n in {"codes", "high"} else p for n, p in w.parts.items()})
        for byte in end_bytes(w.spec)
    )


def _filled(part: torch.Tensor, byte: int) -> torch.Tensor:
    made = torch.empty_like(part)
    made.view(torch.uint8).fill_(byte)
    return made
