"""linear_logprob: compute-bound, so everything is a multiple of cuBLAS's logits matmul in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.gates import COARSE_ABSOLUTE, elementwise, frobenius, tolerance
from rlkernel_bench.suites.common import Definition, Draw, double, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

_MATMUL = "2*N*D*V"
_HEAD = "2*V*D + 2*N*D + 16*N"
_TASKS = ("forward", "forward+backward")
_SCALE = 2.0  # of LoRA, as often taken: alpha is twice the rank
_FORWARD = (Goal(1.00, "times", "H200"), Goal(307.2, "MiB", "H200"))
_BOTH = (
    Goal(3.05, "times", "H200", "save"),
    Goal(3.95, "times", "H200", "recompute"),
    Goal(358.4, "MiB", "H200", "recompute"),
)


def _work(
    N: int, D: int, V: int, task: str = "forward", dtype: str = "bfloat16", why: str = "", K: int = 0, r: int = 0,
    **more: Any,
) -> Work:  # fmt: skip
    both = task != "forward"
    listed, low_rank = {"K": K} if K else {}, {"r": r} if r else {}
    return Work(
        "linear_logprob",
        "linear_logprob",
        {"N": N, "D": D, "V": V},
        dtype,
        task,
        {"entropy": True, **listed, **low_rank},
        f"2*({_HEAD})" if both else _HEAD,
        f"{2 if r else 3}*{_MATMUL}" if both else _MATMUL,  # with LoRA the head itself is frozen
        dtype,
        ruler="cublas",
        why=why,
        **more,
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(64, 32, 500, dtype="float32", memory_at=("N", (16, 64))),
        _work(64, 32, 500, "forward+backward", "bfloat16"),
        _work(64, 32, 500, "forward+backward", "float32", K=8),
        _work(64, 32, 500, "forward+backward", "float32", r=8),
    ),
    "full": (
        _work(8192, 4096, 128256, goals=_FORWARD, memory_at=("N", (2048, 4096, 8192)), why="Llama-3 8B"),
        _work(
            8192, 4096, 128256, "forward+backward", goals=_BOTH, memory_at=("N", (2048, 4096, 8192)), why="Llama-3 8B"
        ),
        _work(16384, 2048, 151936, goals=_FORWARD[:1], why="Qwen-3 1.7B"),
        _work(16384, 2048, 151936, "forward+backward", goals=_BOTH[:2], why="Qwen-3 1.7B"),
        *(_work(8192, 4096, 128256, task, why="Llama-3 8B, a teacher's 64 most likely ids", K=64) for task in _TASKS),
        *(_work(8192, 4096, 128256, task, why="Llama-3 8B, LoRA on a frozen head", r=16) for task in _TASKS),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Hidden states and a head whose logits have a standard deviation of 3 and, in a quarter of the rows, a peak."""
    n, d, v = work.sizes["N"], work.sizes["D"], work.sizes["V"]
    draw = Draw(device, seed)
    hidden = draw.normal(n, d, dtype=work.dtype)
    weight = draw.normal(v, d, std=3 / d**0.5, dtype=work.dtype)
    ids, quarter = draw.ids(v, n), max(1, n // 4)
    toward = weight[ids[:quarter]].float()
    lead = 30 * draw.uniform(quarter, 1) / toward.square().sum(-1, keepdim=True)
    hidden[:quarter] += (lead * toward).to(hidden.dtype)
    K = int(work.options.get("K", 0))
    if K:  # those of a teacher gather around few ids, which rows have in common
        ids = torch.cat([ids[:, None], (ids[:, None] + draw.ids(4 * K, n, K - 1)) % v], 1)
    r = int(work.options.get("r", 0))
    low_rank = {"A": draw.normal(r, d, std=d**-0.5), "B": draw.normal(v, r, std=0.3 * r**-0.5)} if r else {}
    return {
        "hidden": hidden,
        "weight": weight,
        "ids": ids,
        "up_logprob": draw.normal(n, K) if K else draw.normal(n),
        "up_entropy": draw.normal(n),
        **{name: x.to(hidden.dtype) for name, x in low_rank.items()},
    }


def judge_logits(given: Inputs, found: torch.Tensor) -> Judgment:
    """A ruler's logits, some rows of them, against float64."""
    hidden = given["hidden"].reshape(-1, given["hidden"].shape[-1])
    rows = some(len(hidden), 8).to(hidden.device)
    want = hidden[rows].double() @ given["weight"].double().t()
    error = float((found[rows].double() - want).abs().max())
    error = torch.inf if error != error else error  # noqa: PLR0124 NaN
    return Judgment(error, 0.0 if error <= COARSE_ABSOLUTE else torch.inf, error / COARSE_ABSOLUTE)


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    values = ("logprob", "entropy") if work.options["entropy"] else ("logprob",)
    wanted = ("hidden", "A", "B") if work.options.get("r") else ("hidden", "weight")

    def forward(given: Inputs, backward: str = "auto") -> Outputs:
        out = rlk.linear_logprob(
            given["hidden"], given["weight"], given["ids"], entropy=work.options["entropy"], backward=backward,
            lora=rlk.LoRA(given["A"], given["B"], _SCALE) if "A" in given else None,
        )  # fmt: skip
        return {name: getattr(out, name) for name in values}

    def complete(call: Call) -> Call:
        return with_gradients(call, wanted) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        exact = {k: double(x) for k, x in given.items()}

        def call(names: tuple[str, ...]) -> Outputs:
            return complete(lambda g: {k: x for k, x in forward(g, "recompute").items() if k in names})(exact)

        return Definition(call, large=True)

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        if "logits" in found:
            return {"logits": judge_logits(given, found["logits"])}
        names = [name for name in values if name in found]
        want = definition.of(names)
        out = {k: elementwise("linear_logprob", k, work.dtype, found[k], want[k]) for k in names}
        if work.backward:
            _, rtol = tolerance("linear_logprob", "grad", work.dtype)
            out |= {k: frobenius(found[k], want[k], rtol) for k in (f"grad_{name}" for name in wanted)}
        return out

    ways = ("save", "recompute") if work.backward else ("",)
    ours = {way: complete(partial(forward, backward=way or "auto")) for way in ways}
    return Problem(work, partial(make, work, device), ours, expected, judge, complete)
