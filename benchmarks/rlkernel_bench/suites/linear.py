"""linear: a product whose rows have the same bits in any batch, beside cuBLAS, which chooses an order by the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw, some
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

_FAST = Goal(1 / 0.75, "times", "H")  # H100, H200: of cuBLAS's throughput
_READ_ONCE = Goal(0.6, "of copy", "H")  # of the bytes of the weight, which one row waits for


def _work(M: int, K: int, N: int, dtype: str = "bfloat16", why: str = "") -> Work:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    goals = (_FAST,) if M >= 8192 else (_READ_ONCE,) if M == 1 else ()
    floor = f"{size}*(N*K + M*K + M*N)"
    sizes = {"M": M, "K": K, "N": N}
    return Work("linear", "linear", sizes, dtype, "forward", {}, floor, "2*M*K*N", dtype, goals, "cublas", why=why)


_ROWS = (1, 8, 64, 1024, 8192)
_SHAPES = {(4096, 6144): "qkv", (4096, 4096): "out", (4096, 24576): "gate and up", (12288, 4096): "down"}

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(2, 64, 96), _work(70, 300, 40, "float32")),
    "full": tuple(_work(M, K, N, why=f"Qwen-3 8B, {why}") for (K, N), why in _SHAPES.items() for M in _ROWS),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    M, K, N = (work.sizes[s] for s in "MKN")

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        return {"x": draw.normal(M, K, dtype=work.dtype), "weight": draw.normal(N, K, std=K**-0.5, dtype=work.dtype)}

    def call(given: Inputs) -> Outputs:
        return {"y": rlk.linear(given["x"], given["weight"])}

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        """Some rows in float64, and the sums of the sizes of their products."""
        rows, weight = given["x"][some(M, 16).to(given["x"].device)].double(), given["weight"].double()
        return {"y": rows @ weight.t(), "reach": rows.abs() @ weight.abs().t()}

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        error = (found["y"][some(M, 16).to(found["y"].device)].double() - want["y"]).abs()
        allowed = accumulation_bound(want["y"], want["reach"], unit=UNITS[work.dtype], inner=K, weight_rounding="none")
        over = float((error / allowed).nan_to_num(nan=float("inf")).max())
        # Peers that round partial sums to 16 bits are admitted within eight roundings.
        return {"y": Judgment(float(error.max()), over, over / 8)}

    return Problem(work, make, {"": call}, expected, judge)
