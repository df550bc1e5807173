"""A call of a policy loss as the kernels read it: everything but the log-probabilities and entropies.

Made once a call; policy_loss runs it on all tokens, linear_policy_loss on a block of rows at a time. Rejections, and
corrections that look at more than a token, are the definition's own torch operations, before the kernels. Where a batch
is split over ranks, one collective stands before the kernel of its tokens and one after it.

Legend: N tokens · B sequences · T padded length · P programs · K statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from rlkernel_common.loss_batch import prepare
from rlkernel_common.loss_ranks import Counts, of_all_ranks
from rlkernel_common.sequences import Packed, layout
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.policy_loss import LossConfig, LossStats, PolicyLossCall
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, planned
from rlkernel_triton.policy_loss.kernels import K, count_kernel, loss_kernel, scale_kernel, tokens_kernel, total_kernel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BLOCK: Final = 64 if INTERPRETED else 1024  # a span of tokens is a multiple of this, where a batch is taken in blocks
TILE: Final = 64 if INTERPRETED else 256  # tokens that a program goes through at a time
WARPS: Final = 4
# (fewest tokens of a batch, tokens of a program): the lanes of a program are added once, which costs as much as some
# tiles, but few tokens need all programs they can have. Bits of sums depend on it, and so on the size of the batch.
SPANS: Final = ((0, 64), (257, 128)) if INTERPRETED else ((0, 256), (1 << 18, 2048), (1 << 21, 8192))
_TOTALS: Final = 16 if INTERPRETED else 1024
_PART: Final = 128 if INTERPRETED else 16384  # tokens of a row that one program counts
_SCALED: Final = 256 if INTERPRETED else 1024
# What loss_kernel is passed at run time, in its order.
_POINTERS: Final = (
    "logprob", "entropy", "old", "advantages", "ref", "rollout", "correction", "outside", "mask", "bounds", "index",
    "counts", "denominator", "entropy_denominator", "kl_scale", "entropy_scale", "dlogprob", "dentropy", "partial",
)  # fmt: skip
_COUNTED: Final = 64 if INTERPRETED else 2048


@dataclass(frozen=True)
class TokenWeight:
    """The weight of a token: `number`, over a count on the device, over the tokens of its sequence."""

    number: float
    count: Tensor | None = None  # []
    per_sequence: bool = False


@dataclass(frozen=True)
class LossBatch:
    """What is constant in the current log-probabilities."""

    config: LossConfig
    shape: tuple[int, ...]  # (B, T) or (N,)
    bounds: Tensor | None  # [B + 1]
    sequences: int
    arguments: Mapping[str, Any]  # of loss_kernel: tensors, numbers and constants
    counts: Counts  # of the batch of all ranks
    group: ProcessGroup | None  # those ranks; None: this one
    span: int  # tokens of a program
    plan: Plan | None = None  # of calls of this shape, whose launches are bound once

    @classmethod
    def of(
        cls,
        call: PolicyLossCall | LinearPolicyLossCall,
        config: LossConfig,
        like: Tensor,
        *,
        before: Tensor | None,
        span: int | None = None,
        plan: Plan | None = None,
    ) -> LossBatch:
        """The batch of a checked call.

        With a plan the launches are those of its first call: everything but the values on the device is the same.

        Args:
            call: the call.
            config: what it is configured as.
            like: a tensor of the shape of the tokens.
            before: the current log-probability, with which the rollout is compared where there is no old one.
            span: divides the blocks in which the batch will be taken.
            plan: of calls of this shape.
        """
        shape, old, advantages, rollout = tuple(like.shape), call.old_logprob, call.advantages, call.rollout_logprob
        mask, cu_seqlens, kl_coef, entropy_coef = call.mask, call.cu_seqlens, call.kl_coef, call.entropy_coef
        made, weight, outside, group = None, None, None, call.process_group
        rule = config.correction
        if config.rejection is not None or (rule is not None and (rule.level != "token" or rule.normalize)):
            places = layout(shape, cu_seqlens)
            inside = torch.ones(shape, dtype=torch.bool, device=like.device) if mask is None else mask
            made = prepare(
                call, config, places, mask=inside & places.inside if isinstance(places, Packed) else inside,
                before=before if old is None else old, dtype=torch.float32,
            )  # fmt: skip
            mask, weight, outside = made.mask, made.correction, made.outside
        bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
        per_row = advantages.numel() != like.numel() or advantages.dim() != like.dim()
        counts = _counts(shape, mask, bounds, like.device, plan)
        if made is None:
            tokens, filled = _totals(counts, plan)
            whole = Counts(tokens, filled, counts.shape[0], tokens).whole(group)
        else:
            whole = made.counts
        span = span or next(s for fewest, s in reversed(SPANS) if like.numel() >= fewest)
        on_host = mask is None and bounds is None and group is None
        known = (like.numel(), shape[0], counts.shape[0]) if on_host else whole[:3]
        ranks = 1 if group is None else group.size()
        weight_of_token = _token_weight(config, config.aggregate, call.denominator, shape, known, ranks)
        entropy_weight = weight_of_token
        if config.entropy_aggregate is not None:
            entropy_weight = _token_weight(
                config, config.entropy_aggregate, call.entropy_denominator, shape, known, ranks
            )
        sequences = 1 if bounds is None and len(shape) == 1 else counts.shape[0]
        index = None
        token = config.level == "token"
        if bounds is not None and token and (per_row or weight_of_token.per_sequence or entropy_weight.per_sequence):
            index = layout(shape, bounds).index  # type: ignore[union-attr]
        arguments = {
            **_tensors(
                old=old,
                advantages=advantages,
                ref=call.ref_logprob,
                rollout=rollout,
                correction=weight,
                outside=outside,
                mask=mask,
                bounds=bounds,
                index=index,
                counts=counts,
            ),
            **_of_formula(config, weight_of_token, entropy_weight, kl_coef, entropy_coef),
            "OLD": old is not None,
            "ROLLOUT": rollout is not None,
            "CORRECTION": "none" if rule is None else "token" if weight is None else "given",
            "MASK": mask is not None,
            "PACKED": bounds is not None,
            "ADVANTAGE": "row" if per_row else "token",
            "T": shape[-1],
            "sequences": sequences,
            "LONG_ROWS": shape[-1] >= span,
            "BOUNDED_RATIOS": config.log_ratio_limit == 20.0,
            "SPAN": span,
            "BLOCK": min(TILE, span),
        }
        return cls(config, shape, bounds, sequences, arguments, whole, group, span, plan)

    @property
    def programs(self) -> int:
        """Programs that one pass over the whole batch takes: rows of the partial statistics."""
        n = math.prod(self.shape)
        if self.config.level == "token":
            return -(-n // self.span)
        return self.sequences if n else 0

    def partials(self, device: torch.device) -> Tensor:  # [K, P]
        """Room for what the programs find."""
        return torch.empty(K, self.programs, dtype=torch.float32, device=device)

    def run(
        self,
        logprob: Tensor,  # contiguous, all tokens
        entropy: Tensor | None,
        dlogprob: Tensor | None,  # fp32, all tokens; None: not wanted
        dentropy: Tensor | None,
        partial: Tensor,
        *,
        first: int = 0,
        tokens: int | None = None,
    ) -> None:
        """Loss, gradients and statistics of all tokens, or of `tokens` from `first` on, a multiple of `span`."""
        n = logprob.numel()
        stop = n if tokens is None else first + tokens
        programs = self.programs if tokens is None else triton.cdiv(tokens, self.span)
        if not programs:
            return
        given = self.arguments
        tensors = {
            **given, "logprob": logprob, "entropy": entropy, "dlogprob": dlogprob, "dentropy": dentropy,
            "partial": partial,
        }  # fmt: skip

        def bound(launcher: Launcher) -> Launch:
            fixed = {n: x for n, x in given.items() if n not in _POINTERS}
            return launcher.bind(
                loss_kernel, num_warps=WARPS, **fixed, N=stop, P=self.programs, first=first,
                first_program=first // self.span, ENTROPY=entropy is not None, BONUS=dentropy is not None,
                GRAD=dlogprob is not None,
            )  # fmt: skip

        place = "loss" if tokens is None else f"loss from {first} to {stop}"
        launch = planned(self.plan, place, logprob.device, bound)
        launch((programs,), *[partial if (x := tensors[n]) is None else x for n in _POINTERS])

    def summary(self, partial: Tensor, *, entropy: bool) -> tuple[Tensor, LossStats]:
        """The scalar loss and what happened, all on the device."""
        out = torch.empty(K, dtype=torch.float32, device=partial.device)
        loss = torch.empty((), dtype=torch.float32, device=partial.device)

        if self.group is not None:
            partial = of_all_ranks(partial, self.group)

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(total_kernel, P=partial.shape[1], SIZE=_TOTALS)

        planned(self.plan, "total", partial.device, bound)((K,), partial, loss, out)
        of = out.unbind()
        given = self.arguments
        weighed = given["CORRECTION"] != "none"
        tokens, filled, _sequences, offered, *_ = self.counts
        rejected = None
        if self.config.rejection is not None:
            rejected = (offered - tokens).float() / offered.float().clamp(min=1)
        return loss, LossStats(
            tokens=tokens,
            sequences=filled if len(self.shape) == 2 or self.bounds is not None else None,
            policy_loss=of[1],
            ratio_mean=of[3],
            ratio_min=of[4],
            ratio_max=of[5],
            clip_low=of[6],
            clip_high=of[7],
            clip_dual=of[8],
            approx_kl_k1=of[9],
            approx_kl_k3=of[10],
            effective_sample_size=of[12],
            entropy=of[14] if entropy else None,
            kl_ref=of[15] if given["KL"] != "none" else None,
            rollout_kl=of[16] if given["ROLLOUT"] else None,
            rollout_missing=of[17] if given["ROLLOUT"] else None,
            correction_mean=of[18] if weighed else None,
            correction_clipped=of[19] if weighed else None,
            rejected=rejected,
        )


def _counts(
    shape: tuple[int, ...], mask: Tensor | None, bounds: Tensor | None, device: torch.device, plan: Plan | None
) -> Tensor:
    """[B] int64 tokens in the loss of each sequence; [1] where the call has none."""
    if bounds is not None:
        places = bounds.long().clamp(0, shape[0]).cummax(0).values
        if mask is None:
            return places.diff()
        running = torch.cat([places.new_zeros(1), mask.long().cumsum(0)])
        return running[places].diff()
    if mask is not None:
        return _counted(mask.contiguous(), plan)
    rows = shape[:-1]
    return torch.full((rows[0] if rows else 1,), shape[-1], dtype=torch.int64, device=device)


def _counted(mask: Tensor, plan: Plan | None) -> Tensor:  # mask [B, T] or [N]
    """[B] int64, or [1]. torch would first write the mask out in 8 bytes a token."""
    B, T = mask.shape if mask.dim() == 2 else (1, mask.shape[0])
    parts = triton.cdiv(T, _PART)
    counts = torch.empty(B, parts, dtype=torch.int64, device=mask.device)

    def bound(launcher: Launcher) -> Launch:
        return launcher.bind(count_kernel, T=T, parts=parts, PART=_PART, BLOCK=_COUNTED)

    if counts.numel():
        planned(plan, "count", mask.device, bound)((B, parts), mask.view(torch.uint8), counts)
    return counts[:, 0] if parts == 1 else counts.sum(-1)


def _totals(counts: Tensor, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """[] int64: tokens in the loss, and sequences that have some."""
    out = torch.empty(2, dtype=torch.int64, device=counts.device)

    def bound(launcher: Launcher) -> Launch:
        return launcher.bind(tokens_kernel, sequences=counts.shape[0], SIZE=_TOTALS)

    planned(plan, "tokens", counts.device, bound)((1,), counts, out)
    tokens, filled = out.unbind()
    return tokens, filled


def scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype, plan: Plan | None = None) -> Tensor:
    """The gradient times a scalar, in fp32, rounded once; torch takes five times as long for a scalar on the device."""
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)

    def bound(launcher: Launcher) -> Launch:
        return launcher.bind(scale_kernel, any_alignment=("upstream", "gradient"), N=out.numel(), BLOCK=_SCALED)

    if out.numel():
        launch = planned(plan, f"{out.numel()} scaled {dtype} {gradient.dtype} {upstream.dtype}", out.device, bound)
        launch((triton.cdiv(out.numel(), _SCALED),), upstream, gradient.contiguous(), out)
    return out


def _token_weight(
    config: LossConfig,
    aggregate: str,
    given: float | Tensor | None,
    shape: tuple[int, ...],
    counts: tuple[Tensor | int, ...],  # tokens, sequences that have some, and all of them; numbers: the host knows
    ranks: int,
) -> TokenWeight:
    """The weight of a token that makes `aggregate` a plain sum, and that the mean over ranks."""
    number, count = float(ranks), None
    if aggregate == "token_sum":
        return TokenWeight(number)
    if given is None and aggregate == "token_mean":
        given = counts[0]
    elif given is None:
        given = counts[2] if config.count_empty else counts[1]
    if isinstance(given, Tensor):
        count = given
    else:
        number /= given or 1
    if aggregate == "seq_mean_token_sum_norm":
        number /= float(max(shape[-1], 1) if config.horizon is None else config.horizon)
    return TokenWeight(number, count, aggregate == "seq_mean_token_mean")


def _tensors(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    """Contiguous, flags as bytes; None where not given."""
    flat = {n: None if x is None else x.detach().contiguous() for n, x in tensors.items()}
    return {n: x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x for n, x in flat.items()}


def _of_formula(
    config: LossConfig,
    weight: TokenWeight,
    entropy_weight: TokenWeight,
    kl_coef: float | Tensor,
    entropy_coef: float | Tensor,
) -> dict[str, Any]:
    """Numbers, constants and scalars on the device that the formula takes."""
    gate, rule = config.gamma, config.correction
    inf = float("inf")
    kl = config.kl or "none"
    importance = "none"
    if config.kl_importance:
        importance = "ratio" if config.surrogate in {"clip", "cispo", "sapo"} else "own"
    numbers = {
        "denominator": weight.count, "entropy_denominator": entropy_weight.count, "token_weight": weight.number,
        "entropy_weight": entropy_weight.number,
        "kl_scale": kl_coef if isinstance(kl_coef, Tensor) else None,
        "entropy_scale": entropy_coef if isinstance(entropy_coef, Tensor) else None,
        "kl_coef": 1.0 if isinstance(kl_coef, Tensor) else float(kl_coef),
        "entropy_coef": 1.0 if isinstance(entropy_coef, Tensor) else float(entropy_coef),
        "limit": float(config.log_ratio_limit), "low_bound": float(config.clip[0]),
        "high_bound": float(config.clip[1]), "dual_bound": float(config.dual_clip or 0.0),
        "tau_pos": float(config.tau[0]), "tau_neg": float(config.tau[1]), "k_pos": float(gate.k_pos),
        "k_neg": float(gate.k_neg), "lam_pos": float(gate.lambda_pos), "lam_neg": float(gate.lambda_neg),
        "cap": float(config.ratio_cap), "beta": float(config.dro_beta),
        "kl_input_clamp": float(config.kl_clamp[0]), "kl_clamp": float(config.kl_clamp[1]),
        "correction_low": -inf if rule is None or rule.low is None else float(rule.low),
        "correction_high": inf if rule is None or rule.high is None else float(rule.high),
    }  # fmt: skip
    return {
        **numbers,
        "KIND": config.surrogate,
        "LEVEL": config.level,
        "SHARED": config.level == "sequence" and not config.own_gradient,
        "DUAL": config.dual_clip is not None,
        "KL": kl.removesuffix("+"),
        "STRAIGHT_THROUGH": kl.endswith("+"),
        "IMPORTANCE": importance,
        "DROP": config.correction is not None and config.correction.mode == "mask",
        "PER_SEQUENCE": weight.per_sequence,
        "ENTROPY_PER_SEQUENCE": entropy_weight.per_sequence,
        "HAS_DENOMINATOR": weight.count is not None,
        "HAS_ENTROPY_DENOMINATOR": entropy_weight.count is not None,
        "HAS_KL_SCALE": isinstance(kl_coef, Tensor),
        "HAS_ENTROPY_SCALE": isinstance(entropy_coef, Tensor),
    }
