"""Implementations by strangers: right by the contract, with other noise than it defines, and with fewer results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkernel_torch
from rlkernel_core.manifest import Backend, Impl
from rlkernel_core.spec.advantage import AdvantageResult
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sample_clauses import PHILOX
from rlkernel_core.spec.sampling import SampleResult, SamplingParams
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_torch.advantage.estimate import advantage as torch_advantage
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
    place = torch.arange(rows)
    seed = call.seed if isinstance(call.seed, Tensor) else torch.tensor(_signed(call.seed))
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
    if counts is not None and counts.dim() == 1 and out.advantages.dim() == 1:
        out = replace(out, advantages=torch.where(counts == 1, torch.nan, out.advantages))
    return replace(out, stats=None)


def backend(op: str, function: str = "") -> Backend:
    """A backend of one operator, by a function of this module."""
    plain: Impl = next(i for i in rlkernel_torch.backend.impls if i.op.startswith(f"{op}@"))
    claims = plain.supports - LACKING[op]
    target = f"{__name__}:{function or op}"
    impl = Impl(op=plain.op, target=target, requires=plain.requires, supports=claims)
    return Backend(name="stranger", api=rlkernel_torch.backend.api, impls=(impl,))
