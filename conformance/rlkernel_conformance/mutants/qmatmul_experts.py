"""Planted bugs in the grouped product of qmatmul@1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant
from rlkernel_core.quant import QuantTensor


@mutant("QM-28", "QM-31", origin="an empty expert counted as the one behind it")
def skips_empty_experts(reference: Any, x: Tensor, w: QuantTensor, *, ends: Any = None, **rest: Any) -> Any:
    if isinstance(ends, Tensor) and x.dim() == 2 and ends.numel() > 1:
        low = torch.cat((ends.new_zeros(1), ends[:-1]))
        ends = ends[torch.argsort((ends <= low).int(), stable=True)].cummax(0).values
    return reference(x, w, ends=ends, **rest)


@mutant("QM-28", "QM-31", origin="one bias for all experts")
def the_bias_of_the_first_expert(reference: Any, x: Tensor, w: QuantTensor, *, bias: Any = None, **rest: Any) -> Any:
    ends = rest.get("ends")
    if isinstance(ends, Tensor) and isinstance(bias, Tensor) and bias.shape == w.shape[:1] and not bias.requires_grad:
        bias = bias.view(ends.numel(), -1)[:1].expand(ends.numel(), -1).flatten()
    return reference(x, w, bias=bias, **rest)


@mutant("QM-29", "QM-31", origin="rows of no expert given to the last one")
def the_last_expert_takes_the_rest(reference: Any, x: Tensor, w: QuantTensor, *, ends: Any = None, **rest: Any) -> Any:
    if isinstance(ends, Tensor) and ends.numel() and ends.max() > 0:
        ends = torch.cat((ends[:-1], torch.full_like(ends[-1:], x.shape[0])))
    return reference(x, w, ends=ends, **rest)


@mutant("QM-29", origin="rows of no expert masked by a product with 0")
def masks_by_a_product(reference: Any, x: Tensor, w: QuantTensor, **rest: Any) -> Any:
    y = reference(x, w, **rest)
    return y + 0 * x.detach().sum(1, keepdim=True) if rest.get("ends") is not None else y


@mutant("QM-30", origin="ends taken as they are: a range that runs backwards is an index out of range")
def trusts_ends(reference: Any, x: Tensor, w: QuantTensor, *, ends: Any = None, **rest: Any) -> Any:
    if isinstance(ends, Tensor) and ends.dtype == torch.int32 and bool(((ends < 0) | (ends > x.shape[0])).any()):
        raise IndexError("index out of range")
    return reference(x, w, ends=ends, **rest)


@mutant("QM-30", origin="ends read once and remembered by address")
def remembers_ends(reference: Any, x: Tensor, w: QuantTensor, *, ends: Any = None, **rest: Any) -> Any:
    if isinstance(ends, Tensor):
        key = (ends.data_ptr(), ends.shape)
        ends = _SEEN.setdefault(key, (ends, ends.clone()))[1]
    return reference(x, w, ends=ends, **rest)


@mutant("QM-31", "QM-29", origin="the gradient of x by the weight of the first expert")
def gradient_by_the_first_expert(reference: Any, x: Tensor, w: QuantTensor, *, ends: Any = None, **rest: Any) -> Any:
    y = reference(x, w, ends=ends, **rest)
    if isinstance(ends, Tensor) and y.requires_grad and x.dim() == 2 and x.shape[0]:
        first = reference(x, w, ends=torch.full_like(ends, x.shape[0]), **rest)
        return first + (y - first).detach()
    return y


_SEEN: dict[Any, tuple[Tensor, Tensor]] = {}
