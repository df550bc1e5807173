"""advantage: the scan of GAE at the bandwidth of a copy, and group statistics at the cost of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, double, some
from rlkernel_bench.suites.host_advantage import BY_GROUP, by_group, groups
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

_ENOUGH = 4 << 20  # tokens from which the copy bandwidth is asked for


def _gae(B: int, T: int, why: str = "", goals: tuple[Goal, ...] = ()) -> Work:
    asked = goals or ((Goal(0.85, "of copy", "H200"),) if B * T >= _ENOUGH else ())
    options = {"kind": "gae", "gamma": 0.99, "lam": 0.95}
    # fp32 reward and value and a byte of mask in, fp32 advantage and return out
    return Work(
        "advantage", "advantage", {"B": B, "T": T}, "float32", "forward", options, "17*B*T", goals=asked, why=why
    )


def _group(kind: str, B: int, *, ids: bool = False) -> Work:
    why = "statistics of groups: the cost of a launch"
    options = {"kind": kind, "ids": ids}
    floor = "16*B" if ids else "8*B"  # fp32 in and out, and an id
    return Work("advantage", "advantage", {"B": B, "G": 8}, "float32", "forward", options, floor, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_gae(8, 64), *(_group(kind, 64) for kind in BY_GROUP), _group("grpo", 64, ids=True)),
    "full": (
        _gae(512, 4096, "verl's loop: 488 ms on an H200"),
        _gae(4096, 1024, "verl's loop: 116 ms on an H200"),
        _gae(512, 8192, "4 M tokens"),
        _gae(4096, 4096, "16 M tokens"),
        _gae(16384, 8192, "134 M tokens"),
        _gae(16, 131072, "few long rows", (Goal(30, "us", "H200"),)),
        _group("grpo", 4096),
    ),
    "sweep": (
        *(_group(kind, B) for kind in BY_GROUP for B in (64, 65536)),
        *(_group("grpo", B, ids=True) for B in (64, 2048, 65536)),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Rewards and values per token with rows of any length; or a reward per sequence, groups side by side."""
    draw, b = Draw(device, seed), work.sizes["B"]
    if work.options["kind"] in BY_GROUP:
        ids = (torch.arange(b, device=device) // 8)[torch.randperm(b, device=device, generator=draw.generator)]
        return groups(draw, b) | {"group": ids if work.options["ids"] else 8}
    t = work.sizes["T"]
    lengths = 1 + draw.ids(t, b)
    mask = torch.arange(t, device=device)[None] < lengths[:, None]
    return {"rewards": 0.1 * draw.normal(b, t), "values": draw.normal(b, t), "mask": mask}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    kind = str(work.options["kind"])
    grouped = kind in BY_GROUP
    rows = some(work.sizes["B"], work.sizes["B"] if grouped else 32)
    numbers = {k: x for k, x in work.options.items() if k in {"kind", "gamma", "lam"}}

    def call(given: Inputs) -> Outputs:
        if grouped:
            return {"advantages": by_group(rlk.advantage, given, kind, given["group"]).advantages}
        out = rlk.advantage(**given, **numbers)
        return {"advantages": out.advantages, "returns": out.returns}

    def expected(given: Inputs) -> Definition:
        few = given if grouped else {k: x[rows.to(x.device)] for k, x in given.items()}
        return Definition(lambda _: call({k: double(x) for k, x in few.items()}))

    def judge(_given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want, out = definition.of(()), {}
        for name in want.keys() & found.keys():
            have = found[name]
            # As the spec scales its tolerance: by the largest value and the root of the horizon, here 1/(1 - 0.94).
            scale = 4.0 * max(1.0, float(want[name].abs().max()))
            out[name] = elementwise("advantage", name, work.dtype, have[rows.to(have.device)], want[name], scale)
        return out

    return Problem(work, partial(make, work, device), {"": call}, expected, judge)
