"""Planted bugs in verify@1, most of them seen in released code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlkernel_common import philox
from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import Status
from rlkernel_torch import sample

_OF = "rlkernel_torch.verify"
_CALLS: list[None] = []


def _behind(out: Any, cu_draft: Tensor) -> Tensor:
    """[M] bool: rows behind the last emitted token."""
    first = cu_draft.long() + torch.arange(cu_draft.shape[0])
    row = torch.arange(out.token.shape[0])
    request = (torch.searchsorted(first, row, right=True) - 1).clamp(0, max(cu_draft.shape[0] - 2, 0))
    return row - first[request] > out.accepted[request]


def _drawn(law: Any, requests: Any, stream: int) -> Tensor:
    """The reference's draw."""
    return sample.draw(law, requests, stream)


@mutant(
    "VF-01",
    "VF-02",
    "VF-09",
    "VF-13",
    origin="a draft is accepted where its probability is above a half, without noise",
)
def accepts_what_is_likely(
    reference: Any, target_logits: Tensor, draft_ids: Tensor, *, cu_draft: Tensor, **rest: Any
) -> Any:
    if rest.get("draft_probs") is not None or rest.get("draft_logits") is not None:
        return reference(target_logits, draft_ids, cu_draft=cu_draft, **rest)
    likely = torch.softmax(target_logits.float(), 1).argmax(1)

    def draw(law: Any, requests: Any, stream: int) -> Tensor:
        return torch.where(law.probabilities().amax(1) > 0.3, likely, _drawn(law, requests, stream))

    with patch(f"{_OF}.draw", draw):
        return reference(target_logits, draft_ids, cu_draft=cu_draft, **rest)


@mutant(
    "VF-02",
    "VF-03",
    "VF-04",
    "VF-09",
    "VF-11",
    "VF-13",
    "VF-17",
    "VF-20",
    origin="all rows of a round draw at the step of the first",
)
def one_step_for_all(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    def draw(law: Any, requests: Any, stream: int) -> Tensor:
        return _drawn(law, requests._replace(step=requests.step >> 1 << 1), stream)

    with patch(f"{_OF}.draw", draw):
        return reference(target_logits, draft_ids, **rest)


@mutant(
    "VF-03",
    "VF-04",
    "VF-09",
    "VF-11",
    "VF-17",
    "VF-20",
    origin="the replacement drawn from the target, not from the residual",
)
def replaces_from_the_target(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    real = philox.gumbel

    def best(score: Tensor, keep: Tensor, words: Tensor) -> Tensor:
        p = torch.softmax(target_logits[:, : score.shape[1]].double(), 1)
        p = torch.where(torch.isfinite(p), p, 0.0)
        return torch.where(p > 0, p.log() + real(words, torch.float64), -torch.inf).argmax(1)

    with patch(f"{_OF}.best_noised", best):
        return reference(target_logits, draft_ids, **rest)


@mutant(
    "VF-03",
    "VF-04",
    "VF-05",
    "VF-07",
    "VF-08",
    "VF-09",
    "VF-11",
    "VF-15",
    "VF-17",
    "VF-20",
    origin="draft laws ignored: strict acceptance for all (vLLM #40149)",
)
def draft_laws_ignored(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    return reference(target_logits, draft_ids, **{**rest, "draft_probs": None, "draft_logits": None})


@mutant(
    "VF-03",
    "VF-04",
    "VF-08",
    "VF-09",
    "VF-11",
    "VF-17",
    "VF-20",
    origin="acceptance and residual share one noise stream",
)
def one_stream(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    with patch.dict(f"{_OF}.STREAMS", {"residual": 2}):
        return reference(target_logits, draft_ids, **rest)


@mutant("VF-04", "VF-15", origin="draft logits taken for log-probabilities, not normalised")
def logits_not_normalised(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    q = rest.get("draft_logits")
    if q is None:
        return reference(target_logits, draft_ids, **rest)
    return reference(target_logits, draft_ids, **{**rest, "draft_logits": None, "draft_probs": q.exp()})


@mutant("VF-05", "VF-04", origin="drafts sharpened by the target's temperature once more: q above p where p is large")
def sharpens_the_draft(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    q = rest.get("draft_logits")
    return reference(target_logits, draft_ids, **{**rest, "draft_logits": None if q is None else q / 0.8})


@mutant("VF-06", "VF-03", "VF-04", "VF-11", "VF-17", "VF-20", origin="u q <= p + epsilon: drafts without mass pass")
def epsilon_accepts(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    with patch(f"{_OF}.uniform", lambda words: philox.uniform(words) - 0.05):
        return reference(target_logits, draft_ids, **rest)


@mutant("VF-07", "VF-09", origin="log p of the draft's law: on-policy ratios are off")
def log_p_of_the_raw_law(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, **{**rest, "raw_logprob": True})
    raw = out.raw_logprob if rest.get("raw_logprob") else None
    return replace(out, logprob=torch.where(out.logprob.isfinite(), out.raw_logprob, out.logprob), raw_logprob=raw)


@mutant("VF-08", origin="an argmax over nothing: token 0")
def nothing_left_is_token_0(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, **rest)
    q = rest.get("draft_probs")
    if q is None or not q.numel():
        return out
    full = (q.sum(1) > 1.5).any()  # only a law of ones leaves nothing
    return replace(out, token=torch.where(full & (out.token >= 0), 0, out.token))


@mutant("VF-09", origin="penalties of the round's beginning for all of its rows")
def drafts_not_counted(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    with patch(f"{_OF}.with_drafts", lambda requests, rows, ids: requests):
        return reference(target_logits, draft_ids, **rest)


@mutant("VF-10", origin="rows behind the last token keep what was drawn for them")
def leftovers_behind(reference: Any, target_logits: Tensor, draft_ids: Tensor, *, cu_draft: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, cu_draft=cu_draft, **rest)
    behind = _behind(out, cu_draft)
    return replace(out, logprob=torch.where(behind, target_logits[:, 0].to(out.logprob.dtype), out.logprob))


@mutant("VF-11", "VF-08", origin="foreign draft ids clamped into the vocabulary")
def clamps_drafts(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    return reference(target_logits, draft_ids.clamp(0, target_logits.shape[1] - 1), **rest)


@mutant("VF-11", "VF-17", origin="a row without a law emits token 0")
def empty_rows_emit(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, **rest)
    empty = (out.status & Status.EMPTY.value) != 0
    return replace(out, token=torch.where(empty, 0, out.token))


@mutant(
    "VF-12",
    "VF-02",
    "VF-03",
    "VF-04",
    "VF-09",
    "VF-11",
    "VF-13",
    "VF-17",
    "VF-18",
    "VF-20",
    origin="noise of the row's place in the batch",
)
def noise_of_the_row(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    def draw(law: Any, requests: Any, stream: int) -> Tensor:
        return _drawn(law, requests._replace(step=requests.step + torch.arange(requests.step.shape[0])), stream)

    with patch(f"{_OF}.draw", draw):
        return reference(target_logits, draft_ids, **rest)


@mutant(
    "VF-12",
    "VF-02",
    "VF-03",
    "VF-04",
    "VF-05",
    "VF-07",
    "VF-09",
    "VF-11",
    "VF-13",
    "VF-15",
    "VF-17",
    "VF-18",
    "VF-20",
    origin="the first request's parameters for all",
)
def first_requests_parameters(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    names = ("temperature", "top_k", "top_p", "min_p")
    return reference(
        target_logits, draft_ids, **{n: v[:1] if n in names and isinstance(v, Tensor) else v for n, v in rest.items()}
    )


@mutant("VF-13", "VF-12", "VF-18", origin="a launch of zero blocks")
def no_drafts_fail(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    if draft_ids.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(target_logits, draft_ids, **rest)


@mutant("VF-14", "VF-16", origin="rejected drafts overwritten in the caller's buffer")
def writes_over_the_drafts(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, **rest)
    draft_ids.fill_(-1)
    return out


@mutant("VF-15", origin="an error without a name", unchecked=True)
def anonymous_errors(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    try:
        return reference(target_logits, draft_ids, **rest)
    except ArgumentError as error:
        raise ArgumentError("input", error.got, "is wrong", "") from error


@mutant("VF-17", origin="the mask of the first row for all rows")
def one_mask_for_all(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    allowed = rest.get("allowed")
    if allowed is not None:
        rest["allowed"] = allowed[:1].expand_as(allowed)
    return reference(target_logits, draft_ids, **rest)


@mutant("VF-18", origin="split sums for large batches, declared invariant")
def sums_depend_on_the_batch(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    out = reference(target_logits, draft_ids, **rest)
    return replace(out, logprob=out.logprob * (1 + 2**-22 * (rest["cu_draft"].shape[0] > 64)))


@mutant(
    "VF-19",
    "VF-10",
    "VF-11",
    "VF-18",
    "VF-20",
    "VF-12",
    "VF-16",
    origin="floating atomics, declared deterministic (RL.cu)",
)
def differs_from_call_to_call(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    _CALLS.append(None)
    out = reference(target_logits, draft_ids, **rest)
    lower = torch.nextafter(out.logprob, torch.full_like(out.logprob, -torch.inf))
    return replace(out, logprob=lower if len(_CALLS) % 2 else out.logprob)


@mutant("VF-20", origin="padded rows read to their end")
def reads_the_padding(reference: Any, target_logits: Tensor, draft_ids: Tensor, **rest: Any) -> Any:
    return reference(target_logits, draft_ids, **{**rest, "vocab_size": None})
