"""sample@1 of logits whose vocabulary is split over the ranks of a process group: the bits of the joined rows' draw.

Log-probabilities are those of the law in float64, rounded once: the sums of a trainer, which `sample` states, go over
whole rows.

Each rank edits its own columns and sends, in one all-gather, its sums of each row and its best ids: with filters those
of the largest logits, without a filter the two that its noise favors. Every rank joins that in rank order, so all get
the same bits.

Sums that are joined may differ from the sums of a whole row in their last bits (of float64), and ids that were not sent
are known by a bound alone. So nothing is taken on trust: a row stands if every decision in it (where the nucleus ends,
who wins) holds within that error, and every result rounds to the same bits at both ends of it. The logits of the other
rows are gathered and drawn by `reference.sample` itself: a few rows in a million, rows that keep more than was sent,
and all rows of float64, whose results round no error away.

Legend: N rows · V vocabulary · n columns of this rank · C ids sent for each row · R ranks · M = R C.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.philox import gumbel, token_words
from rlkernel_common.requests import Requests, decode, edit
from rlkernel_common.row_statistics import tree_sum
from rlkernel_core import checks
from rlkernel_core.spec.sample import SPEC, SampleCall, check
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_torch.draws import Draw
from rlkernel_torch.sample import sample
from rlkernel_torch.sharded.candidate_filters import Candidates, kept_span
from rlkernel_torch.sharded.statistics import (
    Known,
    columns,
    filled,
    gathered,
    inside,
    joined,
    may_look,
    merged,
    statistics,
)
from rlkernel_torch.truncation import descending

ERROR: Final = 2.0**-42  # relative, of joined sums and their logarithms; exponents down to -745 lose 2^-44
GAP: Final = 1e-9  # of noised scores: a rank's third best may be ahead of its second by rounding, never by this


class Outcome(NamedTuple):
    """A draw, what was asked for besides, and which rows of it are certain."""

    draw: Draw
    extra: dict[str, Tensor]
    certain: Tensor  # [N] bool


def sample_shard(
    logits: Tensor,  # [N, n] of this rank
    *,
    group: dist.ProcessGroup,
    sizes: tuple[int, ...] | None = None,
    candidates: int = 128,
    **request: Any,
) -> SampleResult:
    """The draw of the joined rows, on every rank; `rlkernel.distributed.sample_shard` is the contract."""
    at = columns(logits, group, sizes)
    checks.integer("candidates", candidates, at_least=1)
    call: SampleCall = SPEC.call(logits[:, :1].expand(-1, at.width), **request)
    check(call)

    def whole() -> SampleResult:
        """The draw of the joined rows, joined."""
        return sample(SampleCall.of(call, logits=joined(logits, at)), trainer=None)

    filtered = not (call.top_k is call.top_p is call.min_p is None)
    # Known of whole rows only, or of more ids than are sent.
    beyond = call.top_n or call.rank or call.kept_capacity > candidates
    beyond = beyond or (not filtered and (call.entropy or call.kept_capacity))
    if len(at.sizes) == 1 or beyond or logits.dtype == torch.float64 or not may_look():
        return whole()
    given = inside(logits, at, call.vocab_size)
    requests = decode(call, given.shape[0], given.device, given.dtype, call.slot)
    edited = edit(given, at.first, requests, bias=call.bias, allowed=call.allowed, banned=call.banned)
    mine = statistics(given, edited, at.first, requests, call.stream, candidates if filtered else 0)
    every = gathered(mine, group)
    said = merged(every, requests)
    extras: dict[str, Any] = {
        "raw_logprob": call.raw_logprob,
        "entropy": call.entropy,
        "kept_capacity": call.kept_capacity,
    }
    how: dict[str, Any] = {"filter_order": call.filter_order, "tie": call.tie}
    if filtered:
        found = _filtered(said, requests, call.stream, extras, **how)
    else:
        found = _unfiltered(said, requests, call.stream, extras)
    sure = found.certain | found.draw.none | found.draw.padding
    # The same on every rank, whose joined statistics are the same bits.
    return (
        replace(found.draw.result(call.invalid_token, call.kept_capacity), **found.extra)
        if bool(sure.all())
        else whole()
    )


def _unfiltered(said: Known, requests: Requests, stream: int, extras: dict[str, Any]) -> Outcome:
    """Without a filter: the best noised of the ids that won on their ranks."""
    keys = _scores(said, requests, stream)
    best = keys.amax(1, keepdim=True)
    place = _lowest(said.ids, keys == best)
    second = keys.scatter(1, place, -torch.inf).amax(1, keepdim=True)
    logprob, certain = _steady(said.y.gather(1, place)[:, 0], torch.log1p(said.rest))
    greedy = requests.greedy
    logprob = torch.where(greedy, 0.0, logprob)
    certain = greedy | (certain & (best - second > GAP)[:, 0])
    token = said.ids.gather(1, place)[:, 0]
    cut = said.posinf | (greedy & (said.tokens > 1))
    draw = _draw(
        said, requests, token, logprob, torch.zeros_like(logprob),
        torch.where(greedy, said.tokens.clamp(max=1), said.tokens),
        torch.where(cut, said.top, -torch.inf), torch.where(cut, torch.where(greedy, token, said.last), -1),
    )  # fmt: skip
    return _with_raw(Outcome(draw, {}, certain), said, place, extras)


def _filtered(
    said: Known, requests: Requests, stream: int, extras: dict[str, Any], *, filter_order: str, tie: str
) -> Outcome:
    """With filters: the best ids of all ranks in the total order, as many of them as the filters keep."""
    # Ids of a rank come before those of the next, and stand in the order of the law among themselves.
    order = descending(said.x)[1]
    said = said._replace(**{n: getattr(said, n).gather(1, order) for n in ("x", "y", "raw", "ids", "ends")})
    M = said.x.shape[1]
    place = torch.arange(M, device=said.x.device)
    sure = torch.where(said.ends.any(1), said.ends.int().argmax(1) + 1, said.tokens)
    w = torch.exp(said.y)
    known = Candidates(said.x, said.y, w, sure, said.tokens, 1 + said.rest, ERROR)
    low, count = kept_span(known, requests, filter_order=filter_order, tie=tie)
    certain = (low == count) & (count <= sure)
    kept = (place < count[:, None]) & (said.x > -torch.inf)
    log_sum = torch.log1p(tree_sum(torch.where(kept & (place > 0), w, 0.0)))
    dropped = torch.log1p((said.tail + tree_sum(torch.where(kept, 0.0, w))) * torch.exp(-log_sum))
    keys = torch.where(kept, _scores(said, requests, stream), -torch.inf)
    won = _lowest(said.ids, keys == keys.amax(1, keepdim=True))
    logprob, same = _steady(said.y.gather(1, won)[:, 0], log_sum)
    mass, steady = _steady(torch.zeros_like(dropped), dropped)
    greedy = requests.greedy
    end = (count - 1).clamp(0, M - 1)[:, None]
    whole = (count == said.tokens) & ~said.posinf
    threshold = torch.where(said.posinf, torch.inf, said.x.gather(1, end)[:, 0])
    draw = _draw(
        said, requests, said.ids.gather(1, won)[:, 0], torch.where(greedy, 0.0, logprob),
        torch.where(greedy, 0.0, mass), count,
        torch.where(whole, -torch.inf, threshold), torch.where(whole, -1, said.ids.gather(1, end)[:, 0]),
    )  # fmt: skip
    extra = {}
    if extras["entropy"]:
        moment = tree_sum(torch.where(kept & (w > 0), -said.y * w, 0.0)) * torch.exp(-log_sum)
        value, sharp = _steady(torch.zeros_like(moment), -(log_sum + moment))
        extra["entropy"], same = draw.rows(torch.where(greedy, 0.0, value), torch.nan), same & (sharp | greedy)
    if extras["kept_capacity"]:
        ids = filled(torch.where(kept, said.ids, -1)[:, : extras["kept_capacity"]], extras["kept_capacity"], -1)
        extra["kept_ids"] = torch.where((draw.none | draw.padding)[:, None], -1, ids)
    return _with_raw(Outcome(draw, extra, certain & (greedy | (same & steady))), said, won, extras)


def _with_raw(found: Outcome, said: Known, place: Tensor, extras: dict[str, Any]) -> Outcome:
    """With the log-probability of the token under the law of the logits as given, where that was asked for."""
    if not extras["raw_logprob"]:
        return found
    x = said.raw.gather(1, place)[:, 0]
    y = torch.where(x == said.raw_top, 0.0, x - said.raw_top)
    value, steady = _steady(y, torch.log1p(said.raw_rest))
    extra = found.extra | {"raw_logprob": found.draw.rows(value, torch.nan)}
    return Outcome(found.draw, extra, found.certain & steady)


def _scores(said: Known, requests: Requests, stream: int) -> Tensor:
    """[N, M] y + g of every candidate; y alone on greedy rows."""
    N, M = said.ids.shape
    seed, step = (x[:, None].expand(N, M).reshape(-1) for x in (requests.seed, requests.step))
    noise = gumbel(token_words(seed, step, said.ids.reshape(-1), stream), torch.float64).view(N, M)
    return torch.where(requests.greedy[:, None], said.y, said.y + noise)


def _lowest(ids: Tensor, among: Tensor) -> Tensor:
    """[N, 1] place of the lowest id among some."""
    return torch.where(among, ids, 1 << 62).argmin(1, keepdim=True)


def _steady(y: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """The difference y - log in fp32, and whether `log` is known well enough for all bits of it."""
    low, high = ((y - log * (1 + error)).float() for error in (ERROR, -ERROR))
    return (y - log).float().double(), low == high


def _draw(
    said: Known,
    requests: Requests,
    token: Tensor,
    logprob: Tensor,
    mass: Tensor,
    count: Tensor,
    x: Tensor,
    id_: Tensor,
) -> Draw:
    bad = requests.bad | said.bad
    return Draw(
        token=token,
        logprob=logprob,
        log_kept_mass=mass,
        count=count,
        threshold=x.to(requests.temperature.dtype),
        threshold_id=id_,
        posinf=said.posinf,
        nan=said.nan,
        bad=bad,
        padding=torch.zeros_like(bad) if requests.padding is None else requests.padding,
    )
