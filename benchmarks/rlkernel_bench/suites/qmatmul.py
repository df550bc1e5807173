"""qmatmul: a decode step reads the quantised weight once; from a few hundred rows on it is a matmul like any other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import frobenius
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.errors import ResolutionError
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

# Bits a weight takes with its scales, by format; one bf16 scale a group for int4, an fp32 one a block for nf4.
_BITS = {"int4_g128": 4 + 16 / 128, "int4_g64": 4 + 16 / 64, "nf4": 4 + 32 / 64, "fp8_channel": 8.0, "mxfp4": 4.25}
_OWN_QUANTISER = 0.25  # relative Frobenius error that four bits may have against the full weight
_GOALS = {  # (K, N, M): us on an H200, weights cold
    (4096, 28672, 1): 20, (4096, 28672, 16): 22, (4096, 28672, 64): 34, (4096, 28672, 128): 50,
    (4096, 28672, 256): 90, (4096, 6144, 1): 7.3, (4096, 6144, 16): 8.2, (4096, 6144, 64): 11.5,
}  # fmt: skip


def work_of(M: int, K: int, N: int, form: str = "int4_g128", suite: str = "qmatmul", why: str = "") -> Work:
    """One row; the seeds' rows are made of it too."""
    limit = _GOALS.get((K, N, M)) if form == "int4_g128" else None
    goals = [Goal(limit, "us", "H200")] if limit else []
    if M >= 1024:
        goals.append(Goal(1 / 0.95, "times", "H200"))
    return Work(
        suite,
        "qmatmul",
        {"M": M, "K": K, "N": N},
        "bfloat16",
        "forward",
        {"format": form},
        f"N*K*{_BITS[form]}/8 + 2*M*K + 2*M*N",
        "2*M*K*N",
        goals=tuple(goals),
        ruler="cublas",
        why=why,
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (work_of(2, 64, 96, "int4_g64"), work_of(2, 64, 96, "nf4")),
    "full": (
        *(work_of(M, 4096, 28672, why="Llama-3 8B, gate and up") for M in (1, 16, 64, 128, 256)),
        *(work_of(M, 4096, 6144, why="Llama-3 8B, qkv") for M in (1, 16, 64)),
        work_of(2048, 4096, 6144, why="prefill"),
        work_of(1, 4096, 6144, "nf4", why="QLoRA"),
        work_of(64, 4096, 6144, "fp8_channel", why="fp8 weights"),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Activations, a weight, and the weight quantised by the reference."""
    m, k, n = (work.sizes[s] for s in "MKN")
    draw = Draw(device, seed)
    weight = draw.normal(n, k, std=k**-0.5, dtype=work.dtype)
    with rlk.use("reference"):
        w = rlk.quantize(weight, work.options["format"])
    return {"x": draw.normal(m, k, dtype=work.dtype), "weight": weight, "w": w}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    unit = UNITS[work.dtype]

    def call(given: Inputs) -> Outputs:
        return {"y": rlk.qmatmul(given["x"], given["w"])}

    def prepare(given: Inputs) -> Inputs:
        """The weight as the chosen backend reads it fastest; outside the time."""
        try:
            return {**given, "w": rlk.prepack(given["w"])}
        except ResolutionError:  # it packs nothing: the canonical layout is what it takes
            return given

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        from rlkernel_core.quant import dequantize

        x, w = given["x"].double(), dequantize(given["w"], dtype=torch.float32).double()
        return {"y": x @ w.t(), "reach": x.abs() @ w.abs().t(), "full": x @ given["weight"].double().t()}

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        if "y" not in found:  # the dense product, or a peer with a quantiser of its own
            name = next(iter(found))
            error = frobenius(found[name], want["full"], _OWN_QUANTISER).error
            limit = _OWN_QUANTISER if name == "y_own" else 8 * unit
            return {name: Judgment(error, error / limit, error / limit)}
        error = (found["y"].double() - want["y"]).abs()
        allowed = accumulation_bound(want["y"], want["reach"], unit=unit, inner=work.sizes["K"])
        over = float((error / allowed).nan_to_num(nan=float("inf")).max())
        return {"y": Judgment(float(error.max()), over, over)}

    return Problem(work, partial(make, work, device), {"": call}, expected, judge, prepare=prepare)
