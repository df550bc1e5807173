"""What each operator returns, as empty tensors: sizes, dtypes and devices of a call's results, from its record alone.

Each function stands for its operator while torch traces: the sizes may be symbols. Contracts are in
`rlkernel_core.spec`; tests/test_compiled_fakes.py compares every function with the results of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentTypeError
from rlkernel_core.quant import layouts
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import spec_of
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import extent_of
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult, sequences_of
from rlkernel_core.spec.attention import AttentionCall, AttentionResult
from rlkernel_core.spec.divergence import DivergenceCall
from rlkernel_core.spec.fake_quantize import FakeQuantizeCall
from rlkernel_core.spec.glu import GluCall
from rlkernel_core.spec.group_filter import GroupFilterCall, GroupFilterResult
from rlkernel_core.spec.grouped_linear import GroupedLinearCall
from rlkernel_core.spec.linear import LinearCall
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.listed_ids import flat_ids
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_core.spec.policy_loss import LossFields, LossResult, LossStats, PolicyLossCall
from rlkernel_core.spec.qmatmul import PAIRS, QmatmulCall
from rlkernel_core.spec.quantize import DequantizeCall, PrepackCall, QuantizeCall
from rlkernel_core.spec.rms_norm import RmsNormCall, RmsNormResult
from rlkernel_core.spec.rope import RopeCall, RopeResult
from rlkernel_core.spec.route import RouteCall, RouteResult
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import RequestParams, SampleResult
from rlkernel_core.spec.shape_rewards import RunningMoments, ShapedRewards, ShapeRewardsCall, sizes
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult


def _state(*given: Any) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or float64 where an operand is."""
    return torch.float64 if any(getattr(x, "dtype", None) == torch.float64 for x in given) else torch.float32


def _logprob(call: LogprobCall) -> LogprobResult:
    return _of_rows(call, call.logits.shape[:-1], _state(call.logits), call.top_logprobs)


def _linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    return _of_rows(call, call.hidden.shape[:-1], _state(call.hidden, call.weight, call.bias), 0)


def _of_rows(call: LogprobCall | LinearLogprobCall, rows: torch.Size, state: torch.dtype, n: int) -> LogprobResult:
    ids = flat_ids(call.ids)

    def row(*more: int, dtype: torch.dtype = state) -> Tensor:
        return ids.new_empty((*rows, *more), dtype=dtype)

    return LogprobResult(
        logprob=ids.new_empty(ids.shape, dtype=state),
        lse=row(),
        entropy=row() if call.entropy else None,
        top_ids=row(n, dtype=torch.int64) if n else None,
        top_logprobs=row(n) if n else None,
        log_kept_mass=row() if call.support is not None else None,
        invalid=ids.new_empty(ids.shape, dtype=torch.bool),
    )


def _policy_loss(call: PolicyLossCall) -> LossResult:
    state = _state(call.logprob)
    stats = _stats(call, call.logprob, state, entropy=call.entropy is not None)
    return LossResult(call.logprob.new_empty((), dtype=state), stats)


def _linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    ids, state = call.ids, _state(call.hidden, call.weight, call.bias)
    stats = _stats(call, ids, state, entropy=call.entropy)
    entropy = ids.new_empty(ids.shape, dtype=state) if call.entropy else None
    return LossResult(ids.new_empty((), dtype=state), stats, ids.new_empty(ids.shape, dtype=state), entropy)


def _stats(call: LossFields, of: Tensor, state: torch.dtype, *, entropy: bool) -> LossStats:
    def number(dtype: torch.dtype = state) -> Tensor:
        return of.new_empty((), dtype=dtype)

    rollout, correction = call.rollout_logprob is not None, call.correction is not None
    optional = {
        "entropy": entropy,
        "kl_ref": call.ref_logprob is not None,
        "rollout_kl": rollout,
        "rollout_missing": rollout,
        "correction_mean": correction,
        "correction_clipped": correction,
        "rejected": call.rejection is not None,
    }
    found: dict[str, Any] = {f.name: number() for f in fields(LossStats) if optional.get(f.name, True)}
    sequences = None if of.dim() == 1 and call.cu_seqlens is None else number(torch.int64)
    return LossStats(**found | {"tokens": number(torch.int64), "sequences": sequences})


def _sample(call: SampleCall) -> SampleResult:
    return _drawn(call, call.logits, _state(call.logits))


def _lm_head_sample(call: LmHeadSampleCall) -> SampleResult:
    return _drawn(call, call.hidden, _state(call.hidden, call.weight, call.bias))


def _drawn(call: RequestParams, of: Tensor, state: torch.dtype) -> SampleResult:
    def row(*more: int, dtype: torch.dtype = state) -> Tensor:
        return of.new_empty((of.shape[0], *more), dtype=dtype)

    n, capacity = call.top_n, call.kept_capacity
    return SampleResult(
        token=row(dtype=torch.int64),
        logprob=row(),
        log_kept_mass=row(),
        kept_count=row(dtype=torch.int32),
        status=row(dtype=torch.int32),
        threshold=row(),
        threshold_id=row(dtype=torch.int64),
        raw_logprob=row() if call.raw_logprob else None,
        entropy=row() if call.entropy else None,
        kept_ids=row(capacity, dtype=torch.int64) if capacity else None,
        top_ids=row(n, dtype=torch.int64) if n else None,
        top_logprobs=row(n) if n else None,
        rank=row(dtype=torch.int32) if call.rank else None,
    )


def _verify(call: VerifyCall) -> VerifyResult:
    logits, state = call.target_logits, _state(call.target_logits)

    def row(dtype: torch.dtype = state) -> Tensor:
        return logits.new_empty(logits.shape[0], dtype=dtype)

    return VerifyResult(
        accepted=logits.new_empty(call.cu_draft.shape[0] - 1, dtype=torch.int32),
        token=row(torch.int64),
        logprob=row(),
        log_kept_mass=row(),
        kept_count=row(torch.int32),
        status=row(torch.int32),
        raw_logprob=row() if call.raw_logprob else None,
    )


def _quantize(call: QuantizeCall) -> QuantTensor:
    spec, weight = spec_of(call.format), call.weight
    shape = (int(weight.shape[0]), int(weight.shape[1]))  # packed sizes round up: each weight has a graph of its own
    storage = codec_of(spec).storage(spec, shape).items()
    parts = {name: weight.new_empty(size, dtype=dtype) for name, (size, dtype) in storage}
    default = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    return QuantTensor(spec, shape, call.dtype or default, parts)


def _dequantize(call: DequantizeCall) -> Tensor:
    return torch.empty(call.w.shape, dtype=call.dtype or call.w.dtype, device=call.w.device)


def _fake_quantize(call: FakeQuantizeCall) -> Tensor:
    own = torch.float32 if call.weight.dtype == torch.float64 else call.weight.dtype
    return call.weight.new_empty(call.weight.shape, dtype=call.dtype or own)


def _prepack(call: PrepackCall) -> QuantTensor:
    layout = layouts.TILED if call.layout is None else call.layout
    if layout not in layouts.KNOWN or call.w.layout not in layouts.KNOWN:
        raise ArgumentTypeError(
            "layout", repr(layout), "belongs to a backend, and a graph knows canonical weights only",
            "Pack the weight outside torch.compile.",
        )  # fmt: skip
    return layouts.pack(call.w, layout)


def _qmatmul(call: QmatmulCall) -> Tensor:
    width = call.w.shape[0] if call.ends is None else call.w.shape[0] // call.ends.shape[0]
    width = width // 2 if call.activation in PAIRS else width
    return call.x.new_empty((*call.x.shape[:-1], width))


def _advantage(call: AdvantageCall) -> AdvantageResult:
    extent, kind, state = extent_of(call), KINDS[call.kind], _state(*call.as_dict().values())
    rewards, B = call.rewards, extent.sequences
    grouped = kind.family == "group"
    whiten = (kind.whiten if call.whiten == "auto" else call.whiten) != "none"
    of_group = (B, rewards.shape[1]) if call.kind == "gdpo" else (B,)

    def new(shape: tuple[int, ...], dtype: torch.dtype = state) -> Tensor:
        return rewards.new_empty(shape, dtype=dtype)

    moments = {name: new(()) if whiten else None for name in ("count", "mean", "var", "rstd")}
    by_token = not grouped and not (call.kind == "remax" and not extent.token_rewards)
    tokens = extent.tokens or (B,)
    return AdvantageResult(
        advantages=new(tokens if extent.token_output else (B,)),
        returns=new(tokens) if by_token else None,
        stats=AdvantageStats(
            invalid=new((B,), torch.bool),
            group_count=new(of_group, torch.int64) if grouped or call.kind == "otb" else None,
            group_mean=new(of_group) if grouped else None,
            group_std=new(of_group) if grouped else None,
            constant=new(of_group, torch.bool) if grouped else None,
            **moments,
        ),
    )


def _affine_suffix_scan(call: AffineSuffixScanCall) -> ScanResult:
    b, state = call.b, _state(call.b, call.a, call.init)
    return ScanResult(b.new_empty(b.shape, dtype=state), b.new_empty(sequences_of(call), dtype=state))


def _whiten(call: WhitenCall) -> WhitenResult:
    x, state = call.x, _state(call.x)
    return WhitenResult(x.new_empty(x.shape, dtype=state), *(x.new_empty((), dtype=state) for _ in range(4)))


def _group_filter(call: GroupFilterCall) -> GroupFilterResult:
    rewards = call.rewards
    keep = (rewards.new_empty(rewards.shape[0], dtype=torch.bool) for _ in range(2))
    return GroupFilterResult(*keep, *(rewards.new_empty((), dtype=torch.int64) for _ in range(3)))


def _shape_rewards(call: ShapeRewardsCall) -> ShapedRewards:
    (B, tokens), x, state = sizes(call), call.rewards, _state(call.rewards, call.logprob, call.ref_logprob)

    def new(shape: tuple[int, ...]) -> Tensor:
        return x.new_empty(shape, dtype=state)

    by_token = tokens is not None and tuple(x.shape) == tokens and tuple(x.shape) != (B,)
    whole = tokens is not None and (by_token or call.kl != "none" or call.output == "token")
    running = not by_token and call.normalize == "running"
    return ShapedRewards(
        rewards=new(tokens if whole and tokens is not None else (B,)),
        kl=new((B,)) if call.kl != "none" else None,
        penalty=new((B,)) if not by_token and call.max_length is not None else None,
        running=RunningMoments(new(()), new(()), new(())) if running else None,
    )


def _linear(call: LinearCall) -> Tensor:
    return call.x.new_empty((*call.x.shape[:-1], call.weight.shape[0]))


def _grouped_linear(call: GroupedLinearCall) -> Tensor:
    return call.x.new_empty(call.x.shape[0], call.weight.shape[1])


def _route(call: RouteCall) -> RouteResult:
    (T, E), x = call.logits.shape, call.logits
    ids, gates = x.new_empty(T, call.top_k, dtype=torch.int64), x.new_empty(T, call.top_k, dtype=_state(x))
    return RouteResult(gates, ids, ids.new_empty(T * call.top_k), ids.new_empty(E, dtype=torch.int32))


def _divergence(call: DivergenceCall) -> Tensor:
    return call.logits.new_empty(call.logits.shape[:-1], dtype=_state(call.logits))


def _linear_divergence(call: LinearDivergenceCall) -> Tensor:
    return call.hidden.new_empty(call.hidden.shape[:-1], dtype=_state(call.hidden))


def _rms_norm(call: RmsNormCall) -> RmsNormResult:
    y, s = (call.x.new_empty(call.x.shape) for _ in range(2))
    return RmsNormResult(y, None if call.residual is None else s)


def _rope(call: RopeCall) -> RopeResult:
    return RopeResult(*(x.new_empty(x.shape) for x in (call.q, call.k)))


def _attention(call: AttentionCall) -> AttentionResult:
    q = call.q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return AttentionResult(q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide))


def _glu(call: GluCall) -> Tensor:
    return call.x.new_empty((*call.x.shape[:-1], call.x.shape[-1] // 2))


FAKES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "logprob": _logprob,
    "linear_logprob": _linear_logprob,
    "policy_loss": _policy_loss,
    "linear_policy_loss": _linear_policy_loss,
    "sample": _sample,
    "lm_head_sample": _lm_head_sample,
    "verify": _verify,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "prepack": _prepack,
    "qmatmul": _qmatmul,
    "advantage": _advantage,
    "affine_suffix_scan": _affine_suffix_scan,
    "whiten": _whiten,
    "group_filter": _group_filter,
    "shape_rewards": _shape_rewards,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "route": _route,
    "divergence": _divergence,
    "linear_divergence": _linear_divergence,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "attention": _attention,
    "glu": _glu,
}
