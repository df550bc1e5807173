"""experts: a layer of a mixture of experts on quantized weights, its rows sorted by expert, some experts empty."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import BITS, Draw, prepacked
from rlkernel_bench.suites.qmatmul import expected, judge, product
from rlkernel_bench.work import Inputs, Problem, Work


def _work(tokens: int, E: int, N: int, K: int, form: str = "mxfp4", top: int = 4, why: str = "") -> Work:
    sizes = {"tokens": tokens, "E": E, "N": N, "K": K}
    rows = f"{top}*tokens"
    moved = f"{min(E, top * tokens)}*N*K*{BITS[form]}/8 + 2*{rows}*(N + K)"
    calls = f"2*{rows}*N*K"
    options = {"format": form, "top": top, "chain": "experts"}
    return Work("experts", "qmatmul", sizes, "bfloat16", "forward", options, moved, calls, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(3, 4, 32, 64, top=2),),
    "full": tuple(_work(n, 32, 5760, 2880, why="gpt-oss 20B, gate and up") for n in (4, 64, 1024)),
    "sweep": tuple(
        _work(n, 32, 5760, 2880, form, why="gpt-oss 20B, gate and up")
        for form in ("mxfp4", "nvfp4", "int4_g64")
        for n in (1, 4, 16, 64, 256, 1024)
    ),
}


def ends_of(tokens: int, experts: int, top: int, device: str, seed: int) -> torch.Tensor:
    """Where the rows of each expert end, `top` experts a token, more to some than to others."""
    g = torch.Generator().manual_seed(seed)
    liking = torch.randn(experts, generator=g) + torch.randn(tokens, experts, generator=g)
    chosen = liking.topk(top, 1).indices.flatten()
    return torch.bincount(chosen, minlength=experts).cumsum(0).int().to(device)


def make(work: Work, device: str, seed: int) -> Inputs:
    """Rows sorted by expert, the experts' weights, and those quantized by the reference."""
    tokens, E, N, K = (work.sizes[s] for s in ("tokens", "E", "N", "K"))
    top = work.options["top"]
    draw = Draw(device, seed)
    weight = draw.normal(E * N, K, std=K**-0.5, dtype=work.dtype)
    with rlk.use("reference"):
        w = rlk.quantize(weight, work.options["format"])
    x = draw.normal(tokens * top, K, dtype=work.dtype)
    return {"x": x, "weight": weight.view(E, N, K), "w": w, "ends": ends_of(tokens, E, top, device, seed)}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    return Problem(work, partial(make, work, device), {"": product}, expected, partial(judge, work), prepare=prepacked)
