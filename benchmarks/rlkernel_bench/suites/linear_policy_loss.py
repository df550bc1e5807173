"""linear_policy_loss: three matmuls at least, as multiples of cuBLAS's logits in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise, frobenius, tolerance
from rlkernel_bench.suites import linear_logprob as head
from rlkernel_bench.suites.common import Definition, double, with_gradients
from rlkernel_bench.suites.policy_loss import LAW
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

_ROWS = 512  # whose log-probabilities are computed at a time, where inputs are made


def _work(B: int, T: int, D: int, V: int, dtype: str = "bfloat16", why: str = "") -> Work:
    return Work(
        "linear_policy_loss",
        "linear_policy_loss",
        {"B": B, "T": T, "D": D, "V": V},
        dtype,
        "forward+backward",
        {},
        "2*(2*V*D + 2*B*T*D) + 21*B*T",
        "3*2*B*T*D*V",
        dtype,
        ruler="cublas",
        goals=(Goal(3.05, "times", "H200"),),
        memory_at=("B", tuple(sorted({max(1, B // 4), max(1, B // 2), B}))),
        why=why,
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(4, 16, 32, 500, "float32"), _work(4, 16, 32, 500)),
    "full": (
        _work(8, 1024, 4096, 128256, why="Llama-3 8B, GRPO with known old log-probabilities"),
        _work(16, 1024, 2048, 151936, why="Qwen-3 1.7B"),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """The head of linear_logprob, and old log-probabilities close to its own."""
    b, t, d, v = (work.sizes[k] for k in "BTDV")
    flat = Work("", "", {"N": b * t, "D": d, "V": v}, work.dtype)
    given = head.make(flat, device, seed)
    hidden, weight, ids = given["hidden"], given["weight"], given["ids"]
    near = torch.cat(
        [
            torch.log_softmax((x @ weight.t()).float(), -1).gather(-1, i[:, None]).squeeze(-1)
            for x, i in zip(hidden.split(_ROWS), ids.split(_ROWS), strict=True)
        ]
    )
    return {
        "hidden": hidden.view(b, t, d),
        "weight": weight,
        "ids": ids.view(b, t),
        "old_logprob": (near + 0.1 * given["up_logprob"]).view(b, t),
        "advantages": given["up_entropy"][:b].contiguous(),
        "mask": torch.ones(b, t, dtype=torch.bool, device=device),  # the floor and the goal count every token
        "up_loss": torch.ones((), device=device),
    }


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""

    def forward(given: Inputs) -> Outputs:
        names = ("hidden", "weight", "ids", "old_logprob", "advantages")
        return {"loss": rlk.linear_policy_loss(*(given[n] for n in names), mask=given["mask"], **LAW).loss}

    def complete(call: Call) -> Call:
        return with_gradients(call, ("hidden", "weight"))

    def expected(given: Inputs) -> Definition:
        exact = {k: double(x) for k, x in given.items()}
        return Definition(lambda _: complete(forward)(exact), large=True)

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        if "logits" in found:
            return {"logits": head.judge_logits(given, found["logits"])}
        want = definition.of(("loss",))
        out = {"loss": elementwise("linear_policy_loss", "loss", work.dtype, found["loss"], want["loss"])}
        for name in ("grad_hidden", "grad_weight"):
            _, rtol = tolerance("linear_policy_loss", name, work.dtype)
            out[name] = frobenius(found[name], want[name], rtol)
        return out

    return Problem(work, partial(make, work, device), {"": complete(forward)}, expected, judge, complete)
