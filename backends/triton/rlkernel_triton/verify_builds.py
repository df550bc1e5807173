"""Builds of the kernels of verify: a vocabulary of 128256, parameters per request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton import verify_kernels as kernels
from rlkernel_triton.builds import Build

_TYPES: Final = {
    **dict.fromkeys(("cu_draft", "draft_ids", "step", "seed", "rows", "longs", "threshold_id"), "*i64"),
    **dict.fromkeys(("accept", "accepted", "ints", "winners", "allowed"), "*i32"),
    **dict.fromkeys(("floats", "laws", "threshold"), "*fp32"),
    **dict.fromkeys(("sums", "scores", "parts"), "*fp64"),
    **dict.fromkeys(("M", "K", "V", "S", "W", "row_stride", "q_row_stride", "raw_row_stride", "allowed_stride"), "i32"),
    "invalid_token": "i32",
}
_UNIT: Final = {"column_stride": 1, "q_column_stride": 1, "raw_column_stride": 1, "SEED_EACH": 1, "STEP_EACH": 1}
_SHAPE: Final = {"R": 32, "BLOCK": 1024, "SP": 128, "WIDE": 8192, "PARTS": 16}
# Kernels that read logits, with what tells their builds apart.
_CASES: Final[dict[str, dict[str, Any]]] = {
    "draft logits": {"HAS_ALLOWED": False, "LOGITS": True, "RAW": False, "STRICT": False},
    "draft probabilities, bitmask, raw": {"HAS_ALLOWED": True, "LOGITS": False, "RAW": True, "STRICT": False},
}


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    yield _build(kernels.lay_out, "any", "fp32", {})
    yield _build(kernels.weigh_drafts, "fp32", "fp32", {"column_stride": 1})
    yield _build(kernels.join_drafts, "16 parts", "fp32", {})
    yield _build(kernels.stop, "strict", "fp32", {"STRICT": True, "RAW": False, "accept": None})
    for label, case in _CASES.items():
        for kernel in (kernels.test, kernels.stop, kernels.search, kernels.put):
            yield _build(kernel, f"bf16, {label}", "bf16", case if case["HAS_ALLOWED"] else case | {"allowed": None})


def _build(kernel: Any, label: str, dtype: str, case: dict[str, Any]) -> Build:
    names = kernel.arg_names
    types = {"x": f"*{dtype}", "raw": f"*{dtype}", "q": "*fp32", **_TYPES}
    constants = {n: v for n, v in {**_UNIT, **_SHAPE, **case}.items() if n in names}
    known = {n: t for n, t in types.items() if n in names and n not in constants}
    aligned = tuple(n for n, t in known.items() if t[0] == "*" or n.endswith("row_stride"))
    return Build(kernel, label, known, constants, divisible=aligned)
