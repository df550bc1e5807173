"""linear_policy_loss@1 on Hopper: log-probabilities, loss and gradient of a block of rows while its logits are there.

Three matmuls where a token's gradient depends on that token alone. A block's logits end in its law and in fp16(y - tile
max); rlkernel_triton's coefficient function runs on its rows; what was saved becomes dz in place; dX is complete, dW
adds up in fp32. A batch of one block keeps what was saved until the backward pass instead, which then knows the
upstream gradient and needs no dW in fp32: linear_logprob's own way. Ratios per sequence need every log-probability
first and go that way too.

Legend: N rows · D hidden · V vocabulary · R rows of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel_common.known_gradient import attach
from rlkernel_common.row_selection import choose, selected
from rlkernel_common.row_statistics import temperatures
from rlkernel_core.errors import ArgumentError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_cuda import linear_logprob as head_alone
from rlkernel_cuda import plan
from rlkernel_cuda.head import coefficients, from_saved, head_of, room_to_save, scatter_rows, statistics
from rlkernel_cuda.products import product
from rlkernel_triton.linear_policy_loss import head_then_loss
from rlkernel_triton.loss_batch import BLOCK, LossBatch, scaled

# Logits that are kept at a time, without a limit: 17 thousand rows of a vocabulary of 152 thousand.
KEPT: Final = 5 << 30
PER_ROW: Final = 128  # bytes of the loss's own vectors


def fits(call: LinearPolicyLossCall) -> Reason | None:
    """Refuses what linear_logprob refuses."""
    return head_alone.fits(LinearLogprobCall.of(call))


def workspace(call: LinearPolicyLossCall) -> int:
    """Most bytes of a call beyond its results and gradients.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    hidden, weight, bias, N = call.hidden, call.weight, call.bias, call.ids.numel()
    if not N:
        return 0
    counted = _counted(call.ids, call.mask, call.cu_seqlens)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    way = _way(
        hidden, weight, bias, counted, call.max_workspace_bytes, call.group, wanted=wanted, token=_by_token(call)
    )
    loss = PER_ROW * plan.round_up(N, plan.ROWS)
    if way.block is None:
        head = LinearLogprobCall.of(call, backward=way.mode, max_workspace_bytes=way.limit)
        return head_alone.workspace(head) + loss
    size = head_alone.size_of(hidden, hidden.reshape(N, -1), weight, bias, counted, call.group, wanted=wanted)
    return _fused(size, way.block) + loss


def _by_token(call: LinearPolicyLossCall) -> bool:
    """Whether the loss of a token needs nothing of other blocks."""
    # A block's dX would have to meet those of the other ranks: with a group the head goes alone.
    known = call.old_logprob is not None or call.rollout_logprob is None
    return spec.configure(call).level == "token" and known and call.group is None


def linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    """The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`."""
    hidden, weight, ids, bias, group = call.hidden, call.weight, call.ids, call.bias, call.group
    config = spec.configure(call)
    counted = _counted(ids, call.mask, call.cu_seqlens)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    way = _way(hidden, weight, bias, counted, call.max_workspace_bytes, group, wanted=wanted, token=_by_token(call))
    if way.block is None:
        head = LinearLogprobCall.of(call, backward=way.mode, max_workspace_bytes=way.limit)
        return head_then_loss(head_alone.linear_logprob, head, call)
    with torch.no_grad():
        logprob = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        batch = LossBatch.of(
            config, ids, call.cu_seqlens, before=logprob, old=call.old_logprob, advantages=call.advantages,
            mask=call.mask, ref=call.ref_logprob, rollout=call.rollout_logprob, denominator=call.denominator,
            entropy_denominator=call.entropy_denominator, kl_coef=call.kl_coef, entropy_coef=call.entropy_coef,
            span=BLOCK,
        )  # fmt: skip
        made = _block_by_block(call, counted, batch, logprob, way.block)
        value, stats = batch.summary(made.parts, entropy=call.entropy)
    loss = attach(value, (made.hidden, hidden), (made.weight, weight), (made.bias, bias), by=scaled)
    return LossResult(loss, stats, logprob, made.entropy)


class _Way(NamedTuple):
    """How a call runs: block by block, or through linear_logprob."""

    block: int | None
    mode: str = "recompute"
    limit: int | None = None


def _way(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counted: Tensor | None,
    limit: int | None,
    group: ProcessGroup | None,
    *,
    wanted: bool,
    token: bool,
) -> _Way:
    """The fastest way that the limit allows.

    Raises:
        ArgumentError: none does; the message names the least.
    """
    V, D = weight.shape
    N = hidden.shape[:-1].numel()
    if not N:
        return _Way(None)
    loss = PER_ROW * plan.round_up(N, plan.ROWS)
    size = head_alone.size_of(hidden, hidden.reshape(N, D), weight, bias, counted, group, wanted=wanted)
    if limit is not None:
        # The least serves the same call with gradients, too.
        whole = size if wanted else replace(size, of_hidden=True, of_weight=True)
        least = plan.least(whole, mode="recompute", backward=True).bytes + loss
        if limit < least:
            remedy = f"Pass at least {least}, or None."
            raise ArgumentError("max_workspace_bytes", limit, f"is below the minimum of {least} here", remedy)
    if not wanted:
        return _Way(None, "auto", None if limit is None else limit - loss)
    save = next(plan.plans(size, mode="save", backward=True))
    if save.bytes + loss <= limit if limit is not None else 2 * N * V <= KEPT:
        return _Way(None, "save", None if limit is None else limit - loss)
    if token:
        each = 2 * size.pitch + 12 * size.tiles
        spare = KEPT if limit is None else limit - _fused(size, 0) - loss
        rows = min(plan.round_up(N, BLOCK), spare // each // BLOCK * BLOCK)
        if rows > 0 and (limit is None or _fused(size, rows) + loss <= limit):
            return _Way(rows)
    return _Way(None, "recompute", None if limit is None else limit - loss)


def _fused(size: plan.Size, rows: int) -> int:
    """Most extra bytes of the way block by block: dX as it is known, dW in fp32, the logits of a block."""
    known = 2 * size.N * size.D + 4 * size.V * size.D
    block = rows * (2 * size.pitch + 12 * size.tiles + 2 * plan.round_up(size.D, 8) * 2)
    return plan.FIXED + plan.PER_ROW * plan.round_up(size.N, plan.ROWS) + size.copied + known + block


class _Made(NamedTuple):
    hidden: Tensor | None  # [N, D] bf16
    weight: Tensor | None  # [V, D] fp32
    bias: Tensor | None  # [V] fp32
    entropy: Tensor | None
    parts: Tensor  # statistics of the loss, by program


def _block_by_block(
    call: LinearPolicyLossCall,
    counted: Tensor | None,  # [N]
    batch: LossBatch,
    logprob: Tensor,  # written to
    block: int,
) -> _Made:
    """Log-probabilities, loss and gradients, a block of rows at a time."""
    hidden, weight, ids, bias, entropy = call.hidden, call.weight, call.ids, call.bias, call.entropy
    (V, D), N = weight.shape, ids.numel()
    flat = hidden.detach().reshape(N, D)
    T = temperatures(call.temperature, ids.shape, torch.float32, ids.device)
    chosen = choose(ids.reshape(-1), counted, V, None)
    H = torch.empty_like(logprob) if entropy else None
    g, g_entropy = torch.zeros_like(logprob), torch.zeros_like(logprob) if entropy else None
    parts = batch.partials(ids.device)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format) if hidden.requires_grad else None
    dw = torch.empty(weight.shape, dtype=torch.float32, device=ids.device) if weight.requires_grad else None
    db = torch.zeros(V, dtype=torch.float32, device=ids.device) if bias is not None and bias.requires_grad else None
    room = None
    for first in range(0, N, block):
        rows = slice(first, min(first + block, N))
        n = rows.stop - first
        mask = None if counted is None else counted[rows]
        head = head_of(
            flat[rows], weight.detach(), None if bias is None else bias.detach(), chosen.ids[rows], T[rows], mask,
            call.softcap, call.logit_scale,
        )  # fmt: skip
        room = room_to_save(head, block, 0) if room is None else room
        saved, tops = room[0][:n], room[1]
        law = statistics(head, block, saved, tops)
        for out, value in ((logprob, law.logprob), (H, law.entropy)):
            if out is not None:
                out.view(-1)[rows] = value if mask is None else torch.where(mask, value[head.position], 0.0)
        batch.run(logprob, H, g, g_entropy, parts, first=first, tokens=n)
        up = (g.view(-1)[rows], None, None if g_entropy is None else g_entropy.view(-1)[rows], None)
        slopes = tuple(law.lse.new_zeros(n) if x is None else x for x in selected(up, chosen.ids[rows], mask)[:3])
        if head.place is not None:
            slopes = tuple(x[head.place] for x in slopes)
        dz = from_saved(head, coefficients(head, law, slopes), saved, tops)  # type: ignore[arg-type]
        x, w = head.x[:, :D], head.w[:, :D]
        if dx is not None and head.place is None:
            product(dz, w, dx[rows])
        elif dx is not None:
            part = torch.empty_like(dx[rows])
            product(dz, w, part, count=head.count)
            scatter_rows(part, head, 0, dx[rows])
        if dw is not None:
            product(dz, x, dw, since=dw if first else None, transposed=True, count=head.count)
        if db is not None:
            db += torch.sum(dz, 0, dtype=torch.float32)
    return _Made(None if dx is None else dx.view(hidden.shape), dw, db, H, parts)


def _counted(ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """[N] bool rows that count; None: all."""
    counted = None if mask is None else mask.reshape(-1).contiguous()
    if cu_seqlens is None:
        return counted
    at = torch.arange(ids.shape[0], device=ids.device)
    inside = (at >= cu_seqlens[0]) & (at < cu_seqlens[-1])
    return inside if counted is None else inside & counted
