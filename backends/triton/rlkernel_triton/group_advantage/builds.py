"""Builds of the kernels of `advantage` by group: by size, in pairs and from a table, and what goes before and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.group_advantage.kernels import (
    batch_kernel,
    enter_kernel,
    group_kernel,
    spread_kernel,
    sum_kernel,
    totals_kernel,
    whiten_groups_kernel,
)

_REWARDS: Final = {"rewards": "*fp32", "steps": "*fp32", "in_stats": "*i1"}
_POINTERS: Final = {
    **_REWARDS, "ids": "*i64", "anchor": "*i64", "in_loss": "*i1", "weights": "*fp32", "reward_weights": "*fp32",
    "lengths": "*i64", "batch": "*fp32", "table": "*i64", "owner": "*i32", "owner2": "*i32", "adv": "*fp32",
    "invalid": "*i1", "group_count": "*i64", "group_mean": "*fp32", "group_std": "*fp32", "constant": "*i1",
    "partial": "*fp32",
}  # fmt: skip
_NUMBERS: Final = {
    "B": "i32", "G": "i32", "K": "i32", "P": "i32", "limit": "i32", "low": "fp32", "high": "fp32", "ddof": "i32",
    "eps": "fp32", "eps_mode": "i32", "min_std": "fp32", "center": "i32", "raw_alone": "i32", "raw_invalid": "i32",
    "peer": "i32", "step_weight": "fp32",
}  # fmt: skip
_PLAIN: Final = {
    "KIND": "grpo", "MODE": "size", "IDS": False, "SCALE": "group", "OTHERS": False, "RANGE": False,
    "IN_STATS": False, "IN_LOSS": False, "WEIGHTS": False, "REWARD_WEIGHTS": False, "LENGTHS": "none", "FIELDS": 5,
    "MOMENTS": "none", "TOKENS_COUNT": False, "R": 64, "C": 8, "SIZE": 128,
}  # fmt: skip
_PAIRS: Final = {"MODE": "pairs", "IDS": True, "R": 8, "C": 128}
_TABLE: Final = {"MODE": "table", "IDS": True, "R": 128, "C": 128}
_CASES: Final[dict[str, dict[str, Any]]] = {
    "grpo, groups of 8": {},
    "grpo, masks": {"IN_STATS": True, "IN_LOSS": True},
    "grpo, large groups": {"R": 1, "C": 512},
    "grpo, ids": _PAIRS,
    "grpo, ids, table": _TABLE,
    "grpo, others": {"OTHERS": True, "FIELDS": 9},
    "dr_grpo": {"KIND": "dr_grpo", "SCALE": "none"},
    "opo, lengths": {"KIND": "opo", "SCALE": "none", "LENGTHS": "each", "FIELDS": 7},
    "passk": {"KIND": "passk", "FIELDS": 9},
    "gdpo, whitened over tokens": {
        "KIND": "gdpo", "MOMENTS": "first", "LENGTHS": "each", "TOKENS_COUNT": True, "REWARD_WEIGHTS": True,
    },
    "reinforce_pp_baseline": {"KIND": "reinforce_pp_baseline", "SCALE": "none", "MOMENTS": "first"},
    "gigpo": {"KIND": "gigpo", "SCALE": "none", **_PAIRS, "IDS": False},
    "gigpo, ids, table": {"KIND": "gigpo", "SCALE": "none", **_TABLE},
}  # fmt: skip


def builds(arch: str) -> Iterator[Build]:
    """Every build of a module that is shipped for an architecture."""
    for label, case in _CASES.items():
        yield Build(group_kernel, label, {**_POINTERS, **_NUMBERS}, {**_PLAIN, **case}, divisible=tuple(_POINTERS))
    plain = {"RANGE": False, "IN_STATS": False}
    yield Build(
        batch_kernel,
        "scale",
        {**_REWARDS, "partial": "*fp32", "B": "i32", "K": "i32", "programs": "i32", "low": "fp32", "high": "fp32"},
        {"NONZERO": False, "STEPS": False, "SIZE": 1024, **plain},
        divisible=(*_REWARDS, "partial"),
    )
    whitened = {n: _POINTERS[n] for n in ("adv", "invalid", "in_loss", "weights", "partial")} | {"scalars": "*fp32"}
    yield Build(
        whiten_groups_kernel,
        "applied",
        {**whitened, "B": "i32", "P": "i32", "ddof": "i32", "eps": "fp32", "eps_mode": "i32"},
        {"APPLY": True, "IN_LOSS": False, "WEIGHTS": False, "SIZE": 1024, "MERGED": 128},
        divisible=tuple(whitened),
    )
    filled = {**_REWARDS, "lengths": "*i64", "table": "*i64", "owner": "*i32"}
    numbers = {"B": "i32", "K": "i32", "limit": "i32", "low": "fp32", "high": "fp32"}
    of = {"LENGTHS": "none", "OPO": False, "FIELDS": 5, "SIZE": 256, **plain}
    yield Build(
        enter_kernel,
        "ids",
        {**filled, "ids": "*i64", "anchor": "*i64", "slots": "*i32", "G": "i32", "last": "i32", **numbers},
        {"IDS": True, "SECOND": False, **of},
        divisible=(*filled, "ids", "anchor", "slots"),
    )
    for square in (False, True):
        yield Build(
            sum_kernel,
            "squares" if square else "sums",
            {**filled, "peer": "i32", **numbers},
            {"SECOND": False, "EXTREMES": False, "SQUARE": square, **of},
            divisible=tuple(filled),
        )
    layout = {"mask": "*u8", "ends": "*i64", "bounds": "*i64", "T": "i32", "sequences": "i32"}
    yield Build(
        totals_kernel,
        "padded, mask",
        {"rewards": "*fp32", "totals": "*fp32", "counts": "*i64", **layout},
        {"SUM_UP": True, "MASK": True, "ENDS": False, "PACKED": False, "SIZE": 1024},
        divisible=("rewards", "totals", "counts", "mask", "ends", "bounds"),
    )
    for packed in (False, True):
        yield Build(
            spread_kernel,
            "packed" if packed else "padded, mask",
            {"adv": "*fp32", "out": "*fp32", **layout, "chunks": "i32", "steps": "i32"},
            {"MASK": not packed, "ENDS": False, "PACKED": packed, "SIZE": 1024},
            divisible=("adv", "out", "mask", "ends", "bounds"),
        )
