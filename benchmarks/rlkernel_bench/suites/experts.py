"""experts: a layer of a mixture of experts on quantised weights, its rows sorted by expert, some experts empty."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.errors import ResolutionError
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

_BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "int4_g64": 4.25}


def _work(tokens: int, E: int, N: int, K: int, form: str = "mxfp4", top: int = 4, why: str = "") -> Work:
    sizes = {"tokens": tokens, "E": E, "N": N, "K": K}
    rows = f"{top}*tokens"
    moved = f"{min(E, top * tokens)}*N*K*{_BITS[form]}/8 + 2*{rows}*(N + K)"
    calls = f"2*{rows}*N*K"
    options = {"format": form, "top": top, "chain": "experts"}
    return Work("experts", "qmatmul", sizes, "bfloat16", "forward", options, moved, calls, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(3, 4, 32, 64, top=2),),
    "full": tuple(_work(n, 32, 5760, 2880, why="gpt-oss 20B, gate and up") for n in (4, 64, 1024)),
}


def ends_of(tokens: int, experts: int, top: int, device: str, seed: int) -> torch.Tensor:
    """Where the rows of each expert end, `top` experts a token, more to some than to others."""
    g = torch.Generator().manual_seed(seed)
    liking = torch.randn(experts, generator=g) + torch.randn(tokens, experts, generator=g)
    chosen = liking.topk(top, 1).indices.flatten()
    return torch.bincount(chosen, minlength=experts).cumsum(0).int().to(device)


def make(work: Work, device: str, seed: int) -> Inputs:
    """Rows sorted by expert, the experts' weights, and those quantised by the reference."""
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
    unit = UNITS[work.dtype]

    def call(given: Inputs) -> Outputs:
        return {"y": rlk.qmatmul(given["x"], given["w"], ends=given["ends"])}

    def prepare(given: Inputs) -> Inputs:
        """The weight as the chosen backend reads it fastest; outside the time."""
        try:
            return {**given, "w": rlk.prepack(given["w"])}
        except ResolutionError:
            return given

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        from rlkernel_core.quant import dequantize

        values = dequantize(given["w"], dtype=torch.float32).view(given["weight"].shape)
        found: dict[str, list[torch.Tensor]] = {"y": [], "reach": [], "full": []}
        start = 0
        for e, stop in enumerate(given["ends"].tolist()):
            x, w = given["x"][start:stop].double(), values[e].double()
            found["y"].append(x @ w.t())
            found["reach"].append(x.abs() @ w.abs().t())
            found["full"].append(x @ given["weight"][e].double().t())
            start = stop
        return {name: torch.cat(rows) for name, rows in found.items()}

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        name = next(iter(found))  # a peer multiplies the weight before it was quantised
        error = (found[name].double() - want["y" if name == "y" else "full"]).abs()
        allowed = accumulation_bound(want["y"], want["reach"], unit=unit, inner=work.sizes["K"])
        over = float((error / allowed).nan_to_num(nan=float("inf")).max())
        return {name: Judgment(float(error.max()), over, over)}

    return Problem(work, partial(make, work, device), {"": call}, expected, judge, prepare=prepare)
