"""quantize: the weights of a rollout engine after every update; one read of the weight, one write of the codes.

fake_quantize: the same weights as a trainer sees them; one read, one write of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import BITS, Draw
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

# A weight within 2^-20 of a border between two codes may get either: about that share of them.
_BORDER = 1e-4


def _work(N: int, K: int, form: str, why: str = "") -> Work:
    # 3.2 TB/s of the 4.3 that a copy reaches
    goals = (Goal(3.2 / 4.3, "of copy", "H200"),) if form.startswith("int4") else ()
    floor = f"2*N*K + N*K*{BITS[form]}/8"
    sizes = {"N": N, "K": K}
    return Work("quantize", "quantize", sizes, "bfloat16", "forward", {"format": form}, floor, goals=goals, why=why)


def _fake(N: int, K: int, form: str, dtype: str = "bfloat16", why: str = "") -> Work:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    sizes = {"N": N, "K": K}
    return Work("quantize", "fake_quantize", sizes, dtype, "forward", {"format": form}, f"{size}*2*N*K", why=why)


_FAKED = ("int4_g128", "nf4", "mxfp4", "nvfp4", "gguf_q4_k", "int8_channel", "fp8_channel", "fp8_block128")

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(64, 128, "int4_g64"), _work(64, 128, "nf4"), _fake(64, 128, "int8_channel", "float32")),
    "full": (
        *(_work(28672, 4096, form, "Llama-3 8B, gate and up") for form in ("int4_g128", "nf4", "fp8_channel")),
        _work(4096, 14336, "int4_g128", "Llama-3 8B, down"),
        *(_fake(28672, 4096, form, why="Llama-3 8B, gate and up, in training") for form in _FAKED),
        _fake(28672, 4096, "int8_channel", "float32", "beside torch's fake quantization, which takes fp32"),
    ),
    "sweep": tuple(_work(28672, 4096, form, "every format of Llama-3 8B's gate and up") for form in BITS),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """A weight, and the storage that it is quantized into again and again, as a rollout engine does."""
    draw = Draw(device, seed)
    weight = draw.normal(work.sizes["N"], work.sizes["K"], std=0.02, dtype=work.dtype)
    if work.op == "fake_quantize":
        return {"weight": weight}
    with rlk.use("reference"):
        out = rlk.quantize(weight * 0.5, work.options["format"])
    return {"weight": weight, "out": out}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    form = work.options["format"]
    if work.op == "fake_quantize":
        return _fake_problem(work, device)

    def call(given: Inputs) -> Outputs:
        return dict(rlk.quantize(given["weight"], form, out=given["out"]).parts)

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        with rlk.use("reference"):
            return dict(rlk.quantize(given["weight"], form).parts)

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        out = {}
        for name, expected_part in want.items():
            if name in found:
                have = found[name].reshape(expected_part.shape)
                other = float((have.view(torch.uint8) != expected_part.view(torch.uint8)).double().mean())
                limit = _BORDER if name == "codes" else 0.0
                out[name] = Judgment(other, other / limit if limit else (torch.inf if other else 0.0))
        return out

    return Problem(work, partial(make, work, device), {"": call}, expected, judge)


def _fake_problem(work: Work, device: str) -> Problem:
    form = work.options["format"]

    def expected(given: Inputs) -> dict[str, torch.Tensor]:
        with rlk.use("reference"):
            return {"y": rlk.dequantize(rlk.quantize(given["weight"], form))}

    def judge(_given: Inputs, want: dict[str, torch.Tensor], found: Outputs) -> dict[str, Judgment]:
        other = float((found["y"] != want["y"]).double().mean())
        return {"y": Judgment(other, other / _BORDER)}

    return Problem(
        work, partial(make, work, device), {"": lambda g: {"y": rlk.fake_quantize(g["weight"], form)}}, expected, judge
    )
