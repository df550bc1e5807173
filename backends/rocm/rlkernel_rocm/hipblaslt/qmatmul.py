"""qmatmul by torch's scaled product: fp8 weights with a scale a row, inputs quantized a token.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_rocm.hipblaslt import FLAVOURS
from rlkernel_rocm.products import misfit, operands

_MULTIPLE = 16  # of K and N: what torch asks of both


def qmatmul(call: QmatmulCall) -> Tensor:  # -> [..., N]
    """See `rlkernel_core.spec.qmatmul.QmatmulCall`; the claims leave out every option but formats."""
    x = call.x
    given = operands(x, call.w)
    y = torch._scaled_mm(  # noqa: SLF001 torch names its row-wise product so, and has no other that AMD GPUs take
        given.x, given.w.t(), scale_a=given.x_scale, scale_b=given.w_scale, out_dtype=x.dtype
    )
    return y.view(*x.shape[:-1], call.w.shape[0])


def fits_fnuz(call: QmatmulCall) -> Reason | None:
    """Why a call does not fit an MI300, if it does not."""
    return misfit("hipBLASLt", FLAVOURS["fnuz"][1:], _MULTIPLE, call.x, call.w)


def fits_ocp(call: QmatmulCall) -> Reason | None:
    """Why a call does not fit an MI350 or an RDNA4 GPU, if it does not."""
    return misfit("hipBLASLt", FLAVOURS["ocp"][1:], _MULTIPLE, call.x, call.w)
