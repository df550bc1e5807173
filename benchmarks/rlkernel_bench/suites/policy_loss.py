"""policy_loss: a few numbers a token in, one gradient a token out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, double, with_gradients, without_gradients
from rlkernel_bench.work import Call, Inputs, Judgment, Outputs, Problem, Work

# What makes the law of every row: the clipped surrogate, mean over the tokens of the batch.
LAW: Mapping[str, Any] = {"kind": "grpo", "clip": (0.2, 0.2), "aggregate": "token_mean"}


def _work(B: int, T: int, why: str = "", **options: Any) -> Work:
    reads = 13 + (4 if "kl_coef" in options else 0)  # log-probabilities in, a mask, a gradient out
    floor = f"{reads}*B*T + 4*B"
    return Work("policy_loss", "policy_loss", {"B": B, "T": T}, "float32", "forward+backward", options, floor, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(8, 16), _work(8, 16, kl_coef=0.05)),
    "full": (
        _work(64, 2048, "the batch of a small run"),
        _work(512, 8192, "4 M tokens"),
        _work(512, 8192, "with a reference policy", kl_coef=0.05),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Log-probabilities of two policies close to each other; rows of any length."""
    b, t = work.sizes["B"], work.sizes["T"]
    draw = Draw(device, seed)
    old = -draw.normal(b, t).abs() - 0.01
    return {
        "logprob": old + 0.1 * draw.normal(b, t),
        "old_logprob": old,
        "ref_logprob": old + 0.05 * draw.normal(b, t),
        "advantages": draw.normal(b),
        "mask": torch.arange(t, device=device)[None] < 1 + draw.ids(t, b)[:, None],
        "up_loss": torch.ones((), device=device),
    }


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    beta = work.options.get("kl_coef")

    def forward(given: Inputs) -> Outputs:
        kl = {"ref_logprob": given["ref_logprob"], "kl": "k3", "kl_coef": beta} if beta else {}
        out = rlk.policy_loss(
            given["logprob"], given["old_logprob"], given["advantages"], mask=given["mask"], **LAW, **kl
        )
        return {"loss": out.loss}

    def complete(call: Call) -> Call:
        return with_gradients(call, ("logprob",)) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        exact = {k: double(x) for k, x in given.items()}
        return Definition(lambda _: complete(forward)(exact))

    def judge(_given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want = definition.of(("loss",))
        return {k: elementwise("policy_loss", k, work.dtype, found[k], want[k]) for k in ("loss", "grad_logprob")}

    return Problem(work, partial(make, work, device), {"": complete(forward)}, expected, judge, complete)
