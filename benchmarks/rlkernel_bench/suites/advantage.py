"""advantage: the scan of GAE at the bandwidth of a copy, and group statistics at the cost of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, double, some
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

_ENOUGH = 4 << 20  # tokens from which the copy bandwidth is asked for


def _gae(B: int, T: int, why: str = "", goals: tuple[Goal, ...] = ()) -> Work:
    asked = goals or ((Goal(0.85, "of copy", "H200"),) if B * T >= _ENOUGH else ())
    options = {"kind": "gae", "gamma": 0.99, "lam": 0.95}
    # fp32 reward and value and a byte of mask in, fp32 advantage and return out
    return Work(
        "advantage", "advantage", {"B": B, "T": T}, "float32", "forward", options, "17*B*T", goals=asked, why=why
    )


def _grpo(B: int, G: int) -> Work:
    why = "statistics of groups: the cost of a launch"
    sizes = {"B": B, "G": G}
    return Work("advantage", "advantage", sizes, "float32", "forward", {"kind": "grpo"}, "8*B", why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_gae(8, 64), _grpo(32, 4)),
    "full": (
        _gae(512, 4096, "verl's loop: 488 ms on an H200"),
        _gae(4096, 1024, "verl's loop: 116 ms on an H200"),
        _gae(512, 8192, "4 M tokens"),
        _gae(4096, 4096, "16 M tokens"),
        _gae(16384, 8192, "134 M tokens"),
        _gae(16, 131072, "few long rows", (Goal(30, "us", "H200"),)),
        _grpo(4096, 8),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Rewards and values per token with rows of any length; or a reward per sequence, groups side by side."""
    draw, b = Draw(device, seed), work.sizes["B"]
    if work.options["kind"] == "grpo":
        return {"rewards": draw.uniform(b), "group": work.sizes["G"]}
    t = work.sizes["T"]
    lengths = 1 + draw.ids(t, b)
    mask = torch.arange(t, device=device)[None] < lengths[:, None]
    return {"rewards": 0.1 * draw.normal(b, t), "values": draw.normal(b, t), "mask": mask}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    grouped = work.options["kind"] == "grpo"
    numbers = {k: x for k, x in work.options.items() if k in {"kind", "gamma", "lam"}}

    def call(given: Inputs) -> Outputs:
        out = rlk.advantage(**given, **numbers)
        return {"advantages": out.advantages} | ({} if grouped else {"returns": out.returns})

    def expected(given: Inputs) -> Definition:
        rows = some(work.sizes["B"], work.sizes["B"] if grouped else 32)
        few = {k: double(x[rows.to(x.device)]) if isinstance(x, torch.Tensor) else x for k, x in given.items()}
        return Definition(lambda _: call(few))

    def judge(_given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want, out = definition.of(()), {}
        for name in want.keys() & found.keys():
            have = found[name]
            rows = some(work.sizes["B"], work.sizes["B"] if grouped else 32).to(have.device)
            # As the spec scales its tolerance: by the largest value and the root of the horizon, here 1/(1 - 0.94).
            scale = 4.0 * max(1.0, float(want[name].abs().max()))
            out[name] = elementwise("advantage", name, work.dtype, have[rows], want[name], scale)
        return out

    return Problem(work, partial(make, work, device), {"": call}, expected, judge)
