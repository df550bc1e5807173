"""verify@1 in plain torch: every row draws or tests at once; a minimum per request finds the first rejection.

Legend: B requests · K drafts · M = K + B rows · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlkernel_common.drafts import DraftRows, with_drafts
from rlkernel_common.philox import range_words, token_words, uniform
from rlkernel_common.requests import Requests, decode, edit
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.spec.sampling import STREAMS
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_torch.draws import drawn_from
from rlkernel_torch.sample import Best, best_noised, draw, raw_law
from rlkernel_torch.truncation import FilteredSoftmax, truncate


@dataclass(frozen=True)
class Steps:
    """The steps of `verify` that the conformance suite puts faulty ones in the place of."""

    count: Callable[[Requests, DraftRows, Tensor], Requests] = with_drafts  # drafts count for the penalties
    draw: Callable[[FilteredSoftmax, Requests, int], Tensor] = draw  # from the target's law
    replace: Best = best_noised  # from the residual
    uniform: Callable[[Tensor], Tensor] = uniform  # of the words of an acceptance
    streams: Mapping[str, int] = field(default_factory=lambda: STREAMS)


def verify(call: VerifyCall, steps: Steps = Steps()) -> VerifyResult:
    """Accept drafts and draw replacements: rlkernel_core.spec.verify.VerifyCall is the contract."""
    V = call.vocab_size or call.target_logits.shape[1]
    given = call.target_logits[:, :V]
    given = given.to(accumulator(given))
    rows = _layout(call.cu_draft, call.draft_ids)
    requests = decode(call, given.shape[0], given.device, given.dtype, rows.request)
    requests = requests._replace(step=requests.step + rows.place, padding=None)
    requests = steps.count(requests, rows, call.draft_ids)
    edited = edit(given, 0, requests, bias=call.bias, allowed=call.allowed, banned=call.banned)
    law = truncate(edited.x, requests, filter_order=call.filter_order, tie=call.tie)

    inside = (rows.draft >= 0) & (rows.draft < V) & ~rows.bonus
    drafted = rows.draft.clamp(0, V - 1)
    token = steps.draw(law, requests, steps.streams["target"])
    if call.draft_probs is None and call.draft_logits is None:
        accept = inside & (token == drafted)
    else:
        q = _draft_law(call.draft_probs, call.draft_logits, V)[rows.source]
        p = law.probabilities()
        u = steps.uniform(token_words(requests.seed, requests.step, drafted, steps.streams["accept"]))
        at = drafted[:, None]
        accept = inside & (u * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0])
        words = range_words(requests.seed, requests.step, 0, V, steps.streams["residual"])
        residual = (p - q).clamp(min=0)
        residual = torch.where((residual > 0).any(1, keepdim=True), residual, p)
        replacement = steps.replace(residual.log(), residual > 0, words)
        token = torch.where(rows.bonus, token, replacement)
    token = torch.where(accept, drafted, token)
    drawn = drawn_from(law, edited, requests, token)
    B = call.cu_draft.shape[0] - 1
    stop = torch.where(accept & ~drawn.none, given.shape[0], rows.place)
    accepted = stop.new_full((B,), given.shape[0]).scatter_reduce(0, rows.request, stop, "amin")
    drawn = replace(drawn, padding=rows.place > accepted[rows.request])
    result = drawn.result(call.invalid_token)
    return VerifyResult(
        accepted=accepted.to(torch.int32),
        token=result.token,
        logprob=result.logprob,
        log_kept_mass=result.log_kept_mass,
        kept_count=result.kept_count,
        status=result.status,
        raw_logprob=drawn.rows(raw_law(given).logprob(token), torch.nan) if call.raw_logprob else None,
    )


def _layout(cu_draft: Tensor, draft_ids: Tensor) -> DraftRows:
    K, B = draft_ids.shape[0], cu_draft.shape[0] - 1
    first = cu_draft.long() + torch.arange(B + 1, device=cu_draft.device)
    row = torch.arange(K + B, device=cu_draft.device)
    request = (torch.searchsorted(first, row, right=True) - 1).clamp(0, max(B - 1, 0))
    bonus = row == first[request + 1] - 1
    source = torch.where(bonus, K, row - request)
    drafts = torch.cat((draft_ids.long(), first.new_zeros(1)))
    return DraftRows(request, row - first[request], bonus, source, drafts[source])


def _draft_law(probs: Tensor | None, logits: Tensor | None, V: int) -> Tensor:
    """[K + 1, V] float64 laws of the drafts, zeros last; what is no probability counts as 0."""
    if logits is not None:
        q = torch.softmax(logits[:, :V].double(), 1)
    else:
        q = probs[:, :V].double() if probs is not None else torch.zeros(0, V)
    q = torch.where(q > 0, q, 0.0)
    return torch.cat((q, q.new_zeros(1, V)))
