"""linear_logprob@1 on Triton: logits live in registers, both ways; only their gradient is written, in blocks.

Matmuls both ways: 4 recomputing (5 for more rows than one block holds, as dX and dW then want the gradient in another
order), 3 saving; one less for each frozen operand. All accumulate in fp32 and are rounded once.

Legend: N rows · D hidden · V vocabulary, or this rank's shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel_core.gradients import refuse_second_derivative
from rlkernel_core.reference import vocab_parallel
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_triton import head_workspace
from rlkernel_triton.head_calls import Head, Order, sweep_kind, tile_of
from rlkernel_triton.head_workspace import Plan
from rlkernel_triton.kept_bits import Kept, kept_bits
from rlkernel_triton.logprob import law, per_row

NOWHERE = 1 << 62  # size of a vocabulary in which every id is found: what is invalid is -1 already


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `rlkernel_triton.head_workspace.workspace` states the extra memory. Blocks of masked rows are skipped.
    """
    hidden, weight, ids, support, group = call.hidden, call.weight, call.ids, call.support, call.group
    shape, N, (V, D) = ids.shape, ids.numel(), weight.shape
    item = max(x.element_size() for x in (hidden, weight))
    ranks = 1 if group is None else group.size()
    size = head_workspace.Size(
        N,
        D,
        V,
        item,
        tile_of(hidden, weight, sweep_kind(call.softcap, support is not None)).BN,
        support is not None,
        ranks,
    )
    plan = head_workspace.plan(call.backward, call.max_workspace_bytes, size)
    T, counted = per_row(call.temperature, shape), None if call.mask is None else call.mask.reshape(-1).contiguous()
    flat, whole, offset = ids.reshape(-1).contiguous(), V, None
    if group is not None:
        shard = vocab_parallel.locate(group, V, N, D, hidden.device)
        flat = flat.to(torch.int64)
        flat = torch.where((flat >= 0) & (flat < shard.V), flat, -1)
        whole, offset = NOWHERE, shard.offset
        kept = None if support is None else kept_bits(support, V, shard.V, shard.offset)
    else:
        kept = None if support is None else kept_bits(support, V)
    order = None if counted is None else Order.of(counted)
    operands = (hidden, weight, call.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    how = _How(
        call.softcap, float(call.logit_scale), call.entropy, plan._replace(save=plan.save and wanted), group, whole
    )
    out = _LinearLogprob.apply(*operands, flat, offset, T, counted, order, kept, how)  # type: ignore[no-untyped-call]
    value, lse, H, mass, invalid = out
    return LogprobResult(
        logprob=value.view(shape),
        lse=lse.view(shape),
        entropy=None if H is None else H.view(shape),
        log_kept_mass=None if mass is None else mass.view(shape),
        invalid=invalid.view(shape),
    )


class _How(NamedTuple):
    """What a call asks for besides tensors."""

    softcap: float | None
    scale: float
    entropy: bool
    plan: Plan
    group: ProcessGroup | None
    whole: int


class _LinearLogprob(torch.autograd.Function):
    """Results from the operands of the head, with their analytic gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        ids: Tensor,  # [N] in the whole vocabulary
        offset: Tensor | None,  # 0-dim, first id of this shard
        T: float | Tensor,  # [N]
        mask: Tensor | None,  # [N]
        order: Order | None,
        kept: Kept | None,
        how: _How,
    ) -> tuple[Tensor | None, ...]:
        local = ids if offset is None else ids - offset
        head = Head(hidden, weight, bias, local, T, order, kept, how.softcap, how.scale)
        joined, saved, peaks = head.statistics(how.plan, moment=how.entropy)
        every = joined[:, :, None]
        if how.group is not None:
            every = vocab_parallel.gathered(joined, how.group).permute(1, 2, 0).contiguous()
        row = law(every, ids, T, mask, None if kept is None else kept.bad, how.whole, moment=how.entropy)
        per_row_T = T if isinstance(T, Tensor) else None
        index, count = order or (None, None)
        bits, bad = kept or (None, None)
        ctx.save_for_backward(
            hidden, weight, bias, local, per_row_T, index, count, bits, bad, row.invalid, row.saved, saved, peaks
        )
        ctx.T, ctx.how = T if per_row_T is None else None, how
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row.invalid)
        return row[:5]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprob")
        hidden, weight, bias, ids, T, index, count, bits, bad, invalid, law_rows, saved, peaks = ctx.saved_tensors
        how: _How = ctx.how
        order = None if index is None else Order(index, count)
        kept = None if bits is None else Kept(bits, bad)
        head = Head(hidden, weight, bias, ids, ctx.T if T is None else T, order, kept, how.softcap, how.scale)
        slope = head.slope(invalid, law_rows, upstream[:4], saved, peaks, how.plan)
        gradients = head.gradients(slope, how.plan, ctx.needs_input_grad[:3], how.group)
        return *gradients, *(None,) * 7
