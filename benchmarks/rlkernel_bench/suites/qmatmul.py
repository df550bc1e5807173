"""qmatmul: a decode step reads the quantized weight once; from a few hundred rows on it is a matmul like any other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import frobenius
from rlkernel_bench.suites.common import BITS, Draw, prepacked
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.quant import QuantSpec, dequantize
from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

_OWN_QUANTIZER = 0.25  # relative Frobenius error that four bits may have against the full weight
_GOALS = {  # (K, N, M): us on an H200, weights cold
    (4096, 28672, 1): 20, (4096, 28672, 16): 22, (4096, 28672, 64): 34, (4096, 28672, 128): 50,
    (4096, 28672, 256): 90, (4096, 6144, 1): 7.3, (4096, 6144, 16): 8.2, (4096, 6144, 64): 11.5,
}  # fmt: skip


def work_of(
    M: int, K: int, N: int, form: str = "int4_g128", suite: str = "qmatmul", why: str = "", **options: str
) -> Work:
    """One row; the seeds' rows are made of it too. `act`: how tokens are quantized."""
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
        {"format": form, **options},
        f"N*K*{BITS[form]}/8 + 2*M*K + 2*M*N",
        "2*M*K*N",
        goals=tuple(goals),
        ruler="cublas",
        why=why,
    )


_TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)
_SHAPES = {(4096, 28672): "gate and up", (4096, 6144): "qkv", (14336, 4096): "down", (8192, 10240): "qkv of 70B"}
_FORMATS = ("nf4", "mxfp4", "nvfp4", "int8_channel", "fp8_channel", "mxfp8")
_ACTS = {"fp8_channel": "token_fp8", "fp8_block128": "block128_fp8"}

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        work_of(2, 64, 96, "int4_g64"),
        work_of(2, 64, 96, "nf4"),
        *(work_of(2, 128, 256, form, act=act) for form, act in _ACTS.items()),
    ),
    "full": (
        *(work_of(M, 4096, 28672, why="Llama-3 8B, gate and up") for M in (1, 16, 64, 128, 256)),
        *(work_of(M, 4096, 6144, why="Llama-3 8B, qkv") for M in (1, 16, 64)),
        work_of(2048, 4096, 6144, why="prefill"),
        work_of(1, 4096, 6144, "nf4", why="QLoRA"),
        work_of(64, 4096, 6144, "fp8_channel", why="fp8 weights"),
    ),
    "sweep": (
        *(work_of(M, K, N, why=f"Llama-3 8B, {why}") for (K, N), why in _SHAPES.items() for M in _TOKENS),
        *(work_of(M, 4096, 28672, form, why="by format") for form in _FORMATS for M in _TOKENS),
        *(work_of(M, 4096, 28672, f, why="fp8 on both sides", act=act) for f, act in _ACTS.items() for M in _TOKENS),
    ),
}


def spec_of(work: Work) -> QuantSpec:
    """The format of the workload's weight, with how its tokens are quantized."""
    return QuantSpec.named(work.options["format"], **{k: x for k, x in work.options.items() if k == "act"})


def make(work: Work, device: str, seed: int) -> Inputs:
    """Activations, a weight, and the weight quantized by the reference."""
    m, k, n = (work.sizes[s] for s in "MKN")
    draw = Draw(device, seed)
    weight = draw.normal(n, k, std=k**-0.5, dtype=work.dtype)
    with rlk.use("reference"):
        w = rlk.quantize(weight, spec_of(work))
    return {"x": draw.normal(m, k, dtype=work.dtype), "weight": weight, "w": w}


def product(given: Inputs) -> Outputs:
    """Through the front door; of experts where the inputs say where their rows end."""
    return {"y": rlk.qmatmul(given["x"], given["w"], ends=given.get("ends"))}


def expected(given: Inputs) -> dict[str, torch.Tensor]:
    """The product in float64, what its bound is a share of, and the product with the weight before it was quantized.

    Tokens are rounded as the format says; the third takes them as they are.
    """
    values, weight, spec = dequantize(given["w"], dtype=torch.float32), given["weight"], given["w"].spec
    x = given["x"] if spec.act == "none" else quantize_activation(given["x"].float(), spec).value()
    ends = given["ends"].tolist() if "ends" in given else [len(x)]
    each = weight if weight.dim() == 3 else weight[None]
    found: dict[str, list[torch.Tensor]] = {"y": [], "reach": [], "full": []}
    for w, whole, start, stop in zip(values.view(each.shape), each, [0, *ends[:-1]], ends, strict=True):
        rows, w = x[start:stop].double(), w.double()  # noqa: PLW2901 one expert at a time
        found["y"].append(rows @ w.t())
        found["reach"].append(rows.abs() @ w.abs().t())
        found["full"].append(given["x"][start:stop].double() @ whole.double().t())
    return {name: torch.cat(parts) for name, parts in found.items()}


def judge(work: Work, _given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
    """By the contract's bound; by the norm where others multiply the whole weight, or quantize it themselves."""
    unit = UNITS[work.dtype]
    if "y" not in found:
        name = next(iter(found))
        error = frobenius(found[name], want["full"], _OWN_QUANTIZER).error
        limit = _OWN_QUANTIZER if name == "y_own" else 8 * unit
        return {name: Judgment(error, error / limit, error / limit)}
    error = (found["y"].double() - want["y"]).abs()
    allowed = accumulation_bound(want["y"], want["reach"], unit=unit, inner=work.sizes["K"])
    over = float((error / allowed).nan_to_num(nan=float("inf")).max())
    return {"y": Judgment(float(error.max()), over, over)}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    return Problem(work, partial(make, work, device), {"": product}, expected, partial(judge, work), prepare=prepacked)
