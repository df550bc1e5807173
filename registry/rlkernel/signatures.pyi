# The public operators with their signatures. Written by tools/signatures.py; do not edit.
# Each is a function of its call's arguments; `bind`, of the same, gives one that keeps to the implementation that
# takes this call.
# ruff: noqa: A002 arguments are named by the records

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Generator, Tensor
from torch.distributed import ProcessGroup

from rlkernel.plans import Choice
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.advantage import AdvantageResult
from rlkernel_core.spec.affine_suffix_scan import ScanResult
from rlkernel_core.spec.attention import AttentionResult
from rlkernel_core.spec.form import OpSpec
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, GraphedCallable
from rlkernel_core.spec.group_filter import GroupFilterResult
from rlkernel_core.spec.logprob import LogprobResult, Support
from rlkernel_core.spec.policy_kinds import Correction, GammaGate, Rejection
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.rms_norm import RmsNormResult
from rlkernel_core.spec.rollouts import Field, RolloutBuffer
from rlkernel_core.spec.rope import RopeResult
from rlkernel_core.spec.route import RouteResult
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists
from rlkernel_core.spec.shape_rewards import RunningMoments, ShapedRewards
from rlkernel_core.spec.verify import VerifyResult
from rlkernel_core.spec.whiten import WhitenResult

_R_co = TypeVar("_R_co", covariant=True)

class Operator(Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str

class _AdvantageFunction(Protocol[_R_co]):
    def __call__(
        self,
        rewards: Tensor,
        *,
        kind: str,
        group: int | Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        values: Tensor | None = None,
        gamma: float = 1.0,
        lam: float | Tensor = 1.0,
        lam_value: float | Tensor | None = None,
        length_adaptive: float | None = None,
        bootstrap: Tensor | None = None,
        dones: Tensor | None = None,
        done_index: str = "after",
        turns: Tensor | None = None,
        ratio: Tensor | None = None,
        ratio_clip: float | None = 1.0,
        trace_clip: float | None = 1.0,
        q_values: Tensor | None = None,
        baseline: Tensor | None = None,
        in_stats: Tensor | None = None,
        in_loss: Tensor | None = None,
        valid_range: tuple[float, float] | None = None,
        weights: Tensor | None = None,
        reward_weights: Tensor | None = None,
        step_rewards: Tensor | None = None,
        anchor: Tensor | None = None,
        step_weight: float = 1.0,
        logprob: Tensor | None = None,
        sum_pi_squared: Tensor | None = None,
        leave_one_out: bool = False,
        scale: str = "auto",
        ddof: int = 1,
        eps: float = 1e-06,
        eps_mode: str = "std_add",
        min_std: float = 0.0,
        low_std: str = "zero",
        singleton: str = "zero",
        constant: str = "zero",
        invalid: str = "zero",
        masked_time: str = "skip",
        masked_out: str = "zero",
        whiten: str = "auto",
        whiten_level: str = "auto",
        whiten_ddof: int = 1,
        whiten_eps: float = 1e-08,
        whiten_eps_mode: str = "var_add",
        process_group: ProcessGroup | None = None,
        reward_level: str = "auto",
        output: str = "auto",
    ) -> _R_co: ...

class _Advantage(_AdvantageFunction[AdvantageResult], Operator, Protocol):
    bind: _AdvantageFunction[_AdvantageFunction[AdvantageResult]]

advantage: _Advantage

class _AffineSuffixScanFunction(Protocol[_R_co]):
    def __call__(
        self,
        b: Tensor,
        a: float | Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        init: Tensor | None = None,
        exclusive: bool = False,
        masked_out: str = "zero",
    ) -> _R_co: ...

class _AffineSuffixScan(_AffineSuffixScanFunction[ScanResult], Operator, Protocol):
    bind: _AffineSuffixScanFunction[_AffineSuffixScanFunction[ScanResult]]

affine_suffix_scan: _AffineSuffixScan

class _AttentionFunction(Protocol[_R_co]):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_q: Tensor,
        cu_k: Tensor | None = None,
        page_table: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_k: int | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> _R_co: ...

class _Attention(_AttentionFunction[AttentionResult], Operator, Protocol):
    bind: _AttentionFunction[_AttentionFunction[AttentionResult]]

attention: _Attention

class _CaptureFunction(Protocol[_R_co]):
    def __call__(
        self,
        fn: Callable[..., Any],
        example: Any,
        *,
        buckets: Sequence[Bucket] | None = None,
        pad: Mapping[str, float] | None = None,
        static: Sequence[Any] | None = None,
        mutates: Sequence[Any] | None = None,
        outputs: str = "clone",
        rng: str = "follow",
        generators: Sequence[Generator] | None = None,
        verify: str = "auto",
        guard: str = "sync",
        on_guard_fail: str = "recapture",
        on_capture_error: str = "raise",
        warmup: int = 3,
        max_graphs: int = 32,
        group: CaptureGroup | None = None,
        collectives: bool = False,
        autograd: bool = False,
    ) -> _R_co: ...

class _Capture(_CaptureFunction[GraphedCallable], Operator, Protocol):
    bind: _CaptureFunction[_CaptureFunction[GraphedCallable]]

capture: _Capture

class _DequantizeFunction(Protocol[_R_co]):
    def __call__(
        self,
        w: QuantTensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> _R_co: ...

class _Dequantize(_DequantizeFunction[Tensor], Operator, Protocol):
    bind: _DequantizeFunction[_DequantizeFunction[Tensor]]

dequantize: _Dequantize

class _DivergenceFunction(Protocol[_R_co]):
    def __call__(
        self,
        logits: Tensor,
        teacher: Tensor,
        *,
        kind: str = "forward_kl",
        beta: float | None = None,
        temperature: float | Tensor = 1.0,
        teacher_temperature: float | Tensor | None = None,
        teacher_ids: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> _R_co: ...

class _Divergence(_DivergenceFunction[Tensor], Operator, Protocol):
    bind: _DivergenceFunction[_DivergenceFunction[Tensor]]

divergence: _Divergence

class _FakeQuantizeFunction(Protocol[_R_co]):
    def __call__(
        self,
        weight: Tensor,
        format: str | QuantSpec,
        *,
        dtype: torch.dtype | None = None,
        clipped: bool = False,
    ) -> _R_co: ...

class _FakeQuantize(_FakeQuantizeFunction[Tensor], Operator, Protocol):
    bind: _FakeQuantizeFunction[_FakeQuantizeFunction[Tensor]]

fake_quantize: _FakeQuantize

class _GluFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        *,
        activation: str,
    ) -> _R_co: ...

class _Glu(_GluFunction[Tensor], Operator, Protocol):
    bind: _GluFunction[_GluFunction[Tensor]]

glu: _Glu

class _GroupFilterFunction(Protocol[_R_co]):
    def __call__(
        self,
        rewards: Tensor,
        *,
        group: int | Tensor,
        rule: str = "std",
        threshold: float = 0.0,
        low: float = 0.0,
        high: float = 1.0,
        ddof: int = 1,
        valid: Tensor | None = None,
        min_members: int = 1,
        combine: str = "any",
    ) -> _R_co: ...

class _GroupFilter(_GroupFilterFunction[GroupFilterResult], Operator, Protocol):
    bind: _GroupFilterFunction[_GroupFilterFunction[GroupFilterResult]]

group_filter: _GroupFilter

class _GroupedLinearFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> _R_co: ...

class _GroupedLinear(_GroupedLinearFunction[Tensor], Operator, Protocol):
    bind: _GroupedLinearFunction[_GroupedLinearFunction[Tensor]]

grouped_linear: _GroupedLinear

class _LinearFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        group: ProcessGroup | None = None,
        split: Literal["none", "row", "column"] = "none",
    ) -> _R_co: ...

class _Linear(_LinearFunction[Tensor], Operator, Protocol):
    bind: _LinearFunction[_LinearFunction[Tensor]]

linear: _Linear

class _LinearDivergenceFunction(Protocol[_R_co]):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher: Tensor,
        *,
        teacher_weight: Tensor | None = None,
        kind: str = "forward_kl",
        beta: float | None = None,
        temperature: float | Tensor = 1.0,
        teacher_temperature: float | Tensor | None = None,
        teacher_ids: Tensor | None = None,
        mask: Tensor | None = None,
        backward: str = "recompute",
    ) -> _R_co: ...

class _LinearDivergence(_LinearDivergenceFunction[Tensor], Operator, Protocol):
    bind: _LinearDivergenceFunction[_LinearDivergenceFunction[Tensor]]

linear_divergence: _LinearDivergence

class _LinearLogprobFunction(Protocol[_R_co]):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | QuantTensor,
        ids: Tensor | TokenLists,
        *,
        bias: Tensor | None = None,
        lora: LoRA | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        mask: Tensor | None = None,
        entropy: bool = False,
        support: Support | None = None,
        backward: str = "auto",
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
        partial_grad: bool = False,
    ) -> _R_co: ...

class _LinearLogprob(_LinearLogprobFunction[LogprobResult], Operator, Protocol):
    bind: _LinearLogprobFunction[_LinearLogprobFunction[LogprobResult]]

linear_logprob: _LinearLogprob

class _LinearPolicyLossFunction(Protocol[_R_co]):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        old_logprob: Tensor | None,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        kind: str = "grpo",
        level: str | None = None,
        clip: tuple[float, float] | None = None,
        dual_clip: float | None = None,
        log_ratio_limit: float | None = None,
        tau: tuple[float, float] | None = None,
        gamma: GammaGate | None = None,
        ratio_cap: float | None = None,
        dro_beta: float | None = None,
        aggregate: str | None = None,
        denominator: float | Tensor | None = None,
        horizon: float | None = None,
        count_empty: bool = False,
        ref_logprob: Tensor | None = None,
        kl: str | None = None,
        kl_coef: float | Tensor = 0.0,
        kl_clamp: tuple[float, float] | None = None,
        kl_importance: bool = False,
        entropy_coef: float | Tensor = 0.0,
        entropy_aggregate: str | None = None,
        entropy_denominator: float | Tensor | None = None,
        rollout_logprob: Tensor | None = None,
        correction: Correction | None = None,
        rejection: Rejection | None = None,
        process_group: ProcessGroup | None = None,
        bias: Tensor | None = None,
        lora: LoRA | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        support: Support | None = None,
        entropy: bool = False,
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
        partial_grad: bool = False,
    ) -> _R_co: ...

class _LinearPolicyLoss(_LinearPolicyLossFunction[LossResult], Operator, Protocol):
    bind: _LinearPolicyLossFunction[_LinearPolicyLossFunction[LossResult]]

linear_policy_loss: _LinearPolicyLoss

class _LmHeadSampleFunction(Protocol[_R_co]):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | QuantTensor,
        *,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        seed: int | Tensor,
        step: int | Tensor,
        penalties: Penalties | None = None,
        allowed: Tensor | None = None,
        banned: TokenLists | None = None,
        filter_order: str = "topk_topp",
        tie: str = "lowest_id",
        vocab_size: int | None = None,
        raw_logprob: bool = False,
        slot: Tensor | None = None,
        top_n: int = 0,
        top_n_from: str = "raw",
        rank: bool = False,
        entropy: bool = False,
        kept_capacity: int = 0,
        invalid_token: int = 0,
        stream: int = 0,
        bias: Tensor | None = None,
        lora: LoRA | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        logit_bias: LogitBias | None = None,
    ) -> _R_co: ...

class _LmHeadSample(_LmHeadSampleFunction[SampleResult], Operator, Protocol):
    bind: _LmHeadSampleFunction[_LmHeadSampleFunction[SampleResult]]

lm_head_sample: _LmHeadSample

class _LogprobFunction(Protocol[_R_co]):
    def __call__(
        self,
        logits: Tensor,
        ids: Tensor | TokenLists,
        *,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        mask: Tensor | None = None,
        entropy: bool = False,
        top_logprobs: int = 0,
        support: Support | None = None,
        validate: bool = False,
        logits_scale: float | Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> _R_co: ...

class _Logprob(_LogprobFunction[LogprobResult], Operator, Protocol):
    bind: _LogprobFunction[_LogprobFunction[LogprobResult]]

logprob: _Logprob

class _PolicyLossFunction(Protocol[_R_co]):
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor | None,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        kind: str = "grpo",
        level: str | None = None,
        clip: tuple[float, float] | None = None,
        dual_clip: float | None = None,
        log_ratio_limit: float | None = None,
        tau: tuple[float, float] | None = None,
        gamma: GammaGate | None = None,
        ratio_cap: float | None = None,
        dro_beta: float | None = None,
        aggregate: str | None = None,
        denominator: float | Tensor | None = None,
        horizon: float | None = None,
        count_empty: bool = False,
        ref_logprob: Tensor | None = None,
        kl: str | None = None,
        kl_coef: float | Tensor = 0.0,
        kl_clamp: tuple[float, float] | None = None,
        kl_importance: bool = False,
        entropy_coef: float | Tensor = 0.0,
        entropy_aggregate: str | None = None,
        entropy_denominator: float | Tensor | None = None,
        rollout_logprob: Tensor | None = None,
        correction: Correction | None = None,
        rejection: Rejection | None = None,
        process_group: ProcessGroup | None = None,
        entropy: Tensor | None = None,
    ) -> _R_co: ...

class _PolicyLoss(_PolicyLossFunction[LossResult], Operator, Protocol):
    bind: _PolicyLossFunction[_PolicyLossFunction[LossResult]]

policy_loss: _PolicyLoss

class _PrepackFunction(Protocol[_R_co]):
    def __call__(
        self,
        w: QuantTensor,
        *,
        layout: str | None = None,
    ) -> _R_co: ...

class _Prepack(_PrepackFunction[QuantTensor], Operator, Protocol):
    bind: _PrepackFunction[_PrepackFunction[QuantTensor]]

prepack: _Prepack

class _QmatmulFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        w: QuantTensor,
        *,
        bias: Tensor | None = None,
        lora: LoRA | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        weight_rounding: str = "any",
        ends: Tensor | None = None,
        lora_ends: Tensor | None = None,
    ) -> _R_co: ...

class _Qmatmul(_QmatmulFunction[Tensor], Operator, Protocol):
    bind: _QmatmulFunction[_QmatmulFunction[Tensor]]

qmatmul: _Qmatmul

class _QuantizeFunction(Protocol[_R_co]):
    def __call__(
        self,
        weight: Tensor,
        format: str | QuantSpec,
        *,
        dtype: torch.dtype | None = None,
        out: QuantTensor | None = None,
    ) -> _R_co: ...

class _Quantize(_QuantizeFunction[QuantTensor], Operator, Protocol):
    bind: _QuantizeFunction[_QuantizeFunction[QuantTensor]]

quantize: _Quantize

class _RmsNormFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        eps: float,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> _R_co: ...

class _RmsNorm(_RmsNormFunction[RmsNormResult], Operator, Protocol):
    bind: _RmsNormFunction[_RmsNormFunction[RmsNormResult]]

rms_norm: _RmsNorm

class _RolloutBufferFunction(Protocol[_R_co]):
    def __call__(
        self,
        max_tokens: int,
        max_seqs: int,
        *,
        fields: Mapping[str, Field] | None = None,
        rewards: int = 1,
        group_size: int | None = None,
        max_groups: int | None = None,
        max_seq_tokens: int | None = None,
        max_batch_tokens: int | None = None,
        page_tokens: int = 256,
        on_full: str = "raise",
        device: Any = None,
    ) -> _R_co: ...

class _RolloutBuffer(_RolloutBufferFunction[RolloutBuffer], Operator, Protocol):
    bind: _RolloutBufferFunction[_RolloutBufferFunction[RolloutBuffer]]

rollout_buffer: _RolloutBuffer

class _RopeFunction(Protocol[_R_co]):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        table: Tensor,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float | None = None,
        interleaved: bool = False,
        offset: float = 0.0,
    ) -> _R_co: ...

class _Rope(_RopeFunction[RopeResult], Operator, Protocol):
    bind: _RopeFunction[_RopeFunction[RopeResult]]

rope: _Rope

class _RouteFunction(Protocol[_R_co]):
    def __call__(
        self,
        logits: Tensor,
        *,
        top_k: int,
        replay: Tensor | None = None,
        renormalize: bool = False,
    ) -> _R_co: ...

class _Route(_RouteFunction[RouteResult], Operator, Protocol):
    bind: _RouteFunction[_RouteFunction[RouteResult]]

route: _Route

class _SampleFunction(Protocol[_R_co]):
    def __call__(
        self,
        logits: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        seed: int | Tensor,
        step: int | Tensor,
        penalties: Penalties | None = None,
        allowed: Tensor | None = None,
        banned: TokenLists | None = None,
        filter_order: str = "topk_topp",
        tie: str = "lowest_id",
        vocab_size: int | None = None,
        raw_logprob: bool = False,
        slot: Tensor | None = None,
        top_n: int = 0,
        top_n_from: str = "raw",
        rank: bool = False,
        entropy: bool = False,
        kept_capacity: int = 0,
        invalid_token: int = 0,
        stream: int = 0,
        bias: LogitBias | None = None,
    ) -> _R_co: ...

class _Sample(_SampleFunction[SampleResult], Operator, Protocol):
    bind: _SampleFunction[_SampleFunction[SampleResult]]

sample: _Sample

class _ShapeRewardsFunction(Protocol[_R_co]):
    def __call__(
        self,
        rewards: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        clip: tuple[float, float] | None = None,
        normalize: str = "none",
        running: RunningMoments | None = None,
        center: bool = True,
        ddof: int = 1,
        eps: float = 1e-08,
        max_length: int | None = None,
        overlong_buffer: int | None = None,
        overlong_factor: float = 1.0,
        overlong_cap: bool = True,
        kl: str = "none",
        kl_coef: float = 0.0,
        logprob: Tensor | None = None,
        ref_logprob: Tensor | None = None,
        kl_input_clamp: float | None = None,
        kl_clamp: float | None = None,
        process_group: ProcessGroup | None = None,
        output: str = "auto",
    ) -> _R_co: ...

class _ShapeRewards(_ShapeRewardsFunction[ShapedRewards], Operator, Protocol):
    bind: _ShapeRewardsFunction[_ShapeRewardsFunction[ShapedRewards]]

shape_rewards: _ShapeRewards

class _VerifyFunction(Protocol[_R_co]):
    def __call__(
        self,
        target_logits: Tensor,
        draft_ids: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        seed: int | Tensor,
        step: int | Tensor,
        penalties: Penalties | None = None,
        allowed: Tensor | None = None,
        banned: TokenLists | None = None,
        filter_order: str = "topk_topp",
        tie: str = "lowest_id",
        vocab_size: int | None = None,
        raw_logprob: bool = False,
        cu_draft: Tensor,
        draft_probs: Tensor | None = None,
        draft_logits: Tensor | None = None,
        bias: LogitBias | None = None,
        invalid_token: int = -1,
    ) -> _R_co: ...

class _Verify(_VerifyFunction[VerifyResult], Operator, Protocol):
    bind: _VerifyFunction[_VerifyFunction[VerifyResult]]

verify: _Verify

class _WhitenFunction(Protocol[_R_co]):
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        counts: Tensor | None = None,
        ddof: int = 1,
        eps: float = 1e-08,
        eps_mode: str = "var_add",
        shift_mean: bool = True,
        masked_out: str = "zero",
        apply: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> _R_co: ...

class _Whiten(_WhitenFunction[WhitenResult], Operator, Protocol):
    bind: _WhitenFunction[_WhitenFunction[WhitenResult]]

whiten: _Whiten
