"""The table of workloads: one call for each way in which host code launches a kernel, as data.

What the compile gate compiles (`tools/compile_gate.py`) and what a bundle's kernels are promised (`aot.compiling`) are
the launches of these calls, recorded by `recorded`. Tensors have shapes and types and no memory. Sizes are those of a
run of post-training, but a count of rows is no multiple of 16: what is recorded as such is taken to be kept by calls.

Legend: B sequences or rows · T tokens · N packed tokens · V vocabulary · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_kinds import Correction


@dataclass(frozen=True)
class Workload:
    """One call, and at which of its results gradients arrive."""

    arguments: Mapping[str, Any]  # of the operator
    upstream: tuple[str, ...] = ()  # fields of the result; none: forward alone


def _real(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def _whole(*shape: int) -> Tensor:
    return _real(*shape, dtype=torch.int64)


def _flags(*shape: int) -> Tensor:
    return _real(*shape, dtype=torch.bool)


FP32, BF16 = torch.float32, torch.bfloat16


def _rows(B: int, V: int, dtype: torch.dtype) -> dict[str, Any]:
    """Log-probabilities with everything that costs registers."""
    return {
        "logits": _real(B, V, dtype=dtype, grad=True), "ids": _whole(B), "entropy": True, "softcap": 30.0,
        "temperature": _real(B), "mask": _flags(B), "support": Support(ids=_whole(50 * B), offsets=_whole(B + 1)),
    }  # fmt: skip


_V: Final = 151936
_EVERY: Final = ("logprob", "lse", "entropy", "log_kept_mass")
_LOGPROB: Final = {
    **{
        f"{name}, entropy": Workload(
            {"logits": _real(260, _V, dtype=dtype, grad=True), "ids": _whole(260), "entropy": True},
            ("logprob", "entropy"),
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, everything": Workload(_rows(260, _V, BF16), _EVERY),
    "fp32, everything": Workload(_rows(260, _V, FP32), _EVERY),
    # As many parts of a row as the tiles of a head make; no vocabulary has as many columns.
    "bf16, everything, 1024 parts": Workload(_rows(8, 1024 << 15, BF16)),
    "bf16, top 20": Workload(
        {"logits": _real(8, _V, dtype=BF16), "ids": _whole(8), "top_logprobs": 20, "softcap": 30.0,
         "temperature": _real(8), "mask": _flags(8)},
    ),
}  # fmt: skip

_B: Final = 8
_T: Final = 1024
_N: Final = 4096
_SHAPE: Final = (_B, _T)
_SCAN: Final = {
    "rows": Workload({"b": _real(*_SHAPE), "a": _real(*_SHAPE), "init": _real(_B)}),
    "mask, number": Workload({"b": _real(*_SHAPE), "a": 0.95, "mask": _flags(*_SHAPE)}),
}


def _gae(*shape: int, **more: Any) -> dict[str, Any]:
    return {"rewards": _real(*shape), "values": _real(*shape), "kind": "gae", "gamma": 0.99, "lam": 0.95, **more}


def _masked(*shape: int) -> Workload:
    return Workload(_gae(*shape, mask=_flags(*shape), bootstrap=_real(shape[0])))


_S: Final = 248  # sequences of a batch in groups
_MANY: Final = 4100  # sequences whose ids are searched in a table


def _group(kind: str, B: int = _S, **more: Any) -> Workload:
    return Workload({"rewards": _real(B), "kind": kind, "group": 8, **more})


def _table(kind: str, **more: Any) -> Workload:
    return _group(kind, _MANY, **{"group": _whole(_MANY), **more})


def _table_of_tokens(**more: Any) -> Workload:
    columns = {name: _real(_S, _T) for name in ("rewards", "logprob", "sum_pi_squared")}
    return _group("otb", **{**columns, **more})


_ADVANTAGE: Final = {
    "gae, mask": _masked(*_SHAPE),
    "gae, mask, many chunks": _masked(200, 8192),
    "gae, mask, by chunks": _masked(_B, 32768),
    "gae, outcome, mask": Workload(_gae(*_SHAPE, mask=_flags(*_SHAPE)) | {"rewards": _real(_B)}),
    "gae, outcome, packed": Workload(_gae(_N, cu_seqlens=_whole(_B + 1)) | {"rewards": _real(_B)}),
    "gae, lengths, decoupled, dones": Workload(
        _gae(*_SHAPE, lengths=_whole(_B), lam=_real(_B), lam_value=0.9, dones=_flags(*_SHAPE))
    ),
    "returns, mask": Workload({"rewards": _real(*_SHAPE), "kind": "returns", "gamma": 0.9, "mask": _flags(*_SHAPE)}),
    "retrace, mask": Workload(
        _gae(*_SHAPE, mask=_flags(*_SHAPE), q_values=_real(*_SHAPE), ratio=_real(*_SHAPE)) | {"kind": "retrace"}
    ),
    "vtrace, mask": Workload(
        _gae(*_SHAPE, mask=_flags(*_SHAPE), ratio=_real(*_SHAPE), bootstrap=_real(_B)) | {"kind": "vtrace"}
    ),
    "reinforce_pp, mask, weights": Workload(
        {"rewards": _real(*_SHAPE), "kind": "reinforce_pp", "mask": _flags(*_SHAPE), "weights": _real(_B)}
    ),
    "grpo, groups of 8": _group("grpo"),
    "grpo, masks": _group("grpo", in_stats=_flags(_S), in_loss=_flags(_S)),
    "grpo, groups of 500": _group("grpo", 1500, group=500),
    "grpo, ids": _group("grpo", group=_whole(_S)),
    "grpo, ids, table": _table("grpo"),
    "grpo, others": _group("grpo", leave_one_out=True),
    "grpo, scale of the batch": _group("grpo", scale="batch"),
    "grpo, tokens, mask": _group("grpo", rewards=_real(_S, _T), mask=_flags(_S, _T), output="token"),
    "grpo, tokens, packed": _group("grpo", rewards=_real(_N), cu_seqlens=_whole(_S + 1), output="token"),
    "dr_grpo": _group("dr_grpo"),
    "opo, lengths": _group("opo", lengths=_whole(_S)),
    "passk": _group("passk"),
    "gdpo, whitened over tokens": _group(
        "gdpo", rewards=_real(_S, 4), lengths=_whole(_S), reward_weights=_real(4)
    ),
    "reinforce_pp_baseline": _group("reinforce_pp_baseline"),
    "otb": _table_of_tokens(),
    "otb, ids, masks": _table_of_tokens(group=_whole(_S), mask=_flags(_S, _T), in_stats=_flags(_S)),
    "gigpo": _group("gigpo", step_rewards=_real(_S), anchor=_whole(_S)),
    "gigpo, ids, table": _table("gigpo", step_rewards=_real(_MANY), anchor=_whole(_MANY)),
}  # fmt: skip

_WHITEN: Final = {
    "mask": Workload({"x": _real(*_SHAPE), "mask": _flags(*_SHAPE)}),
    "lengths, counts": Workload({"x": _real(*_SHAPE), "lengths": _whole(_B), "counts": _real(*_SHAPE)}),
}

_TOKENS: Final = (260, 8192)


def _loss(kind: str, *shape: int, dtype: torch.dtype = FP32, **more: Any) -> Workload:
    given = {
        "logprob": _real(*shape, dtype=dtype, grad=True), "old_logprob": _real(*shape),
        "advantages": _real(shape[0]), "mask": _flags(*shape), "kind": kind,
    }  # fmt: skip
    return Workload(given | more, ("loss",))


def _packed(kind: str, **more: Any) -> Workload:
    N = _TOKENS[0] * _TOKENS[1]
    places = {"advantages": _real(_TOKENS[0], 1), "mask": None, "cu_seqlens": _whole(_TOKENS[0] + 1)}
    return _loss(kind, N, **{**places, **more})


_LOSS: Final = {
    "grpo, mask": _loss("grpo", *_TOKENS),
    "grpo, mask, short rows": _loss("grpo", 60, 100, dtype=BF16),
    "grpo, all options": _loss(
        "grpo", *_TOKENS, dual_clip=3.0, ref_logprob=_real(*_TOKENS), kl="k3", kl_coef=0.01, kl_importance=True,
        entropy=_real(*_TOKENS, grad=True), entropy_coef=0.01, rollout_logprob=_real(*_TOKENS),
        correction=Correction("token", high=2.0),
    ),
    "dapo, packed, token advantages": _packed("dapo", advantages=_real(_TOKENS[0] * _TOKENS[1])),
    "gspo, mask": _loss("gspo", *_TOKENS),
    "gspo_token, packed, mask": _packed("gspo_token", mask=_flags(_TOKENS[0] * _TOKENS[1])),
    **{kind: _loss(kind, *_TOKENS) for kind in ("cispo", "sapo", "gmpo", "vespo", "reinforce")},
    **{kind: _loss(kind, *_TOKENS, clip=(0.2, 0.2)) for kind in ("dppo_tv", "dppo_kl")},
    "dro": _loss("dro", *_TOKENS, dro_beta=0.1),
}  # fmt: skip


def _draw(B: int, *filters: str, dtype: torch.dtype = FP32, **more: Any) -> Workload:
    """Every row a request with parameters of its own."""
    law = {
        "temperature": _real(B), "top_k": _whole(B), "top_p": _real(B), "min_p": _real(B), "seed": _whole(B),
        "step": _whole(B),
    }  # fmt: skip
    asked = {n: x for n, x in law.items() if n in {"temperature", "seed", "step", *filters}}
    return Workload({"logits": _real(B, _DRAWN, dtype=dtype), **asked, **more})


_DRAWN: Final = 128256
_WORDS: Final = _DRAWN // 32
_SAMPLE: Final = {
    "fp32, no filter": _draw(4),
    "fp32, no filter, many rows": _draw(250),
    "fp32, top-k, top-p": _draw(4, "top_k", "top_p"),
    "fp32, top-k, top-p, many rows": _draw(250, "top_k", "top_p"),
    "bf16, top-k, top-p, many rows": _draw(250, "top_k", "top_p", dtype=BF16),
    "fp32, top-k, top-p, min-p, allowed, slots, entropy, raw": _draw(
        4, "top_k", "top_p", "min_p", entropy=True, raw_logprob=True, slot=_whole(4),
        allowed=_real(4, _WORDS, dtype=torch.int32),
    ),
}  # fmt: skip

WORKLOADS: Final[Mapping[str, Mapping[str, Workload]]] = {
    "logprob": _LOGPROB,
    "sample": _SAMPLE,
    "affine_suffix_scan": _SCAN,
    "advantage": _ADVANTAGE,
    "whiten": _WHITEN,
    "policy_loss": _LOSS,
}
