"""linear_logprob@1 on Hopper: every logit matmul is one Gluon kernel that ends in the row's statistics or in dz.

The logits stay fp32 accumulators; what is saved or passed on is fp16(y - tile max) and dz. dX and dW are cuBLAS matmuls
over slices of dz with fp32 accumulation and one rounding. plan.py says how a call is cut and what memory it takes.
A saved logit more than 65504 below its tile's largest counts as forbidden on the way back: its probability is 0 at any
temperature below 600.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel_common.row_selection import choose, selected
from rlkernel_common.row_statistics import temperatures
from rlkernel_common.vocab_parallel import Shard, add, locate
from rlkernel_core.errors import ArgumentError
from rlkernel_core.gradients import refuse_second_derivative
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_cuda import plan
from rlkernel_cuda.back import Back
from rlkernel_cuda.head import (
    Head,
    Law,
    Ranks,
    aligned,
    coefficients,
    from_saved,
    head_of,
    room_to_save,
    statistics,
)

# A head whose rows TMA cannot read is copied at every call; above this the portable kernels are the better choice.
COPY_LIMIT: Final = 64 << 20


def fits(call: LinearLogprobCall) -> Reason | None:
    """Refuses a large head that would have to be copied, and sizes beyond 32-bit coordinates."""
    weight = call.weight
    if not aligned(weight) and 2 * weight.shape[0] * weight.shape[1] > COPY_LIMIT:
        return Reason(
            "shape",
            "unsupported",
            f"TMA reads rows that are contiguous and start at multiples of 16 bytes; weight {list(weight.shape)} with "
            f"strides {list(weight.stride())} would have to be copied",
            "store the head contiguously, with D a multiple of 8",
        )
    if max(call.ids.numel(), weight.shape[0]) >= 2**30:
        return Reason(
            "shape", "unsupported", f"{call.ids.numel()} rows by {weight.shape[0]} ids pass 32-bit coordinates"
        )
    return None


def workspace(call: LinearLogprobCall) -> int:
    """Most bytes of a call beyond its results and gradients; of one whose limit is too low, the least."""
    hidden, weight, bias, N = call.hidden, call.weight, call.bias, call.ids.numel()
    if not N:
        return 0
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    flat = hidden.reshape(N, hidden.shape[-1])
    size = size_of(hidden, flat, weight, bias, call.mask, call.group, wanted=wanted)
    found = plan.choose(size, mode=call.backward, backward=wanted, limit=call.max_workspace_bytes)
    return (found or plan.least(size, mode=call.backward, backward=wanted)).bytes


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `plan.choose` states the extra memory. Rows that count are gathered, so masked ones cost neither forward nor
    recomputed logits; `support` and weights of another dtype are not claimed.
    """
    hidden, weight, ids, bias, mask = call.hidden, call.weight, call.ids, call.bias, call.mask
    if call.support is not None:
        raise ArgumentError(
            "support", type(call.support).__name__, "is not claimed by this implementation", "Leave it out."
        )
    rows, N = ids.shape, ids.numel()
    flat = hidden.reshape(N, hidden.shape[-1])
    mask = None if mask is None else mask.reshape(-1)
    shard = locate(call.group, weight.shape[0], N, hidden.shape[-1], hidden.device)
    chosen = choose(ids.reshape(-1), mask, shard.V, None)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    size = size_of(hidden, flat, weight, bias, mask, call.group, wanted=wanted)
    cut = _plan(size, call.backward, call.max_workspace_bytes, wanted=wanted) if N else None
    T = temperatures(call.temperature, rows, torch.float32, hidden.device)
    out = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, chosen.ids, T, mask, call.softcap, call.logit_scale, call.entropy, wanted, cut, shard
    )
    logprob, lse, H = out
    return LogprobResult(
        logprob=logprob.view(rows),
        lse=lse.view(rows),
        entropy=None if H is None else H.view(rows),
        invalid=chosen.invalid.view(rows),
    )


def size_of(
    whole: Tensor,  # [..., D] as the caller gave it
    hidden: Tensor,  # [N, D]
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    group: ProcessGroup | None = None,
    *,
    wanted: bool,
) -> plan.Size:
    """What the memory of a call depends on."""
    copied = 0 if bias is None else 16 * weight.shape[0]  # in fp32, its gradient and a slice's share of that
    if hidden.data_ptr() != whole.data_ptr():  # its leading dimensions could not be joined in place
        copied += hidden.nbytes
    if group is not None:  # dX in fp32 until the ranks have added theirs, and what each says of a row
        copied += (4 * hidden.shape[1] * (wanted and whole.requires_grad) + 32 * (group.size() + 1)) * hidden.shape[0]
    for x in (weight,) if mask is not None else (hidden, weight):
        copied += 0 if aligned(x) else 2 * x.shape[0] * plan.round_up(x.shape[1], 8)
    return plan.Size(
        N=hidden.shape[0],
        V=weight.shape[0],
        D=weight.shape[1],
        of_hidden=wanted and whole.requires_grad,
        of_weight=wanted and weight.requires_grad,
        masked=mask is not None,
        copied=copied,
    )


def _plan(size: plan.Size, mode: str, limit: int | None, *, wanted: bool) -> plan.Plan:
    """How the call is cut.

    Raises:
        ArgumentError: no way to cut it fits in the limit; the message names the least.
    """
    found = plan.choose(size, mode=mode, backward=wanted, limit=limit)
    if found is None:
        # Without gradients less would do; the limit that is named serves the same call with them, too.
        whole = size if wanted else dataclasses.replace(size, of_hidden=True, of_weight=True)
        need = plan.least(whole, mode=mode, backward=True).bytes
        remedy = f"Pass at least {need}" + (", or backward='recompute'." if mode == "save" else ", or None.")
        raise ArgumentError("max_workspace_bytes", limit, f"is below what backward={mode!r} needs here, {need}", remedy)
    return found


class _LinearLogprob(torch.autograd.Function):
    """Log-probability, lse and entropy of every row, with their analytic gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        ids: Tensor,  # [N]; -1: none
        T: Tensor,  # [N]
        mask: Tensor | None,  # [N]
        softcap: float | None,
        logit_scale: float,
        entropy: bool,
        wanted: bool,
        cut: plan.Plan | None,  # None: there are no rows
        shard: Shard,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.scalars, ctx.group = cut, (hidden.shape[1], softcap, logit_scale), shard.group
        ctx.bias_dtype = None if bias is None else bias.dtype
        if cut is None:
            ctx.save_for_backward(hidden, weight, bias)
            return T, T.clone(), T.clone() if entropy else None
        ranks, here = None, ids
        if shard.group is not None:
            here = ids - shard.offset
            here = torch.where((ids >= 0) & (here >= 0) & (here < weight.shape[0]), here, -1)
        head = head_of(hidden, weight, bias, here, T, mask, softcap, logit_scale)
        if shard.group is not None:
            ranks = Ranks(shard.group, ids if head.place is None else ids[head.place])
        ctx.saved = None
        if cut.save:
            ctx.saved = room_to_save(head, ids.shape[0], cut.buffer)
        saved, tops = ctx.saved or (None, None)
        law = statistics(head, cut.forward_rows, saved, tops, ranks)
        if wanted:
            ctx.save_for_backward(*head.tensors(), *law.tensors(), ids, mask)
        # Results are tensors of their own: the law is read again on the way back, whatever becomes of them.
        out = [law.logprob, law.lse, law.entropy if entropy else None]
        if head.position is None or mask is None:
            return tuple(None if x is None else x.clone() for x in out)
        return tuple(None if x is None else torch.where(mask, x[head.position], 0.0) for x in out)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprob")
        wanted = ctx.needs_input_grad[:3]
        rest = (None,) * 9
        if ctx.cut is None:
            return *(
                torch.zeros_like(x) if want else None for x, want in zip(ctx.saved_tensors, wanted, strict=True)
            ), *rest
        saved_tensors = ctx.saved_tensors
        of_head, of_law, (ids, mask) = (
            saved_tensors[: Head.TENSORS],
            saved_tensors[Head.TENSORS : -2],
            saved_tensors[-2:],
        )
        head, law = Head.of(of_head, *ctx.scalars), Law(*of_law)
        g = selected((*upstream, None), ids, mask)[:3]
        g = tuple(law.lse.new_zeros(ids.shape[0]) if x is None else x.contiguous() for x in g)
        if head.place is not None:
            g = tuple(x[head.place] for x in g)
        coef = coefficients(head, law, g)
        saved, ctx.saved = ctx.saved, None  # dz overwrites what was saved: a second pass makes the logits again
        back = Back(head, coef, *wanted, partial=ctx.group is not None)
        if saved is not None:
            back.at_once(from_saved(head, coef, *saved))
        else:
            back.by_slices(ctx.cut.block, ctx.cut.width, ctx.cut.buffer, apart=ctx.cut.apart)
        if ctx.group is not None and back.hidden is not None:
            add(back.hidden, ctx.group)
            back.hidden = back.hidden.to(head.x.dtype)
        return back.hidden, back.weight, None if back.bias is None else back.bias.to(ctx.bias_dtype), *rest
