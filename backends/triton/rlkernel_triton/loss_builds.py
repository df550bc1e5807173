"""Builds of the policy losses: every kind once, and the options that change what is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.loss_kernels import count_kernel, loss_kernel, scale_kernel, tokens_kernel, total_kernel

_BLOCK: Final = 256
_POINTERS: Final = {
    "logprob": "*fp32", "entropy": "*fp32", "old": "*fp32", "advantages": "*fp32", "ref": "*fp32", "rollout": "*fp32",
    "weight": "*fp32", "outside": "*u8", "mask": "*u8", "bounds": "*i64", "index": "*i64", "counts": "*i64",
    "denominator": "*i64", "denominator2": "*i64", "kl_at": "*fp32", "entropy_at": "*fp32", "dlogprob": "*fp32",
    "dentropy": "*fp32", "partial": "*fp32",
}  # fmt: skip
_SIZES: Final = dict.fromkeys(("N", "T", "sequences", "P", "first", "slot"), "i32")
_NUMBERS: Final = dict.fromkeys(
    (
        "omega", "omega2", "kl_coef", "entropy_coef", "limit", "low_bound", "high_bound", "dual_bound", "tau_pos",
        "tau_neg", "k_pos", "k_neg", "lam_pos", "lam_neg", "cap", "beta", "kl_input_clamp", "kl_clamp", "w_low",
        "w_high",
    ),
    "fp32",
)  # fmt: skip
_PLAIN: Final[dict[str, Any]] = {
    "KIND": "clip", "LEVEL": "token", "SHARED": False, "DUAL": False, "OLD": True, "KL": "none", "STRAIGHT": False,
    "IMPORTANCE": "none", "ENTROPY": False, "BONUS": False, "ROLLOUT": False, "W": "none", "DROP": False, "MASK": True,
    "PACKED": False, "ADVANTAGE": "row", "PER": True, "PER2": False, "DEN": True, "DEN2": False, "KL_AT": False,
    "ENTROPY_AT": False, "GRAD": True, "LONG": True, "TAME": True, "SPAN": 8192,
    "BLOCK": _BLOCK,
}  # fmt: skip
_CASES: Final[dict[str, dict[str, Any]]] = {
    "grpo, mask": {},
    "grpo, all options": {
        "DUAL": True, "KL": "k3", "ENTROPY": True, "BONUS": True, "ROLLOUT": True, "W": "token", "IMPORTANCE": "ratio",
    },
    "dapo, packed, token advantages": {"PACKED": True, "MASK": False, "ADVANTAGE": "token", "PER": False},
    "gspo, mask": {"LEVEL": "sequence", "SHARED": True},
    "gspo_token, packed": {"LEVEL": "sequence", "PACKED": True},
    **{
        kind: {"KIND": kind, "PER": False}
        for kind in ("cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "dro")
    },
    **{kind: {"KIND": kind, "LEVEL": "sequence", "SHARED": True} for kind in ("gmpo", "vespo")},
}  # fmt: skip


def builds(arch: str) -> Iterator[Build]:
    """Every build of a module that is shipped for an architecture."""
    for label, case in _CASES.items():
        yield Build(
            loss_kernel, label, {**_POINTERS, **_SIZES, **_NUMBERS}, {**_PLAIN, **case}, divisible=tuple(_POINTERS)
        )
    yield Build(
        count_kernel, "any", {"mask": "*u8", "counts": "*i64", "T": "i32", "parts": "i32"},
        {"PART": 16384, "BLOCK": 2048}, divisible=("mask", "counts", "T"),
    )  # fmt: skip
    for dtype in ("fp32", "bf16"):
        yield Build(
            scale_kernel, dtype, {"upstream": "*fp32", "gradient": f"*{dtype}", "out": f"*{dtype}", "N": "i32"},
            {"INTERPRETED": False, "BLOCK": 1024}, divisible=("gradient", "out", "N"),
        )  # fmt: skip
    yield Build(tokens_kernel, "any", {"counts": "*i64", "out": "*i64", "sequences": "i32"}, {"SIZE": 1024})
    yield Build(total_kernel, "any", {"partial": "*fp32", "loss": "*fp32", "out": "*fp32", "P": "i32"}, {"SIZE": 1024})
