"""What the ranks of a split vocabulary tell each other of their rows, and what they know together.

Legend: N rows · V vocabulary · n columns of this rank · C ids sent for each row · R ranks · M = R C.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_common.graphs.audit import recording
from rlkernel_common.philox import gumbel, range_words
from rlkernel_common.requests import Edited, Requests
from rlkernel_common.row_statistics import tree_sum
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_torch.truncation import weigh

RACE: Final = 2  # ids sent where there is no filter


class Columns(NamedTuple):
    """Where this rank's columns stand."""

    group: dist.ProcessGroup
    sizes: tuple[int, ...]  # columns of every rank, in rank order

    @property
    def first(self) -> int:
        """Id of this rank's first column."""
        return sum(self.sizes[: self.group.rank()])

    @property
    def width(self) -> int:
        """V, the columns of all ranks."""
        return sum(self.sizes)


class Statistics(NamedTuple):
    """What a rank says of each row: [N], or [N, ranks] of all of them; of the ids it sends [N, C], or [N, ranks, C]."""

    top: Tensor  # largest edited logit; -inf: none there
    rest: Tensor  # weights of all its ids but the best, relative to that
    tail: Tensor  # weights of the ids that it does not send
    raw_top: Tensor  # the same two of the logits as given
    raw_rest: Tensor
    tokens: Tensor  # ids above -inf, or at +inf where there are such
    last: Tensor  # the last of these
    flaws: Tensor  # 1: NaN among the logits; 2: the edits made NaN
    x: Tensor  # edited logits of the ids that it sends; -inf behind the last
    raw: Tensor  # logits of them as given
    ids: Tensor


def columns(logits: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...] | None) -> Columns:
    """Where the columns of every rank stand; ranks tell each other unless sizes are named.

    Raises:
        ArgumentError: the sizes are not those of as many ranks, not this rank's, or absent where a graph is recorded;
            ranks that tell each other have other numbers of rows.
    """
    checks.tensor("logits", logits, ndim=2, kind="floating")
    at = Columns(group, _told(logits, group) if sizes is None else tuple(sizes))
    if len(at.sizes) != group.size() or at.sizes[group.rank()] != logits.shape[1] or min(at.sizes) < 1:
        problem = f"must hold a size >= 1 for each of {group.size()} ranks, {logits.shape[1]} for rank {group.rank()}"
        raise ArgumentError("sizes", at.sizes, problem, "Pass the columns of every rank, in rank order.")
    return at


def _told(logits: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Columns of every rank, by one all-gather of two integers that is read on the host."""
    if group.size() == 1:
        return (logits.shape[1],)
    if not may_look():
        problem = "must be given while a graph is recorded, where ranks cannot read each other's"
        raise ArgumentError("sizes", None, problem, "Pass the columns of every rank, in rank order.")
    every = vocab_parallel.gathered(torch.tensor(logits.shape, device=logits.device), group).tolist()
    rows = [of[0] for of in every]
    if len(set(rows)) > 1:
        raise ArgumentError("logits", rows, "must have as many rows on all ranks of the group", "Pass equal [N].")
    return tuple(of[1] for of in every)


def may_look() -> bool:
    """Whether a value may be read on the host: no graph is being recorded."""
    return not recording() and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def joined(logits: Tensor, at: Columns) -> Tensor:
    """[N, V] the columns of all ranks side by side: one all-gather of the logits."""
    if len(at.sizes) == 1:
        return logits
    mine = logits.new_zeros(logits.shape[0], max(at.sizes))
    mine[:, : logits.shape[1]] = logits
    every = vocab_parallel.gathered(mine.view(torch.uint8), at.group)  # bytes: every backend sends those
    return torch.cat([x.view(logits.dtype)[:, :size] for x, size in zip(every, at.sizes, strict=True)], 1)


def inside(logits: Tensor, at: Columns, vocab_size: int | None) -> Tensor:
    """This rank's columns of the vocabulary, as sample reads them; one of -inf where there are none."""
    width = min(max((vocab_size or at.width) - at.first, 0), logits.shape[1])
    given = logits[:, :width].float()
    return given if width else torch.full_like(logits[:, :1], -torch.inf, dtype=torch.float32)


def statistics(given: Tensor, edited: Edited, first: int, requests: Requests, stream: int, C: int) -> Statistics:
    """Of this rank's columns [N, n]; the C best ids by logit, or with C = 0 those that win the race there."""
    part = weigh(edited.x, requests.temperature)
    given = torch.where(given.isnan(), -torch.inf, given)
    whole = weigh(given, torch.ones_like(requests.temperature))
    if C:
        ids = _first(edited.x, min(C, edited.x.shape[1]))
    else:
        words = range_words(requests.seed, requests.step, first, first + given.shape[1], stream)
        score = torch.where(requests.greedy[:, None], part.y, part.y + gumbel(words, torch.float64))
        ids = _first_two(torch.where(part.present, score, -torch.inf))
    column = torch.arange(given.shape[1], device=given.device)
    return Statistics(
        top=edited.x.amax(1).double(),
        rest=torch.where(column != part.best[:, None], part.w, 0.0).sum(1),
        tail=part.w.scatter(1, ids, 0.0).sum(1),
        raw_top=given.amax(1).double(),
        raw_rest=torch.where(column != whole.best[:, None], whole.w, 0.0).sum(1),
        tokens=part.present.sum(1).double(),
        last=torch.where(part.present, column + first, 0).amax(1).double(),
        flaws=edited.nan.double() + 2 * edited.bad.double(),
        x=filled(edited.x.gather(1, ids).double(), C or RACE, -torch.inf),
        raw=filled(given.gather(1, ids).double(), C or RACE, -torch.inf),
        ids=filled((ids + first).double(), C or RACE, 0.0),
    )


def _first(x: Tensor, C: int) -> Tensor:
    """[N, C] ids of the best in the total order of `descending`, without sorting the row; x is fp32 without NaN.

    A key that no other has: the float as an integer of the same order, and below it the id, lower ones first.
    """
    bits = (x + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ((order << 32) - torch.arange(x.shape[1], device=x.device)).topk(C, 1).indices


def _first_two(score: Tensor) -> Tensor:
    """[N, 1 or 2] ids of the largest and the second; the lowest id on ties."""
    best = score.argmax(1, keepdim=True)
    if score.shape[1] == 1:
        return best
    return torch.cat((best, score.scatter(1, best, -torch.inf).argmax(1, keepdim=True)), 1)


def filled(x: Tensor, width: int, value: float) -> Tensor:
    """[N, width]: with a value behind the last."""
    out = x.new_full((x.shape[0], width), value)
    out[:, : x.shape[1]] = x
    return out


def gathered(mine: Statistics, group: dist.ProcessGroup) -> Statistics:
    """What all ranks say, beside each other: one all-gather of [N, 8 + 3 C] numbers."""
    packed = torch.cat([x if x.dim() == 2 else x[:, None] for x in mine], 1)
    every = vocab_parallel.gathered(packed, group).transpose(0, 1)  # [N, R, 8 + 3 C]
    parts, first = [], 0
    for x in mine:
        width = x.shape[1] if x.dim() == 2 else 1
        part = every[:, :, first : first + width]
        parts.append(part if x.dim() == 2 else part[..., 0])
        first += width
    return Statistics(*parts)


class Known(NamedTuple):
    """Rows as all ranks together tell them; relative to the best id of all."""

    top: Tensor  # [N]
    posinf: Tensor  # [N] bool
    rest: Tensor  # [N] weights of all ids but the best
    tail: Tensor  # [N] weights of the ids that were not sent
    raw_top: Tensor  # [N]
    raw_rest: Tensor  # [N]
    tokens: Tensor  # [N] int64
    last: Tensor  # [N] int64
    nan: Tensor  # [N] bool
    bad: Tensor  # [N] bool
    x: Tensor  # [N, M] float64, rows with +inf as 0 and -inf
    y: Tensor  # [N, M] float64
    raw: Tensor  # [N, M] float64
    ids: Tensor  # [N, M] int64
    ends: Tensor  # [N, M] bool: the last that a rank sent, which has more


def merged(every: Statistics, requests: Requests) -> Known:
    """Join what all ranks said; finite logits no longer count where one of them saw +inf."""
    T = requests.temperature.double()
    top, posinf, scale, winner = _side_by_side(every.top, T)
    raw_top, _, raw_scale, raw_winner = _side_by_side(every.raw_top, torch.ones_like(T))
    counted = every.tokens * (~posinf[:, None] | (every.top == torch.inf))
    x = every.x
    x = torch.where(posinf[:, None, None], torch.where(x == torch.inf, 0.0, -torch.inf), x)
    C = x.shape[2]
    more = (counted > C)[:, :, None] & (torch.arange(C, device=x.device) == C - 1)
    base = torch.where(posinf, 0.0, top)
    y = torch.where(x > -torch.inf, (x - base[:, None, None]) / T[:, None, None], -torch.inf)
    return Known(
        top,
        posinf,
        tree_sum((every.rest + ~winner) * scale),
        tree_sum(every.tail * scale),
        raw_top,
        tree_sum((every.raw_rest + ~raw_winner) * raw_scale),
        counted.sum(1).long(),
        torch.where(counted > 0, every.last, 0).amax(1).long(),
        (every.flaws % 2 > 0).any(1),
        (every.flaws >= 2).any(1),
        *(v.flatten(1) for v in (x, y, every.raw, every.ids.long(), more)),
    )


def _side_by_side(tops: Tensor, T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of [N, R] largest values: the largest, whether it is +inf, what weights of each rank are worth, who has it."""
    top = tops.amax(1)
    scale = torch.where(tops == top[:, None], 1.0, torch.exp((tops - top[:, None]) / T[:, None]))
    scale = torch.where(tops > -torch.inf, scale, 0.0)
    winner = torch.arange(tops.shape[1], device=tops.device) == tops.argmax(1, keepdim=True)
    return top, top == torch.inf, scale, winner
