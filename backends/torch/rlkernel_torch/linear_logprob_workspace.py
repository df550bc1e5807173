"""How much extra memory a call of linear_logprob takes in plain torch, and how its backward pass comes by its logits.

Legend: N rows · D hidden · V vocabulary, or this rank's shard · w ids of a tile · r rank of a low-rank addition.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlkernel_common.row_statistics import accumulator, tile_width
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.codec import ALIGN
from rlkernel_core.spec.linear_logprob import PIECES, LinearLogprobCall
from rlkernel_core.spec.listed_ids import listed_shape
from rlkernel_torch.head import ROWS, stored


def workspace(
    backward: str, N: int, D: int, V: int, itemsize: int = 4, nnz: int = 0, ranks: int = 1, M: int = 0, r: int = 0,
    quantized: bool = False,
) -> int:  # fmt: skip
    """Most extra bytes of a call, beyond its results and gradients.

    A block of rows, a tile of the weight and its gradient, some temporaries of a tile of logits, a few numbers per row
    and rank and per listed id, six per kept id; and, for "save", the logits of all rows.

    Args:
        backward: "recompute" or "save".
        N: rows.
        D: hidden size.
        V: size of the vocabulary, or of this rank's shard.
        itemsize: of the accumulator: 4, or 8 for float64.
        nnz: kept ids of the support.
        ranks: of the group.
        M: listed ids of all rows; 0 where a row has one that is not listed.
        r: rank of the low-rank addition; 0 where there is none.
        quantized: the weight is, and a tile of it is decoded.
    """
    w = tile_width(V)
    operands = 3 * (ROWS + w) * (D + r)
    if r:  # A twice and its gradient; operands before they are joined
        operands += 3 * r * D + 2 * (ROWS + w) * (D + r)
    operands += 6 * (w + ALIGN) * D if quantized else 0
    logits = ROWS * (16 * w + 16 * -(-V // w))
    saved = N * V if backward == "save" else 0
    rows = 8 * (16 + 8 * max(ranks, PIECES)) * (N + ROWS) + 8 * 24 * (M + ROWS if M else 0)
    return itemsize * (operands + logits + saved) + rows + 6 * 8 * nnz


def mode(call: LinearLogprobCall) -> str:
    """How the backward pass of a call comes by its logits, within the limit of the call: "recompute" or "save".

    Raises:
        ArgumentError: the limit is below what it needs.
    """
    backward, limit = call.backward, call.max_workspace_bytes
    if limit is None:
        return "recompute" if backward == "auto" else backward
    nnz = 0 if call.support is None else call.support.ids.shape[0]
    ranks = 1 if call.group is None else call.group.size()
    itemsize = accumulator(call.hidden, stored(call.weight), call.bias).itemsize
    (V, D), listed = call.weight.shape, listed_shape(call.ids, call.hidden)
    M = 0 if listed is None else listed[0] * listed[1]
    r = 0 if call.lora is None else call.lora.A.shape[0]
    for found in ("save", "recompute") if backward == "auto" else (backward,):
        N, quantized = math.prod(call.hidden.shape[:-1]), not isinstance(call.weight, Tensor)
        least = workspace(found, N, D, V, itemsize, nnz, ranks, M, r, quantized=quantized)
        if least <= limit:
            return found
    remedy = f"Pass at least {least}" + (", or backward='recompute'." if backward == "save" else ", or None.")
    raise ArgumentError(
        "max_workspace_bytes", limit, f"is below what backward={backward!r} needs here, {least}", remedy
    )
