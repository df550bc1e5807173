"""linear_policy_loss@1 on matmul tiles: log-probabilities, loss and gradient of a block of rows while its logits exist.

Three matmuls where a token's gradient depends on that token alone: logits in fp32, dX, dW. logprob's kernels read a
block's logits once for the softmax statistics, policy_loss's kernel computes the coefficients of its rows, logprob's
gradient kernel writes dz, and dW adds up in fp32. Ratios per sequence need every log-probability first: a first pass
makes them, the second makes the logits again, four matmuls. Memory beyond results: `workspace`; it is constant in N.

Legend: N rows · D hidden · V vocabulary · R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.precision import full_precision
from rlkernel_core.errors import ArgumentError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.policy_loss import LossConfig, LossResult, PolicyLossCall
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.merge_softmax import SAVED_PLANES
from rlkernel_triton.common.row_layout import is_per_row, layout_of, per_row
from rlkernel_triton.common.softmax_rows import MergeSoftmax, RowShape, RowTensors, SoftmaxStats
from rlkernel_triton.launchers import Launcher, Plan, launcher_for
from rlkernel_triton.linear_logprob.launch import LinearLogprobPair, linear_logprob
from rlkernel_triton.linear_logprob.launch import workspace as linear_logprob_workspace
from rlkernel_triton.logprob.launch import PartialSoftmax, SoftmaxBackward
from rlkernel_triton.policy_loss.batch import LossBatch, scaled
from rlkernel_triton.policy_loss.launch import Host as LossHost
from rlkernel_triton.policy_loss.launch import policy_loss

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
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearPolicyLossCall) -> Callable[[LinearPolicyLossCall], LossResult]:
    """What runs calls of this shape.

    The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`.
    """
    if gradient_wanted("linear_policy_loss", call):
        return LinearPolicyLossPair(call)
    if call.group is not None:
        return lambda call: head_then_loss(linear_logprob, LinearLogprobCall.of(call), call)
    host = _Host(call, (False,) * 5)
    return lambda call: host.forward(call)[0]


class LinearPolicyLossPair(Pair[LinearPolicyLossCall, LossResult]):
    """The loss with the gradients of its operands; with a group, with what they are made of.

    There a block's dX would have to meet those of the other ranks: the head and the loss are worked on one by one.
    """

    op = "linear_policy_loss"

    def __init__(self, call: LinearPolicyLossCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._dtypes = [None if x is None else x.dtype for x in self.inputs(call)]
        self._host = _Host(call, self.wanted) if call.group is None else None
        if call.group is not None:
            self._head = LinearLogprobPair(LinearLogprobCall.of(call, mask=_mask_of(call)))
            self._loss = LossHost(spec.configure(call), call.ids.shape, call.hidden.device, (True, call.entropy))

    @classmethod
    def inputs(cls, call: LinearPolicyLossCall) -> Saved:
        """Hidden states, weight, bias, and A and B of LoRA."""
        lora = call.lora
        return call.hidden, call.weight, call.bias, *((None, None) if lora is None else (lora.A, lora.B))

    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Saved]:
        """The loss; and its gradients, or what those of the head need and its gradients by the results of the head."""
        if self._host is not None:
            return self._host.forward(call)
        head_result, saved = self._head.forward(LinearLogprobCall.of(call, mask=_mask_of(call)))
        of_head = PolicyLossCall.of(call, logprob=head_result.logprob, entropy=head_result.entropy)
        result, known = self._loss.forward(of_head)
        return LossResult(result.loss, result.stats, head_result.logprob, head_result.entropy), (*known, *saved)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Scale what forward made, and take it through the head where that is left to do."""
        (g,) = grads
        if self._host is not None:
            return self._scaled(saved, g, self._dtypes, self._host.plan)
        dlogprob, dentropy, *rest = saved
        dtypes = [None if x is None else x.dtype for x in (dlogprob, dentropy)]
        of_logprob, of_entropy = self._scaled((dlogprob, dentropy), g, dtypes, self._loss.plan)
        return self._head.backward(tuple(rest), (of_logprob, None, of_entropy, None))

    @staticmethod
    def _scaled(known: Saved, g: Tensor | None, dtypes: Sequence[torch.dtype | None], plan: Plan) -> Saved:
        pairs = zip(known, dtypes, strict=True)
        return tuple(
            [scaled(x, g, kind, plan) if x is not None and g is not None and kind else None for x, kind in pairs]
        )

    @classmethod
    def saved_like(cls, call: LinearPolicyLossCall, result: LossResult, wanted: tuple[bool, ...]) -> Saved:
        """Gradients, in fp32 but dX; with a group, two numbers a token and what linear_logprob saves."""
        del result
        if call.group is None:
            like = torch.empty_like
            hidden, *others = (x if wants else None for x, wants in zip(cls.inputs(call), wanted, strict=True))
            d_hidden = None if hidden is None else like(hidden, memory_format=torch.contiguous_format)
            return d_hidden, *[
                None if x is None else like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
                for x in others
            ]
        ids = call.ids
        head_result = LogprobResult(
            ids.new_empty(ids.shape, dtype=torch.float32), ids.new_empty(ids.shape, dtype=torch.float32),
            invalid=ids.new_empty(ids.shape, dtype=torch.bool),
        )  # fmt: skip
        of_entropy = ids.new_empty(ids.shape, dtype=torch.float32) if call.entropy else None
        head = LinearLogprobPair.saved_like(LinearLogprobCall.of(call, mask=_mask_of(call)), head_result, wanted)
        return head_result.logprob, of_entropy, *head


class _Host:
    """What the host does for calls of one shape, without a group."""

    def __init__(self, call: LinearPolicyLossCall, needs: tuple[bool, ...]) -> None:
        self._config, self._shape, self._device = spec.configure(call), call.ids.shape, call.hidden.device
        self._N, (self._V, D) = call.ids.numel(), call.weight.shape
        self._needs, self._any, self._entropy = needs, any(needs), call.entropy
        r, item = 0 if call.lora is None else call.lora.A.shape[0], call.hidden.element_size()
        self._R = rows_of_a_block(self._N, D, self._V, item, call.max_workspace_bytes, r)
        self._early = _needs_all(self._config, call.old_logprob, call.rollout_logprob)
        launcher = launcher_for(self._device)
        self.plan, self._head = Plan(launcher), _Head(launcher, call, self._R, keep=self._any)
        self._dz_dtype = torch.float32 if self._V * D <= SMALL else call.hidden.dtype

    def _batch(self, call: LinearPolicyLossCall, logprob: Tensor) -> LossBatch:
        return LossBatch.of(call, self._config, call.ids, before=logprob, span=BLOCK, plan=self.plan)

    @torch.no_grad()
    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Saved]:
        """The result, and the gradients that are wanted."""
        head, N, entropy, early, device = self._head, self._N, self._entropy, self._early, self._device
        of = head.of(call)
        z, softmax = None, None
        if 0 < N <= self._R:  # the only block is multiplied once, and its statistics are those of all rows
            z = head.logits(of, slice(0, N), None)
            softmax = head.softmax(of, slice(0, N), z)
            logprob, H = softmax.logprob, softmax.entropy
        else:
            logprob = torch.empty(self._shape, dtype=torch.float32, device=device)
            H = torch.empty_like(logprob) if entropy else None
            z = torch.empty(min(self._R, N), self._V, dtype=torch.float32, device=device)
            if early or not self._any:
                for rows in head.blocks:
                    head.put(head.softmax(of, rows, head.logits(of, rows, z)), rows, logprob, H)
        batch = self._batch(call, logprob)
        partials = batch.partials(device)
        if not self._any:
            batch.run(logprob, H, None, None, partials)
            value, stats = batch.summary(partials, entropy=entropy)
            return LossResult(value, stats, logprob, H), (None,) * 5
        # Tokens outside of all sequences are in no program.
        room = torch.empty_like if call.cu_seqlens is None else torch.zeros_like
        g, g_entropy = room(logprob), room(logprob) if entropy else None
        if early or softmax is not None:
            batch.run(logprob, H, g, g_entropy, partials)
        into = _Gradients.of(of, self._needs)
        dz = torch.empty_like(z, dtype=self._dz_dtype)
        if softmax is not None:
            head.backward(of, slice(0, N), z, softmax, g, g_entropy, dz, into)
        else:
            for rows in head.blocks:
                logits = head.logits(of, rows, z)
                some = head.softmax(of, rows, logits)
                head.put(some, rows, logprob, H)
                if not early:
                    batch.run(logprob, H, g, g_entropy, partials, first=rows.start, tokens=rows.stop - rows.start)
                head.backward(of, rows, logits, some, g, g_entropy, dz, into)
        value, stats = batch.summary(partials, entropy=entropy)
        d_hidden = None if into.hidden is None else into.hidden.view(call.hidden.shape)
        return LossResult(value, stats, logprob, H), (d_hidden, into.weight, into.bias, into.A, into.B)


def head_then_loss(
    linear_logprob: Callable[[LinearLogprobCall], LogprobResult], head: LinearLogprobCall, call: LinearPolicyLossCall
) -> LossResult:
    """The loss of log-probabilities that `linear_logprob` makes of `head`, and its gradient: one after the other."""
    head.mask = _mask_of(call)
    head_result = linear_logprob(head)
    result = policy_loss(PolicyLossCall.of(call, logprob=head_result.logprob, entropy=head_result.entropy))
    entropy = None if head_result.entropy is None else head_result.entropy.detach()
    return LossResult(result.loss, result.stats, head_result.logprob.detach(), entropy)


def workspace_of(call: LinearPolicyLossCall) -> int:
    """Most bytes of a call beyond its results and gradients; with a group, those of linear_logprob and the loss.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    N, (V, D), item = call.ids.numel(), call.weight.shape, call.hidden.element_size()
    if call.group is not None:
        return linear_logprob_workspace(LinearLogprobCall.of(call)) + _PER_ROW * (N + BLOCK)
    r = 0 if call.lora is None else call.lora.A.shape[0]
    return workspace(rows_of_a_block(N, D, V, item, call.max_workspace_bytes, r), N, D, V, item, r)


def workspace(R: int, N: int, D: int, V: int, itemsize: int, r: int = 0) -> int:
    """Most extra bytes beyond results and gradients with blocks of R rows.

    The weight's gradient in fp32 until backward scales it; of a block, the logits in fp32, their gradient, and its rows
    of hidden; some hundred bytes a token; a small head twice, in fp32; of a low-rank addition, B in fp32 and its
    gradient, and a block's rows once more in fp32.
    """
    low_rank = 4 * (r * (3 * V + 3 * D + 4 * R) + 2 * R * D) if r else 0
    small = V * D <= SMALL
    return (
        4 * V * (D + 2) * (2 if small else 1)
        + R * (V * (8 if small else 4 + itemsize) + 12 * D)
        + _PER_ROW * (N + BLOCK)
        + low_rank
    )


def rows_of_a_block(N: int, D: int, V: int, itemsize: int, limit: int | None, r: int = 0) -> int:
    """Rows of a block, a multiple of BLOCK: as many as the limit lets, all blocks alike.

    Raises:
        ArgumentError: not even the smallest block keeps the limit.
    """
    least = workspace(BLOCK, N, D, V, itemsize, r)
    if limit is not None and limit < least:
        raise ArgumentError("max_workspace_bytes", limit, f"is below the minimum of {least}", f"Pass {least} or more.")
    each = workspace(2 * BLOCK, N, D, V, itemsize, r) - least
    if limit is not None:
        most = 1 + (limit - least) // each
    else:
        most = max(1, min(DEFAULT_WORKSPACE // each, DEFAULT_ROWS * D // BLOCK))
    blocks = max(1, -(-N // BLOCK))
    return BLOCK * -(-blocks // -(-blocks // most))  # all of them alike


@dataclass(frozen=True, slots=True)
class _Operands:
    """The tensors of a call; none asks for a gradient."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    ids: Tensor  # N, contiguous
    T: Tensor | None  # N; None: a number
    counted: Tensor | None  # [N] bool
    lora: LoRA | None


class _Block:
    """The launches of a block of n rows."""

    def __init__(
        self, launcher: Launcher, rows: RowShape, shape: torch.Size, device: torch.device, *, keep: bool, moment: bool
    ) -> None:  # fmt: skip
        layout, _ = layout_of(torch.empty(rows.N, rows.V, device="meta"))
        self.partial = PartialSoftmax(launcher, rows, layout, moment=moment)
        self.merge = MergeSoftmax(launcher, rows, rows.V, self.partial.P, shape, device, keep=keep, moment=moment)
        self.backward = SoftmaxBackward(launcher, rows, layout)
        room = [self.partial.numbers, 0 if keep else SAVED_PLANES * rows.N]
        self.room = [-(-n // 4) * 4 for n in room]  # each begins at a multiple of 16 bytes


class _Head:
    """Calls of one shape: logits of a block of rows, their softmax statistics and gradient, each launch bound once."""

    def __init__(self, launcher: Launcher, call: LinearPolicyLossCall, R: int, *, keep: bool) -> None:
        N, self.D, self.device = call.ids.numel(), call.hidden.shape[-1], call.hidden.device
        self.blocks = [slice(r, min(r + R, N)) for r in range(0, N, R)]
        self._shape, self._scale, self._keep = call.ids.shape, call.logit_scale, keep
        self._masked = call.mask is not None or call.cu_seqlens is not None
        # Fold logit_scale s: cap(s z; c) / T = cap(z; c / s) / (T / s).
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature) / call.logit_scale
        self._T_as_it_is = T is None and is_per_row(call.temperature, self._shape)
        softcap = None if call.softcap is None else call.softcap / call.logit_scale
        self._T_given, self._of = T is None, {}
        for n in {rows.stop - rows.start for rows in self.blocks}:
            of_block = RowShape(n, call.weight.shape[0], T, softcap, self._masked, None)
            shape = self._shape if len(self.blocks) == 1 else torch.Size((n,))
            self._of[n] = _Block(launcher, of_block, shape, self.device, keep=keep, moment=call.entropy)

    def of(self, call: LinearPolicyLossCall) -> _Operands:
        """The operands of a call as they are multiplied and read."""
        ids = call.ids if call.ids.is_contiguous() else call.ids.contiguous()
        T = None
        if self._T_given:
            given: Any = call.temperature if self._T_as_it_is else per_row(call.temperature, self._shape)
            T = (given if self._scale == 1.0 else given / self._scale).view(-1)
        hidden = call.hidden.detach()
        return _Operands(
            hidden if hidden.dim() == 2 else hidden.reshape(-1, self.D), call.weight.detach(),
            None if call.bias is None else call.bias.detach(), ids.view(-1), T,
            _counted(call.ids, call.mask, call.cu_seqlens) if self._masked else None,
            None if call.lora is None else LoRA(call.lora.A.detach(), call.lora.B.detach(), call.lora.scale),
        )  # fmt: skip

    def rows(self, of: _Operands, rows: slice) -> Tensor:
        """[R, D] of hidden; zeros where a row does not count, for 0 times NaN is NaN."""
        x = self._part(of.hidden, rows)
        return x if of.counted is None else torch.where(of.counted[rows, None], x, 0.0).to(x.dtype)

    def logits(self, of: _Operands, rows: slice, room: Tensor | None) -> Tensor:
        """[R, V] fp32, before cap and temperature, in `room` if it is given."""
        x = self.rows(of, rows)
        z = product(x, of.weight.T, None if room is None else room[: rows.stop - rows.start])
        if of.lora is not None:
            with full_precision(z):
                z.addmm_(inner_product(x, of.lora), of.lora.B.float().T)
        return z if of.bias is None else z.add_(of.bias)

    def softmax(self, of: _Operands, rows: slice, z: Tensor) -> SoftmaxStats:
        """Softmax statistics of a block."""
        block = self._of[rows.stop - rows.start]
        parts, saved = torch.empty(
            sum(block.room), dtype=torch.float32, device=self.device
        ).unsafe_split_with_sizes(block.room)  # fmt: skip
        tensors = self._tensors(of, rows)
        block.partial(z, tensors, parts)
        return block.merge(parts, tensors, None if self._keep else saved)

    def put(self, softmax: SoftmaxStats, rows: slice, logprob: Tensor, H: Tensor | None) -> None:
        """A block's log-probabilities and entropies in their places."""
        logprob.view(-1)[rows] = softmax.logprob
        if H is not None and softmax.entropy is not None:
            H.view(-1)[rows] = softmax.entropy

    def backward(
        self, of: _Operands, rows: slice, z: Tensor, softmax: SoftmaxStats, g: Tensor, g_entropy: Tensor | None,
        room: Tensor, into: _Gradients,
    ) -> None:  # fmt: skip
        """Add the gradients that a block's rows make; `room` is for the gradient of its logits."""
        dz = self._part(room, slice(0, rows.stop - rows.start))
        up = (g.view(-1)[rows], None, None if g_entropy is None else g_entropy.view(-1)[rows], None)
        self._of[rows.stop - rows.start].backward(z, self._tensors(of, rows), softmax.invalid, softmax.saved, up, dz)
        if of.lora is not None:
            self._through_lora(of, of.lora, rows, dz, into)
        elif into.hidden is not None:
            if dz.dtype != of.weight.dtype:
                into.hidden[rows] = product(dz, of.weight)
            else:
                with full_precision(dz):
                    torch.mm(dz, of.weight, out=into.hidden[rows])
        if into.weight is not None:
            product(dz.T, self.rows(of, rows), into.weight, first=rows.start == 0)
        if into.bias is not None:
            into.bias += dz.sum(0, dtype=torch.float32)

    def _through_lora(self, of: _Operands, lora: LoRA, rows: slice, dz: Tensor, into: _Gradients) -> None:
        """Gradients of hidden, rounded once, of A and of B, from that of the logits."""
        x, du = self.rows(of, rows), lora.scale * exact_product(dz, lora.B)
        with full_precision(du):
            if into.hidden is not None:
                into.hidden[rows] = exact_product(dz, of.weight).addmm_(du, lora.A.float())
            if into.A is not None:
                into.A.addmm_(du.T, x.float())
        if into.B is not None:
            into.B += exact_product(dz.T, inner_product(x, lora))

    def _tensors(self, of: _Operands, rows: slice) -> RowTensors:
        ids, T, counted = (None if x is None else self._part(x, rows) for x in (of.ids, of.T, of.counted))
        return RowTensors(ids, T, counted)  # type: ignore[arg-type]  # ids are there

    def _part(self, x: Tensor, rows: slice) -> Tensor:
        """Some rows, where they are not all."""
        return x if len(self.blocks) == 1 else x[rows]


@dataclass
class _Gradients:
    """What the pass accumulates; None where an operand is frozen."""

    hidden: Tensor | None  # [N, D] in the dtype of hidden: each row is complete when it is written
    weight: Tensor | None  # [V, D] fp32
    bias: Tensor | None  # [V] fp32
    A: Tensor | None  # [r, D] fp32
    B: Tensor | None  # [V, r] fp32

    @classmethod
    def of(cls, operands: _Operands, needs: tuple[bool, ...]) -> _Gradients:
        """Room for them; dW is written by the first block."""
        hidden, weight, bias, lora = operands.hidden, operands.weight, operands.bias, operands.lora
        matrices = (None, None) if lora is None else (lora.A, lora.B)
        some = hidden.shape[0] > 0
        room = torch.empty if some else torch.zeros
        return cls(
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None,
            room(weight.shape, dtype=torch.float32, device=hidden.device) if needs[1] else None,
            *[
                torch.zeros(x.shape, dtype=torch.float32, device=hidden.device) if need and x is not None else None
                for x, need in zip((bias, *matrices), needs[2:], strict=True)
            ],
        )


def product(a: Tensor, b: Tensor, into: Tensor | None = None, *, first: bool = True) -> Tensor:
    """A b in fp32, added to `into` unless it is the first; operands of 16 bits keep fp32 sums and are not rounded."""
    wide = a.dtype == torch.float32 or not a.is_cuda
    more: dict[str, Any] = {} if wide else {"out_dtype": torch.float32}
    with full_precision(a):
        if wide:
            a, b = a.float(), b.float()
        if into is None:
            return torch.mm(a, b, **more)
        return torch.mm(a, b, out=into, **more) if first else torch.addmm(into, a, b, out=into, **more)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """A b in fp32; where a has 16 bits, b of another dtype is two numbers of it, so that none is rounded."""
    if b.dtype == a.dtype or not a.is_cuda or a.dtype == torch.float32:
        return product(a, b)
    high = b.to(a.dtype)
    return product(a, (b - high).to(a.dtype)).add_(product(a, high))


def inner_product(x: Tensor, lora: LoRA) -> Tensor:
    """[R, r] scale times x A^T, fp32."""
    return lora.scale * exact_product(x, lora.A.T)


def _counted(ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """[N] bool rows that count; None: all."""
    counted = None if mask is None else mask.reshape(-1).contiguous()
    if cu_seqlens is None:
        return counted
    at = torch.arange(ids.shape[0], device=ids.device)
    inside = (at >= cu_seqlens[0]) & (at < cu_seqlens[-1])
    return inside if counted is None else inside & counted


def _mask_of(call: LinearPolicyLossCall) -> Tensor | None:
    """[N] or [B, T] tokens whose rows count; None: all."""
    counted = _counted(call.ids, call.mask, call.cu_seqlens)
    return None if counted is None else counted.view(call.ids.shape)


def _needs_all(config: LossConfig, old: Tensor | None, rollout: Tensor | None) -> bool:
    """Whether a token's gradient depends on the log-probabilities of others."""
    return config.level == "sequence" or (old is None and rollout is not None)
