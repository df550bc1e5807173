"""linear_logprob@1 on Hopper: every logit matmul is one Gluon kernel that ends in the row's statistics or in dz.

The logits stay fp32 accumulators; what is saved or passed on is fp16(y - tile max) and dz. dX and dW are cuBLAS matmuls
over slices of dz with fp32 accumulation and one rounding. plan.py says how a call is cut and what memory it takes; that
and every launch is decided once a shape.
A saved logit more than 65504 below its tile's largest counts as forbidden on the way back: its probability is 0 at any
temperature below 600.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rlkernel_common.row_selection import choose
from rlkernel_common.vocab_parallel import add, locate
from rlkernel_core.errors import ArgumentError
from rlkernel_core.gradients import Pair, gradient_wanted
from rlkernel_core.gradients import Saved as Tensors
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import filled
from rlkernel_core.spec.linear_logprob import LinearLogprobCall, stored_head
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.listed_ids import flat_ids
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_cuda.linear_logprob import plan
from rlkernel_cuda.linear_logprob.head import (
    ForwardState,
    Given,
    Head,
    Ranks,
    Results,
    Rows,
    Saved,
    aligned,
    room_to_save,
    rows_like,
    saved_like,
)
from rlkernel_cuda.linear_logprob.linear_backward import Backward, Wanted
from rlkernel_cuda.linear_logprob.logits import Kind
from rlkernel_triton.common.row_layout import is_per_row, per_row

# A head whose rows TMA cannot read is copied at every call; above this the portable kernels are the better choice.
COPY_LIMIT: Final = 64 << 20


def fits(call: LinearLogprobCall) -> Reason | None:
    """Refuses a large head that would have to be copied, and sizes beyond 32-bit coordinates."""
    weight = stored_head(call)
    if (refused := too_large_to_copy("weight", weight)) is not None:
        return refused
    if max(flat_ids(call.ids).numel(), weight.shape[0]) >= 2**30:
        return Reason(
            "shape",
            "unsupported",
            f"{flat_ids(call.ids).numel()} rows by {weight.shape[0]} ids pass 32-bit coordinates",
        )
    return None


def too_large_to_copy(name: str, weight: Tensor) -> Reason | None:
    """Refuses a large head whose rows TMA cannot read."""
    if aligned(weight) or 2 * weight.shape[0] * weight.shape[1] <= COPY_LIMIT:
        return None
    return Reason(
        "shape",
        "unsupported",
        f"TMA reads rows that are contiguous and start at multiples of 16 bytes; {name} {list(weight.shape)} with "
        f"strides {list(weight.stride())} would have to be copied",
        "store the head contiguously, with its hidden size a multiple of 8",
    )


def workspace(call: LinearLogprobCall) -> int:
    """Most bytes of a call beyond its results and gradients; of one whose limit is too low, the least."""
    if not flat_ids(call.ids).numel():
        return 0
    wanted = wanted_of(call)
    size = size_of(call, wanted, masked=call.mask is not None)
    found = plan.choose(size, mode=call.backward, backward=any(wanted), limit=call.max_workspace_bytes)
    return (found or plan.least(size, mode=call.backward, backward=any(wanted))).bytes


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearLogprobCall) -> Callable[[LinearLogprobCall], LogprobResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `plan.choose` states the extra memory. Rows that count are gathered, so masked ones cost neither forward nor
    recomputed logits; `support` and weights of another dtype are not claimed.

    Raises:
        ArgumentError: the call has a support, or no way to cut it fits in its limit; the message names the least.
    """
    if gradient_wanted("linear_logprob", call):
        return LinearLogprobPair(call)
    host = host_of(call, Wanted(False, False, False))
    return lambda call: host.forward(call, call.mask)[0]


class LinearLogprobPair(Pair[LinearLogprobCall, LogprobResult]):
    """Log-probability, lse and entropy of every row, with their analytic gradients."""

    op = "linear_logprob"

    def __init__(self, call: LinearLogprobCall) -> None:
        """Plan calls of this shape."""
        super().__init__(call)
        self._host = host_of(call, Wanted(*self.wanted))

    @classmethod
    def inputs(cls, call: LinearLogprobCall) -> Tensors:
        """Hidden states, weight and bias: LoRA is not claimed."""
        return call.hidden, stored_head(call), call.bias

    def forward(self, call: LinearLogprobCall) -> tuple[LogprobResult, Tensors]:
        """Three launches or four, and those of the logits."""
        return self._host.forward(call, call.mask)

    def backward(self, saved: Tensors, grads: Tensors) -> Tensors:
        """From saved logits, or from logits that are made again."""
        return self._host.backward(saved, grads[:3])

    @classmethod
    def saved_like(cls, call: LinearLogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Tensors:
        """The operands, what backward reads of the rows, and logits where they are saved."""
        del result
        masked, save = call.mask is not None, call.backward == "save" and flat_ids(call.ids).numel() > 0
        if call.max_workspace_bytes is not None and flat_ids(call.ids).numel():
            size = size_of(call, Wanted(*wanted), masked=masked)
            save = _cut(size, call.backward, call.max_workspace_bytes, wanted=True).save
        return like(call, masked=masked, save=save)


def host_of(call: LinearLogprobCall, wanted: Wanted) -> Host:
    """The plan of a call.

    Raises:
        ArgumentError: as `prepare`.
    """
    if call.support is not None:
        raise ArgumentError(
            "support", type(call.support).__name__, "is not claimed by this implementation", "Leave it out."
        )
    cut = None
    if flat_ids(call.ids).numel():
        size = size_of(call, wanted, masked=call.mask is not None)
        cut = _cut(size, call.backward, call.max_workspace_bytes, wanted=any(wanted))
    return Host(call, wanted, cut, masked=call.mask is not None)


def like(call: LinearLogprobCall | LinearPolicyLossCall, *, masked: bool, save: bool) -> Tensors:
    """What `Host.forward` saves, as empty tensors; sizes may be symbols."""
    N, (V, D) = flat_ids(call.ids).numel(), call.weight.shape
    rows = rows_like(call.hidden, N, D, masked=masked)
    logits = saved_like(call.hidden, N, V) if save else (None, None)
    whole = None if call.group is None else flat_ids(call.ids).new_empty(N, dtype=torch.int32)
    return None if masked else call.hidden, stored_head(call), call.bias, *rows, whole, *logits


class Host:
    """What the host does for calls of one shape.

    Args:
        call: the first of them, of linear_logprob or of linear_policy_loss.
        wanted: operands that gradients are wanted of.
        cut: how it is cut; None: there are no rows.
        masked: whether some rows do not count.
    """

    def __init__(
        self, call: LinearLogprobCall | LinearPolicyLossCall, wanted: Wanted, cut: plan.Plan | None, *, masked: bool
    ) -> None:
        N, (V, D) = flat_ids(call.ids).numel(), call.weight.shape
        self._shape, self._device, self._dtypes = flat_ids(call.ids).shape, call.hidden.device, _dtypes(call)
        self._N, self._V, self._D, self._cut, self._wanted, self._group = N, V, D, cut, wanted, call.group
        self._keep, self._entropy, self._flat = any(wanted), call.entropy, call.hidden.dim() == 2
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        self._T_given, self._T_as_it_is = T is None, is_per_row(call.temperature, self._shape)
        self._ids_as_they_are = flat_ids(call.ids).is_contiguous()
        kind = Kind(N, V, D, self._device, T, call.softcap, call.logit_scale, masked, call.bias is not None)
        if cut is not None:
            self._head = Head(kind, cut.forward_rows, keep=self._keep, entropy=call.entropy)
            self._backward = Backward(self._head, wanted, partial=call.group is not None)

    def forward(
        self, call: LinearLogprobCall | LinearPolicyLossCall, mask: Tensor | None
    ) -> tuple[LogprobResult, Tensors]:
        """The result, and what backward reads of it.

        Args:
            call: a call of this shape.
            mask: rows that count; None: all.
        """
        shape, device = self._shape, self._device
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        logprob, H = torch.empty_like(lse), torch.empty_like(lse) if self._entropy else None
        invalid = torch.empty(shape, dtype=torch.bool, device=device)
        result = filled(LogprobResult, logprob=logprob, lse=lse, entropy=H, invalid=invalid)
        cut, saved, state = self._cut, None, None
        if cut is not None:
            given, ranks, result = self._given(call, mask, result)
            if cut.save:
                saved = room_to_save(given.hidden, self._N, self._V, cut.buffer)
            state = self._head.forward(given, Results(logprob, lse, H, invalid), saved, ranks)
        if not self._keep:
            return result, ()
        if state is None:
            rows = rows_like(call.hidden, 0, self._D, masked=mask is not None)
            whole = None if self._group is None else flat_ids(call.ids).new_empty(0, dtype=torch.int32)
        else:
            rows, whole = state.rows, None if self._group is None else state.target
        hidden = None if mask is not None else call.hidden
        return result, (hidden, stored_head(call), call.bias, *rows, whole, *(saved or (None, None)))

    def backward(self, saved: Tensors, upstream: Tensors) -> Tensors:
        """The gradients of hidden, weight and bias, where they are wanted."""
        hidden, weight, bias, planes, marks, order, x, whole, *logits = saved
        cut = self._cut
        if cut is None:
            return self._zeros()
        rows = Rows(planes, marks, order, x)  # type: ignore[arg-type]  # they are there
        flat = weight if hidden is None else hidden if self._flat else hidden.reshape(self._N, self._D)
        of, stats = self._head.restore(flat, weight, bias, rows)  # type: ignore[arg-type]  # a weight is there
        state = ForwardState(of, rows, stats, of.target if whole is None else whole)
        if logits[0] is None:
            found = self._backward.recompute_by_slices(state, self._head.coefficients(state, upstream), cut)
        else:
            kept = Saved(*logits)  # type: ignore[arg-type]  # the maxima of tiles are there too
            if getattr(kept.logits, _SPENT, False):
                self._head.save_again(of, kept)
            setattr(kept.logits, _SPENT, True)  # dz overwrites it
            dz = self._head.dlogits_from_saved(of, self._head.coefficients(state, upstream), kept)
            found = self._backward.from_dlogits(state, dz)
        dx = found.hidden
        if dx is not None:
            if self._group is not None:
                add(dx, self._group)
                dx = dx.to(self._dtypes[0])
            dx = dx if self._flat else dx.view(*self._shape, self._D)
        return dx, found.weight, None if found.bias is None else found.bias.to(self._dtypes[2])

    def _given(
        self, call: LinearLogprobCall | LinearPolicyLossCall, mask: Tensor | None, result: LogprobResult
    ) -> tuple[Given, Ranks | None, LogprobResult]:
        """The tensors of a call, flat; with a group, ids of this shard, and which ids of the whole are invalid."""
        hidden, ids, T, ranks = call.hidden, flat_ids(call.ids), None, None
        hidden = hidden if self._flat else hidden.reshape(self._N, self._D)
        ids = ids if self._ids_as_they_are else ids.contiguous()
        if mask is not None and not mask.is_contiguous():
            mask = mask.contiguous()
        if self._T_given:
            T = call.temperature if self._T_as_it_is else per_row(call.temperature, self._shape)
        if self._group is not None:
            flat = None if mask is None else mask.view(-1)
            shard = locate(self._group, self._V, self._N, self._D, self._device)
            chosen = choose(ids.view(-1), flat, shard.V, None)
            here = chosen.ids - shard.offset
            ids = torch.where((chosen.ids >= 0) & (here >= 0) & (here < self._V), here, -1)
            ranks = Ranks(self._group, chosen.ids)
            result = dataclasses.replace(result, invalid=chosen.invalid.view(self._shape))
        mask = None if mask is None else mask.view(-1)
        return Given(hidden, stored_head(call), call.bias, ids, T, mask), ranks, result  # type: ignore[arg-type]

    def _zeros(self) -> Tensors:
        sizes = (*self._shape, self._D), (self._V, self._D), (self._V,)
        of = zip(self._wanted, sizes, self._dtypes, strict=True)
        return tuple([torch.zeros(s, dtype=d, device=self._device) if want else None for want, s, d in of])


_SPENT: Final = "rlkernel_spent"  # attribute of saved logits that their gradient has overwritten


def _dtypes(call: Any) -> tuple[torch.dtype | None, ...]:
    return tuple([None if x is None else x.dtype for x in (call.hidden, stored_head(call), call.bias)])


def wanted_of(call: LinearLogprobCall | LinearPolicyLossCall) -> Wanted:
    """Operands of a call that gradients are wanted of."""
    of = (call.hidden, stored_head(call), call.bias)
    return Wanted(*[torch.is_grad_enabled() and x is not None and x.requires_grad for x in of])


def size_of(call: LinearLogprobCall | LinearPolicyLossCall, wanted: Wanted, *, masked: bool) -> plan.Size:
    """What the memory of a call depends on; tensors of a trace, which have no address, count as aligned.

    Args:
        call: of linear_logprob or of linear_policy_loss.
        wanted: operands that gradients are wanted of.
        masked: whether some rows do not count.
    """
    hidden, weight, group = call.hidden, stored_head(call), call.group
    N, (V, D) = int(flat_ids(call.ids).numel()), map(int, weight.shape)
    copied = 0 if call.bias is None else 20 * V  # in fp32 twice, its gradient and a slice's share of that
    if group is not None:  # dX in fp32 until the ranks have added theirs, and what each says of a row
        copied += (4 * D * wanted.hidden + 32 * (group.size() + 1)) * N
    if not isinstance(hidden, FakeTensor):
        flat = hidden.reshape(N, D)
        if hidden.data_ptr() != flat.data_ptr():  # its leading dimensions could not be joined in place
            copied += flat.nbytes
        for x in (weight,) if masked else (flat, weight):
            copied += 0 if aligned(x) else 2 * x.shape[0] * plan.round_up(D, 8)
    return plan.Size(N, V, D, of_hidden=wanted.hidden, of_weight=wanted.weight, masked=masked, copied=copied)


def _cut(size: plan.Size, mode: str, limit: int | None, *, wanted: bool) -> plan.Plan:
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
