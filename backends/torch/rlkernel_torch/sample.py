"""sample@1 in plain torch: edits, total order, filters, Gumbel noise per token, one argmax.

Vectorized over rows, without a host synchronization or a shape that depends on data. Sums, exponents and noise are
float64 for every dtype; edits round to fp32 as the contract says. What a trainer computes of the token that knows
nothing of the filters is added as `logprob` adds it, and the two numbers of the draw are those whose sum has its bits.

Legend: N rows · V vocabulary · W stored columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rlkernel_common.philox import gumbel, range_words
from rlkernel_common.requests import Requests, decode, edit
from rlkernel_common.row_statistics import accumulator, join, partial_softmax, softmax_stats, tile_width
from rlkernel_common.shares import with_sum
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_torch.draws import Draw, drawn_from
from rlkernel_torch.truncation import FilteredSoftmax, descending, truncate, weigh, whole

# Words of a block of rows on a CPU, 1 MiB: noise takes some eighty passes over them, which a core's cache then serves.
# Speed only; bits do not depend on it.
_BLOCK = 1 << 17
# Scores, kept ids and random words, [N, V] each, to the token of each row, [N].
Best: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
# Logits [N, V] without NaN, one id a row and temperatures, [N] each, to log-probabilities [N].
Trainer: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_noised(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
    """[N] argmax of score + g over the kept ids; g is the Gumbel noise of the words."""
    return torch.where(keep, score + gumbel(words, torch.float64), -torch.inf).argmax(1)


def draw(law: FilteredSoftmax, requests: Requests, stream: int, best: Best = best_noised) -> Tensor:
    """[N] the kept token with the best noised score, the lowest id on ties; the best token on greedy rows."""
    (N, V), found = law.keep.shape, []
    size = max(1, _BLOCK // V) if law.keep.is_cpu else max(1, N)
    for first in range(0, max(1, N), size):
        rows = slice(first, first + size)
        words = range_words(requests.seed[rows], requests.step[rows], 0, V, stream)
        found.append(best(law.weights.y[rows], law.keep[rows], words))
    return torch.cat(found)


def tempered(x: Tensor, ids: Tensor, T: Tensor) -> Tensor:
    """[N] log-probabilities of one id a row under softmax(x / T), of x [N, V] without NaN: the bits of `logprob`.

    NaN or -inf where it has none: beside +inf, and where a row has no token.
    """
    return softmax_stats(join(partial_softmax(x, ids, T, tile_width(x.shape[1]), None, moment=False), T), T).logprob


def sample(call: SampleCall, best: Best = best_noised, *, trainer: Trainer | None = tempered) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.sample.SampleCall is the contract.

    Args:
        call: its record.
        best: the token of each row; the conformance suite puts faulty ones in its place.
        trainer: what a trainer computes of the token, whose bits the results state; None: the numbers of the law in
            float64, rounded once, as ranks with columns of their own can compute them.
    """
    top_n, kept_capacity = call.top_n, call.kept_capacity
    given = call.logits[:, : call.vocab_size or call.logits.shape[1]]
    given = given.to(accumulator(given))
    requests = decode(call, given.shape[0], given.device, given.dtype, call.slot)
    edited = edit(given, 0, requests, bias=call.bias, allowed=call.allowed, banned=call.banned)
    law = truncate(edited.x, requests, filter_order=call.filter_order, tie=call.tie)
    drawn = drawn_from(law, edited, requests, draw(law, requests, call.stream, best))
    result = drawn.result(call.invalid_token, kept_capacity)
    if trainer is not None:
        whole = trainer(edited.x, drawn.token, requests.temperature)
        result = with_trainer_bits(result, drawn, requests, whole)
    extra: dict[str, Tensor] = {}
    if call.raw_logprob:
        raw = raw_law(given).logprob(drawn.token)
        if trainer is not None:
            x = torch.where(given.isnan(), -torch.inf, given)
            raw = finite_or(trainer(x, drawn.token, torch.ones_like(requests.temperature)), raw)
        extra["raw_logprob"] = drawn.rows(raw, torch.nan)
    if call.entropy:
        extra["entropy"] = drawn.rows(law.entropy(), torch.nan)
    if kept_capacity:
        extra["kept_ids"] = _kept_ids(law, drawn, kept_capacity)
    if top_n or call.rank:
        ranked = raw_law(given) if call.top_n_from == "raw" else law
        if call.rank:
            # By the logits themselves: beside +inf all others have no mass, and still an order.
            x = torch.where(given.isnan(), -torch.inf, given) if call.top_n_from == "raw" else law.weights.x
            extra["rank"] = drawn.rows(_rank(x, drawn.token), -1, -1).to(torch.int32)
        if top_n:
            without = drawn.padding if call.top_n_from == "raw" else drawn.padding | drawn.none
            extra["top_ids"], extra["top_logprobs"] = _top(ranked, without, top_n, drawn.threshold.dtype)
    return replace(result, **extra)


def with_trainer_bits(result: SampleResult, drawn: Draw, requests: Requests, whole: Tensor) -> SampleResult:
    """The result whose logprob + log_kept_mass has the bits of `whole` [N], what a trainer computes of the tokens.

    Greedy rows, and those of which a trainer computes no finite number, stay as they are.
    """
    shares = with_sum(result.logprob, result.log_kept_mass, whole, drawn.count == 1)
    exact = ~(drawn.none | drawn.padding | requests.greedy) & (whole > -torch.inf)
    logprob = torch.where(exact, shares[0], result.logprob)
    return replace(result, logprob=logprob, log_kept_mass=torch.where(exact, shares[1], result.log_kept_mass))


def finite_or(of_trainer: Tensor, otherwise: Tensor) -> Tensor:
    """[N] what a trainer computes where it is finite."""
    return torch.where(of_trainer > -torch.inf, of_trainer, otherwise.to(of_trainer.dtype))


def raw_law(given: Tensor) -> FilteredSoftmax:
    """The law of the logits as given [N, V]: nothing edited, T = 1, nothing dropped."""
    given = torch.where(given.isnan(), -torch.inf, given)
    return whole(weigh(given, given.new_ones(given.shape[0])))


def _top(law: FilteredSoftmax, without: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The n best ids of a law and their log-probabilities, [N, n]; none in rows that are `without` [N]."""
    best = _order(law)[:, :n]
    there = law.keep.gather(1, best) & ~without[:, None]
    y = law.weights.y.gather(1, best) - law.log_total[:, None]
    y = torch.where(law.greedy[:, None], 0.0, y)
    return torch.where(there, best, -1), torch.where(there, y, -torch.inf).to(dtype)


def _kept_ids(law: FilteredSoftmax, drawn: Draw, capacity: int) -> Tensor:
    """[N, capacity] kept ids, best first, -1 behind the last."""
    best = _order(law)[:, :capacity]
    ids = best.new_full((best.shape[0], capacity), -1)
    place = torch.arange(best.shape[1], device=best.device)
    there = (place < law.count[:, None]) & ~(drawn.none | drawn.padding)[:, None]
    ids[:, : best.shape[1]] = torch.where(there, best, -1)
    return ids


def _order(law: FilteredSoftmax) -> Tensor:
    return descending(law.weights.x)[1] if law.order is None else law.order


def _rank(x: Tensor, token: Tensor) -> Tensor:
    """[N] how many tokens stand before this one in the total order."""
    own = x.gather(1, token[:, None])
    ids = torch.arange(x.shape[1], device=x.device)
    return ((x > own) | ((x == own) & (ids < token[:, None]))).sum(1)
