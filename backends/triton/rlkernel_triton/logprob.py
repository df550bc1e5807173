"""logprob@1 on Triton: one read of the logits forward, one read and one write back.

Legend: N rows · V vocabulary · P parts of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.row_selection import check_values, refuse_second_derivative
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_triton import law_kernel, logprob_kernels
from rlkernel_triton.kept_bits import Kept, kept_bits
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.row_layout import Rows, rows_of
from rlkernel_triton.top_ids import best_ids, log_probabilities


class Law(NamedTuple):
    """What the rows say, [N] each, and what the gradient needs of it."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None
    invalid: Tensor  # bool
    saved: Tensor  # [6, N]


def logprob(call: LogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.logprob.LogprobCall`.

    Memory beyond results and gradient: 16 bytes (32 with a support) per row and 32768 columns, 24 per row; a bit per
    logit with a support; with top_logprobs some blocks of 64 MiB.
    """
    logits, ids, mask, top_logprobs, support = call.logits, call.ids, call.mask, call.top_logprobs, call.support
    shape, V = ids.shape, logits.shape[-1]
    if call.validate:
        check_values(ids, mask, V, call.temperature, support)
    T, counted = per_row(call.temperature, shape), None if mask is None else mask.reshape(-1).contiguous()
    kept = None if support is None else kept_bits(support, V)
    flat = ids.reshape(-1).contiguous()
    value, lse, H, mass, invalid = _Logprob.apply(logits, flat, T, counted, kept, call.softcap, call.entropy)  # type: ignore[no-untyped-call]
    top_ids, top = None, None
    if top_logprobs:
        rows = rows_of(logits.detach())
        top_ids = best_ids(rows, V, flat.shape[0], top_logprobs)
        top = _of_best(rows, V, top_ids, T, counted, call.softcap)
        if counted is not None:
            top_ids = torch.where(counted[:, None], top_ids, -1)
    return LogprobResult(
        logprob=value.view(shape),
        lse=lse.view(shape),
        entropy=None if H is None else H.view(shape),
        top_ids=None if top_ids is None else top_ids.view(*shape, top_logprobs),
        top_logprobs=None if top is None else top.view(*shape, top_logprobs),
        log_kept_mass=None if mass is None else mass.view(shape),
        invalid=invalid.view(shape),
    )


def per_row(temperature: float | Tensor, rows: torch.Size) -> float | Tensor:
    """A number for all rows, or [N]."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return temperature.to(torch.float32).expand(rows).reshape(-1).contiguous()


class _Logprob(torch.autograd.Function):
    """Results of [..., V] logits, with their analytic gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [..., V]
        ids: Tensor,  # [N]
        T: float | Tensor,
        mask: Tensor | None,
        kept: Kept | None,
        softcap: float | None,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        rows = rows_of(logits)
        row = statistics(rows, logits.shape[-1], ids, T, mask, kept, softcap, moment=entropy)
        per_row_T = T if isinstance(T, Tensor) else None
        bits = () if kept is None else kept
        ctx.save_for_backward(logits, ids, per_row_T, mask, row.invalid, row.saved, *bits)
        ctx.T, ctx.softcap = T if per_row_T is None else None, softcap
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row.invalid)
        return row[:5]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("logprob")
        logits, ids, T, mask, invalid, saved, *bits = ctx.saved_tensors
        kept = Kept(*bits) if bits else None
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        slopes(logits, ids, ctx.T if T is None else T, mask, invalid, saved, kept, ctx.softcap, upstream[:4], out)
        return out, None, None, None, None, None, None


def statistics(
    rows: Rows,
    V: int,
    ids: Tensor,
    T: float | Tensor,
    mask: Tensor | None,
    kept: Kept | None,
    softcap: float | None,
    *,
    moment: bool,
) -> Law:
    """Sweep and join."""
    N, P = ids.shape[0], triton.cdiv(V, logprob_kernels.PART)
    parts = torch.empty(logprob_kernels.PLANES[kept is not None], N, P, dtype=torch.float32, device=ids.device)
    if N:
        with on_device_of(ids):
            logprob_kernels.sweep[(N, P)](
                rows.data, ids, _or(mask, ids), T, softcap or 0.0, ids if kept is None else kept.bytes, parts, N, V,
                *rows.places, 0 if kept is None else kept.row_bytes,
                HAS_MASK=mask is not None, HAS_T=isinstance(T, Tensor), HAS_CAP=softcap is not None,
                SUPPORT=kept is not None, MOMENT=moment, PART=logprob_kernels.PART, TILE=logprob_kernels.TILE,
                LOG_LANES=logprob_kernels.LOG_LANES, INTERPRETED=INTERPRETED,
                num_warps=logprob_kernels.SWEEP_WARPS, **FUSED,
            )  # fmt: skip
    return law(parts, ids, T, mask, None if kept is None else kept.bad, V, moment=moment)


def law(
    parts: Tensor,  # [planes, N, P]
    ids: Tensor,  # [N]
    T: float | Tensor,
    mask: Tensor | None,
    bad_kept: Tensor | None,
    whole: int,
    *,
    moment: bool,
) -> Law:
    """Join the parts of every row, in their order, and say what they mean."""
    _, N, P = parts.shape
    width = triton.next_power_of_2(P)
    block = law_kernel.rows_of_a_program(width)

    def column() -> Tensor:
        return torch.empty(N, dtype=torch.float32, device=ids.device)

    value, lse = column(), column()
    H = column() if moment else None
    mass = None if bad_kept is None else column()
    invalid = torch.empty(N, dtype=torch.bool, device=ids.device)
    saved = torch.empty(law_kernel.SAVED, N, dtype=torch.float32, device=ids.device)
    if N:
        with on_device_of(ids):
            law_kernel.law[(triton.cdiv(N, block),)](
                parts, ids, _or(mask, ids), _or(bad_kept, ids), T, value, lse, _or(H, value), _or(mass, value),
                invalid.view(torch.int8), saved, N, P, whole, HAS_MASK=mask is not None, HAS_T=isinstance(T, Tensor),
                SUPPORT=mass is not None, MOMENT=moment, ROWS=block, WIDTH=width,
                LOG=width.bit_length() - 1, INTERPRETED=INTERPRETED, num_warps=law_kernel.WARPS, **FUSED,
            )  # fmt: skip
    return Law(value, lse, H, mass, invalid, saved)


def slopes(
    logits: Tensor,
    ids: Tensor,
    T: float | Tensor,
    mask: Tensor | None,
    invalid: Tensor,
    saved: Tensor,
    kept: Kept | None,
    softcap: float | None,
    upstream: tuple[Tensor | None, ...],
    out: Tensor,
) -> None:
    """Write the gradient of [..., V] logits."""
    N, V = ids.shape[0], logits.shape[-1]
    if not N:
        return
    rows = rows_of(logits)
    g = [None if x is None else x.reshape(-1).contiguous() for x in upstream]
    g_mask = [x is not None for x in g]
    repeats = next(k for fewest, k in reversed(logprob_kernels.REPEATS) if fewest <= N)
    with on_device_of(ids):
        logprob_kernels.gradient[(N, triton.cdiv(V, repeats * logprob_kernels.COLUMNS))](
            rows.data, ids, _or(mask, ids), invalid.view(torch.int8), T, softcap or 0.0,
            ids if kept is None else kept.bytes, saved, *(_or(x, saved) for x in g), out, N, V, *rows.places,
            0 if kept is None else kept.row_bytes, HAS_MASK=mask is not None, HAS_T=isinstance(T, Tensor),
            HAS_CAP=softcap is not None, SUPPORT=kept is not None, G=g_mask[0], G_LSE=g_mask[1], G_ENTROPY=g_mask[2],
            G_MASS=g_mask[3], COLUMNS=logprob_kernels.COLUMNS, REPEATS=repeats,
            INTERPRETED=INTERPRETED,
            num_warps=logprob_kernels.GRADIENT_WARPS, **FUSED,
        )  # fmt: skip


def _or(x: Tensor | None, instead: Tensor) -> Tensor:
    """A tensor where a kernel wants a pointer that it will not follow."""
    return instead if x is None else x


def _of_best(rows: Rows, V: int, best: Tensor, T: float | Tensor, mask: Tensor | None, softcap: float | None) -> Tensor:
    """[N, n] log-probabilities of the best ids, by one more read with the best id as the chosen one.

    So the best one keeps its precision; the others have p <= 1/2.
    """
    row = statistics(rows, V, best[:, 0].contiguous(), T, mask, None, softcap, moment=False)
    return log_probabilities(rows, best, T, mask, softcap, row.logprob, row.saved)
