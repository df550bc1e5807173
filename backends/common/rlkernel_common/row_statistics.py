"""Partial softmax statistics of a row of logits, how parts of a row are merged, and the results and gradients.

A row's vocabulary is cut into parts: tiles of one process, shards of several. One read of a part gives its largest
logit, its sum of exponentials and their first moment, with the chosen id left out; parts are merged in a fixed order.

    y      capped logits, before the temperature        d = (y - top) / T <= 0
    total  sum of e^d over a set of ids                 moment  sum of e^d d

Leaving the chosen id out is what keeps precision: log p = -softplus((top - y_id) / T + log total) never subtracts two
large numbers, so a row with p near 1 does not round to 0, and a shift of all logits by 1e5 changes nothing.

Sums are halving trees of elementwise additions, so the bits of a row depend on the row alone, on every device.

Legend: n rows · w ids of a part · P parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Width of the tiles of a row: the unit of every sum, so results do not depend on how a caller slices rows.
TILE = 1024


class Sums(NamedTuple):
    """Sums over a set of ids, relative to the largest of them; `top` is -inf and the rest 0 where the set is empty."""

    top: Tensor  # [n] or [n, P]
    total: Tensor
    moment: Tensor | None  # None where no entropy is asked for


class Part(NamedTuple):
    """One part of each row: the chosen id by itself, the other ids as sums, kept apart where there is a support."""

    target: Tensor  # y of the chosen id; -inf where it lies in another part
    rest: Sums  # ids that are not kept; without a support all but the chosen one
    kept: Sums | None  # kept ids but the chosen one


class SoftmaxStats(NamedTuple):
    """What the complete statistics of each row say; every tensor is [n]."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None
    # For the gradient: p_j = exp((y_j - top) / T - log_total), the mean of d under p, and the same for the kept ids.
    top: Tensor
    log_total: Tensor
    mean: Tensor | None
    kept_top: Tensor | None
    kept_log_total: Tensor | None

    def of(self, rows: slice) -> SoftmaxStats:
        """The values of some rows."""
        return SoftmaxStats._make(None if x is None else x[rows] for x in self)


def tile_width(V: int) -> int:
    """Width of a row's tiles: the next power of two of V, at most `TILE`."""
    return min(TILE, 1 << max(V - 1, 0).bit_length())


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """Type of all arithmetic: fp32, or float64 where an operand is."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def temperatures(temperature: float | Tensor, rows: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One temperature per row, [n]; NaN where it has no meaning, so that only that row is spoiled."""
    if not isinstance(temperature, Tensor):
        return torch.full((rows.numel(),), temperature, dtype=dtype, device=device)
    each = temperature.to(dtype).expand(rows).reshape(-1)
    return torch.where((each > 0) & each.isfinite(), each, torch.nan)


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """Capped logits, c tanh(x / c); -inf stays -inf, because a forbidden id must not come back."""
    if softcap is None:
        return x
    return torch.where(x == -torch.inf, x, torch.tanh(x / softcap) * softcap)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in an order that depends on its size only: halves are added until one is left."""
    width = x.shape[-1]
    if width == 0:
        return x.sum(-1)
    half = 1 << (width - 1).bit_length() >> 1  # largest power of two below the width; 0 for width 1
    while half:
        if width == 2 * half:  # the same additions without a copy
            halved = x[..., :half] + x[..., half:]
        else:
            halved = x[..., :half].clone()
            halved[..., : width - half] += x[..., half:width]
        x, width, half = halved, half, half >> 1
    return x[..., 0]


def partial_softmax(y: Tensor, ids: Tensor, T: Tensor, width: int, kept: Tensor | None, *, moment: bool) -> Part:
    """Statistics of each tile of a part of the rows.

    Args:
        y: [n, w] capped logits in the accumulator's type; not written to.
        ids: [n] chosen ids counted from the first column of `y`; one outside of [0, w) lies in another part.
        T: [n] temperatures.
        width: tile width; the last tile is filled up with -inf.
        kept: [n, w] bool, or None without a support.
        moment: whether the first moment is wanted.

    Returns:
        Statistics of shape [n, P], P = w / width rounded up.
    """
    n, w = y.shape
    here = (ids >= 0) & (ids < w)
    at = ids.clamp(0, w - 1)[:, None]
    tiles = -(-w // width)
    rest = y.new_full((n, tiles * width), -torch.inf)
    rest[:, :w] = y
    target = torch.where(here[:, None], y.gather(1, at), -torch.inf)
    rest.scatter_(1, at, torch.where(here[:, None], -torch.inf, y.gather(1, at)))
    tile = torch.arange(tiles, device=y.device)
    targets = torch.where(at // width == tile, target, -torch.inf)
    if kept is None:
        return Part(targets, _sums(rest.view(n, tiles, width), T, moment=moment), None)
    among = rest.clone()
    among[:, :w].masked_fill_(~kept, -torch.inf)
    rest[:, :w].masked_fill_(kept, -torch.inf)
    return Part(
        targets,
        _sums(rest.view(n, tiles, width), T, moment=moment),
        _sums(among.view(n, tiles, width), T, moment=moment),
    )


def _sums(y: Tensor, T: Tensor, *, moment: bool) -> Sums:
    """[n, P, w] -> sums over w."""
    top = y.amax(-1)
    d = (y - top.masked_fill(top == -torch.inf, 0.0)[..., None]).div_(T[:, None, None])  # -inf where y is, so e = 0
    if not moment:
        return Sums(top, tree_sum(d.exp_()), None)
    e = torch.exp(d)
    # Where d is -inf, of y = -inf or of a finite y far below, e is 0, and so is its part of the moment.
    return Sums(top, tree_sum(e), tree_sum(d.mul_(e).masked_fill_(e == 0, 0.0)))


def side_by_side(parts: Sequence[Part]) -> Part:
    """Statistics of several parts of the rows, [n, P] each, one after the other."""
    return _each(parts, lambda x: torch.cat(x, -1))


def stacked(parts: Sequence[Part]) -> Part:
    """Statistics of several parts of the rows, [n] each, as [n, parts]."""
    return _each(parts, lambda x: torch.stack(x, -1))


def below(blocks: Sequence[Part]) -> Part:
    """Statistics of several blocks of rows, one below the other."""
    return _each(blocks, torch.cat)


def _each(parts: Sequence[Part], joined: Callable[[list[Tensor]], Tensor]) -> Part:
    def of(sums: Sequence[Sums]) -> Sums:
        return Sums._make(None if x[0] is None else joined(list(x)) for x in zip(*sums, strict=True))

    kept = [part.kept for part in parts if part.kept is not None]
    target = joined([part.target for part in parts])
    return Part(target, of([part.rest for part in parts]), of(kept) if kept else None)


def join(part: Part, T: Tensor) -> Part:
    """Join the parts along the last dimension, [n, P] -> [n], in their order."""
    return Part(part.target.amax(-1), _joined(part.rest, T), None if part.kept is None else _joined(part.kept, T))


def _joined(sums: Sums, T: Tensor) -> Sums:
    top = sums.top.amax(-1)
    shift = (sums.top - top[:, None]) / T[:, None]
    empty = sums.top == -torch.inf
    scale = torch.exp(shift).masked_fill(empty, 0.0)
    moment = None
    if sums.moment is not None:
        moment = tree_sum(((sums.moment + sums.total * shift) * scale).masked_fill(scale == 0, 0.0))
    return Sums(top, tree_sum(sums.total * scale), moment)


def softmax_stats(part: Part, T: Tensor) -> SoftmaxStats:
    """Log-probabilities, logsumexp and entropy from the complete statistics of each row, all [n]."""
    others = part.rest
    if part.kept is not None:
        others = _joined(Sums(*map(_pair, part.rest, part.kept)), T)  # type: ignore[arg-type]
    top, log_total, mean, entropy = _with_target(others, part.target, T)
    broken = top == torch.inf  # +inf has no softmax: NaN for this row
    log_total = log_total.masked_fill(broken, torch.nan)
    lse = torch.where(broken, top, top / T + log_total)
    if part.kept is None:
        gap = (others.top - part.target) / T + others.total.log()
        return SoftmaxStats(
            (0 - _softplus(gap)).masked_fill(broken, torch.nan), lse, entropy, None, top, log_total, mean, None, None
        )
    gap = (part.kept.top - part.target) / T + part.kept.total.log()
    kept_top, kept_log_total, _, _ = _with_target(part.kept._replace(moment=None), part.target, T)
    dropped = (part.rest.top - kept_top) / T + part.rest.total.log() - kept_log_total
    return SoftmaxStats(
        (0 - _softplus(gap)).masked_fill(broken, torch.nan),
        lse,
        entropy,
        (0 - _softplus(dropped)).masked_fill(broken, torch.nan),
        top,
        log_total,
        mean,
        kept_top,
        kept_log_total,
    )


def _pair(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.stack((a, b), -1)


def _with_target(others: Sums, target: Tensor, T: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The sums with the chosen id among them: (top, log of the total, mean of d, entropy)."""
    top = torch.maximum(others.top, target)
    shift, own = (others.top - top) / T, (target - top) / T
    absent, gone = others.top == -torch.inf, target == -torch.inf
    scale, weight = torch.exp(shift).masked_fill(absent, 0.0), torch.exp(own).masked_fill(gone, 0.0)
    total = others.total * scale
    # Where the chosen id is the largest its weight is 1, and log1p keeps what the others add.
    log_total = torch.where(target >= others.top, torch.log1p(total), torch.log(total + weight))
    log_total = log_total.masked_fill(absent & gone, -torch.inf)
    if others.moment is None:
        return top, log_total, None, None
    moment = ((others.moment + others.total * shift) * scale).masked_fill(scale == 0, 0.0)
    mean = (moment + (own * weight).masked_fill(weight == 0, 0.0)) / (total + weight)
    return top, log_total, mean, (log_total - mean).masked_fill(top == torch.inf, torch.nan)


def _softplus(x: Tensor) -> Tensor:
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


class Upstream(NamedTuple):
    """Gradients of the loss with respect to the results of each row, [n]; None where there is none."""

    logprob: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    log_kept_mass: Tensor | None

    def of(self, rows: slice) -> Upstream:
        """The values of some rows."""
        return Upstream._make(None if x is None else x[rows] for x in self)


def gradient(y: Tensor, ids: Tensor, T: Tensor, row: SoftmaxStats, g: Upstream, kept: Tensor | None) -> Tensor:
    """Gradient of the loss with respect to y, [n, w].

        dz_j = g_logprob (1[j = id] - q_j) + g_mass (q_j - p_j) + g_lse p_j - g_entropy p_j (d_j - mean),  dy = dz / T

    p is the tempered law, q the law over the kept ids (p without a support). The chosen id's own term uses
    1 - q_id = -expm1(log q_id). Ids with y = -inf have p = 0 and take no part.

    Args as in `partial_softmax`; `row` and `g` hold [n].
    """
    w = y.shape[1]
    absent = y == -torch.inf
    d = (y - row.top[:, None]).div_(T[:, None])
    p = (d - row.log_total[:, None]).exp_().masked_fill_(absent, 0.0)
    column = torch.arange(w, device=y.device)
    chosen = column == ids[:, None]
    q = p
    if kept is not None and row.kept_top is not None and row.kept_log_total is not None:
        q = torch.exp((y - row.kept_top[:, None]).div_(T[:, None]) - row.kept_log_total[:, None])
        q.masked_fill_(absent | ~(kept | chosen), 0.0)
    dz = torch.zeros_like(y)
    if g.lse is not None:
        dz += g.lse[:, None] * p
    if g.entropy is not None and row.mean is not None:
        dz -= g.entropy[:, None] * p * (d - row.mean[:, None]).masked_fill_(p == 0, 0.0)
    if g.log_kept_mass is not None:
        dz += g.log_kept_mass[:, None] * (q - p)
    if g.logprob is not None:
        dz += torch.where(chosen, torch.expm1(row.logprob)[:, None], q).mul_(-g.logprob[:, None])
    return dz.div_(T[:, None])


def uncap(dy: Tensor, x: Tensor, softcap: float | None) -> Tensor:
    """Gradient with respect to the logits x from the one with respect to cap(x)."""
    if softcap is None:
        return dy
    return dy * (1 - torch.tanh(x / softcap).square())
