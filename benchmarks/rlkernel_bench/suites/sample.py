"""sample: one read of the logits is the floor, filters or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, some
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

STEP = 7
# Where the two best noised scores are within rounding, either may win: that share of rows at most.
TIED = 0.02
_GOALS = {1: 9, 32: 14, 64: 17, 256: 42, 1024: 135}  # us on an H200, fp32 logits, top-k 50 and top-p 0.95


def _work(B: int, V: int, dtype: str = "float32", why: str = "", **options: Any) -> Work:
    size = 4 if dtype == "float32" else 2
    asked = dtype == "float32" and options == {"top_k": 50, "top_p": 0.95} and V == 128256
    goals = (Goal(_GOALS[B], "us", "H200"),) if asked else ()
    floor = f"{size}*B*V + 48*B"
    return Work("sample", "sample", {"B": B, "V": V}, dtype, "forward", options, floor, goals=goals, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(4, 500, top_k=20, top_p=0.9), _work(4, 500)),
    "full": (
        *(_work(B, 128256, top_k=50, top_p=0.95) for B in _GOALS),
        *(_work(B, 128256, "bfloat16", top_k=50, top_p=0.95) for B in (1, 64, 256)),
        *(_work(B, 128256, why="no filter") for B in (1, 64, 256, 1024)),
        *(_work(B, 128256, why="a nucleus alone", top_p=0.9) for B in (1, 64, 256)),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Skewed rows, one seed each."""
    b, v = work.sizes["B"], work.sizes["V"]
    draw = Draw(device, seed)
    logits = draw.normal(b, v, std=3.0, dtype=work.dtype)
    return {"logits": logits, "seed": torch.arange(b, device=device) + 1000 * seed}


def draw_token(work: Work, given: Inputs) -> Any:
    """Through the front door."""
    filters = {k: work.options[k] for k in ("top_k", "top_p") if k in work.options}
    return rlk.sample(given["logits"], seed=given["seed"], step=STEP, **filters)


def judge_draws(op: str, dtype: str, found: Outputs, want: Outputs, rows: torch.Tensor) -> dict[str, Judgment]:
    """Our own draws are those of the contract, token by token; a peer's noise is its own: it must stay in the support.

    Args:
        op: whose tolerances count.
        dtype: of the logits.
        found: `token`, and `logprob` and `log_kept_mass` where they are given.
        want: the same of the reference for `rows`, with `logits`, `threshold` and `threshold_id` of those rows.
        rows: which rows those are.
    """
    token = found["token"][rows.to(found["token"].device)].long().cpu()
    if "logprob" not in found:
        x = want["logits"].float().cpu().gather(-1, token[:, None]).squeeze(-1)
        at = want["threshold"]
        kept = (x > at) | ((x == at) & (token <= want["threshold_id"]))
        outside = 1.0 - float(kept.double().mean())
        return {"token": Judgment(outside, math.inf, 0.0 if outside == 0 else math.inf)}
    other = token != want["token"]
    share = float(other.double().mean())
    out = {"token": Judgment(share, float(other.sum()) / max(1.0, TIED * len(token)))}
    for name in ("logprob", "log_kept_mass"):
        have = found[name][rows.to(found[name].device)].cpu()
        out[name] = elementwise(op, name, dtype, have[~other], want[name][~other])
    return out


def results(out: Any) -> Outputs:
    """What is judged of a SampleResult."""
    return {"token": out.token, "logprob": out.logprob, "log_kept_mass": out.log_kept_mass}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    rows = some(work.sizes["B"], 64)

    def expected(given: Inputs) -> Definition:
        at = rows.to(given["logits"].device)
        few = {"logits": given["logits"][at], "seed": given["seed"][at]}

        def call(_names: tuple[str, ...]) -> Outputs:
            out = draw_token(work, few)
            return {
                **results(out),
                "threshold": out.threshold,
                "threshold_id": out.threshold_id,
                "logits": few["logits"],
            }

        return Definition(call)

    def judge(_given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        return judge_draws("sample", work.dtype, found, definition.of(()), rows)

    ours = {"": lambda given: results(draw_token(work, given))}
    return Problem(work, partial(make, work, device), ours, expected, judge)
