"""Builds of the suffix scan: the recursions in the layouts and stages that a run of post-training launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.scan_kernels import CHAIN, chain_kernel, ends_kernel, gaps_kernel, scan_kernel

_TILE: Final = 128
_POINTERS: Final = {
    "b": "*fp32", "a": "*fp32", "v": "*fp32", "q": "*fp32", "ratio": "*fp32", "lam": "*fp32", "lam2": "*fp32",
    "mask": "*u8", "stop": "*u8", "init": "*fp32", "outcome": "*fp32", "baseline": "*fp32", "ends": "*i64",
    "bounds": "*i64", "adv": "*fp32", "ret": "*fp32", "first": "*fp32", "invalid": "*u8", "parts": "*fp32",
    "chain": "*fp32", "flags": "*u8",
}  # fmt: skip
_NUMBERS: Final = {
    "T": "i32", "C": "i32", "sequences": "i32", "a_number": "fp32", "gamma": "fp32", "decay": "fp32", "blend": "fp32",
    "decay2": "fp32", "blend2": "fp32", "ratio_clip": "fp32", "trace_clip": "fp32",
}  # fmt: skip
_PLAIN: Final = {
    "STAGE": "rows", "J": _TILE, "A": False, "VALUES": False, "Q": False, "LAM": "number", "LAM2": "none",
    "MASK": False, "STOP": False, "INIT": False, "OUTCOME": False, "BASELINE": False, "ENDS": False, "PACKED": False,
    "MASKED": "skip", "EXCLUSIVE": False, "CARRY": False, "STAGES": 1,
}  # fmt: skip
_CASES: Final[dict[str, dict[str, Any]]] = {
    "scan": {"RULE": "scan", "A": True, "INIT": True},
    "gae, mask": {"RULE": "gae", "VALUES": True, "MASK": True, "INIT": True},
    "gae, mask, many chunks": {"RULE": "gae", "VALUES": True, "MASK": True, "INIT": True, "STAGES": 3},
    "gae, mask, part": {"RULE": "gae", "VALUES": True, "MASK": True, "INIT": True, "STAGE": "part"},
    "gae, mask, apply": {"RULE": "gae", "VALUES": True, "MASK": True, "INIT": True, "STAGE": "apply"},
    "gae, packed, outcome": {"RULE": "gae", "VALUES": True, "PACKED": True, "OUTCOME": True},
    "gae, lengths, decoupled, dones": {
        "RULE": "gae", "VALUES": True, "ENDS": True, "LAM": "row", "LAM2": "number", "STOP": True,
    },
    "returns, mask": {"RULE": "returns", "MASK": True},
    "retrace, mask": {"RULE": "retrace", "VALUES": True, "Q": True, "MASK": True},
    "vtrace, mask": {"RULE": "vtrace", "VALUES": True, "MASK": True, "INIT": True},
}  # fmt: skip


def builds(arch: str) -> Iterator[Build]:
    """Every build of a module that is shipped for an architecture."""
    wave = 64 if arch.startswith("gfx9") else 32
    divisible = (*_POINTERS, "T")
    for label, case in _CASES.items():
        yield Build(
            scan_kernel,
            label,
            {**_POINTERS, **_NUMBERS},
            {**_PLAIN, **case},
            num_warps=_TILE // wave,
            divisible=tuple(n for n in divisible if n != "T" or not case.get("PACKED")),
        )
    yield Build(
        chain_kernel,
        "one recursion",
        {**{n: _POINTERS[n] for n in ("parts", "chain", "flags", "init", "first", "invalid")}, "C": "i32",
         "sequences": "i32", "scale": "fp32"},
        {"INIT": True, "TWO": False, "SCAN": False, "U": CHAIN},
        num_warps=1,
    )  # fmt: skip
    yield Build(
        ends_kernel,
        "padded",
        {"mask": "*u8", "bounds": "*u8", "ends": "*i64", "T": "i32", "sequences": "i32"},
        {"PACKED": False, "BLOCK": 1024},
        divisible=("mask", "T"),
    )
    yield Build(
        gaps_kernel,
        "advantages and returns",
        {"adv": "*fp32", "ret": "*fp32", "bounds": "*i64", "T": "i32", "sequences": "i32"},
        {"RETURNS": True, "BLOCK": 1024},
        divisible=("adv", "ret", "bounds"),
    )
