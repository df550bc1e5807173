"""Implementations by strangers: right by the contract, with other noise than it defines, and with fewer results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkernel_torch
from rlkernel_core.manifest import Backend, Impl
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.advantage import AdvantageResult
from rlkernel_core.spec.group_filter import GroupFilterResult
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sample_clauses import PHILOX
from rlkernel_core.spec.sampling import SampleResult, SamplingParams
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_torch.advantage.estimate import advantage as torch_advantage
from rlkernel_torch.advantage.filtering import group_filter as torch_group_filter
from rlkernel_torch.linear_logprob import linear_logprob as torch_linear_logprob
from rlkernel_torch.lm_head_sample import lm_head_sample as torch_lm_head_sample
from rlkernel_torch.logprob import logprob as torch_logprob
from rlkernel_torch.policy_loss import policy_loss as torch_policy_loss
from rlkernel_torch.sample import sample as torch_sample
from rlkernel_torch.verify import verify as torch_verify

LACKING = {
    "sample": {PHILOX.name, "batch_invariant", "capturable", "slot"},
    "lm_head_sample": {PHILOX.name, "batch_invariant", "capturable", "slot"},
    "verify": {PHILOX.name, "batch_invariant", "capturable"},
    "logprob": {"lse"},
    "linear_logprob": {"lse", "batch_invariant", "group"},
    "policy_loss": {"stats", "count_empty"},
    "advantage": {"stats", "singleton_zero", "singleton_error", "ddof", "peer", "process_group"},
}


def sample(call: SampleCall) -> SampleResult:
    """Plain torch's sampler at other seeds: those of the contract, mixed with the place of the row."""
    return torch_sample(replace(call, seed=mixed(call, call.logits.shape[0])))


def lm_head_sample(call: LmHeadSampleCall) -> SampleResult:
    """The same of a head."""
    return torch_lm_head_sample(replace(call, seed=mixed(call, call.hidden.shape[0])))


def verify(call: VerifyCall) -> VerifyResult:
    """The same of drafts."""
    return torch_verify(replace(call, seed=mixed(call, call.cu_draft.shape[0] - 1)))


def mixed(call: SamplingParams, rows: int) -> Tensor:
    """Seeds [rows] int64 of other noise: an odd multiple is one to one, so different requests stay different."""
    place = torch.arange(rows, device="cpu")  # whatever the default is
    seed = (
        call.seed.to(torch.int64) if isinstance(call.seed, Tensor) else torch.tensor(_signed(call.seed), device="cpu")
    )
    return seed * 6364136223846793005 + place * 1442695040888963407 + 1


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def biased(call: SampleCall) -> SampleResult:
    """The same, at half the temperature."""
    return sample(replace(call, temperature=call.temperature * 0.5))


_DRAWN = [0]


def unrepeatable(call: SampleCall) -> SampleResult:
    """The same, with noise of its own at every call."""
    _DRAWN[0] += 1
    return torch_sample(replace(call, seed=mixed(call, call.logits.shape[0]) + _DRAWN[0]))


def logprob(call: Any) -> LogprobResult:
    """Without lse."""
    return replace(torch_logprob(call), lse=None)


def policy_loss(call: Any) -> LossResult:
    """Without statistics."""
    return replace(torch_policy_loss(call), stats=None)


def advantage(call: Any) -> AdvantageResult:
    """Without statistics, and NaN for groups of one."""
    out = torch_advantage(call)
    counts = out.stats.group_count if out.stats is not None else None
    if counts is not None and counts.shape == out.advantages.shape:
        alone = counts == 1 if call.in_loss is None else (counts == 1) & call.in_loss
        alone = alone if call.weights is None else alone & (call.weights != 0)
        out = replace(out, advantages=torch.where(alone, torch.nan, out.advantages))
    return replace(out, stats=None)


def backend(op: str, function: str = "", check: str | None = None) -> Backend:
    """A backend of one operator, by a function of this module, with a check of this module if one is named."""
    plain: Impl = next(i for i in rlkernel_torch.backend.impls if i.op.startswith(f"{op}@"))
    claims = plain.supports - LACKING.get(op, set())
    target = f"{__name__}:{function or op}"
    asked = f"{__name__}:{check}" if check else None
    impl = Impl(op=plain.op, target=target, requires=plain.requires, supports=claims, check=asked)
    return Backend(name="stranger", api=rlkernel_torch.backend.api, impls=(impl,))


def rounds_strided_loss(call: Any) -> LossResult:
    """Another order of summation for tensors that are not contiguous: the last bits differ."""
    out = torch_policy_loss(call)
    return out if call.logprob.is_contiguous() else replace(out, loss=out.loss * (1 + torch.finfo(out.loss.dtype).eps))


def rounds_strided_heads(call: Any) -> LogprobResult:
    """The same of a head."""
    out = torch_linear_logprob(call)
    contiguous = call.hidden.is_contiguous() and call.weight.is_contiguous()
    return out if contiguous else replace(out, logprob=out.logprob * (1 + torch.finfo(out.logprob.dtype).eps))


def small_groups_only(call: Any) -> Reason | None:
    """The check of an implementation that takes batches of at most four sequences."""
    if call.rewards.shape[0] <= 4:
        return None
    return Reason("shape", "unsupported", "it takes four sequences at most", "split the batch")


def raises(call: Any) -> Reason | None:
    """A check with a bug."""
    raise RuntimeError(f"no table of tiles for {call.rewards.shape[0]}")


def wrong_count(call: Any) -> GroupFilterResult:
    """A wrong result, and nothing left behind."""
    out = torch_group_filter(call)
    return replace(out, kept_groups=out.kept_groups + 1)
