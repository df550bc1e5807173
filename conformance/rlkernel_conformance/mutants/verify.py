"""Planted bugs in verify@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common import philox
from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_conformance.mutants.sample import draws_anew, first_parameters, raw_for_processed, with_status
from rlkernel_core.spec.sampling import STREAMS, Status
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_torch.sample import draw
from rlkernel_torch.verify import Steps, verify


def with_steps(**steps: Any) -> How:
    """Plain torch with other steps of a round."""
    return lambda right, call: verify(call, Steps(**steps))


def accepts_what_is_likely(right: Run, call: VerifyCall) -> VerifyResult:
    likely = torch.softmax(call.target_logits.float(), 1).argmax(1)

    def by_size(law: Any, requests: Any, stream: int) -> Tensor:
        return torch.where(law.probabilities().amax(1) > 0.3, likely, draw(law, requests, stream))

    strict = call.draft_probs is None and call.draft_logits is None
    return verify(call, Steps(draw=by_size)) if strict else right(call)


def even_steps(law: Any, requests: Any, stream: int) -> Tensor:
    return draw(law, requests._replace(step=requests.step >> 1 << 1), stream)


def steps_of_the_rows(law: Any, requests: Any, stream: int) -> Tensor:
    return draw(law, requests._replace(step=requests.step + torch.arange(requests.step.shape[0])), stream)


def replaces_from_the_target(right: Run, call: VerifyCall) -> VerifyResult:
    def best(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
        p = torch.softmax(call.target_logits[:, : score.shape[1]].double(), 1)
        p = torch.where(torch.isfinite(p), p, 0.0)
        return torch.where(p > 0, p.log() + philox.gumbel(words, torch.float64), -torch.inf).argmax(1)

    return verify(call, Steps(replace=best))


def logits_not_normalized(right: Run, call: VerifyCall) -> VerifyResult:
    q = call.draft_logits
    return right(call if q is None else replace(call, draft_logits=None, draft_probs=q.exp()))


def padded_draft_laws(call: VerifyCall) -> VerifyCall:
    q, z = call.draft_probs, call.draft_logits

    def widened(x: Tensor | None, value: float) -> Tensor | None:
        more = 0 if x is None else call.target_logits.shape[1] - x.shape[1]
        return torch.nn.functional.pad(x, (0, more), value=value) if x is not None and more > 0 else x

    return replace(call, vocab_size=None, draft_probs=widened(q, 0.0), draft_logits=widened(z, -torch.inf))


def nothing_left_is_token_0(call: VerifyCall, out: VerifyResult) -> Tensor:
    q = call.draft_probs
    if q is None or not q.numel():
        return out.token
    full = (q.sum(1) > 1.5).any()  # only a law of ones leaves nothing
    return torch.where(full & (out.token >= 0), 0, out.token)


def leftovers_behind(call: VerifyCall, out: VerifyResult) -> Tensor:
    first = call.cu_draft.long() + torch.arange(call.cu_draft.shape[0])
    row = torch.arange(out.token.shape[0])
    request = (torch.searchsorted(first, row, right=True) - 1).clamp(0, max(call.cu_draft.shape[0] - 2, 0))
    behind = row - first[request] > out.accepted[request]
    return torch.where(behind, call.target_logits[:, 0].to(out.logprob.dtype), out.logprob)


BUGS: Final = {
    "accepts_what_is_likely": Bug(
        "VF-01", "a draft is accepted where its probability is above a half, without noise", accepts_what_is_likely
    ),
    "one_step_for_all": Bug("VF-02", "all rows of a round draw at the step of the first", with_steps(draw=even_steps)),
    "replaces_from_the_target": Bug(
        "VF-03", "the replacement drawn from the target, not from the residual", replaces_from_the_target
    ),
    "draft_laws_ignored": Bug(
        "VF-03",
        "draft laws ignored: strict acceptance for all (vLLM #40149)",
        plant.ignores("draft_probs", "draft_logits"),
    ),
    "one_stream": Bug(
        "VF-03",
        "acceptance and residual share one noise stream",
        with_steps(streams={**STREAMS, "residual": STREAMS["accept"]}),
    ),
    "logits_not_normalized": Bug(
        "VF-04", "draft logits taken for log-probabilities, not normalized", logits_not_normalized
    ),
    "sharpens_the_draft": Bug(
        "VF-05",
        "drafts sharpened by the target's temperature once more: q above p where p is large",
        plant.maps(draft_logits=lambda q: q / 0.8),
    ),
    "epsilon_accepts": Bug(
        "VF-06",
        "u q <= p + epsilon: drafts without mass pass",
        with_steps(uniform=lambda words: philox.uniform(words) - 0.05),
    ),
    "log_p_of_the_raw_law": Bug("VF-07", "log p of the draft's law: on-policy ratios are off", raw_for_processed),
    "nothing_left_is_token_0": Bug(
        "VF-08", "an argmax over nothing: token 0", plant.returns(token=nothing_left_is_token_0)
    ),
    "drafts_not_counted": Bug(
        "VF-09",
        "penalties of the round's beginning for all of its rows",
        with_steps(count=lambda requests, rows, ids: requests),
    ),
    "leftovers_behind": Bug(
        "VF-10", "rows behind the last token keep what was drawn for them", plant.returns(logprob=leftovers_behind)
    ),
    "clamps_drafts": Bug(
        "VF-11",
        "foreign draft ids clamped into the vocabulary",
        plant.given(draft_ids=lambda c: c.draft_ids.clamp(0, c.target_logits.shape[1] - 1)),
    ),
    "empty_rows_emit": Bug(
        "VF-11",
        "a row without a law emits token 0",
        plant.returns(token=lambda c, o: torch.where(with_status(o, Status.EMPTY), 0, o.token)),
    ),
    "noise_of_the_row": Bug("VF-12", "noise of the row's place in the batch", with_steps(draw=steps_of_the_rows)),
    "first_requests_parameters": Bug("VF-12", "the first request's parameters for all", first_parameters),
    "no_drafts_fail": Bug("VF-13", "a launch of zero blocks", plant.fails_if(lambda c: c.draft_ids.numel() == 0)),
    "writes_over_the_drafts": Bug(
        "VF-14", "rejected drafts overwritten in the caller's buffer", plant.writes(lambda c: c.draft_ids.fill_(-1))
    ),
    "anonymous_errors": plant.anonymous_errors("VF-15"),
    "one_mask_for_all": Bug(
        "VF-17", "the mask of the first row for all rows", plant.maps(allowed=lambda x: x[:1].expand_as(x))
    ),
    "sums_depend_on_the_batch": plant.batch_dependent(
        "VF-18", "logprob", "split sums for large batches, declared invariant", lambda c: c.cu_draft.shape[0] > 64
    ),
    "differs_from_call_to_call": plant.nondeterministic("VF-19", "logprob"),
    "reads_the_padding": Bug(
        "VF-20", "padded rows read to their end", lambda right, call: right(padded_draft_laws(call))
    ),
    "draws_anew": Bug("VF-21", "noise of a generator that runs on", plant.maps(seed=draws_anew)),
    "asks_the_host": plant.reads_a_value("VF-16", lambda c: c.target_logits),
    "bias_ignored_beside_draft_laws": Bug(
        "VF-97",
        "the bias ignored where the laws of the drafts are given",
        plant.where(lambda c: c.draft_probs is not None, plant.ignores("bias")),
    ),
}
