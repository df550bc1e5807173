"""How many ids the filters of sample@1 keep, told from the best ids of a row alone, or that these cannot tell.

A count is a span: the filters keep at least `low` and at most `high` ids. A filter that sees its end among the ids that
are known to be the first of the row makes both the same; one that does not leaves `high` where it was.

Legend: N rows · M candidates, in the order of the law (x descending, id ascending).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.requests import Requests
from rlkernel_torch.truncation import running_sum


class Candidates(NamedTuple):
    """The best ids of each row, as far as they are known."""

    x: Tensor  # [N, M] edited logits, descending; rows with +inf hold 0 there and -inf elsewhere
    y: Tensor  # [N, M] float64 (x - best x) / T
    w: Tensor  # [N, M] float64 exp(y); 0 where there is no candidate
    sure: Tensor  # [N] so many of them are the first of the whole row
    total: Tensor  # [N] ids of the row with a logit above -inf
    mass: Tensor  # [N] float64 weight of all of those
    error: float  # relative, of `mass`


class Span(NamedTuple):
    """A count per row, [N] each."""

    low: Tensor
    high: Tensor


def kept_span(found: Candidates, requests: Requests, *, filter_order: str, tie: str) -> Span:
    """How many ids min-p, top-k and top-p keep; see `truncation.truncate` for the same on whole rows."""
    filters = _Filters(found, requests, keep_ties=tie == "keep_all")
    whole = Span(found.total, found.total)
    if filter_order == "joint":
        every = [f(whole) for f in (filters.min_p, filters.top_k, filters.top_p)]
        low, high = (torch.stack(counts).amin(0) for counts in zip(*every, strict=True))
        kept = Span(low, high)
    elif filter_order == "topp_topk":
        kept = filters.top_k(filters.top_p(filters.min_p(whole)))
    else:
        kept = filters.top_p(filters.top_k(filters.min_p(whole)))
    one = found.total.clamp(max=1)
    return Span(*(torch.where(requests.greedy, one, count) for count in kept))


class _Filters:
    def __init__(self, found: Candidates, requests: Requests, *, keep_ties: bool) -> None:
        self._found, self._requests, self._keep_ties = found, requests, keep_ties
        self._place = torch.arange(found.x.shape[1], device=found.x.device)
        self._known = self._place < found.sure[:, None]  # [N, M]

    def min_p(self, left: Span) -> Span:
        """Ids with y >= ln(min_p)."""
        if self._requests.min_p is None:
            return left
        floor = self._requests.min_p.double()
        enough = ((self._found.y >= floor.clamp(min=0).log()[:, None]) & self._known).sum(1)
        return self._where(floor > 0, self._cut(left, self._unless_all(enough, left)), left)

    def top_k(self, left: Span) -> Span:
        """The first k ids."""
        k = self._requests.top_k
        return left if k is None else self._where(k > 0, self._cut(left, Span(k, k)), left)

    def top_p(self, left: Span) -> Span:
        """Ids with less than p of the mass of what is left before them."""
        if self._requests.top_p is None:
            return left
        found, p = self._found, self._requests.top_p.double()[:, None]
        until = running_sum(found.w)
        known = until.gather(1, (left.low - 1).clamp(0, until.shape[1] - 1)[:, None])
        exact = (left.low <= found.sure)[:, None]
        before = torch.cat((torch.zeros_like(known), until[:, :-1]), 1)

        def inside(error: float) -> Tensor:
            mass = torch.where(exact, known, found.mass[:, None] * (1 + error))
            return ((before < p * mass) & (self._place < left.low[:, None]) & self._known).sum(1)

        least, most = inside(-found.error), inside(found.error)
        reach = self._unless_all(most, left)
        # The mass is that of a known number of the first ids, or of all there are; of nothing in between.
        told = (left.low == left.high) & (exact[:, 0] | (left.low == found.total))
        cut = self._cut(left, Span(least, reach.high))
        return self._where(p[:, 0] < 1, self._where(told, cut, Span(left.low.clamp(max=1), left.high)), left)

    def _unless_all(self, count: Tensor, left: Span) -> Span:
        """A count among the known ids; if it is all of them, and more are left, it may go on behind them."""
        on = (count >= self._found.sure) & (left.high > self._found.sure)
        return Span(count, torch.where(on, left.high, count))

    def _cut(self, left: Span, count: Span) -> Span:
        """At least the first id, at most what is left; with the ties of the last one if they stay."""
        low, high = (torch.minimum(c.clamp(min=1), most) for c, most in zip(count, left, strict=True))
        if not self._keep_ties:
            return Span(low, high)
        x, last = self._found.x, self._found.x.shape[1] - 1

        def with_ties(at: Tensor, most: Tensor) -> Span:
            edge = x.gather(1, (at - 1).clamp(0, last)[:, None])
            tied = torch.maximum(((x >= edge) & self._known).sum(1), at)
            span = self._unless_all(tied, Span(most, most))
            return Span(*(torch.minimum(c, most) for c in span))

        return Span(with_ties(low, left.low).low, with_ties(high, left.high).high)

    @staticmethod
    def _where(on: Tensor, a: Span, b: Span) -> Span:
        return Span(torch.where(on, a.low, b.low), torch.where(on, a.high, b.high))
