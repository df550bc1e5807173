"""The law a row is drawn from: the total order, the filters, and the masses of what they keep.

Every kept set is a prefix of one order (x descending, id ascending), so a filter is a count, and any kept set is
described by its last token: kept = {x > threshold} and {x == threshold, id <= threshold_id}.

Sums are trees of elementwise additions whose shape depends on V alone: the bits of a row depend on the row alone, on
every device. Exponents are relative to the best token, whose weight is exactly 1 and is left out of the sums, so that
log1p keeps what the others add on confident rows.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.requests import Requests
from rlkernel_common.row_statistics import tree_sum


class Weights(NamedTuple):
    """A row of logits relative to its best token."""

    x: Tensor  # [N, V] as given, but rows with +inf are 0 at +inf and -inf elsewhere
    y: Tensor  # [N, V] float64, (x - max x) / T; -inf where x is
    w: Tensor  # [N, V] float64, exp(y)
    best: Tensor  # [N] id of the first maximum
    present: Tensor  # [N, V] bool, x > -inf
    posinf: Tensor  # [N] bool


@dataclass(frozen=True)
class FilteredSoftmax:
    """The processed law of each row."""

    weights: Weights
    keep: Tensor  # [N, V] bool
    count: Tensor  # [N] int64 kept tokens
    order: Tensor | None  # [N, V] ids, best first; None where no filter needed them
    threshold: Tensor  # [N] in the type of x
    threshold_id: Tensor  # [N] int64
    log_total: Tensor  # [N] float64, log of the kept weights' sum
    log_kept_mass: Tensor  # [N] float64
    greedy: Tensor  # [N] bool

    def logprob(self, ids: Tensor) -> Tensor:
        """[N] float64 log-probability of one id in [0, V) per row; -inf where it is not kept."""
        y = self.weights.y.gather(1, ids[:, None])[:, 0]
        kept = self.keep.gather(1, ids[:, None])[:, 0]
        return torch.where(kept, torch.where(self.greedy, 0.0, y - self.log_total), -torch.inf)

    def probabilities(self) -> Tensor:
        """[N, V] float64; rows with nothing kept are 0."""
        p = torch.where(self.keep, torch.exp(self.weights.y - self.log_total[:, None]), 0.0)
        return torch.where(self.greedy[:, None], self.keep.double(), p)

    def entropy(self) -> Tensor:
        """[N] float64 nats: log S + (sum of w (-y)) / S, both terms non-negative."""
        y, w = self.weights.y, self.weights.w
        moment = tree_sum(torch.where(self.keep & (w > 0), -y * w, 0.0))
        return torch.where(self.greedy, 0.0, self.log_total + moment * torch.exp(-self.log_total))


def weigh(x: Tensor, temperature: Tensor) -> Weights:
    """Weights of x [N, V] (no NaN) at temperatures [N]."""
    posinf = (x == torch.inf).any(1)
    x = torch.where(posinf[:, None] & (x < torch.inf), -torch.inf, x)
    x = torch.where(x == torch.inf, 0.0, x)
    present = x > -torch.inf
    best = x.argmax(1)
    top = x.gather(1, best[:, None])
    y = (x.double() - top.double()) / temperature.double()[:, None]
    y = torch.where(present, y, -torch.inf)
    return Weights(x, y, torch.exp(y), best, present, posinf)


def log_total(weights: Weights, keep: Tensor) -> Tensor:
    """[N] log of the sum of the kept weights, the best one among them."""
    ids = torch.arange(keep.shape[1], device=keep.device)
    return torch.log1p(tree_sum(torch.where(keep & (ids != weights.best[:, None]), weights.w, 0.0)))


def whole(weights: Weights) -> FilteredSoftmax:
    """The law without a filter."""
    keep = weights.present
    total = log_total(weights, keep)
    none, zero = torch.full_like(weights.best, -1), torch.zeros_like(total)
    top = torch.full_like(weights.x[:, 0], -torch.inf)
    return FilteredSoftmax(weights, keep, keep.sum(1), None, top, none, total, zero, torch.zeros_like(weights.posinf))


def descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids in the total order. Adding 0 makes -0 and 0 the same value for sorts that look at bits."""
    values, ids = torch.sort(x + 0.0, dim=1, descending=True, stable=True)
    return values, ids


def truncate(x: Tensor, requests: Requests, *, filter_order: str, tie: str) -> FilteredSoftmax:
    """Steps 6 to 9 of the contract on edited logits x [N, V].

    Args:
        x: edited logits without NaN; a row of -inf has nothing to keep.
        requests: parameters per row.
        filter_order: "topk_topp", "joint" or "topp_topk".
        tie: "lowest_id" or "keep_all".
    """
    weights = weigh(x, requests.temperature)
    present, greedy = weights.present, requests.greedy
    total = present.sum(1)
    ids = torch.arange(x.shape[1], device=x.device)
    order = None
    if not requests.top_k is requests.top_p is requests.min_p is None:
        values, order = descending(weights.x)
        y, w = weights.y.gather(1, order), weights.w.gather(1, order)
        kept = _Prefixes(values, y, w, requests, keep_ties=tie == "keep_all")
        if filter_order == "joint":
            count = torch.minimum(torch.minimum(kept.min_p(total), kept.top_k(total)), kept.top_p(total))
        elif filter_order == "topp_topk":
            count = kept.top_k(kept.top_p(kept.min_p(total)))
        else:
            count = kept.top_p(kept.top_k(kept.min_p(total)))
        count = torch.where(greedy, total.clamp(max=1), count)
        last = order.gather(1, (count - 1).clamp(min=0)[:, None])
    else:
        count = torch.where(greedy, total.clamp(max=1), total)
        last = torch.where(greedy[:, None], weights.best[:, None], torch.where(present, ids, 0).amax(1, keepdim=True))
    cut = weights.x.gather(1, last)
    keep = present & ((weights.x > cut) | ((weights.x == cut) & (ids <= last)))
    whole = (count == total) & ~weights.posinf
    keep = torch.where(whole[:, None], present, keep)
    log_sum = log_total(weights, keep)
    dropped = tree_sum(torch.where(keep, 0.0, weights.w))
    mass = 0.0 - torch.log1p(dropped * torch.exp(-log_sum))
    threshold = torch.where(weights.posinf, torch.inf, cut[:, 0])
    return FilteredSoftmax(
        weights,
        keep,
        count,
        order,
        torch.where(whole, -torch.inf, threshold),
        torch.where(whole, -1, last[:, 0]),
        log_sum,
        torch.where(greedy, 0.0, mass),
        greedy,
    )


@dataclass(frozen=True)
class _Prefixes:
    """Filters as counts along the order: each takes how many tokens are left and says how many it keeps."""

    values: Tensor  # [N, V] x, descending
    y: Tensor  # [N, V] in the same order
    w: Tensor  # [N, V] in the same order
    requests: Requests
    keep_ties: bool

    def min_p(self, count: Tensor) -> Tensor:
        """Tokens with y >= ln(min_p)."""
        if self.requests.min_p is None:
            return count
        floor = self.requests.min_p.double()
        enough = (self.y >= floor.clamp(min=0).log()[:, None]).sum(1)
        return torch.where(floor > 0, self._cut(count, enough), count)

    def top_k(self, count: Tensor) -> Tensor:
        """The first k tokens."""
        if self.requests.top_k is None:
            return count
        return torch.where(self.requests.top_k > 0, self._cut(count, self.requests.top_k), count)

    def top_p(self, count: Tensor) -> Tensor:
        """Tokens with less than p of the mass of the first `count` before them."""
        if self.requests.top_p is None:
            return count
        p = self.requests.top_p.double()
        place = torch.arange(self.w.shape[1], device=self.w.device)
        until = running_sum(self.w)
        mass = until.gather(1, (count - 1).clamp(min=0)[:, None])
        before = torch.cat((torch.zeros_like(mass), until[:, :-1]), 1)
        inside = (before < p[:, None] * mass) & (place < count[:, None])
        return torch.where(p < 1, self._cut(count, inside.sum(1)), count)

    def _cut(self, left: Tensor, count: Tensor) -> Tensor:
        """At least the first token, at most what is left; with the ties of the last one if they stay."""
        count = torch.minimum(count.clamp(min=1), left)
        if not self.keep_ties:
            return count
        edge = self.values.gather(1, (count - 1).clamp(min=0)[:, None])
        return torch.minimum((self.values >= edge).sum(1), left)


def running_sum(w: Tensor) -> Tensor:
    """Inclusive prefix sums of [N, V] by pairwise elementwise additions: their order depends on V alone."""
    V = w.shape[1]
    if V == 1:
        return w
    pairs = running_sum(w[:, 0 : V - 1 : 2] + w[:, 1::2])  # prefixes that end at odd places
    out = w.clone()
    out[:, 1::2] = pairs
    out[:, 2::2] += pairs[:, : (V - 1) // 2]
    return out
