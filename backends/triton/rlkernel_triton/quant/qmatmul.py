"""qmatmul@1 in Triton: the operator's function, and gradients of x, bias, LoRA and residual.

The backward pass dequantises the weight again, to the dtype of x and in pieces, and multiplies with torch; where an
activation needs the product it is computed once more, in fp32.

Legend: M tokens · K inputs · E experts, 1 where there is no `ends` · N rows of an expert · r LoRA rank ·
R = N, or N / 2 for a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rlkernel_common.activations import ACTIVATIONS
from rlkernel_common.row_views import shaped
from rlkernel_core.gradients import Pair, Saved, gradient_wanted, recording_gradients
from rlkernel_core.quant.tensor import QuantMeta, QuantTensor
from rlkernel_core.spec.qmatmul import PAIRS, LoRA, QmatmulCall
from rlkernel_triton.launchers import Plan, launcher_for, piece_of, planned
from rlkernel_triton.quant import blocks, storage
from rlkernel_triton.quant.block_products import dense_experts, dense_product, multiplied
from rlkernel_triton.quant.product import NOTHING, PIECE, After, bound_words, wide_product


def qmatmul(call: QmatmulCall) -> Tensor:  # -> [..., R]
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: QmatmulCall) -> Callable[[QmatmulCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.qmatmul.QmatmulCall`."""
    if gradient_wanted("qmatmul", call):
        return QmatmulPair(call)
    return _Host(call).forward


class QmatmulPair(Pair[QmatmulCall, Tensor]):
    """Gradients of x, bias, LoRA and residual; the weight is saved packed."""

    op = "qmatmul"

    def __init__(self, call: QmatmulCall) -> None:
        """Keep what is done once for calls of this shape."""
        super().__init__(call)
        self._host = _Host(call)
        self._kinds = [None if x is None else (x.dtype, x.shape) for x in self.inputs(call)]

    @classmethod
    def inputs(cls, call: QmatmulCall) -> Saved:
        """The input, bias, A and B of LoRA, and residual."""
        a, b = (None, None) if call.lora is None else (call.lora.A, call.lora.B)
        return call.x, call.bias, a, b, call.residual

    def forward(self, call: QmatmulCall) -> tuple[Tensor, Saved]:
        """The result; what is saved belongs to the call."""
        return self._host.forward(call), self.saved_like(call, call.x, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """The weight is dequantised again, in pieces, and multiplied with the gradient."""
        (dy,) = grads
        if dy is None:
            return (None,) * len(self._kinds)
        found = self._host.backward(saved, dy.reshape(-1, dy.shape[-1]), self.wanted)
        kinds = zip(found, self._kinds, strict=True)
        return tuple([None if g is None or kind is None else g.to(kind[0]).view(kind[1]) for g, kind in kinds])

    @classmethod
    def saved_like(cls, call: QmatmulCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Tensors of the call alone: the packed weight, and x where an activation or LoRA needs it."""
        del result, wanted
        x, bias, a, b, _ = cls.inputs(call)
        return x if call.activation or a is not None else None, bias, a, b, call.ends, *call.w.flatten()[0]


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: QmatmulCall) -> None:
        storage.check_layouts("w", call.w)
        scale = 0.0 if call.lora is None else float(call.lora.scale)
        self._how = _How(call.w.flatten()[1], scale, call.activation, call.weight_rounding)
        self._leading, self._K, self._dtype = call.x.shape[:-1], call.x.shape[-1], call.x.dtype
        launcher = launcher_for(call.x.device)
        # `again` is of what the backward pass launches: among it the product once more, in another dtype.
        self._plan, self._again = Plan(launcher), Plan(launcher)
        self._words = None if call.ends is not None else _in_one_launch(call, self._how, self._plan)

    def forward(self, call: QmatmulCall) -> Tensor:  # -> [..., R]
        """The result."""
        x, w, lora, residual = call.x, call.w, call.lora, call.residual
        if self._words is not None:
            return self._words(x, w, NOTHING, x.dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, self._K)
        added = None if residual is None else residual.reshape(rows.shape[0], residual.shape[-1])
        a, b = (None, None) if lora is None else (lora.A, lora.B)
        y = self._how.run(rows, call.bias, a, b, added, call.ends, w, plan=self._plan)
        return y if x.dim() == 2 else shaped(y, torch.Size((*self._leading, y.shape[-1])))

    def backward(self, saved: Saved, dy: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The gradients of x, bias, A, B and residual that are wanted, as rows and not yet of their dtypes."""
        how, plan = self._how, self._again
        x, bias, a, b, ends, *parts = saved
        x = None if x is None else x.reshape(-1, self._K)
        w = QuantTensor.unflatten(parts, how.meta)  # type: ignore[arg-type]  # all parts are there
        dh = dy if how.activation is None else _through(how, x, bias, a, b, ends, w, dy, plan)  # type: ignore[arg-type]
        dx = _times_weight(dh.to(self._dtype), ends, w, plan) if wanted[0] else None
        da = db = None
        if a is not None and any((wanted[0], wanted[2], wanted[3])):
            low = _wide(dh, b) * how.lora_scale  # type: ignore[arg-type]  # [M, r] = s dh B
            if dx is not None:
                dx += _wide(low, a)
            if wanted[2]:
                da = _wide(low.t(), x)  # type: ignore[arg-type]  # it is saved beside a LoRA
            if wanted[3]:
                db = _wide(dh.t(), _wide(x, a.t())) * how.lora_scale  # type: ignore[arg-type]
        dbias = _sums(dh, ends) if wanted[1] else None
        if ends is not None:
            dy = torch.where(_members(ends, dy.shape[0]).any(0), dy, 0)
        return dx, dbias, da, db, dy if wanted[4] else None


def _in_one_launch(
    call: QmatmulCall, how: _How, plan: Plan
) -> Callable[[Tensor, QuantTensor, After, torch.dtype], Tensor] | None:
    """What multiplies and does nothing more, where x can be read as it is; None for other calls."""
    plain = all(x is None for x in (call.activation, call.lora, call.bias, call.residual))
    if not plain or call.x.dim() != 2 or not call.x.is_contiguous() or blocks.reads(call.w.spec):
        return None
    return bound_words(plan.launcher, call.x, call.w, NOTHING, how.weight_rounding)


@dataclass(frozen=True)
class _How:
    """What a call says beside tensors."""

    meta: QuantMeta
    lora_scale: float
    activation: str | None
    weight_rounding: str

    def run(
        self,
        x: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        residual: Tensor | None,
        ends: Tensor | None,
        w: QuantTensor,
        dtype: torch.dtype | None = None,
        plan: Plan | None = None,
    ) -> Tensor:  # -> [M, R]
        """The forward pass."""
        lora = None if a is None or b is None else LoRA(a, b, self.lora_scale)
        after = After(bias, lora, self.activation, residual)
        return multiplied(x.contiguous(), w, after, self.weight_rounding, ends, dtype, plan)


def _through(
    how: _How, x: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, ends: Tensor | None, w: QuantTensor,
    dy: Tensor, plan: Plan,
) -> Tensor:  # -> [M, N] fp32  # fmt: skip
    """The gradient of h from that of y."""
    h = replace(how, activation=None).run(x, bias, a, b, None, ends, w, torch.float32, plan)
    with recording_gradients():
        leaf = h.requires_grad_()
        given = leaf.chunk(2, 1) if how.activation in PAIRS else (leaf,)
        y = ACTIVATIONS[how.activation](*given)
    return torch.autograd.grad(y, leaf, dy.float())[0]


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """A small product in fp32."""
    return left.float() @ right.float()


def _members(ends: Tensor, M: int) -> Tensor:  # -> [E, M, 1]
    """Which rows an expert has."""
    last = ends.clamp(0, M).cummax(0).values.unsqueeze(1)
    first = functional.pad(last[:-1], (0, 0, 1, 0))
    row = torch.arange(M, device=ends.device)
    return ((row >= first) & (row < last)).unsqueeze(2)


def _sums(dh: Tensor, ends: Tensor | None) -> Tensor:  # [M, N] -> [E N] fp32
    """Sums over the rows of each expert."""
    if ends is None:
        return dh.sum(0, dtype=torch.float32)
    return torch.cat([torch.where(mine, dh, 0).sum(0, dtype=torch.float32) for mine in _members(ends, dh.shape[0])])


def _times_weight(dh: Tensor, ends: Tensor | None, w: QuantTensor, plan: Plan) -> Tensor:  # [M, N] -> [M, K] fp32
    """Dh w', the weight rounded to the dtype of dh, in pieces of its rows."""
    N, K = w.shape
    if ends is not None:
        dx = dh.new_zeros(dh.shape[0], K, dtype=torch.float32)
        for first, some, dense in dense_experts(w, ends.shape[0], dh.dtype):
            turned = dense.view(some, -1, K).transpose(1, 2).reshape(some * K, -1)
            dense_product(dh.contiguous(), turned, After(), ends, dx, first=first, experts=some, N=K)
        return dx
    rows = max(64, 2 * piece_of(PIECE, 2) // (K * dh.element_size()) // 64 * 64)
    total = None
    for first in range(0, N, rows):
        last = min(first + rows, N)
        dequantise = planned(plan, f"rows {first}", dh.device, partial(storage.dequantiser, w, dh.dtype, (first, last)))
        left = dh if last - first == N else dh[:, first:last]
        part = wide_product(left, dequantise(w).t())
        total = part if total is None else total.add_(part)
    return dh.new_zeros(dh.shape[0], K, dtype=torch.float32) if total is None else total
