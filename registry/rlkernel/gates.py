"""Gates of a policy gradient by delight, which is advantage times surprisal: weights that go into the advantages.

    chi_t   = A_t * (-logprob_t)                                      (delight; -logprob is the surprisal, in nats)
    delight   g_t = sigmoid(chi_t / eta),  A'_t = g_t A_t             (Osband, arXiv 2603.14608)
    kondo     g_t = 1 where chi_t >= lambda, else 0,  A'_t = g_t A_t  (Osband, arXiv 2603.20526, eta -> 0)
              g_t ~ Bernoulli(sigmoid((chi_t - lambda) / eta))        (the same, eta > 0)

Surprisal is that of the policy that trains. No gate has a gradient. lambda is a price, or the value that the best
share of the batch's tokens reaches, which is the (1 - share) quantile.

The policy term of every kind of `policy_loss` but gmpo and dro is proportional to the advantage, so that A' gives
g_t times the term of a token, in value and in gradient; a token with g = 0 stays in every denominator, in the KL term
and in the entropy bonus.

Legend: B sequences · T padded length · N packed tokens. Imports torch when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkernel.sequences import starts_of
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gated", "delight_gate", "kondo_gate"]


@dataclass(frozen=True)
class Gated:
    """Advantages behind a gate, without gradient; fp32 (float64 where an input is)."""

    advantages: Tensor  # as logprob: the gate times the advantage, for `policy_loss`; 0 at masked tokens
    gate: Tensor  # as logprob: the weight in [0, 1]; 0 at masked tokens


def delight_gate(
    logprob: Tensor,  # [B, T] or [N]
    advantages: Tensor,  # [B], [B, 1] or as logprob
    *,
    eta: float = 1.0,
    mask: Tensor | None = None,  # as logprob
    cu_seqlens: Tensor | None = None,  # [B + 1]
) -> Gated:
    """The delightful policy gradient: rare successes weigh more, rare failures less.

        gated = rlk.delight_gate(logprob, advantages, mask=mask)
        loss = rlk.policy_loss(logprob, old_logprob, gated.advantages, mask=mask, kind="reinforce").loss

    Args:
        logprob: [B, T] padded, or [N] packed; of the policy that trains.
        advantages: [B], [B, 1] per sequence, or [B, T] per token; packed: [N] per token or [B, 1] per sequence.
        eta: temperature of the gate in nats times advantage; a large one makes every weight 1/2.
        mask: as logprob, bool, True where a token counts; elsewhere every tensor may hold anything.
        cu_seqlens: [B + 1] starts of packed sequences, for advantages per sequence.

    Returns:
        Gated, with tensors of the shape of logprob.

    Raises:
        ArgumentTypeError: another dtype than the ones above.
        ArgumentError: sizes that do not match, or eta <= 0.
    """
    import torch

    A, counted = _tokens(logprob, advantages, mask, cu_seqlens)
    checks.number("eta", eta, above=0.0)
    chi = _delight(logprob, A)
    return _gated(A, chi, torch.sigmoid(chi / eta), counted)


def kondo_gate(
    logprob: Tensor,  # [B, T] or [N]
    advantages: Tensor,  # [B], [B, 1] or as logprob
    *,
    keep: float | None = None,
    price: float | None = None,
    eta: float = 0.0,
    uniform: Tensor | None = None,  # as logprob
    mask: Tensor | None = None,  # as logprob
    cu_seqlens: Tensor | None = None,  # [B + 1]
) -> Gated:
    """The Kondo gate, token by token: those with the most delight are kept as they are, the others weigh nothing.

    The quantile of `keep` is that of this call's tokens: of a micro-batch or of a rank, where the batch is split.

    Args:
        logprob: [B, T] padded, or [N] packed; of the policy that trains.
        advantages: [B], [B, 1] per sequence, or [B, T] per token; packed: [N] per token or [B, 1] per sequence.
        keep: share of the tokens, in (0, 1]: lambda is the delight of the token in place round(keep * tokens), the
            first at least. Tokens that tie with it are kept too.
        price: lambda itself, in nats times advantage; give one of the two.
        eta: temperature; 0 compares with lambda, more needs `uniform`.
        uniform: as logprob, floating, random numbers in [0, 1): a token is kept where its number is below
            sigmoid((chi - lambda) / eta). The caller draws them, so that the gate repeats.
        mask: as logprob, bool, True where a token counts; elsewhere every tensor may hold anything.
        cu_seqlens: [B + 1] starts of packed sequences, for advantages per sequence.

    Returns:
        Gated; its gate is 0 or 1.

    Raises:
        ArgumentTypeError: another dtype than the ones above.
        ArgumentError: sizes that do not match, both or none of keep and price, or eta without uniform.
    """
    import torch

    A, counted = _tokens(logprob, advantages, mask, cu_seqlens)
    checks.number("eta", eta, at_least=0.0)
    checks.aligned("uniform", uniform, logprob.shape, "logprob", kind="floating", beside=logprob, where="logprob")
    if (uniform is not None) != (eta > 0):
        raise ArgumentError("uniform", checks.describe(uniform), f"does not go with eta={eta}", "Give both or none.")
    chi = _delight(logprob, A)
    if (keep is None) == (price is None):
        given = f"keep={keep}, price={price}"
        raise ArgumentError("keep", given, "lambda comes from keep or from price", "Give one of the two.")
    if price is not None:
        level: float | Tensor = checks.number("price", price)
    else:
        level = _quantile(chi, counted, checks.number("keep", keep, above=0.0, at_most=1.0))
    if uniform is None:
        return _gated(A, chi, chi >= level, counted)
    return _gated(A, chi, uniform.detach() < torch.sigmoid((chi - level) / eta), counted)


def _quantile(chi: Tensor, counted: Tensor, keep: float) -> Tensor:
    """[1] the smallest delight of the best share of the tokens that count, anything without tokens. No host waits."""
    import torch

    best = torch.where(counted, chi, -torch.inf).flatten().sort(descending=True).values
    place = (counted.sum() * keep).round().long().clamp(min=1) - 1
    return torch.cat((best, best.new_zeros(1))).gather(0, place.reshape(1))


def _delight(logprob: Tensor, A: Tensor) -> Tensor:
    import torch

    return torch.where(A == 0, 0.0, A * -logprob.detach().to(A.dtype))  # also of a token with probability 0


def _gated(A: Tensor, chi: Tensor, gate: Tensor, counted: Tensor) -> Gated:
    import torch

    gate = torch.where(chi.isnan(), chi, gate.to(A.dtype))  # NaN is no reason to drop a token
    gate = torch.where(counted, gate, 0.0)
    return Gated(torch.where(gate == 0, 0.0, gate * A), gate)


def _tokens(
    logprob: Tensor, advantages: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The advantage of every token, without gradient, and which tokens count; both as logprob."""
    import torch

    checks.tensor("logprob", logprob, ndim=(1, 2), kind="floating")
    checks.tensor("advantages", advantages, ndim=(1, 2), kind="floating")
    checks.same_device("advantages", advantages, logprob, "logprob")
    checks.aligned("mask", mask, logprob.shape, "logprob", kind="bool", beside=logprob, where="logprob")
    counted = torch.ones_like(logprob, dtype=torch.bool) if mask is None else mask
    dtype = torch.promote_types(torch.promote_types(logprob.dtype, advantages.dtype), torch.float)
    A, shape, got = advantages.detach().to(dtype), tuple(logprob.shape), tuple(advantages.shape)
    if len(shape) == 2 and cu_seqlens is not None:
        told = checks.describe(cu_seqlens)
        raise ArgumentError("cu_seqlens", told, "describes packed tokens", "Pass logprob as [N], or a mask.")
    if cu_seqlens is not None:
        starts, B = starts_of(cu_seqlens, logprob), cu_seqlens.shape[0] - 1
        owner = torch.searchsorted(starts, torch.arange(shape[0], device=A.device), right=True) - 1
        counted = counted & (owner >= 0) & (owner < B)
        if got == (B, 1) and B:
            A = A[:, 0][owner.clamp(0, B - 1)]
        elif got == (B, 1):
            A = A.new_zeros(shape)
    elif len(shape) == 2 and got in (shape[:1], (shape[0], 1)):
        A = A.reshape(-1, 1).expand(shape)
    if tuple(A.shape) != shape:
        remedy = "Give one per token, or one per sequence: [B] of [B, T], [B, 1] with cu_seqlens."
        raise ArgumentError("advantages", checks.describe(advantages), f"must go with logprob {list(shape)}", remedy)
    return A, counted
