"""The most likely ids of each row by (logit descending, id ascending), and their log-probabilities.

A logit and its column become one integer, larger for what comes first, so that no two are equal and any selection
gives the same answer.

Legend: N rows · V vocabulary · n ids wanted.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_triton.common.arithmetic import cap, row_offset
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.listed_ids import log_share
from rlkernel_triton.common.row_layout import Rows
from rlkernel_triton.common.softmax import row_scale
from rlkernel_triton.launchers import piece_of, plain_launcher_for
from rlkernel_triton.logprob.kernels import load_logits, logits_scale
from rlkernel_triton.logprob.stored_logits import Coded

BLOCK_BYTES: Final = 64 << 20  # of keys that are there at a time
COLUMNS: Final = 2048
WARPS: Final = 4


@triton.jit
def sort_keys(
    logits,  # [N, V]: row i starts as `row_offset` says, columns are `stride` apart
    scales,  # [N] of logits of 8 bits, which come as bytes, read where EIGHT_BITS
    keys,  # [n, V] int64, of rows first .. first + n
    first, V, inner, outer_stride, inner_stride, stride,
    EIGHT_BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One integer for each logit of some rows, in the order of (logit, -column); NaN is largest, as in torch.sort."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < V
    x0 = logits + row_offset(first + row, inner, outer_stride, inner_stride)
    times = logits_scale(scales, first + row, EIGHT_BITS)
    x = load_logits(x0 + at.to(tl.int64) * stride, inside, times, EIGHT_BITS) + 0.0  # -0 becomes 0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of a negative number all bits but the sign, so that integers compare
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - at.to(tl.int64))
    tl.store(keys + row * V + at, key, mask=inside)


@triton.jit
def top_logprobs(
    logits,  # [N, V], as in `sort_keys`
    scales,  # the same
    ids,  # [N, n] int64
    mask,  # [N], read where HAS_MASK
    T,  # [N] where HAS_T, else a number
    softcap,
    logprob,  # [N] of ids[:, 0]
    saved,  # [planes, N] fp32, as `merge_softmax` wrote it
    out,  # [N, n] fp32
    N, n, inner, outer_stride, inner_stride, stride,
    HAS_MASK: tl.constexpr, HAS_T: tl.constexpr, HAS_CAP: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # n padded to a power of two
):  # fmt: skip
    """Log-probabilities of the best ids of one row, 0 where it is masked; that of the first is known."""
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    inside = at < n
    to = out + row.to(tl.int64) * n + at
    if HAS_MASK:
        if tl.load(mask + row) == 0:
            tl.store(to, tl.zeros([WIDTH], tl.float32), mask=inside)
            return
    id = tl.load(ids + row.to(tl.int64) * n + at, mask=inside, other=0)
    x0 = logits + row_offset(row, inner, outer_stride, inner_stride)
    y = load_logits(x0 + id * stride, inside, logits_scale(scales, row, EIGHT_BITS), EIGHT_BITS)
    if HAS_CAP:
        y = cap(y, softcap)
    value = log_share(y, row_scale(T, row, HAS_T), tl.load(saved + row), tl.load(saved + N + row))
    tl.store(to, tl.where(at == 0, tl.load(logprob + row), value), mask=inside)


def best_ids(rows: Rows, coded: Coded, V: int, N: int, n: int) -> Tensor:
    """[N, n] int64."""
    out = torch.empty(N, n, dtype=torch.int64, device=rows.data.device)
    step = max(1, piece_of(BLOCK_BYTES) // (8 * V))
    launch = plain_launcher_for(out.device).bind(
        sort_keys, num_warps=WARPS, V=V, **rows.layout._asdict(), EIGHT_BITS=coded.mantissa, COLUMNS=COLUMNS
    )
    for first in range(0, N, step):
        some = min(step, N - first)
        keys = torch.empty(some, V, dtype=torch.int64, device=out.device)
        launch((some, triton.cdiv(V, COLUMNS)), rows.data, coded.scales, keys, first)
        best = torch.topk(keys, n, dim=1, sorted=True).values
        out[first : first + some] = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    return out


def log_probabilities(
    rows: Rows,
    coded: Coded,
    ids: Tensor,  # [N, n]
    T: float | Tensor,
    mask: Tensor | None,
    softcap: float | None,
    logprob: Tensor,  # [N] of ids[:, 0]
    saved: Tensor,  # [planes, N], top and log total first
) -> Tensor:
    """[N, n] under the distribution that `saved` describes."""
    N, n = ids.shape
    out = torch.empty(N, n, dtype=torch.float32, device=ids.device)
    if N:
        launch = plain_launcher_for(ids.device).bind(
            top_logprobs, num_warps=WARPS, N=N, n=n, **rows.layout._asdict(), HAS_MASK=mask is not None,
            HAS_T=isinstance(T, Tensor), HAS_CAP=softcap is not None, EIGHT_BITS=coded.mantissa,
            WIDTH=triton.next_power_of_2(n),
        )  # fmt: skip
        launch(
            (N,), rows.data, coded.scales, ids, ids if mask is None else mask, T, softcap or 0.0, logprob, saved, out
        )
    return out
