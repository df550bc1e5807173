"""Logits as kernels read them: floats as they are, those of 8 bits as bytes beside the scales of their rows.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.spec.logprob import LogprobCall

MANTISSA: Final = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits


class Coded(NamedTuple):
    """What kernels take for logits of 8 bits."""

    mantissa: int  # bits, 0 where logits have more
    scales: Tensor | None  # [N] fp32; None where logits have no scale


def coded_of(call: LogprobCall) -> Coded:
    """Mantissa and scales of the logits of a call."""
    scale, logits = call.logits_scale, call.logits
    if scale is None:
        return Coded(0, None)
    rows, fp32 = logits.shape[:-1], torch.float32
    if isinstance(scale, Tensor):
        each = scale.to(fp32).expand(rows).reshape(-1).contiguous()
    else:
        each = torch.full((rows.numel(),), scale, dtype=fp32, device=logits.device)
    return Coded(MANTISSA[logits.dtype], each)


def readable(logits: Tensor) -> Tensor:
    """Logits, [..., V], of 8 bits as bytes."""
    return logits.view(torch.uint8) if logits.dtype in MANTISSA else logits
