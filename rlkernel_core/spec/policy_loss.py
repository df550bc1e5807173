"""policy_loss@1: the scalar loss of a policy-gradient step from log-probabilities, with its statistics.

    d_t = logprob_t - old_t;  r_t = e^(d_t);  s_i = exp(mean over the sequence of d_t);  rho = r_t or s_i by `level`
    loss = sum_t omega_t (w_t l_t + kl_coef * kl_t) - entropy_coef * sum_t omega'_t H_t

    clip       l = -min(rho A, clip(rho, 1 - low, 1 + high) A);  A < 0 and dual_clip c: at most -c A
    cispo      l = -sg(clip(rho, 1 - low, 1 + high)) A logprob
    sapo       l = -(4 / tau) sigmoid(tau (rho - 1)) A,  tau = tau[0] where A > 0, else tau[1]
    gmpo       l = -A exp(mean of d_t clipped to [-low, high] on the side that helps A)
    vespo      l = -sg(exp(lambda + k log v - lambda v)) A logprob,  log v = sum_t (d_t + log w_t) in [log 1e-8, 20]
    reinforce  l = -A logprob
    dppo       l = -sg(min(r, ratio_cap)) A logprob where the divergence is within `clip`, else 0
    dro        l = -(A logprob - dro_beta d^2 / 2)

sg is stop-gradient, w the off-policy correction (no gradient), omega the aggregation (see `aggregate` below),
kl one of `KLS` on q = logprob - ref: k1 q, abs |q|, k2 q^2 / 2, k3 e^(-q) - 1 + q, low_var k3 clamped; a trailing
"+" keeps the value and takes the gradient of k2. Sources: KINDS in policy_kinds.py; KL estimators: Schulman 2020,
joschu.net/blog/kl-approx.html.

Legend: B sequences · T padded length · N packed tokens · S sequences that count · L horizon.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core.spec import policy_checks
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, GRAD, Feature, OpCall, OpSpec, Tolerance
from rlkernel_core.spec.policy_clauses import CLAUSES
from rlkernel_core.spec.policy_kinds import (
    AGGREGATES,
    KINDS,
    KLS,
    Correction,
    GammaGate,
    LossConfig,
    Rejection,
)
from rlkernel_core.spec.policy_presets import policy_loss_preset

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall

__all__ = [
    "KINDS",
    "SPEC",
    "Correction",
    "GammaGate",
    "LossConfig",
    "LossResult",
    "LossStats",
    "PolicyLossCall",
    "Rejection",
    "check",
    "configure",
    "features",
    "loss_needed",
    "policy_loss_preset",
]


@dataclass(frozen=True)
class LossStats:
    """What happened in a loss: 0-dim tensors on the device, without gradient; means are over tokens in the loss.

    Nothing here synchronizes. With no token in the loss every statistic is 0. With a process group they are those of
    the batch of all ranks, the same bits on every rank.
    """

    tokens: Tensor  # int64: tokens in the loss (after rejection)
    sequences: Tensor | None  # int64: sequences with at least one token in the loss; None without sequences
    policy_loss: Tensor  # the policy term alone, aggregated
    ratio_mean: Tensor  # of rho as the kind uses it, before clipping (gmpo clips inside its own; vespo: v)
    ratio_min: Tensor  # the smallest of the same
    ratio_max: Tensor  # and the largest
    clip_low: Tensor  # fraction of tokens held at the lower bound (their policy gradient is 0, but for cispo)
    clip_high: Tensor  # ... at the upper bound
    clip_dual: Tensor  # ... at dual_clip or ratio_cap
    approx_kl_k1: Tensor  # mean of -d, estimates KL(old || current)
    approx_kl_k3: Tensor  # mean of e^d - 1 - d, d within +-20: the same without negative values
    effective_sample_size: Tensor  # (sum v)^2 / (n sum v^2) in (0, 1], v = rho * w
    entropy: Tensor | None = None  # mean entropy, nats; None if none was given
    kl_ref: Tensor | None = None  # mean of the KL estimate to the reference, nats, before kl_importance
    rollout_kl: Tensor | None = None  # nats, mean of e^x - 1 - x, x = old - rollout within +-20: KL(rollout || old)
    rollout_missing: Tensor | None = None  # fraction of tokens whose rollout_logprob is NaN (taken as equal to old)
    correction_mean: Tensor | None = None  # mean of w
    correction_clipped: Tensor | None = None  # fraction of tokens whose weight was outside [low, high]
    rejected: Tensor | None = None  # fraction of the masked-in tokens that were rejected


@dataclass(frozen=True)
class LossResult:
    """What policy_loss and linear_policy_loss return."""

    loss: Tensor  # 0-dim, fp32 (float64 for float64 inputs), differentiable
    stats: LossStats | None = None  # what happened; None if not claimed
    logprob: Tensor | None = None  # linear_policy_loss: [N] or [B, T], detached; masked 0; None if not claimed
    entropy: Tensor | None = None  # linear_policy_loss with entropy=True: [N] or [B, T] nats, detached; masked 0


@dataclass(slots=True, eq=False, kw_only=True)
class LossFields:
    """Arguments that policy_loss and linear_policy_loss share. See `policy_loss`."""

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    kind: str = "grpo"
    level: str | None = None
    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    log_ratio_limit: float | None = None
    tau: tuple[float, float] | None = None
    gamma: GammaGate | None = None
    ratio_cap: float | None = None
    dro_beta: float | None = None
    aggregate: str | None = None
    denominator: float | Tensor | None = None
    horizon: float | None = None
    count_empty: bool = False
    ref_logprob: Tensor | None = None
    kl: str | None = None
    kl_coef: float | Tensor = 0.0
    kl_clamp: tuple[float, float] | None = None
    kl_importance: bool = False
    entropy_coef: float | Tensor = 0.0
    entropy_aggregate: str | None = None
    entropy_denominator: float | Tensor | None = None
    rollout_logprob: Tensor | None = None
    correction: Correction | None = None
    rejection: Rejection | None = None
    process_group: ProcessGroup | None = None


@dataclass(slots=True, eq=False)
class PolicyLossCall(LossFields, OpCall[LossResult]):
    """Policy-gradient loss of one batch, differentiable in `logprob` and `entropy`.

    An option left at None takes what the source of the kind states (KINDS); an option that the kind does not have is
    refused. All other tensors are constants and must not require a gradient. Arithmetic is fp32 (float64 for float64).

    Args:
        logprob: [B, T] padded, or [N] packed; of the current policy.
        old_logprob: as logprob, of the policy that the ratio is taken against; None: the current one, detached (r = 1).
        advantages: [B] per sequence or [B, T] per token; packed: [N] per token or [B, 1] per sequence.
        mask: as logprob, bool, True where a token counts; elsewhere every tensor may hold anything.
        cu_seqlens: [B + 1] int32 or int64 sequence starts of a packed batch, cu_seqlens[0] == 0; tokens from
            cu_seqlens[-1] on do not count. [N] without it is a bag of tokens: nothing per sequence can be asked for.
        kind: ppo, grpo, dr_grpo, dapo, gspo, gspo_token, luspo, cispo, sapo, gmpo, vespo, reinforce, dppo_tv,
            dppo_kl, dro.
        level: "token" (rho = r_t) or "sequence" (rho = s_i).
        clip: (low, high): rho within [1 - low, 1 + high]; gmpo: d within [-low, high]; dppo: divergence thresholds
            for A <= 0 and A > 0. math.inf switches a side off.
        dual_clip: c > 1: where A < 0 the loss is at most -c A (arXiv 1912.09729; TRL's `delta` for c >= 1 + high).
        log_ratio_limit: d (or the log of s) is clamped to +- this, gradient 0 outside; math.inf for none.
        tau: (positive, negative) temperatures of sapo.
        gamma: the gate of vespo.
        ratio_cap: upper bound of dppo's detached ratio.
        dro_beta: strength of dro's quadratic penalty.
        aggregate: n = tokens that count, S = sequences with such tokens, n_i = such tokens of sequence i:
            token_mean: omega = 1 / n;  token_sum: 1;  seq_mean_token_sum: 1 / S;
            seq_mean_token_mean: 1 / (S n_i);  seq_mean_token_sum_norm: 1 / (S L).
        denominator: used instead of the n or S that is counted. For micro-batches: the count of the whole step, and
            the losses of its micro-batches *add up* to that of the step; with process_group, of all ranks. Without
            process_group the same holds for ranks: with the global count the *sum* of their losses is that of the
            whole batch; where gradients are averaged over ranks (DDP, FSDP) pass global count / ranks, and the *mean*
            is.
        horizon: L of seq_mean_token_sum_norm; default T, required for packed batches and with process_group.
        count_empty: S counts all B sequences, those without tokens too.
        ref_logprob: as logprob, of the reference policy.
        kl: k1, abs, k2, k3 (default), low_var, or k1+, abs+, k3+, low_var+.
        kl_coef: weight of the KL term, a number or a 0-dim tensor.
        kl_clamp: low_var: q within +- the first, the result at most the second; default (20, 10); gradient 0 outside.
        kl_importance: multiply the KL by the ratio, with the ratio's gradient (arXiv 2512.02556): rho for clip, sapo
            and cispo, else r. The gradient of r * k3 is r * q: unbiased for the reverse KL off-policy.
        entropy: as logprob, nats.
        entropy_coef: weight of the entropy bonus, a number or a 0-dim tensor.
        entropy_aggregate: aggregation of the bonus, where not that of the policy term.
        entropy_denominator: its denominator; only with entropy_aggregate.
        rollout_logprob: as logprob, of the engine that sampled; NaN where it could not tell (taken as equal to old).
        correction: importance weight for old against rollout, on the policy term only; vespo takes a token-level one
            into its gate, gmpo none at token level.
        rejection: tokens or sequences to take out of the loss mask.
        process_group: ranks over which the batch is split, those whose gradients are averaged (DDP, FSDP); ranks that
            hold the same tokens do not belong in it. Counts, statistics and loss are those of all ranks, and equal on
            every rank. The gradient is, by definition, that of the sum of the losses that the ranks return: ranks
            times what this rank's tokens add to the loss, so that the *mean* of the ranks' gradients is that of the
            whole batch. Where gradients are summed instead, divide the loss by process_group.size(). Every rank
            calls with the same options, also one without tokens, and takes its gradient with the same upstream
            factor. Two all-gathers of at most 20 numbers a rank in forward, none in backward. A sequence lies on one
            rank: where context parallelism cuts sequences, pass a rank's tokens as [N] without cu_seqlens.

    Raises:
        ArgumentError: wrong rank, sizes or dtype; an option that the kind does not have; a constant that requires a
            gradient; an option whose tensor is missing; a process group without horizon.
    """

    logprob: Tensor
    old_logprob: Tensor | None
    advantages: Tensor
    _: KW_ONLY
    entropy: Tensor | None = None


def configure(call: PolicyLossCall) -> LossConfig:
    """The options of a call with the defaults of its kind."""
    return policy_checks.configure(call, entropy=call.entropy)


def check(call: PolicyLossCall) -> None:
    """Checks shared by all implementations; reads no value off the device."""
    policy_checks.check_tensors(call, configure(call), call.logprob, name="logprob", entropy=call.entropy)


def loss_needed(call: PolicyLossCall | LinearPolicyLossCall) -> dict[str, object]:
    """Feature -> whether the loss arguments need it, where the name of an argument does not say so."""
    kind = KINDS.get(call.kind)
    level = call.level or (kind.levels[0] if kind else "token")
    aggregate = call.aggregate or (kind.aggregate if kind else "token_mean")
    return {
        f"aggregate:{aggregate}": True,
        f"kl:{call.kl or 'k3'}": call.ref_logprob is not None,
        "level:sequence": level == "sequence",
        "packed": call.cu_seqlens is not None,
        "on_policy": call.old_logprob is None,
        "rollout": call.rollout_logprob is not None,
    }


features: tuple[Feature, ...] = (
    GRAD,
    DETERMINISTIC,
    CAPTURABLE,
    *(Feature(f"kind:{name}", f"the {name} loss ({kind.source})") for name, kind in KINDS.items()),
    *(Feature(f"aggregate:{name}", f"aggregation {name}, with local and given denominators") for name in AGGREGATES),
    *(Feature(f"kl:{name}", f"the KL estimator {name} to a reference policy") for name in KLS),
    Feature("level:sequence", "ratio and clipping per sequence"),
    Feature("mask", "masked tokens count nowhere, whatever they hold"),
    Feature("packed", "sequences packed end to end, described by cu_seqlens"),
    Feature("on_policy", "old_logprob=None: the ratio is 1 and carries its gradient"),
    Feature("count_empty", "means over sequences that count those without tokens too"),
    Feature("stats", "statistics of what happened in the loss are returned"),
    Feature("dual_clip", "bounded loss where the advantage is negative and the ratio large"),
    Feature("kl_importance", "KL term times the differentiable ratio"),
    Feature("entropy", "entropy bonus and statistic"),
    Feature("entropy_aggregate", "the entropy bonus aggregated in another way than the policy term"),
    Feature("rollout", "statistics of old against rollout log-probabilities"),
    Feature("correction", "off-policy importance weights, truncated or masked, per token and per sequence"),
    Feature("rejection", "tokens and sequences taken out of the loss mask"),
    Feature("process_group", "a batch that is split over ranks is aggregated as one"),
)

SPEC = OpSpec(
    name="policy_loss",
    record=PolicyLossCall,
    summary="policy-gradient losses with KL, entropy, off-policy correction and statistics",
    primary="logprob",
    one_of=("kind", "aggregate"),
    differentiable=("logprob", "entropy"),
    carrying=("loss",),
    optional=("stats",),
    check=check,
    needed=loss_needed,
    features=features,
    clauses=CLAUSES,
    tolerances=(
        Tolerance("loss", "float32", 1e-6, 1e-5, "relative to the sum of |omega l|; fp32 sums of up to 1e6 tokens"),
        Tolerance("loss", "float64", 1e-12, 1e-10, "float64 throughout"),
        Tolerance("grad_logprob", "float32", 1e-9, 2e-5, "e^d in fp32 for |d| <= 20 has relative error 20 * 6e-8"),
        Tolerance("grad_logprob", "bfloat16", 1e-9, 2**-8, "one rounding to a 7-bit mantissa"),
        Tolerance(
            "grad_logprob", "float16", 6e-8, 2**-11, "one rounding to a 10-bit mantissa; the least number is 6e-8"
        ),
        Tolerance("grad_logprob", "float64", 1e-14, 1e-10, "float64 throughout"),
        Tolerance("grad_entropy", "float32", 1e-9, 1e-6, "a coefficient times omega"),
        Tolerance("grad_entropy", "bfloat16", 1e-9, 2**-8, "one rounding to a 7-bit mantissa"),
        Tolerance(
            "grad_entropy", "float16", 6e-8, 2**-11, "one rounding to a 10-bit mantissa; the least number is 6e-8"
        ),
        Tolerance("grad_entropy", "float64", 1e-14, 1e-10, "float64 throughout"),
        Tolerance("stats", "float32", 1e-6, 1e-5, "as loss; fractions are exact but at a bound within rounding"),
        Tolerance("stats", "float64", 1e-12, 1e-10, "float64 throughout"),
    ),
)
