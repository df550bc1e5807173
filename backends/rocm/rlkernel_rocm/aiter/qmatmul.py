"""qmatmul by AITER: 8-bit weights with a scale a row, inputs quantised a token, one matrix product.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch, and AITER at the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.errors import CaptureError
from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_rocm.aiter import ELEMENTS
from rlkernel_rocm.aiter.calls import GEMM_A8W8, load

_MULTIPLE = 16  # of K and N: the tiles that its instances take
_ran: set[tuple[object, ...]] = set()  # what has been built and run in this process


def qmatmul(
    x: Tensor,  # [..., K]
    w: QuantTensor,  # [N, K]
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_rounding: str = "any",
    ends: Tensor | None = None,
) -> Tensor:  # -> [..., N]
    """See `rlkernel_core.spec.qmatmul.qmatmul`; the claims leave out every option but formats.

    Raises:
        CaptureError: a graph is being captured and this product has not been built yet.
        RLKernelError: AITER is not there, or not as it should be.
    """
    kind = (x.device, w.spec.element, x.dtype)
    if kind not in _ran and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError("AITER builds a product at its first call, which a capture would break; call it once before")
    rows = x.reshape(-1, x.shape[-1])
    given = quantize_activation(rows.float(), w.spec)
    scale = w.parts["scale"].reshape(1, -1).float()
    gemm = load(GEMM_A8W8)
    y: Tensor = gemm(given.codes.contiguous(), w.parts["codes"], given.scale.float(), scale, None, x.dtype)
    _ran.add(kind)
    return y.view(*x.shape[:-1], w.shape[0])


def _fits(arch: str, x: Tensor, w: QuantTensor) -> Reason | None:
    outputs, inputs = w.shape
    said, fix = None, ""
    if w.layout != CANONICAL:
        said, fix = f"the weight is packed as {w.layout}", "use it as quantize made it"
    elif w.spec.act == "none":
        said, fix = "AITER quantises what comes in", "use a format with an act, such as int8_w8a8"
    elif w.spec.element not in {"int8", ELEMENTS[arch]}:
        said, fix = f"{arch} multiplies {ELEMENTS[arch]}, not {w.spec.element}", "rlkernel_rocm.fp8 converts weights"
    elif outputs % _MULTIPLE or inputs % _MULTIPLE:
        said, fix = f"a weight of {outputs} x {inputs}", f"multiples of {_MULTIPLE}"
    elif not x.numel():
        said = "no token comes in"
    return Reason("shape", "unsupported", said, fix) if said else None


def fits_gfx942(
    x: Tensor,
    w: QuantTensor,
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_rounding: str = "any",
    ends: Tensor | None = None,
) -> Reason | None:
    """Why a call does not fit an MI300, if it does not."""
    return _fits("gfx942", x, w)


def fits_gfx950(
    x: Tensor,
    w: QuantTensor,
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_rounding: str = "any",
    ends: Tensor | None = None,
) -> Reason | None:
    """Why a call does not fit an MI350, if it does not."""
    return _fits("gfx950", x, w)
