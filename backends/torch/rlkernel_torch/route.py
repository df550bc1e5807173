"""route@1 in plain torch: a stable sort of logits, a softmax in one order of sums, and a stable sort of pairs.

Exponentials are those of `rlkernel_common.exact_functions`, sums those of `rlkernel_common.fixed_sums`: a row's gates
and gradient have the same bits in every batch. Shapes do not depend on data, and the host reads nothing.

Extra memory is a few fp32 copies of the logits.

Legend: T tokens · E experts · k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.exact_functions import exp
from rlkernel_common.fixed_sums import lane_sum
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.route import RouteCall, RouteResult


def route(call: RouteCall) -> RouteResult:
    """See `rlkernel_core.spec.route.RouteCall`."""
    if gradient_wanted("route", call):
        return RoutePair(call)(call)
    with torch.no_grad():
        return _forward(call)


class RoutePair(Pair[RouteCall, RouteResult]):
    """Gates, and their gradient."""

    op = "route"

    def __init__(self, call: RouteCall) -> None:
        """Keep which softmax it is."""
        super().__init__(call)
        self._renormalize = call.renormalize

    def forward(self, call: RouteCall) -> tuple[RouteResult, Saved]:
        """The result; logits and ids are saved, and the softmax is computed again."""
        result = _forward(call)
        return result, self.saved_like(call, result, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A chosen logit gets g gate; each logit of the softmax loses its probability times the sum of g gate."""
        (logits, ids), (g,) = saved, grads
        if logits is None or ids is None or g is None:
            raise RLKernelError("route: its backward pass got less than its forward pass saved")
        wide = logits.to(accumulator(logits))
        gates = gates_of(wide, ids, renormalize=self._renormalize)
        known = _known(ids, wide.shape[1])
        terms = torch.where(known, g.to(wide.dtype) * gates, 0)
        total = lane_sum(terms)[:, None]
        if self._renormalize:
            d_logits = _onto(ids, torch.where(known, terms - total * gates, 0), wide)
        else:
            # A row of which no expert is chosen has no gradient, whatever its logits are.
            d_logits = _onto(ids, terms, wide) - torch.where(known.any(1, keepdim=True), total * _softmax(wide), 0)
        return (d_logits.to(logits.dtype),)

    @classmethod
    def saved_like(cls, call: RouteCall, result: RouteResult, wanted: tuple[bool, ...]) -> Saved:
        """Logits and ids."""
        del wanted
        return call.logits, result.ids


def _forward(call: RouteCall) -> RouteResult:
    logits = call.logits.to(accumulator(call.logits))
    E = logits.shape[1]
    if call.replay is None:
        ids = logits.sort(dim=1, descending=True, stable=True).indices[:, : call.top_k].contiguous()
    else:
        ids = call.replay.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    expert, order = torch.where(_known(ids, E), ids, E).flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(E, device=ids.device), right=True).to(torch.int32)
    return RouteResult(gates_of(logits, ids, renormalize=call.renormalize), ids, order, ends)


def gates_of(logits: Tensor, ids: Tensor, *, renormalize: bool) -> Tensor:  # -> [T, k]
    """Gates of ids in the dtype of logits; where an id is no expert 0 for -1, and NaN for others."""
    E = logits.shape[1]
    known, at = _known(ids, E), ids.clamp(0, E - 1)
    if renormalize:
        gates = _softmax(torch.where(known, logits.gather(1, at), -torch.inf))
    else:
        gates = _softmax(logits).gather(1, at)
    return torch.where(known, gates, torch.where(ids == -1, 0.0, torch.nan).to(gates.dtype))


def _known(ids: Tensor, E: int) -> Tensor:
    """Which ids are experts."""
    return (ids >= 0) & (ids < E)


def _softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    e = exp(x - x.amax(1, keepdim=True))
    return e / lane_sum(e)[:, None]


def _onto(ids: Tensor, terms: Tensor, like: Tensor) -> Tensor:  # -> [T, E]
    """Terms added to the columns that ids name, choice by choice: in one order where an id stands twice."""
    total, expert = torch.zeros_like(like), torch.arange(like.shape[1], device=ids.device)
    for j in range(ids.shape[1]):
        total += torch.where(ids[:, j : j + 1] == expert, terms[:, j : j + 1], 0)
    return total
