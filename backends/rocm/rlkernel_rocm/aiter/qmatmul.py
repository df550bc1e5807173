"""qmatmul by AITER: 8-bit weights with scales by rows or blocks, inputs quantized likewise, one matrix product.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch, and AITER at the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.errors import CaptureError
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_rocm.aiter import ELEMENTS
from rlkernel_rocm.aiter.calls import GEMM_A8W8, GEMM_A8W8_BLOCKS, load
from rlkernel_rocm.products import misfit, operands

_MULTIPLE = 16  # of K and N: the tiles that its instances take
BLOCK = 128  # of K and N, where scales are by blocks
# act of the format -> the call that multiplies what it makes
CALLS_OF = {"token_int8": GEMM_A8W8, "token_fp8": GEMM_A8W8, "block128_fp8": GEMM_A8W8_BLOCKS}
_ran: set[tuple[object, ...]] = set()  # what has been built and run in this process


def qmatmul(call: QmatmulCall) -> Tensor:  # -> [..., N]
    """See `rlkernel_core.spec.qmatmul.QmatmulCall`; the claims leave out every option but formats.

    Raises:
        CaptureError: a graph is being captured and this product has not been built yet.
        RLKernelError: AITER is not there, or not as it should be.
    """
    x, w = call.x, call.w
    of_aiter = CALLS_OF[w.spec.act]
    kind = (x.device, of_aiter.name, w.spec.element, x.dtype)
    if kind not in _ran and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError("AITER builds a product at its first call, which a capture would break; call it once before")
    given = operands(x, w)
    more = (None, x.dtype) if of_aiter is GEMM_A8W8 else (x.dtype,)
    y: Tensor = load(of_aiter)(*given, *more)
    _ran.add(kind)
    return y.view(*x.shape[:-1], w.shape[0])


def _fits(arch: str, x: Tensor, w: QuantTensor) -> Reason | None:
    multiple = BLOCK if w.spec.act == "block128_fp8" else _MULTIPLE
    return misfit("AITER", ("int8", ELEMENTS[arch]), multiple, x, w)


def fits_gfx942(call: QmatmulCall) -> Reason | None:
    """Why a call does not fit an MI300, if it does not."""
    return _fits("gfx942", call.x, call.w)


def fits_gfx950(call: QmatmulCall) -> Reason | None:
    """Why a call does not fit an MI350, if it does not."""
    return _fits("gfx950", call.x, call.w)
