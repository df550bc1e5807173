"""linear_policy_loss@1 on Hopper: log-probabilities, loss and gradient of a block of rows while its logits are there.

Three matmuls where a token's gradient depends on that token alone. A block's logits end in its softmax statistics and
in fp16(y - tile max); rlkernel_triton's coefficient function runs on its rows; what was saved becomes dz in place; dX
is complete, dW adds up in fp32. A batch of one block holds what was saved until the backward pass instead, which then
knows the upstream gradient and needs no dW in fp32: linear_logprob's own way. Ratios per sequence need every
log-probability first and go that way too. Which way it is, and every launch, is decided once a shape.

Legend: N rows · D hidden · V vocabulary · R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.gradients import Pair, gradient_wanted
from rlkernel_core.gradients import Saved as Tensors
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.policy_loss import LossResult, PolicyLossCall
from rlkernel_cuda.linear_logprob import launch as head_alone
from rlkernel_cuda.linear_logprob import plan
from rlkernel_cuda.linear_logprob.head import Given, Head, Results, Saved, room_to_save
from rlkernel_cuda.linear_logprob.linear_backward import Wanted
from rlkernel_cuda.linear_logprob.logits import Kind
from rlkernel_cuda.linear_logprob.products import Products
from rlkernel_triton.common.row_layout import per_row
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.policy_loss import launch as policy_loss
from rlkernel_triton.policy_loss.batch import BLOCK, LossBatch, scaled

# Logits that are saved at a time, without a limit: 17 thousand rows of a vocabulary of 152 thousand.
SAVED_LOGITS: Final = 5 << 30
PER_ROW: Final = 128  # bytes of the loss's own vectors
_OF_HEAD: Final = frozenset({"logprob", "entropy"})  # arguments of policy_loss that the head gives


def fits(call: LinearPolicyLossCall) -> Reason | None:
    """Refuses what linear_logprob refuses."""
    return head_alone.fits(LinearLogprobCall.of(call))


def workspace(call: LinearPolicyLossCall) -> int:
    """Most bytes of a call beyond its results and gradients.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    N = call.ids.numel()
    if not N:
        return 0
    wanted = head_alone.wanted_of(call)
    size, way = head_alone.size_of(call, wanted, masked=_masked(call)), _way(call, wanted)
    loss = PER_ROW * plan.round_up(N, plan.ROWS)
    return (_fused(size, way.block) if way.cut is None else way.cut.bytes) + loss


def linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearPolicyLossCall) -> Callable[[LinearPolicyLossCall], LossResult]:
    """What runs calls of this shape.

    The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`.

    Raises:
        ArgumentError: no way to run it fits in its limit; the message names the least.
    """
    if gradient_wanted("linear_policy_loss", call):
        return LinearPolicyLossPair(call)
    host = _host(call, Wanted(False, False, False))
    return lambda call: host.forward(call)[0]


class LinearPolicyLossPair(Pair[LinearPolicyLossCall, LossResult]):
    """The loss, with gradients that are made with it, block by block, or from what linear_logprob keeps."""

    op = "linear_policy_loss"

    def __init__(self, call: LinearPolicyLossCall) -> None:
        """Plan calls of this shape."""
        super().__init__(call)
        self._host = _host(call, Wanted(*self.wanted))

    @classmethod
    def inputs(cls, call: LinearPolicyLossCall) -> Tensors:
        """Hidden states, weight and bias: LoRA is not claimed."""
        return call.hidden, call.weight, call.bias

    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Tensors]:
        """The loss, and its gradients or what they are made of."""
        return self._host.forward(call)

    def backward(self, saved: Tensors, grads: Tensors) -> Tensors:
        """Scale what forward made, or make it."""
        (g,) = grads
        return self._host.backward(saved, g)  # type: ignore[arg-type]  # one gradient arrives at least

    @classmethod
    def saved_like(cls, call: LinearPolicyLossCall, result: LossResult, wanted: tuple[bool, ...]) -> Tensors:
        """Gradients of hidden, weight and bias; or what linear_logprob saves, and the gradients of its results."""
        if call.max_workspace_bytes is None:  # sizes may be symbols, which are compared and no more
            some, V = call.ids.numel() > 0, call.weight.shape[0]
            save = some and _kept(call.ids.numel(), V)
            blocks = some and not save and _by_token(call) and _block(V, SAVED_LOGITS) > 0
        else:
            way = _way(call, Wanted(*wanted))
            save, blocks = way.cut is not None and way.cut.save, way.block > 0
        if blocks:
            return _Blocks.saved_like(call, wanted)
        like = head_alone.like(call, masked=_masked(call), save=save)
        of_logprob = result.loss.new_empty(call.ids.shape, dtype=torch.float32)
        return (*like, of_logprob, torch.empty_like(of_logprob) if call.entropy else None)


class _Way(NamedTuple):
    """How a call runs: through linear_logprob, or block by block."""

    cut: plan.Plan | None  # of the head; None: no rows, or block by block
    block: int = 0  # rows of a block; 0: through linear_logprob


def _way(call: LinearPolicyLossCall, wanted: Wanted) -> _Way:
    """The fastest way that the limit allows.

    Raises:
        ArgumentError: none does; the message names the least.
    """
    N, V, limit = int(call.ids.numel()), int(call.weight.shape[0]), call.max_workspace_bytes
    if not N:
        return _Way(None)
    loss = PER_ROW * plan.round_up(N, plan.ROWS)
    size = head_alone.size_of(call, wanted, masked=_masked(call))
    if limit is not None:
        # The least serves the same call with gradients, too.
        whole = size if any(wanted) else replace(size, of_hidden=True, of_weight=True)
        least = plan.least(whole, mode="recompute", backward=True).bytes + loss
        if limit < least:
            remedy = f"Pass at least {least}, or None."
            raise ArgumentError("max_workspace_bytes", limit, f"is below the minimum of {least} here", remedy)
    rest = None if limit is None else limit - loss
    if not any(wanted):
        return _Way(plan.choose(size, mode="auto", backward=False, limit=rest))
    save = next(plan.plans(size, mode="save", backward=True))
    if save.bytes <= rest if rest is not None else _kept(N, V):
        return _Way(plan.choose(size, mode="save", backward=True, limit=rest))
    if _by_token(call):
        spare = SAVED_LOGITS if rest is None else rest - _fused(size, 0)
        rows = min(plan.round_up(N, BLOCK), _block(V, spare))
        if rows > 0 and (rest is None or _fused(size, rows) <= rest):
            return _Way(None, rows)
    return _Way(plan.choose(size, mode="recompute", backward=True, limit=rest))


def _kept(N: int, V: int) -> bool:
    """Whether all logits are saved, where there is no limit."""
    return 2 * N * V <= SAVED_LOGITS


def _block(V: int, spare: int) -> int:
    """Most rows of a block whose logits and partial sums take no more than so many bytes."""
    each = 2 * plan.round_up(V, 8) + 12 * plan.count_of(V, plan.COLS)
    return spare // each // BLOCK * BLOCK


def _by_token(call: LinearPolicyLossCall) -> bool:
    """Whether the loss of a token needs nothing of other blocks."""
    # A block's dX would have to meet those of the other ranks: with a group the head goes alone.
    known = call.old_logprob is not None or call.rollout_logprob is None
    return spec.configure(call).level == "token" and known and call.group is None


def _fused(size: plan.Size, rows: int) -> int:
    """Most extra bytes of the way block by block: dX as it is known, dW in fp32, the logits of a block."""
    known = 2 * size.N * size.D + 4 * size.V * size.D
    block = rows * (2 * size.pitch + 12 * size.tiles + 2 * plan.round_up(size.D, 8) * 2)
    return plan.FIXED + plan.PER_ROW * plan.round_up(size.N, plan.ROWS) + size.copied + known + block


def _host(call: LinearPolicyLossCall, wanted: Wanted) -> _HeadThenLoss | _Blocks:
    way = _way(call, wanted)
    return _Blocks(call, wanted, way.block) if way.block else _HeadThenLoss(call, wanted, way.cut)


class _HeadThenLoss:
    """Calls of one shape: the log-probabilities of all rows, and then their loss."""

    def __init__(self, call: LinearPolicyLossCall, wanted: Wanted, cut: plan.Plan | None) -> None:
        self._head, self._keep = head_alone.Host(call, wanted, cut, masked=_masked(call)), any(wanted)
        first = torch.empty(call.ids.shape, dtype=torch.float32, device=call.ids.device)
        if self._keep:
            first = first.requires_grad_()
        known = {f.name for f in fields(call)}
        self._names = tuple([f.name for f in fields(PolicyLossCall) if f.init and f.name in known - _OF_HEAD])
        self._shared = attrgetter(*self._names)
        self._pair = policy_loss.PolicyLossPair(self._of_loss(call, first, first if call.entropy else None))

    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Tensors]:
        """The result, and what both backward passes read."""
        row, saved = self._head.forward(call, _counted(call))
        result, derivatives = self._pair.forward(self._of_loss(call, row.logprob, row.entropy))
        return LossResult(result.loss, result.stats, row.logprob, row.entropy), (*saved, *derivatives)

    def backward(self, saved: Tensors, g: Tensor) -> Tensors:
        """The gradients of hidden, weight and bias."""
        *of_head, logprob, entropy = saved
        of_logprob, of_entropy = self._pair.backward((logprob, entropy), (g,))
        return self._head.backward(tuple(of_head), (of_logprob, None, of_entropy))

    def _of_loss(self, call: LinearPolicyLossCall, logprob: Tensor, entropy: Tensor | None) -> PolicyLossCall:
        shared = dict(zip(self._names, self._shared(call), strict=True))
        return PolicyLossCall(logprob=logprob, entropy=entropy, **shared)


class _Blocks:
    """Calls of one shape: log-probabilities, loss and gradients of a block of rows at a time."""

    def __init__(self, call: LinearPolicyLossCall, wanted: Wanted, block: int) -> None:
        N, (V, D), device = call.ids.numel(), call.weight.shape, call.ids.device
        self._config, self._wanted, self._block = spec.configure(call), wanted, block
        self._sizes = (N, V, D)
        self._plan, self._product = Plan(launcher_for(device)), Products()
        self._rows = [slice(r, min(r + block, N)) for r in range(0, N, block)]
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        self._heads = {
            n: Head(
                Kind(n, V, D, device, T, call.softcap, call.logit_scale, _masked(call), call.bias is not None),
                block, keep=True, entropy=call.entropy,
            )
            for n in {rows.stop - rows.start for rows in self._rows}
        }  # fmt: skip
        self._dtypes = [None if x is None else x.dtype for x in (call.hidden, call.weight, call.bias)]

    @classmethod
    def saved_like(cls, call: LinearPolicyLossCall, wanted: tuple[bool, ...]) -> Tensors:
        """The gradients, as empty tensors."""
        fp32 = torch.float32
        return (
            call.hidden.new_empty(call.hidden.shape) if wanted[0] else None,
            call.weight.new_empty(call.weight.shape, dtype=fp32) if wanted[1] else None,
            call.weight.new_empty(call.weight.shape[0], dtype=fp32) if wanted[2] else None,
        )

    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Tensors]:
        """The result and its gradients: dX in bf16, dW and dbias in fp32."""
        ids, device, wanted, (N, V, D) = call.ids, call.ids.device, self._wanted, self._sizes
        flat = ids if ids.is_contiguous() else ids.contiguous()
        T = per_row(call.temperature, ids.shape) if isinstance(call.temperature, Tensor) else None
        counted = _counted(call)
        given = Given(
            call.hidden.reshape(N, D), call.weight, call.bias, flat.view(-1), T,  # type: ignore[arg-type]  # a tensor
            None if counted is None else counted.view(-1),
        )  # fmt: skip
        logprob = torch.empty(ids.shape, dtype=torch.float32, device=device)
        lse, invalid = torch.empty_like(logprob), torch.empty(ids.shape, dtype=torch.bool, device=device)
        results = Results(logprob, lse, torch.empty_like(logprob) if call.entropy else None, invalid)
        g = torch.zeros_like(logprob)
        work = _Work(
            given, results, g, torch.zeros_like(g) if call.entropy else None,
            torch.empty(N, D, dtype=torch.bfloat16, device=device) if wanted.hidden else None,
            torch.empty(V, D, dtype=torch.float32, device=device) if wanted.weight else None,
            torch.zeros(V, dtype=torch.float32, device=device) if wanted.bias else None,
        )  # fmt: skip
        batch = LossBatch.of(call, self._config, ids, before=logprob, span=BLOCK, plan=self._plan)
        parts, room = batch.partials(device), room_to_save(call.hidden, self._block, V, 0)
        for rows in self._rows:
            self._of_block(work, batch, parts, room, rows)
        value, stats = batch.summary(parts, entropy=call.entropy)
        dx = None if work.dx is None else work.dx.view(call.hidden.shape)
        return LossResult(value, stats, logprob, results.entropy), (dx, work.dw, work.db)

    def backward(self, saved: Tensors, g: Tensor) -> Tensors:
        """Scale the gradients."""
        found = zip(saved, self._dtypes, strict=True)
        return tuple([None if x is None or d is None else scaled(x, g, d, self._plan) for x, d in found])

    def _of_block(self, work: _Work, batch: LossBatch, parts: Tensor, room: Saved, rows: slice) -> None:
        n, (given, results, g, g_entropy, dx, dw, db) = rows.stop - rows.start, work
        head, D = self._heads[n], self._sizes[2]
        some = Given(
            given.hidden[rows], given.weight, given.bias, given.ids[rows],
            *[None if x is None else x[rows] for x in (given.T, given.mask)],
        )  # fmt: skip
        saved = Saved(room.logits[:n], room.tops)
        state = head.forward(some, Results(*[x if x is None else x.view(-1)[rows] for x in results]), saved)  # type: ignore[arg-type]
        batch.run(results.logprob, results.entropy, g, g_entropy, parts, first=rows.start, tokens=n)
        up = (g.view(-1)[rows], None, None if g_entropy is None else g_entropy.view(-1)[rows])
        of = state.of
        dz = head.dlogits_from_saved(of, head.coefficients(state, up), saved)
        x, w = of.x[:, :D], of.w[:, :D]
        if dx is not None:
            part = dx[rows] if of.place is None else torch.empty_like(dx[rows])
            self._product(dz, w, part, count=of.counted)
            if of.place is not None:
                head.scatter(part, of, 0, dx[rows])
        if dw is not None:
            self._product(dz, x, dw, earlier=dw if rows.start else None, transposed=True, count=of.counted)
        if db is not None:
            db += torch.sum(dz, 0, dtype=torch.float32)


class _Work(NamedTuple):
    """The tensors that a call goes through block by block."""

    given: Given
    results: Results
    g: Tensor  # d loss / d logprob
    g_entropy: Tensor | None
    dx: Tensor | None  # [N, D] bf16
    dw: Tensor | None  # [V, D] fp32
    db: Tensor | None  # [V] fp32


def _masked(call: LinearPolicyLossCall) -> bool:
    return call.mask is not None or call.cu_seqlens is not None


def _counted(call: LinearPolicyLossCall) -> Tensor | None:
    """Bool rows that count, contiguous; None: all."""
    counted = None if call.mask is None else call.mask.contiguous()
    if call.cu_seqlens is None:
        return counted
    at = torch.arange(call.ids.shape[0], device=call.ids.device)
    inside = (at >= call.cu_seqlens[0]) & (at < call.cu_seqlens[-1])
    return inside if counted is None else inside & counted.view(-1)
