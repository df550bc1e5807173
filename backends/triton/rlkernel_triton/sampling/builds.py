"""Builds of the sampler: the draws that a rollout engine makes, at the vocabulary of a large model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.sampling.finish import finish
from rlkernel_triton.sampling.searched import searched
from rlkernel_triton.sampling.stream import tiles

_V: Final = 128256
_EDGES: Final = ("sm90", "sm100", "sm120")  # where `plan.overlaps`
# Types as they are launched with tensors of parameters; what a case lacks is None, a constant.
_TYPES: Final = {
    "row_stride": "i32", "V": "i32", "allowed": "*i32", "allowed_stride": "i32", "slot": "*i64", "last_slot": "i32",
    "temperature": "*fp32", "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32", "seed": "*i64", "step": "*i64",
    "noise_stream": "i32", "work": "*fp32", "words": "i32", "S": "i32", "N": "i32", "per": "i32",
    "spoiled": "*i32", "raw_row_stride": "i32",
    "invalid_token": "i32", "longs": "*i64", "ints": "*i32", "floats": "*fp32", "laws": "*fp32",
}  # fmt: skip
_ALIGNED: Final = ("row_stride", "raw_row_stride")  # multiples of 16, beside pointers
_NONE: Final = {
    "T_EACH": 1, "K_EACH": -2, "P_EACH": -2, "M_EACH": -2, "SEED_EACH": 1, "STEP_EACH": 1, "HAS_ALLOWED": False,
    "HAS_SLOT": False, "HAS_SPOILED": False, "ENTROPY": False, "RAW": False, "LAWS": False, "KEEP_ALL": False,
    "ORDER": 0, "UNIT": True, "WHOLE": True, "column_stride": 1, "raw_column_stride": 1,
}  # fmt: skip
_CASES: Final[dict[str, dict[str, Any]]] = {
    "no filter": _NONE,
    "top-k, top-p": {**_NONE, "K_EACH": 1, "P_EACH": 1},
    "top-k, top-p, min-p, allowed, slots, entropy, raw": {
        **_NONE, "K_EACH": 1, "P_EACH": 1, "M_EACH": 1, "HAS_ALLOWED": True, "HAS_SLOT": True, "ENTROPY": True,
        "RAW": True,
    },
}  # fmt: skip
# Which constant says that an argument is there.
_GIVEN: Final = {
    "allowed": "HAS_ALLOWED", "allowed_stride": "HAS_ALLOWED", "slot": "HAS_SLOT", "spoiled": "HAS_SPOILED",
    "raw": "RAW", "laws": "LAWS",
}  # fmt: skip


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    from rlkernel_triton.sampling.plan import SHAPE, padded

    for dtype in ("fp32", "bf16"):
        for label, case in _CASES.items():
            filters = label != "no filter"
            sizes = {"TILE": SHAPE.TILE, "GROUP": SHAPE.GROUP, **padded(_V, SHAPE)}
            sizes |= {"BLOCK": SHAPE.BLOCK, "FEW": SHAPE.FEW, "SEARCH": filters}
            shapes = [(tiles, "", SHAPE.stream_warps, 0, {"PER": SHAPE.tiles_a_program(1024, free=not filters)})]
            shapes += [(finish, "", *SHAPE.end(1), {})]
            lanes = 64 if arch.startswith("gfx9") else 32
            if label == "top-k, top-p" and SHAPE.end(1024, lanes) != SHAPE.end(1):
                shapes += [(finish, ", many rows", *SHAPE.end(1024, lanes), {})]
            shapes += [(searched, "", SHAPE.search_warps, 0, {})] if filters else []
            for kernel, of_rows, warps, registers, own in shapes:
                if dtype == "bf16" and (kernel is not tiles or label != "top-k, top-p"):
                    continue  # bf16 differs in the loads, and those of the others are few
                types = {"x": f"*{dtype}", "raw": f"*{dtype}", **_TYPES}
                constants = {**case, **sizes, **own, "EDGE": arch in _EDGES}
                constants |= {name: None for name, there in _GIVEN.items() if not case[there]}
                constants |= {"top_k": None, "top_p": None} if not filters else {}
                constants |= {"min_p": None} if case["M_EACH"] == -2 else {}
                names = set(kernel.arg_names)
                constants = {n: v for n, v in constants.items() if n in names}
                types = {n: t for n, t in types.items() if n in names and n not in constants}
                aligned = (*(n for n, t in types.items() if t[0] == "*"), *_ALIGNED)
                yield Build(
                    kernel,
                    f"{dtype}, {label}{of_rows}",
                    types,
                    constants,
                    num_warps=warps,
                    divisible=tuple(n for n in aligned if n in types),
                    options={"maxnreg": registers} if registers and arch.startswith("sm") else {},
                )
