"""linear_policy_loss@1 on matmul tiles: log-probabilities, loss and gradient of a block of rows while its logits exist.

Three matmuls where a token's gradient depends on that token alone: logits in fp32, dX, dW. A block's logits are swept
once for the law (logprob's kernels), the coefficient function runs on its rows (policy_loss's kernel), the slope of the
law writes dz, and dW adds up in fp32. Ratios per sequence need every log-probability first: a first pass makes them,
the second makes the logits again, four matmuls. Memory beyond results: `workspace`; it does not grow with N.

Legend: N rows · D hidden · V vocabulary · R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reference.known_gradient import attach
from rlkernel_core.reference.precision import full_precision
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.policy_loss import LossConfig, LossResult, PolicyLossCall
from rlkernel_triton.launch import INTERPRETED
from rlkernel_triton.linear_logprob import linear_logprob
from rlkernel_triton.linear_logprob import workspace as head_memory
from rlkernel_triton.logprob import per_row, slopes, statistics
from rlkernel_triton.loss_batch import LossBatch, scaled
from rlkernel_triton.policy_loss import policy_loss
from rlkernel_triton.row_layout import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlkernel_triton.logprob import Law

# Rows of a block are a multiple of this, the tokens of one program of the loss.
BLOCK: Final = 64 if INTERPRETED else 128
# Without a limit: what a block may take, and its rows, in multiples of D. Every block adds to dW, 2 D V reads and
# writes in fp32 against 6 R D V operations: with R = D that is small, and a small head takes a small block.
DEFAULT_WORKSPACE: Final = 4 << 30
DEFAULT_ROWS: Final = 2
# Up to so many weights the gradient of the logits stays in fp32: few of them do not average the rounding to 16 bits.
SMALL: Final = 1 << 20
_PER_ROW: Final = 256  # bytes of all vectors of [N]: log-probability, entropy, gradients, statistics


def linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    """The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`."""
    hidden, weight, ids, bias, entropy = call.hidden, call.weight, call.ids, call.bias, call.entropy
    mask, cu_seqlens, softcap, logit_scale = call.mask, call.cu_seqlens, call.softcap, call.logit_scale
    if call.group is not None:  # a block's dX would have to meet those of the other ranks
        return head_then_loss(linear_logprob, LinearLogprobCall.of(call), call)
    config = spec.configure(call)
    N, (V, D) = ids.numel(), weight.shape
    wanted = torch.is_grad_enabled()
    needs = tuple(wanted and x is not None and x.requires_grad for x in (hidden, weight, bias))
    R = rows_of_a_block(N, D, V, hidden.element_size(), call.max_workspace_bytes)
    with torch.no_grad():
        counted = _counted(ids, mask, cu_seqlens)
        logprob = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        H = torch.zeros_like(logprob) if entropy else None
        flat = hidden.detach().reshape(-1, D)
        T = per_row(call.temperature, ids.shape)
        # scale z through cap and temperature is z through cap / scale and temperature / scale.
        head = _Head(
            flat, weight.detach(), None if bias is None else bias.detach(), ids.reshape(-1).contiguous(),
            T / logit_scale, None if softcap is None else softcap / logit_scale, counted, R,
        )  # fmt: skip
        early = _needs_all(config, call.old_logprob, call.rollout_logprob)
        z = torch.empty(min(R, N), V, dtype=torch.float32, device=ids.device)
        if early or not any(needs):
            for rows in head.blocks():
                head.law(rows, head.logits(rows, z), logprob, H)
        batch = LossBatch.of(
            config, ids, cu_seqlens, before=logprob, old=call.old_logprob, advantages=call.advantages,
            mask=mask, ref=call.ref_logprob, rollout=call.rollout_logprob, denominator=call.denominator,
            entropy_denominator=call.entropy_denominator, kl_coef=call.kl_coef, entropy_coef=call.entropy_coef,
            span=BLOCK,
        )  # fmt: skip
        partial = batch.partials(ids.device)
        if not any(needs):
            batch.run(logprob, H, None, None, partial)
            value, stats = batch.summary(partial, entropy=entropy)
            return LossResult(value, stats, logprob, H)
        g = torch.zeros_like(logprob)
        g_entropy = torch.zeros_like(logprob) if entropy else None
        if early:
            batch.run(logprob, H, g, g_entropy, partial)
        into = _Gradients.of(flat, weight, bias, needs)
        dz = torch.empty_like(z, dtype=torch.float32 if weight.numel() <= SMALL else hidden.dtype)
        for rows in head.blocks():
            logits = head.logits(rows, z)
            law = head.law(rows, logits, logprob, H)
            if not early:
                batch.run(logprob, H, g, g_entropy, partial, first=rows.start, tokens=rows.stop - rows.start)
            head.backward(rows, logits, law, g, g_entropy, dz, into)
        value, stats = batch.summary(partial, entropy=entropy)
    d_hidden = None if into.hidden is None else into.hidden.view(hidden.shape)
    loss = attach(value, (d_hidden, hidden), (into.weight, weight), (into.bias, bias), by=scaled)
    return LossResult(loss, stats, logprob, H)


def head_then_loss(
    linear_logprob: Callable[[LinearLogprobCall], LogprobResult], head: LinearLogprobCall, call: LinearPolicyLossCall
) -> LossResult:
    """The loss of log-probabilities that `linear_logprob` makes of `head`, and its gradient: one after the other."""
    counted = _counted(call.ids, call.mask, call.cu_seqlens)
    head.mask = None if counted is None else counted.view(call.ids.shape)
    law = linear_logprob(head)
    result = policy_loss(PolicyLossCall.of(call, logprob=law.logprob, entropy=law.entropy))
    entropy = None if law.entropy is None else law.entropy.detach()
    return LossResult(result.loss, result.stats, law.logprob.detach(), entropy)


def workspace_of(call: LinearPolicyLossCall) -> int:
    """Most bytes of a call beyond its results and gradients; with a group, those of linear_logprob and the loss.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    N, (V, D), item = call.ids.numel(), call.weight.shape, call.hidden.element_size()
    if call.group is not None:
        return head_memory(LinearLogprobCall.of(call)) + _PER_ROW * (N + BLOCK)
    return workspace(rows_of_a_block(N, D, V, item, call.max_workspace_bytes), N, D, V, item)


def workspace(R: int, N: int, D: int, V: int, itemsize: int) -> int:
    """Most extra bytes beyond results and gradients with blocks of R rows.

    The weight's gradient in fp32 until backward scales it; of a block, the logits in fp32, their gradient, and its rows
    of hidden; some hundred bytes a token; a small head twice, in fp32.
    """
    small = V * D <= SMALL
    return (
        4 * V * (D + 2) * (2 if small else 1)
        + R * (V * (8 if small else 4 + itemsize) + 12 * D)
        + _PER_ROW * (N + BLOCK)
    )


def rows_of_a_block(N: int, D: int, V: int, itemsize: int, limit: int | None) -> int:
    """Rows of a block, a multiple of BLOCK: as many as the limit lets, all blocks alike.

    Raises:
        ArgumentError: not even the smallest block keeps the limit.
    """
    least = workspace(BLOCK, N, D, V, itemsize)
    if limit is not None and limit < least:
        raise ArgumentError("max_workspace_bytes", limit, f"is below the minimum of {least}", f"Pass {least} or more.")
    each = workspace(2 * BLOCK, N, D, V, itemsize) - least
    if limit is not None:
        most = 1 + (limit - least) // each
    else:
        most = max(1, min(DEFAULT_WORKSPACE // each, DEFAULT_ROWS * D // BLOCK))
    blocks = max(1, -(-N // BLOCK))
    return BLOCK * -(-blocks // -(-blocks // most))  # all of them alike


@dataclass(frozen=True)
class _Head:
    """The logits of a block of rows, their law and their gradient."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    ids: Tensor  # [N]
    T: float | Tensor  # or [N]
    softcap: float | None
    counted: Tensor | None  # [N] bool
    R: int

    def blocks(self) -> list[slice]:
        """Blocks of rows."""
        N = self.ids.shape[0]
        return [slice(r, min(r + self.R, N)) for r in range(0, N, self.R)]

    def rows(self, rows: slice) -> Tensor:
        """[R, D] of hidden; zeros where a row does not count, for 0 times NaN is NaN."""
        x = self.hidden[rows]
        return x if self.counted is None else torch.where(self.counted[rows, None], x, 0.0).to(x.dtype)

    def logits(self, rows: slice, room: Tensor) -> Tensor:
        """[R, V] fp32, before cap and temperature, in `room`."""
        z = product(self.rows(rows), self.weight.T, room[: rows.stop - rows.start])
        return z if self.bias is None else z.add_(self.bias)

    def temperature(self, rows: slice) -> float | Tensor:
        """Of a block."""
        return self.T[rows] if isinstance(self.T, Tensor) else self.T

    def law(self, rows: slice, z: Tensor, logprob: Tensor, H: Tensor | None) -> Law:
        """The law of a block; its log-probabilities and entropies are put in their places."""
        mask = None if self.counted is None else self.counted[rows]
        row = statistics(
            rows_of(z), z.shape[1], self.ids[rows], self.temperature(rows), mask, None, self.softcap,
            moment=H is not None,
        )  # fmt: skip
        logprob.view(-1)[rows] = row.logprob
        if H is not None and row.entropy is not None:
            H.view(-1)[rows] = row.entropy
        return row

    def backward(
        self, rows: slice, z: Tensor, law: Law, g: Tensor, g_entropy: Tensor | None, room: Tensor, into: _Gradients
    ) -> None:
        """Add the gradients that a block's rows make; `room` is for the gradient of its logits."""
        mask = None if self.counted is None else self.counted[rows]
        dz = room[: rows.stop - rows.start]
        up = (g.view(-1)[rows], None, None if g_entropy is None else g_entropy.view(-1)[rows], None)
        slopes(
            z, self.ids[rows], self.temperature(rows), mask, law.invalid, law.saved, None, self.softcap, up, dz
        )  # fmt: skip
        if into.hidden is not None:
            if dz.dtype != self.weight.dtype:
                into.hidden[rows] = product(dz, self.weight)
            else:
                with full_precision(dz):
                    torch.mm(dz, self.weight, out=into.hidden[rows])
        if into.weight is not None:
            product(dz.T, self.rows(rows), into.weight, first=rows.start == 0)
        if into.bias is not None:
            into.bias += dz.sum(0, dtype=torch.float32)


@dataclass
class _Gradients:
    """What the pass accumulates; None where an operand is frozen."""

    hidden: Tensor | None  # [N, D] in the dtype of hidden: each row is complete when it is written
    weight: Tensor | None  # [V, D] fp32
    bias: Tensor | None  # [V] fp32

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> _Gradients:
        """Room for them; dW is written by the first block."""
        some = hidden.shape[0] > 0
        room = torch.empty if some else torch.zeros
        return cls(
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None,
            room(weight.shape, dtype=torch.float32, device=hidden.device) if needs[1] else None,
            None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=torch.float32),
        )


def product(a: Tensor, b: Tensor, into: Tensor | None = None, *, first: bool = True) -> Tensor:
    """A b in fp32, added to `into` unless it is the first; operands of 16 bits keep fp32 sums and are not rounded."""
    wide = a.dtype == torch.float32 or not a.is_cuda
    more: dict[str, torch.dtype] = {} if wide else {"out_dtype": torch.float32}
    with full_precision(a):
        if wide:
            a, b = a.float(), b.float()
        if into is None:
            return torch.mm(a, b, **more)
        return torch.mm(a, b, out=into, **more) if first else torch.addmm(into, a, b, out=into, **more)


def _counted(ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """[N] bool rows that count; None: all."""
    counted = None if mask is None else mask.reshape(-1).contiguous()
    if cu_seqlens is None:
        return counted
    at = torch.arange(ids.shape[0], device=ids.device)
    inside = (at >= cu_seqlens[0]) & (at < cu_seqlens[-1])
    return inside if counted is None else inside & counted


def _needs_all(config: LossConfig, old: Tensor | None, rollout: Tensor | None) -> bool:
    """Whether a token's gradient depends on the log-probabilities of others."""
    return config.level == "sequence" or (old is None and rollout is not None)
