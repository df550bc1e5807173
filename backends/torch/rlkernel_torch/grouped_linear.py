"""grouped_linear@1 in plain torch: all rows times the weight of each expert, of which a row's own result is taken.

That is E times the work: no shape may depend on data, as in `qmatmul`. The products are those of `linear`, whose rows
have bits of their own, so that a row has the bits of linear with its expert's weight.

The gradient of weight[e] is a product of all rows, those of other experts set to 0: its bits depend on T.

Extra memory is that of `linear`, one fp32 result of an expert, and backward one fp32 copy of x.

Legend: T rows · E experts · N outputs · K inputs · C columns of a product.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlkernel_common.precision import full_precision
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.grouped_linear import GroupedLinearCall
from rlkernel_torch.linear import row_products


def grouped_linear(call: GroupedLinearCall) -> Tensor:
    """See `rlkernel_core.spec.grouped_linear.GroupedLinearCall`."""
    if gradient_wanted("grouped_linear", call):
        return GroupedLinearPair(call)(call)
    with torch.no_grad():
        return _forward(call)


class GroupedLinearPair(Pair[GroupedLinearCall, Tensor]):
    """The product, and its gradients."""

    op = "grouped_linear"

    def forward(self, call: GroupedLinearCall) -> tuple[Tensor, Saved]:
        """The result; x is saved for the weight's gradient, the weight for that of x."""
        return _forward(call), self.saved_like(call, call.x, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Dx = g weight[e], dweight[e] = g^T x and dbias[e] the sum of g, over the rows of e."""
        (x, weight, ends), (g,) = saved, grads
        if g is None or ends is None:
            raise RLKernelError("grouped_linear: its backward pass got no gradient")
        of_x, of_weight, of_bias = self.wanted
        d_x = d_weight = d_bias = None
        mine = members(ends, g.shape[0])
        if of_x and weight is not None:
            d_x = _of_each(g, (w.contiguous() for w in weight), mine, weight.shape[2])
        with full_precision(g):  # autocast has no `stack` of every dtype
            if of_weight and x is not None:
                d_weight = torch.stack([_outer(g, x, of_e) for of_e in mine])
            if of_bias:
                sums = (torch.where(of_e, g, 0).sum(0, dtype=accumulator(g)) for of_e in mine)
                d_bias = torch.stack([of_e.to(g.dtype) for of_e in sums])
        return d_x, d_weight, d_bias

    @classmethod
    def saved_like(cls, call: GroupedLinearCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments alone."""
        del result
        return call.x if wanted[1] else None, call.weight if wanted[0] else None, call.ends


def members(ends: Tensor, T: int) -> Tensor:  # -> [E, T, 1]
    """Which rows an expert has."""
    last = ends.clamp(0, T).cummax(0).values.unsqueeze(1)
    first = torch.nn.functional.pad(last[:-1], (0, 0, 1, 0))
    row = torch.arange(T, device=ends.device)
    return ((row >= first) & (row < last)).unsqueeze(2)


def _forward(call: GroupedLinearCall) -> Tensor:
    x, weight = call.x, call.weight
    right = (w.contiguous().t() for w in weight)
    return _of_each(x, right, members(call.ends, x.shape[0]), weight.shape[1], call.bias)


def _of_each(a: Tensor, right: Iterable[Tensor], mine: Tensor, C: int, bias: Tensor | None = None) -> Tensor:
    """[T, C]: a row of a times the matrix of its expert, and its bias, in the dtype of a; 0 in the rows of none."""
    y = a.new_zeros(a.shape[0], C)
    for e, (b, of_e) in enumerate(zip(right, mine, strict=True)):
        product = row_products(a, b)
        if bias is not None:
            product += bias[e]
        y = torch.where(of_e, product.to(y.dtype), y)
    return y


def _outer(g: Tensor, x: Tensor, mine: Tensor) -> Tensor:  # -> [N, K]
    """The gradient of an expert's weight; autocast is off here."""
    state = accumulator(g)
    return (torch.where(mine, g, 0).to(state).t() @ torch.where(mine, x, 0).to(state)).to(g.dtype)
