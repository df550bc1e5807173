"""qmatmul@1 in Triton: the operator's function, and gradients of x, bias, LoRA and residual.

The backward pass dequantizes the weight again, to the dtype of x and in pieces, and multiplies with torch; where an
activation needs the product it is computed once more, in fp32.

Legend: M tokens · K inputs · E experts, 1 where there is no `ends` · N rows of an expert · r LoRA rank ·
R = N, or N / 2 for a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from rlkernel_common.activations import ACTIVATIONS
from rlkernel_common.precision import full_precision
from rlkernel_common.row_views import shaped
from rlkernel_core.gradients import Pair, Saved, gradient_wanted, recording_gradients
from rlkernel_core.quant.tensor import QuantMeta, QuantTensor
from rlkernel_core.spec.qmatmul import PAIRS, LoRA, QmatmulCall
from rlkernel_triton.launchers import Plan, launcher_for, piece_of
from rlkernel_triton.quant.dequantized import PIECE, dense_experts, dequantized_rows, float32_product
from rlkernel_triton.quant.epilogue import NO_EPILOGUE, Epilogue
from rlkernel_triton.quant.formats import is_of_blocks
from rlkernel_triton.quant.grouped_lora import add_low_rank_backward
from rlkernel_triton.quant.layouts import check_layout
from rlkernel_triton.quant.product import bind_w4_product, dense_product, product

# A gradient may arrive at any address; where there is no epilogue it stands for its tensors too.
_ARRIVES: Final = ("x", "x_scale", "bias", "xa", "lora_b", "residual")


def qmatmul(call: QmatmulCall) -> Tensor:  # -> [..., R]
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: QmatmulCall) -> Callable[[QmatmulCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.qmatmul.QmatmulCall`."""
    if gradient_wanted("qmatmul", call):
        return QmatmulPair(call)
    return _Prepared(call).forward


class QmatmulPair(Pair[QmatmulCall, Tensor]):
    """Gradients of x, bias, LoRA and residual; the weight is saved packed."""

    op = "qmatmul"

    def __init__(self, call: QmatmulCall) -> None:
        """Keep what is done once for calls of this shape."""
        super().__init__(call)
        self._prepared = _Prepared(call)
        self._kinds = [None if x is None else (x.dtype, x.shape) for x in self.inputs(call)]

    @classmethod
    def inputs(cls, call: QmatmulCall) -> Saved:
        """The input, bias, A and B of LoRA, and residual."""
        a, b = (None, None) if call.lora is None else (call.lora.A, call.lora.B)
        return call.x, call.bias, a, b, call.residual

    def forward(self, call: QmatmulCall) -> tuple[Tensor, Saved]:
        """The result; what is saved belongs to the call."""
        return self._prepared.forward(call), self.saved_like(call, call.x, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """The weight is dequantized again, in pieces, and multiplied with the gradient."""
        (dy,) = grads
        if dy is None:
            return (None,) * len(self._kinds)
        with full_precision(dy):
            found = self._prepared.backward(saved, dy.reshape(-1, dy.shape[-1]), self.wanted)
        kinds = zip(found, self._kinds, strict=True)
        return tuple([None if g is None or kind is None else g.to(kind[0]).view(kind[1]) for g, kind in kinds])

    @classmethod
    def saved_like(cls, call: QmatmulCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Tensors of the call alone: the packed weight, and x where an activation or LoRA needs it."""
        del result, wanted
        x, bias, a, b, _ = cls.inputs(call)
        needs_x = call.activation is not None or a is not None
        return x if needs_x else None, bias, a, b, call.ends, call.lora_ends, *call.w.flatten()[0]


class _Prepared:
    """What is done once for calls of one shape."""

    def __init__(self, call: QmatmulCall) -> None:
        check_layout("w", call.w)
        self._meta: QuantMeta = call.w.flatten()[1]
        self._lora_scale = 0.0 if call.lora is None else float(call.lora.scale)
        self._activation, self._rounding = call.activation, call.weight_rounding
        self._leading, self._K, self._dtype = call.x.shape[:-1], call.x.shape[-1], call.x.dtype
        launcher = launcher_for(call.x.device)
        # The backward pass has a plan of its own: among its launches is the product once more, in another dtype.
        self._plan, self._backward_plan = Plan(launcher), Plan(launcher)
        self._w4_product = None
        empty = all(x is None for x in (call.activation, call.lora, call.bias, call.residual, call.ends))
        if empty and call.x.dim() == 2 and call.x.is_contiguous() and not is_of_blocks(call.w.spec):
            self._w4_product = bind_w4_product(launcher, call.x, call.w, NO_EPILOGUE, self._rounding)

    def forward(self, call: QmatmulCall) -> Tensor:  # -> [..., R]
        """The result."""
        x, w, residual = call.x, call.w, call.residual
        if self._w4_product is not None:
            return self._w4_product(x, w, NO_EPILOGUE, x.dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, self._K)
        added = None if residual is None else residual.reshape(rows.shape[0], residual.shape[-1])
        groups = _groups(call.lora, call.ends, call.lora_ends)
        epilogue = Epilogue(call.bias, call.lora, self._activation, added, groups)
        with full_precision(x):
            y = product(rows.contiguous(), w, epilogue, self._rounding, call.ends, plan=self._plan)
        return y if x.dim() == 2 else shaped(y, torch.Size((*self._leading, y.shape[-1])))

    def backward(self, saved: Saved, dy: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The gradients of x, bias, A, B and residual that are wanted, as rows and not yet of their dtypes."""
        x, bias, a, b, ends, lora_ends, *parts = saved
        x = None if x is None else x.reshape(-1, self._K)
        w = QuantTensor.unflatten(parts, self._meta)  # type: ignore[arg-type]  # all parts are there
        lora = None if a is None or b is None else LoRA(a, b, self._lora_scale)
        groups, dh = _groups(lora, ends, lora_ends), dy
        if self._activation is not None:
            dh = self._activation_backward(x, w, Epilogue(bias, lora, groups=groups), ends, dy)  # type: ignore[arg-type]
        dx = _linear_backward(dh.to(self._dtype), ends, w, self._backward_plan) if wanted[0] else None
        da = db = None
        if lora is not None and x is not None and groups is not None:
            of = wanted[0], wanted[2], wanted[3]
            added, da, db = add_low_rank_backward(x, lora, groups, dh, of, self._backward_plan)
            dx = added if dx is None or added is None else dx.add_(added)
        elif a is not None and any((wanted[0], wanted[2], wanted[3])):
            low = _float32_matmul(dh, b) * self._lora_scale  # type: ignore[arg-type]  # [M, r] = s dh B
            if dx is not None:
                dx += _float32_matmul(low, a)
            if wanted[2]:
                da = _float32_matmul(low.t(), x)  # type: ignore[arg-type]  # it is saved beside a LoRA
            if wanted[3]:
                db = _float32_matmul(dh.t(), _float32_matmul(x, a.t())) * self._lora_scale  # type: ignore[arg-type]
        dbias = _bias_backward(dh, ends) if wanted[1] else None
        if ends is not None:
            dy = torch.where(_members(ends, dy.shape[0]).any(0), dy, 0)
        return dx, dbias, da, db, dy if wanted[4] else None

    def _activation_backward(
        self, x: Tensor, w: QuantTensor, epilogue: Epilogue, ends: Tensor | None, dy: Tensor
    ) -> Tensor:  # -> [M, N] fp32
        """The gradient of the activation's input h from that of y; h is computed once more."""
        h = product(x.contiguous(), w, epilogue, self._rounding, ends, torch.float32, self._backward_plan)
        with recording_gradients():
            leaf = h.requires_grad_()
            given = leaf.chunk(2, 1) if self._activation in PAIRS else (leaf,)
            y = ACTIVATIONS[self._activation](*given)
        return torch.autograd.grad(y, leaf, dy.float())[0]


def _groups(lora: LoRA | None, ends: Tensor | None, lora_ends: Tensor | None) -> Tensor | None:
    """Where the rows of each low-rank addition end; None where there is none, or one for all."""
    return None if lora is None else lora_ends if ends is None else ends


def _float32_matmul(left: Tensor, right: Tensor) -> Tensor:
    """A small product in fp32."""
    return left.float() @ right.float()


def _members(ends: Tensor, M: int) -> Tensor:  # -> [E, M, 1]
    """Which rows an expert has."""
    last = ends.clamp(0, M).cummax(0).values.unsqueeze(1)
    first = functional.pad(last[:-1], (0, 0, 1, 0))
    row = torch.arange(M, device=ends.device)
    return ((row >= first) & (row < last)).unsqueeze(2)


def _bias_backward(dh: Tensor, ends: Tensor | None) -> Tensor:  # [M, N] -> [E N] fp32
    """Sums over the rows of each expert."""
    if ends is None:
        return dh.sum(0, dtype=torch.float32)
    return torch.cat([torch.where(mine, dh, 0).sum(0, dtype=torch.float32) for mine in _members(ends, dh.shape[0])])


def _linear_backward(dh: Tensor, ends: Tensor | None, w: QuantTensor, plan: Plan) -> Tensor:  # [M, N] -> [M, K] fp32
    """Dh w', the weight rounded to the dtype of dh, in pieces of its rows."""
    N, K = w.shape
    if ends is not None:
        dx = dh.new_zeros(dh.shape[0], K, dtype=torch.float32)
        dh = dh.contiguous()
        for first, some, dense in dense_experts(w, ends.shape[0], dh.dtype, plan):
            transposed = dense.view(some, -1, K).transpose(1, 2).reshape(some * K, -1).contiguous()  # one is a view
            dense_product(
                dh, transposed, NO_EPILOGUE, ends, dx, plan, "gradient", first=first, experts=some, N=K,
                any_alignment=_ARRIVES,
            )  # fmt: skip
        return dx
    rows = max(64, 2 * piece_of(PIECE, 2) // (K * dh.element_size()) // 64 * 64)
    total = None
    for first in range(0, N, rows):
        last = min(first + rows, N)
        left = dh if last - first == N else dh[:, first:last]
        part = float32_product(left, dequantized_rows(w, dh.dtype, first, last, plan).t())
        total = part if total is None else total.add_(part)
    return dh.new_zeros(dh.shape[0], K, dtype=torch.float32) if total is None else total
