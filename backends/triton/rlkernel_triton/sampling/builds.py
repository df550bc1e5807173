"""Builds of the sampler: the draws that a rollout engine makes, at the vocabulary of a large model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.sampling.finish import finish
from rlkernel_triton.sampling.stream import tiles

_V: Final = 128256
_LAW: Final = {
    "row_stride": "i64", "column_stride": "i32", "V": "i32", "allowed": "*i32", "allowed_stride": "i64",
    "slot": "*i64", "last_slot": "i32", "temperature": "*fp32", "temperature_number": "fp32", "top_k": "*i64",
    "k_number": "i32", "top_p": "*fp32", "p_number": "fp32", "min_p": "*fp32", "m_number": "fp32", "seed": "*i64",
    "seed_number": "i64", "step": "*i64", "step_number": "i64", "noise_stream": "i32", "best": "*fp32",
    "best_id": "*i32", "count": "*i32", "total": "*fp32", "moment": "*fp32", "group_best": "*fp32",
    "winners": "*i32", "S": "i32",
}  # fmt: skip
_RESULTS: Final = {
    "scratch": "*i64", "spoiled": "*i32", "raw_row_stride": "i64", "raw_column_stride": "i32", "raw_best": "*fp32",
    "raw_total": "*fp32", "invalid_token": "i32", "token": "*i64", "logprob": "*fp32", "log_kept_mass": "*fp32",
    "kept_count": "*i32", "status": "*i32", "threshold": "*fp32", "threshold_id": "*i64", "raw_logprob": "*fp32",
    "entropy": "*fp32", "laws": "*fp32",
}  # fmt: skip
_NONE: Final = {"T_EACH": 1, "K_EACH": -2, "P_EACH": -2, "M_EACH": -2, "SEED_EACH": 1, "STEP_EACH": 1}
_CASES: Final[dict[str, dict[str, Any]]] = {
    "no filter": _NONE,
    "top-k, top-p": {**_NONE, "K_EACH": 1, "P_EACH": 1},
    "top-k, top-p, min-p, allowed, slots, entropy, raw": {
        **_NONE, "K_EACH": 1, "P_EACH": 1, "M_EACH": 1, "HAS_ALLOWED": True, "HAS_SLOT": True, "ENTROPY": True,
        "RAW": True,
    },
}  # fmt: skip


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    from rlkernel_triton.sampling.call import SHAPE, padded

    for dtype in ("fp32", "bf16"):
        for label, case in _CASES.items():
            given = {"HAS_ALLOWED": False, "HAS_SLOT": False, "ENTROPY": False, **case}
            shape = {"TILE": SHAPE.TILE, "GROUP": SHAPE.GROUP}
            divisible = tuple(n for n, t in (_LAW | _RESULTS).items() if t.startswith("*"))
            yield Build(
                tiles,
                f"{dtype}, {label}",
                {"x": f"*{dtype}", **_LAW},
                {**given, **shape, "RAW": False, "PER": SHAPE.tiles_a_program(1024)},
                num_warps=SHAPE.stream_warps,
                divisible=("x", *(n for n in divisible if n in _LAW)),
            )
            yield Build(
                finish,
                f"{dtype}, {label}",
                {"x": f"*{dtype}", "raw": f"*{dtype}", **_LAW, **_RESULTS},
                {"RAW": False, **given, **shape, **padded(_V, SHAPE), "ORDER": 0, "KEEP_ALL": False,
                 "HAS_SPOILED": False},
                num_warps=SHAPE.finish_warps,
                divisible=("x", "raw", *divisible),
            )  # fmt: skip
