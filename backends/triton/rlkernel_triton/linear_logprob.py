"""linear_logprob@1 on Triton: logits live in registers, both ways; only their gradient is written, in blocks.

Matmuls both ways: 4 recomputing (5 for more rows than one block holds, as dX and dW then want the gradient in another
order), 3 saving; one less for each frozen operand. All accumulate in fp32 and are rounded once.

Legend: N rows · D hidden · V vocabulary, or this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_core.gradients import refuse_second_derivative
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_triton import head_workspace, law_kernel
from rlkernel_triton.head_calls import Head, Operands, Order, Swept, sweep_kind, tile_of
from rlkernel_triton.kept_bits import Kept, kept_bits
from rlkernel_triton.launchers import launcher_for
from rlkernel_triton.logprob import Join, Kind, Law, is_per_row, per_row

NOWHERE = 1 << 62  # size of a vocabulary in which every id is found: what is invalid is -1 already


def workspace(call: LinearLogprobCall) -> int:
    """Most bytes of a call, forward and backward, beyond its results and gradients.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    size = _size(call)
    return head_workspace.workspace(head_workspace.plan(call.backward, call.max_workspace_bytes, size), size)


def _size(call: LinearLogprobCall) -> head_workspace.Size:
    """What the memory of a call depends on."""
    hidden, weight, N, (V, D) = call.hidden, call.weight, call.ids.numel(), call.weight.shape
    item = max(x.element_size() for x in (hidden, weight))
    columns = tile_of(hidden, weight, sweep_kind(call.softcap, call.support is not None)).BN
    ranks = 1 if call.group is None else call.group.size()
    return head_workspace.Size(N, D, V, item, columns, call.support is not None, ranks)


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearLogprobCall) -> Callable[[LinearLogprobCall], LogprobResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `rlkernel_triton.head_workspace.workspace` states the extra memory. Blocks of masked rows are skipped.
    """
    plan = _Plan(call)
    V, shape, group, wanted = plan.head.V, call.ids.shape, call.group, plan.keep
    supported, masked, T_given = call.support is not None, call.mask is not None, isinstance(call.temperature, Tensor)
    ids_as_they_are = call.ids.is_contiguous()
    mask_as_it_is = not masked or call.mask.is_contiguous()  # type: ignore[union-attr]  # it is there
    bias_as_it_is = call.bias is None or call.bias.is_contiguous()
    T_as_it_is = is_per_row(call.temperature, shape)

    def run(call: LinearLogprobCall) -> LogprobResult:
        ids, mask, bias, T, offset, order, kept = call.ids, call.mask, call.bias, None, None, None, None
        if not ids_as_they_are:
            ids = ids.contiguous()
        if masked:
            mask = mask.reshape(-1) if mask_as_it_is else mask.contiguous().view(-1)  # type: ignore[union-attr]
            order = Order.of(mask)
        if not bias_as_it_is:
            bias = bias.contiguous()  # type: ignore[union-attr]  # it is there
        if T_given:
            T = call.temperature if T_as_it_is else per_row(call.temperature, shape)
        if group is not None:
            shard = vocab_parallel.locate(group, V, plan.head.N, plan.head.D, call.hidden.device)
            ids = ids.reshape(-1).to(torch.int64)
            ids = torch.where((ids >= 0) & (ids < shard.V), ids, -1)
            offset = shard.offset
            kept = kept_bits(call.support, V, shard.V, shard.offset) if supported else None  # type: ignore[arg-type]
        elif supported:
            kept = kept_bits(call.support, V)  # type: ignore[arg-type]  # it is there
        local = ids if offset is None else ids - offset
        of = Operands(call.hidden, call.weight, bias, local, T, order, kept)  # type: ignore[arg-type]  # a tensor or None
        if wanted:
            index, count = order or (None, None)
            row = _LinearLogprob.apply(*of[:5], index, count, *(kept or (None, None)), ids, mask, plan)  # type: ignore[no-untyped-call]
        else:
            _, row = plan.forward(of, ids, mask)
        return LogprobResult(row[0], row[1], row[2], None, None, row[3], row[4])

    return run


class _LinearLogprob(torch.autograd.Function):
    """Results from the operands of the head, with their analytic gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        local: Tensor,  # N, counted from the first column of the head
        T: Tensor | None,  # N
        index: Tensor | None,
        count: Tensor | None,
        bits: Tensor | None,
        bad: Tensor | None,
        ids: Tensor,  # N in the whole vocabulary
        mask: Tensor | None,  # N
        plan: _Plan,
    ) -> tuple[Tensor | None, ...]:
        of = _operands(hidden, weight, bias, local, T, index, count, bits, bad)
        swept, row = plan.forward(of, ids, mask)
        ctx.save_for_backward(
            hidden, weight, bias, local, T, index, count, bits, bad, row.invalid, row.saved, swept.saved, swept.peaks
        )
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row.invalid)
        return row[:5]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprob")
        *given, invalid, law_rows, saved, peaks = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradients = plan.head.gradients(
            _operands(*given), invalid, law_rows, upstream[:4], saved, peaks, ctx.needs_input_grad[:3], plan.group
        )
        return *gradients, *(None,) * 9


def _operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, local: Tensor, T: Tensor | None, index: Tensor | None,
    count: Tensor | None, bits: Tensor | None, bad: Tensor | None,
) -> Operands:  # fmt: skip
    """From what autograd saves."""
    order = None if index is None or count is None else Order(index, count)
    kept = None if bits is None or bad is None else Kept(bits, bad)
    return Operands(hidden, weight, bias, local, T, order, kept)


class _Plan:
    """The launches of one shape."""

    def __init__(self, call: LinearLogprobCall) -> None:
        hidden, weight, support, group = call.hidden, call.weight, call.support, call.group
        N, V = call.ids.numel(), weight.shape[0]
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        row_bytes = None if support is None else -(-V // 32) * 4
        ranks, size = 1 if group is None else group.size(), _size(call)
        cut = head_workspace.plan(call.backward, call.max_workspace_bytes, size)
        leaves = (hidden, weight, call.bias)
        self.keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        self.group, launcher = group, launcher_for(hidden.device)
        self.head = Head(
            launcher, hidden, weight, N=N, bias=call.bias is not None, T=T, masked=call.mask is not None,
            kept_row_bytes=row_bytes, softcap=call.softcap, scale=float(call.logit_scale), moment=call.entropy,
            plan=cut._replace(save=cut.save and self.keep),
        )  # fmt: skip
        kind = Kind(N, V, T, None, call.mask is not None, row_bytes)
        self._join = Join(
            launcher, kind, V if group is None else NOWHERE, ranks, call.ids.shape, hidden.device, keep=self.keep,
            moment=call.entropy,
        )  # fmt: skip
        self._rest = 0 if self.keep else law_kernel.SAVED * N

    def forward(self, of: Operands, ids: Tensor, mask: Tensor | None) -> tuple[Swept, Law]:
        """What the rows say, and what a plan that saves keeps."""
        swept = self.head.statistics(of, self._rest)
        every = swept.joined
        if self.group is not None:
            planes, N = self.head.planes, self.head.N
            own = every[: planes * N].view(planes, N)
            every = vocab_parallel.gathered(own, self.group).permute(1, 2, 0).contiguous()
        bad = None if of.kept is None else of.kept.bad
        return swept, self._join(every, ids, of.T, mask, bad, None if self.keep else swept.rest)
