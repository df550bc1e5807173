"""Tokens of bf16 coded to e4m3 in blocks of 128 columns, by the definition's bits, as libraries of products read them.

    s = max |x| / 448 of a block    codes = e4m3(x / s)     (rlkernel_core.quant.activations, `block128_fp8`)

Legend: M tokens · K inputs, a multiple of 128.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.launchers import plain_launcher_for
from rlkernel_triton.quant.code_tiles import encode_float8

BLOCK: Final = 128
_ROWS: Final = 16  # tokens of a program


@triton.jit(do_not_specialize=["M", "stride"])
def code_blocks(
    x,  # [M, K]
    codes,  # [stride, K] bytes of e4m3
    scale,  # [K / 128, stride] fp32: a block's scales of all tokens, one after the other
    M,
    K,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,  # by the GPU's instruction; Triton's interpreter rounds otherwise
):
    """Grid: (M over ROWS, K over COLUMNS)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    at = row.to(tl.int64)[:, None] * K + block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = row < stride
    v = tl.load(x + at, mask=(row < M)[:, None], other=0.0).to(tl.float32)
    # Bits of magnitudes have their order, with NaN above inf.
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    s = tl.div_rn(most, tl.full([ROWS], 448.0, tl.float32))
    s = tl.where(s < float("inf"), s, float("nan"))
    ratio = tl.div_rn(v, tl.where(s > 0, s, float("inf"))[:, None] + tl.zeros_like(v))
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    if CAST:
        code = ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode_float8(ratio, 3, 7, False, 448.0).to(tl.uint8)
    tl.store(codes + at, code, mask=live[:, None])
    tl.store(scale + block.to(tl.int64) * stride + row, s, mask=live)


def coded(x: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Codes [M up to a multiple, K] and scales [K / 128, the same], 0 beyond M.

    Args:
        x: [M, K] contiguous.
        multiple: of the tokens that the results have room for.
    """
    M, K = x.shape
    stride = -(-M // multiple) * multiple
    codes = torch.empty(stride, K, dtype=torch.uint8, device=x.device)
    scale = torch.empty(K // BLOCK, stride, dtype=torch.float32, device=x.device)
    launch = plain_launcher_for(x.device).bind(
        code_blocks, num_warps=4, ROWS=_ROWS, COLUMNS=BLOCK, CAST=not INTERPRETED
    )
    launch((triton.cdiv(stride, _ROWS), K // BLOCK, 1), x, codes, scale, M, K, stride)
    return codes.view(torch.float8_e4m3fn), scale
