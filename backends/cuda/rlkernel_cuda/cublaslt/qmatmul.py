"""qmatmul@1 by cuBLASLt through torch: fp8 weights and fp8 tokens, scales a row and a token, or by blocks of 128.

    fp8_channel with act="token_fp8"        a scale a row of the weight and a scale a token
    fp8_block128 with act="block128_fp8"    a scale a block of 128 x 128, and one for 128 columns of a token

Fp8 sums of Hopper's tensor cores keep about 14 bits before they are added in fp32, which is within what a rounded bf16
weight is allowed (`weight_rounding="any"`) and not within the others, which are not claimed.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_triton.launchers import on_device_of
from rlkernel_triton.quant import layouts

BLOCKS: Final = "block128_fp8"
MULTIPLES: Final = {"token_fp8": (16, 16), BLOCKS: (128, 512)}  # act of the format -> what N and K are multiples of
_TOKENS: Final = 16  # with blocks, cuBLASLt takes tokens in multiples: rows of zeros fill up


def fits(call: QmatmulCall) -> Reason | None:
    """Refuses tokens that the format does not quantize, other layouts, and what cuBLASLt does not divide."""
    w = call.w
    N, K = w.shape
    said, fix = "", ""
    if w.layout not in layouts.KNOWN:
        return None  # an error of the call, which says so
    if w.spec.act not in MULTIPLES:
        said, fix = "cuBLASLt multiplies tokens of 8 bits", f'quantize with act="{"/".join(MULTIPLES)}"'
    elif w.layout != CANONICAL:
        said, fix = f"the weight is packed as {w.layout!r}", "use it as quantize made it"
    elif N % MULTIPLES[w.spec.act][0] or K % MULTIPLES[w.spec.act][1]:
        said, fix = f"a weight of {N} x {K}", "multiples of {} and {}".format(*MULTIPLES[w.spec.act])
    elif not all(part.is_contiguous() for part in w.parts.values()) or w.parts["codes"].data_ptr() % 16:
        said = "a weight that is not contiguous, or not at a multiple of 16 bytes"
    return Reason("shape", "unsupported", said, fix) if said else None


def prepare(call: QmatmulCall) -> Callable[[QmatmulCall], Tensor]:
    """What multiplies for calls of this shape.

    See `rlkernel_core.spec.qmatmul.QmatmulCall`; the claims leave out every option but formats.
    """
    x, w = call.x, call.w
    layouts.check_layout("w", w)
    (N, K), device, dtype = w.shape, x.device, x.dtype
    M, out = x.numel() // K, (*x.shape[:-1], N)
    if not M:
        return lambda _: torch.empty(out, dtype=dtype, device=device)

    def run(call: QmatmulCall) -> Tensor:
        w = call.w
        codes, scale, weight_scale = _coded(call.x.detach().reshape(M, K).contiguous(), w)
        with on_device_of(call.x):
            y = torch._scaled_mm(  # noqa: SLF001 torch has no public name for it
                codes, w.parts["codes"].t(), scale_a=scale, scale_b=weight_scale, out_dtype=dtype
            )
        return y[:M].view(out)

    return run


def qmatmul(call: QmatmulCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def _coded(rows: Tensor, w: QuantTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [M, K] and scales of the tokens [M, 1 or K / 128] and of the weight [1 or K / 128, N or N / 128]."""
    if w.spec.act == BLOCKS:
        from rlkernel_cuda.common.quantize_tokens import coded

        codes, scales = coded(rows, _TOKENS)
        return codes, scales.t(), w.parts["scale"].t()
    from rlkernel_triton.quant.quantize import quantize_activation

    made = quantize_activation(rows, w.spec)
    return made.codes, made.scale, w.parts["scale"].reshape(1, -1)
