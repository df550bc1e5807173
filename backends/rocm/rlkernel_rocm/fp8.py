"""fp8 weights of one flavour as those of the other: OCP (e4m3fn, e5m2) and FNUZ (e4m3fnuz, e5m2fnuz, gfx942).

A code means twice as much in an OCP format as in its FNUZ counterpart, so the bits stay and the scale changes by two.
What one flavour has and the other has not: negative zero and the NaNs of OCP, infinities of e5m2, and 0x80, the only
NaN of FNUZ. Exact, or an error; nothing is rounded. Imports torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError, ArgumentTypeError

_FNUZ: Final = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
_OCP: Final = {fnuz: ocp for ocp, fnuz in _FNUZ.items()}
_SIGN: Final = 0x80
# Magnitude codes of OCP formats that are no finite number: from here on.
_SPECIAL: Final = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def to_fnuz(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """OCP codes and their scales as FNUZ ones of the same values.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape.
        scale: floating point, any shape; doubled. A scale beyond half its dtype's range overflows and is an error.

    Returns:
        Codes of the FNUZ counterpart and the new scale. Negative zeros become zeros.

    Raises:
        ArgumentTypeError: codes of another dtype.
        ArgumentError: NaN or infinity among the codes, which would become numbers; or a scale that overflows.
    """
    if codes.dtype not in _FNUZ:
        wanted = "Pass float8_e4m3fn or float8_e5m2 codes."
        raise ArgumentTypeError("codes", codes.dtype, "is not an OCP fp8 dtype", wanted)
    bits = codes.view(torch.uint8)
    if bool(((bits & 0x7F) >= _SPECIAL[codes.dtype]).any()):
        raise ArgumentError("codes", "NaN or infinity", "has no counterpart", "Quantize finite weights.")
    return torch.where(bits == _SIGN, 0, bits).to(torch.uint8).view(_FNUZ[codes.dtype]), _times(scale, 2.0)


def to_ocp(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FNUZ codes and their scales as OCP ones of the same values.

    The largest magnitudes of FNUZ formats (240 in e4m3fnuz, whose code is OCP's NaN) have no counterpart.

    Args:
        codes: float8_e4m3fnuz or float8_e5m2fnuz, any shape.
        scale: floating point, any shape; halved.

    Raises:
        ArgumentTypeError: codes of another dtype.
        ArgumentError: NaN or a magnitude without counterpart among the codes; or a scale that underflows.
    """
    if codes.dtype not in _OCP:
        wanted = "Pass float8_e4m3fnuz or float8_e5m2fnuz codes."
        raise ArgumentTypeError("codes", codes.dtype, "is not a FNUZ fp8 dtype", wanted)
    bits, other = codes.view(torch.uint8), _OCP[codes.dtype]
    if bool(((bits == _SIGN) | ((bits & 0x7F) >= _SPECIAL[other])).any()):
        remedy = "Dequantize and quantize again."
        raise ArgumentError("codes", "NaN or a largest magnitude", "has no OCP counterpart", remedy)
    return bits.clone().view(other), _times(scale, 0.5)


def _times(scale: Tensor, factor: float) -> Tensor:
    changed = scale * factor
    if bool((changed / factor != scale).any()):
        raise ArgumentError("scale", scale.dtype, f"cannot hold {factor} times its values", "Use float32 scales.")
    return changed
