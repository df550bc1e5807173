"""adapters: a decode step of several LoRAs in one batch over one quantized weight, beside a loop over them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.suites import qmatmul
from rlkernel_bench.suites.common import BITS, Draw, prepacked
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work

SCALE = 2.0  # of every low-rank addition


def _work(M: int, K: int, N: int, G: int = 8, r: int = 16, form: str = "int4_g128", why: str = "") -> Work:
    sizes = {"M": M, "K": K, "N": N, "G": G, "r": r}
    moved = f"N*K*{BITS[form]}/8 + 2*G*r*(K + N) + 2*M*(K + N)"
    options = {"format": form, "chain": "adapters"}
    return Work("adapters", "qmatmul", sizes, "bfloat16", "forward", options, moved, "2*M*K*N", ruler="torch", why=why)


_QKV, _UP = "Llama-3 8B, qkv", "Llama-3 8B, gate and up"
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(6, 64, 96, 3, 4, "int4_g64"),),
    "full": (
        _work(16, 4096, 6144, why=_QKV),
        *(_work(M, 4096, 28672, why=_UP) for M in (64, 256)),
        _work(2048, 4096, 6144, why=_QKV),
    ),
    "sweep": tuple(_work(M, 4096, 28672, G, why=_UP) for G in (2, 8, 32) for M in (32, 64, 128, 256, 1024)),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """The inputs of a product, and adapters of M / G rows each."""
    G, r, K, N = (work.sizes[s] for s in "GrKN")
    draw = Draw(device, seed + 1)
    A = draw.normal(G, r, K, std=K**-0.5, dtype=work.dtype)
    B = draw.normal(G, N, r, std=r**-0.5, dtype=work.dtype)
    ends = torch.arange(1, G + 1, dtype=torch.int32, device=A.device) * (work.sizes["M"] // G)
    return {**qmatmul.make(work, device, seed), "A": A, "B": B, "lora_ends": ends}


def product(given: Inputs) -> Outputs:
    """One call."""
    lora = rlk.LoRA(given["A"], given["B"], SCALE)
    return {"y": rlk.qmatmul(given["x"], given["w"], lora=lora, lora_ends=given["lora_ends"])}


def looped(given: Inputs) -> Outputs:
    """The product, then one adapter after the other in plain torch."""
    y = qmatmul.product(given)["y"]
    add_each(given, y)
    return {"y": y}


def add_each(given: Inputs, y: torch.Tensor) -> None:
    """The rows of each adapter, as many as those of any other, get its addition, rounded to the dtype of y."""
    rows = len(y) // len(given["A"])
    for x, some, a, b in zip(given["x"].split(rows), y.split(rows), given["A"], given["B"], strict=True):
        some.addmm_(x @ a.t(), b.t(), alpha=SCALE)


def expected(given: Inputs) -> dict[str, torch.Tensor]:
    """Those of the product with the additions, in float64."""
    want = qmatmul.expected(given)
    wide = {name: given[name].double() for name in ("x", "A", "B")}
    for name in ("y", "full"):
        add_each(wide, want[name])
    reach = torch.zeros_like(want["y"])
    add_each({name: x.abs() for name, x in wide.items()}, reach)
    return want | {"lora_reach": reach}


def judge(work: Work, given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
    """As the product alone: the bound allows (u + e) sum |x||w'|, and (2 u + e) lora_reach of the additions."""
    return qmatmul.judge(work, given, {**want, "reach": want["reach"] + 2 * want["lora_reach"]}, found)


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    ours = {"": product, "looped": looped}
    return Problem(work, partial(make, work, device), ours, expected, partial(judge, work), prepare=prepacked)
