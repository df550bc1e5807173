"""Weights one under the other: projections that share an input, or the experts of a layer, as one weight.

    w = stack((w_q, w_k, w_v))                     # [Nq + Nk + Nv, K]
    q, k, v = rlkernel.qmatmul(x, w).split((Nq, Nk, Nv), -1)

No code changes: the stacked weight dequantizes to the stacked values, bit for bit. Where one scale belongs to all rows
(fp8_tensor, nvfp4, the groups of act_order, double quantization) it has to be the same in all weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.slicing import whole_rows
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor, check_layout


def stack(weights: Sequence[QuantTensor]) -> QuantTensor:  # of [N_i, K] -> [sum N_i, K]
    """One weight of the rows of all `weights`; its memory is its own. Compares what all rows share, on the host.

    Raises:
        ArgumentError: none is given; formats, K, dtypes or devices differ; a block of rows or of elements would go on
            from one weight into the next; what all rows share differs.
        LayoutError: a weight is not canonical: stack first, prepack then.
    """
    if not weights:
        raise ArgumentError("weights", weights, "are none", "Pass at least one QuantTensor.")
    first = weights[0]
    for w in weights:
        check_layout("weights", w, (CANONICAL,))
        if (w.spec, w.shape[1], w.dtype, w.device) != (first.spec, first.shape[1], first.dtype, first.device):
            raise ArgumentError("weights", [first, w], "must agree in format, K, dtype and device", "Convert one.")
    for w in weights[:-1]:
        _check_whole(w)
    shape = (sum(w.shape[0] for w in weights), first.shape[1])
    sizes = codec_of(first.spec).storage(first.spec, shape)
    parts = {name: _joined(name, [w.parts[name] for w in weights], sizes[name][0]) for name in first.parts}
    return QuantTensor(first.spec, shape, first.dtype, parts)


def _check_whole(w: QuantTensor) -> None:
    """What follows the last row of `w` starts a byte, a block and a scale of its own."""
    rows, columns = w.shape
    if not whole_rows(w.spec, rows, columns, flat="absmax" in w.parts):
        raise ArgumentError("weights", w, "ends inside a block", "Quantize the stacked weight instead.")


def _joined(name: str, parts: list[Tensor], size: tuple[int, ...]) -> Tensor:
    """Rows of all, or what they share."""
    rows = sum(part.shape[0] for part in parts)
    if rows == size[0]:
        return torch.cat(parts)
    raw = [part.contiguous().view(torch.uint8) for part in parts]
    if any(not torch.equal(raw[0], other) for other in raw[1:]):
        raise ArgumentError("weights", f"{name} of all rows", "differs", "Quantize the stacked weight instead.")
    return parts[0].clone()
