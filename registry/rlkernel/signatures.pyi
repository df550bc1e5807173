# The public operators with their signatures. Written by tools/signatures.py; do not edit.
# Each is a function of its call's arguments; `bind` gives one that keeps to the implementation which takes this call.
# ruff: noqa: A002 arguments are named by the records

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from torch.distributed import ProcessGroup

from rlkernel.plans import Choice
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.advantage import AdvantageResult
from rlkernel_core.spec.affine_suffix_scan import ScanResult
from rlkernel_core.spec.form import OpSpec
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, GraphedCallable
from rlkernel_core.spec.group_filter import GroupFilterResult
from rlkernel_core.spec.logprob import LogprobResult, Support
from rlkernel_core.spec.policy_kinds import Correction, GammaGate, Rejection
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.rollouts import Field, RolloutBuffer
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists
from rlkernel_core.spec.shape_rewards import RunningMoments, ShapedRewards
from rlkernel_core.spec.verify import VerifyResult
from rlkernel_core.spec.whiten import WhitenResult

class _AdvantageFunction(Protocol):
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
    ) -> AdvantageResult: ...

class _Advantage(_AdvantageFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _AdvantageFunction: ...

advantage: _Advantage

class _AffineSuffixScanFunction(Protocol):
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
    ) -> ScanResult: ...

class _AffineSuffixScan(_AffineSuffixScanFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _AffineSuffixScanFunction: ...

affine_suffix_scan: _AffineSuffixScan

class _CaptureFunction(Protocol):
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
    ) -> GraphedCallable: ...

class _Capture(_CaptureFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _CaptureFunction: ...

capture: _Capture

class _DequantizeFunction(Protocol):
    def __call__(
        self,
        w: QuantTensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...

class _Dequantize(_DequantizeFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        w: QuantTensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> _DequantizeFunction: ...

dequantize: _Dequantize

class _GroupFilterFunction(Protocol):
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
    ) -> GroupFilterResult: ...

class _GroupFilter(_GroupFilterFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _GroupFilterFunction: ...

group_filter: _GroupFilter

class _LinearLogprobFunction(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        mask: Tensor | None = None,
        entropy: bool = False,
        support: Support | None = None,
        backward: str = "auto",
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
    ) -> LogprobResult: ...

class _LinearLogprob(_LinearLogprobFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        mask: Tensor | None = None,
        entropy: bool = False,
        support: Support | None = None,
        backward: str = "auto",
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
    ) -> _LinearLogprobFunction: ...

linear_logprob: _LinearLogprob

class _LinearPolicyLossFunction(Protocol):
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
        bias: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        support: Support | None = None,
        entropy: bool = False,
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
    ) -> LossResult: ...

class _LinearPolicyLoss(_LinearPolicyLossFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
        bias: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        support: Support | None = None,
        entropy: bool = False,
        max_workspace_bytes: int | None = None,
        group: ProcessGroup | None = None,
    ) -> _LinearPolicyLossFunction: ...

linear_policy_loss: _LinearPolicyLoss

class _LmHeadSampleFunction(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
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
        logit_scale: float = 1.0,
        softcap: float | None = None,
        logit_bias: LogitBias | None = None,
    ) -> SampleResult: ...

class _LmHeadSample(_LmHeadSampleFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        hidden: Tensor,
        weight: Tensor,
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
        logit_scale: float = 1.0,
        softcap: float | None = None,
        logit_bias: LogitBias | None = None,
    ) -> _LmHeadSampleFunction: ...

lm_head_sample: _LmHeadSample

class _LogprobFunction(Protocol):
    def __call__(
        self,
        logits: Tensor,
        ids: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        mask: Tensor | None = None,
        entropy: bool = False,
        top_logprobs: int = 0,
        support: Support | None = None,
        validate: bool = False,
    ) -> LogprobResult: ...

class _Logprob(_LogprobFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        logits: Tensor,
        ids: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        mask: Tensor | None = None,
        entropy: bool = False,
        top_logprobs: int = 0,
        support: Support | None = None,
        validate: bool = False,
    ) -> _LogprobFunction: ...

logprob: _Logprob

class _PolicyLossFunction(Protocol):
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
        entropy: Tensor | None = None,
    ) -> LossResult: ...

class _PolicyLoss(_PolicyLossFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
        entropy: Tensor | None = None,
    ) -> _PolicyLossFunction: ...

policy_loss: _PolicyLoss

class _PrepackFunction(Protocol):
    def __call__(
        self,
        w: QuantTensor,
        *,
        layout: str | None = None,
    ) -> QuantTensor: ...

class _Prepack(_PrepackFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        w: QuantTensor,
        *,
        layout: str | None = None,
    ) -> _PrepackFunction: ...

prepack: _Prepack

class _QmatmulFunction(Protocol):
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
    ) -> Tensor: ...

class _Qmatmul(_QmatmulFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _QmatmulFunction: ...

qmatmul: _Qmatmul

class _QuantizeFunction(Protocol):
    def __call__(
        self,
        weight: Tensor,
        format: str | QuantSpec,
        *,
        dtype: torch.dtype | None = None,
        out: QuantTensor | None = None,
    ) -> QuantTensor: ...

class _Quantize(_QuantizeFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
        self,
        weight: Tensor,
        format: str | QuantSpec,
        *,
        dtype: torch.dtype | None = None,
        out: QuantTensor | None = None,
    ) -> _QuantizeFunction: ...

quantize: _Quantize

class _RolloutBufferFunction(Protocol):
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
    ) -> RolloutBuffer: ...

class _RolloutBuffer(_RolloutBufferFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _RolloutBufferFunction: ...

rollout_buffer: _RolloutBuffer

class _SampleFunction(Protocol):
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
    ) -> SampleResult: ...

class _Sample(_SampleFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _SampleFunction: ...

sample: _Sample

class _ShapeRewardsFunction(Protocol):
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
    ) -> ShapedRewards: ...

class _ShapeRewards(_ShapeRewardsFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _ShapeRewardsFunction: ...

shape_rewards: _ShapeRewards

class _VerifyFunction(Protocol):
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
    ) -> VerifyResult: ...

class _Verify(_VerifyFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _VerifyFunction: ...

verify: _Verify

class _WhitenFunction(Protocol):
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
    ) -> WhitenResult: ...

class _Whiten(_WhitenFunction, Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str
    def bind(
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
    ) -> _WhitenFunction: ...

whiten: _Whiten
