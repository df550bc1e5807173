"""layer: rms_norm and glu between the products of a transformer layer, bound by the bytes they move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlkernel as rlk
from rlkernel_bench.gates import elementwise, frobenius, tolerance
from rlkernel_bench.suites.common import Definition, Draw, double, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Inputs, Judgment, Outputs, Problem, Work

EPS = 1e-6


def _norm(N: int, D: int, task: str = "forward", dtype: str = "bfloat16", why: str = "") -> Work:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    # Forward: x, residual, their sum, y. Backward: the sum, two upstream gradients and the gradient of both arguments.
    floor = f"{size}*(4*N*D + D)" if task == "forward" else f"{size}*(8*N*D + 3*D)"
    return Work("layer", "rms_norm", {"N": N, "D": D}, dtype, task, {"residual": True}, floor, why=why)


def _glu(N: int, D: int, task: str = "forward", dtype: str = "bfloat16", why: str = "") -> Work:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    floor = f"{size}*3*N*D" if task == "forward" else f"{size}*8*N*D"
    return Work("layer", "glu", {"N": N, "D": D}, dtype, task, {"activation": "silu"}, floor, why=why)


_BOTH = "forward+backward"
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_norm(6, 96, dtype="float32"), _norm(6, 96, _BOTH), _glu(6, 96, dtype="float32"), _glu(6, 96, _BOTH)),
    "full": tuple(
        make(8192, D, task, why="Qwen-3 8B")
        for make, D in ((_norm, 4096), (_glu, 12288))
        for task in ("forward", _BOTH)
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    N, D, norm = work.sizes["N"], work.sizes["D"], work.op == "rms_norm"
    leaves, values = (("x", "residual", "weight"), ("y", "total")) if norm else (("x",), ("y",))

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        given = {
            "x": draw.normal(N, D if norm else 2 * D, dtype=work.dtype),
            "up_y": draw.normal(N, D, dtype=work.dtype),
        }
        if norm:
            given |= {"residual": draw.normal(N, D, dtype=work.dtype), "up_total": draw.normal(N, D, dtype=work.dtype)}
            given["weight"] = 1 + draw.normal(D, std=0.25, dtype=work.dtype)
        return given

    def forward(given: Inputs) -> Outputs:
        if not norm:
            return {"y": rlk.glu(given["x"], activation="silu")}
        out = rlk.rms_norm(given["x"], given["weight"], eps=EPS, residual=given["residual"])
        return {"y": out.y, "total": out.residual}

    def complete(call: Call) -> Call:
        return with_gradients(call, leaves) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        rows = some(N).to(given["x"].device)
        few = {k: double(x if k == "weight" else x[rows]) for k, x in given.items()}
        if norm:  # what is normalized is the sum as it is stored
            stored = (given["x"][rows].float() + given["residual"][rows].float()).to(given["x"].dtype)
            few |= {"x": double(stored), "residual": few["residual"] * 0}
        return Definition(lambda _names: complete(forward)(few))

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want, rows = definition.of(values), some(N)
        scale: Any = 1.0 if norm else few_of(given["x"], rows)[:, D:].abs().clamp(min=1.0)
        have = {k: few_of(found[k], rows) for k in values if k in found}
        judged = {k: elementwise(work.op, "y", work.dtype, x, want[k], scale) for k, x in have.items()}
        if work.backward:
            _, rtol = tolerance(work.op, "grad", work.dtype)
            judged["grad_x"] = frobenius(few_of(found["grad_x"], rows), want["grad_x"], rtol)
        return judged

    return Problem(work, make, {"": complete(forward)}, expected, judge, complete)


def few_of(x: Any, rows: Any) -> Any:
    """Rows that are judged, in float64 on the CPU."""
    return x[rows.to(x.device)].detach().double().cpu()
