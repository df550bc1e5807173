"""grouped_linear: products of experts whose rows have the bits of linear, beside torch's grouped_mm."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

_FAST = Goal(1 / 0.75, "times", "H")  # H100, H200: of the throughput of torch's grouped_mm


_OP = "grouped_linear"
_LEAVES = ("x", "weight")
_BOTH = "forward+backward"


def _work(E: int, T: int, K: int, N: int, dtype: str = "bfloat16", task: str = "forward", why: str = "") -> Work:
    size, passes = {"bfloat16": 2, "float32": 4}[dtype], 3 if task == _BOTH else 1
    experts = "E*(1 - (1 - 1/E)**T)"  # that rows are drawn for, on average
    floor = f"{passes}*{size}*({experts}*N*K + T*K + T*N)"
    goals = (_FAST,) if T >= 8192 else ()
    sizes = {"E": E, "T": T, "K": K, "N": N}
    ruler = "grouped_mm"
    return Work(_OP, _OP, sizes, dtype, task, {}, floor, f"{passes}*2*T*K*N", dtype, goals, ruler, why=why)


_MODELS = {
    "Qwen3-30B-A3B, gate and up": (128, 2048, 1536),
    "Qwen3-30B-A3B, down": (128, 768, 2048),
    "Mixtral 8x7B, gate and up": (8, 4096, 28672),
}
_ROWS = {128: (64, 512, 8192, 65536), 8: (16, 128, 2048, 16384)}  # a few tokens, to those of a training step

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(3, 20, 64, 48), _work(2, 30, 72, 40, "float32"), _work(3, 20, 64, 48, task=_BOTH)),
    "full": (
        *(_work(E, T, K, N, why=why) for why, (E, K, N) in _MODELS.items() for T in _ROWS[E]),
        *(_work(E, _ROWS[E][-1], K, N, task=_BOTH, why=why) for why, (E, K, N) in _MODELS.items() if E == 128),
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    E, T, K, N = (work.sizes[s] for s in "ETKN")

    def make(seed: int) -> Inputs:
        """Rows of experts that are drawn, so that each has a number of its own; the last rows are of none."""
        draw = Draw(device, seed)
        expert = torch.randint(E, (T - T // 16,), generator=torch.Generator().manual_seed(seed))
        return {
            "x": draw.normal(T, K, dtype=work.dtype),
            "weight": draw.normal(E, N, K, std=K**-0.5, dtype=work.dtype),
            "ends": torch.bincount(expert, minlength=E).cumsum(0).int().to(device),
            "up_y": draw.normal(T, N, dtype=work.dtype),
        }

    def call(given: Inputs) -> Outputs:
        return {"y": rlk.grouped_linear(given["x"], given["weight"], given["ends"])}

    def complete(forward: Call) -> Call:
        return with_gradients(forward, _LEAVES) if work.backward else without_gradients(forward)

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        """Some rows that an expert has, of the result and of the gradient of x, and the sums of their terms' sizes."""
        ends = given["ends"].long()
        rows = some(int(ends[-1]), 16).to(ends.device)
        weight = given["weight"][torch.searchsorted(ends, rows, right=True)].double()
        x, g = given["x"][rows].double(), given["up_y"][rows].double()
        both = {"y": (x, weight.mT), "grad_x": (g, weight)}
        products = {n: (a[:, None] @ w)[:, 0] for n, (a, w) in both.items()}
        reach = {f"{n} reach": (a[:, None].abs() @ w.abs())[:, 0] for n, (a, w) in both.items()}
        return {"rows": rows, **products, **reach}

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        judged = {}
        for name, inner in (("y", K), ("grad_x", N)):
            if name in found:
                error = (found[name][want["rows"]].double() - want[name]).abs()
                allowed = accumulation_bound(
                    want[name], want[f"{name} reach"], unit=UNITS[work.dtype], inner=inner, weight_rounding="none"
                )
                over = float((error / allowed).nan_to_num(nan=float("inf")).max())
                # Peers that round partial sums to 16 bits are admitted within eight roundings.
                judged[name] = Judgment(float(error.max()), over, over / 8)
        return judged

    return Problem(work, make, {"": complete(call)}, expected, judge, complete=complete)
