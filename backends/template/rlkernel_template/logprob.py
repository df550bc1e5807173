"""logprob@1: log-probability of tokens, and entropy where it is asked for; gradients by autograd.

The contract, clause by clause, is `rlkernel_core.spec.logprob`.
N: tokens, in any leading shape. V: vocabulary.
"""

from __future__ import annotations

import torch
from rlkernel_core import Reason
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from torch import Tensor
from torch.nn.functional import softplus

_MOST = 1 << 31  # logits in one call: beyond it, the copies in float32 take more than 8 GiB each


def logprob(call: LogprobCall) -> LogprobResult:
    """Serve a call, which the operator's check has passed; one that needs a feature not claimed does not come here."""
    ids = call.ids
    T = call.temperature
    if isinstance(T, Tensor):  # one per row; a row without a law gives NaN and disturbs no other
        T = torch.where((T > 0) & T.isfinite(), T.float(), torch.nan)[..., None]
    z = call.logits.contiguous().float() / T
    counted = torch.ones_like(ids, dtype=torch.bool) if call.mask is None else call.mask
    z = torch.where(counted[..., None], z, 0.0)  # masked rows hold anything: select, never multiply
    outside = (ids < 0) | (ids >= z.shape[-1])
    at = torch.where(outside, 0, ids).long()[..., None]
    # The chosen id is left out of the sum: `chosen - logsumexp(z)` would round to 0 where p is near 1.
    chosen = z.gather(-1, at)[..., 0]
    others = z.scatter(-1, at, -torch.inf)
    alone = (others == -torch.inf).all(-1)  # the only possible id: a logsumexp of nothing has NaN for a gradient
    rest = torch.where(alone, -torch.inf, torch.logsumexp(torch.where(alone[..., None], 0.0, others), -1))
    lse = torch.logaddexp(rest, chosen)
    values = torch.where(outside | ~lse.isfinite(), torch.nan, -softplus(rest - chosen))
    return LogprobResult(
        logprob=torch.where(counted, values, 0.0),
        lse=torch.where(counted, lse, 0.0),
        entropy=torch.where(counted, _entropy(z, lse), 0.0) if call.entropy else None,
        invalid=outside & counted,
    )


def _entropy(z: Tensor, lse: Tensor) -> Tensor:
    log_p = z - lse[..., None]
    return -(log_p.exp() * log_p.clamp_min(-1000.0)).sum(-1)  # 0 log 0 is 0, and no gradient of it overflows


def fits(call: LogprobCall) -> Reason | None:
    """None takes the calls of this shape, a Reason refuses them in words. Asked once a shape: look at metadata only."""
    logits = call.logits
    if logits.numel() < _MOST:
        return None
    text = f"it copies all logits to float32, and takes fewer than 2^31 of them; these are {logits.numel()}"
    return Reason("shape", "unsupported", text, "call it on fewer rows, or name another backend first")


def self_test(device: str) -> None:
    """Raise unless log(1/2) comes out on this device."""
    logits = torch.zeros(2, 2, device=device)
    out = logprob(LogprobCall(logits, torch.tensor([0, 1], device=device), entropy=True))
    found = [*out.logprob.tolist(), *out.entropy.tolist()]
    expected = [-0.6931472, -0.6931472, 0.6931472, 0.6931472]
    if any(abs(f - e) > 1e-5 for f, e in zip(found, expected, strict=True)):
        raise ValueError(f"logprob and entropy of a fair coin are {found}")
