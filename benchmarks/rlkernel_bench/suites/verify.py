"""verify: every row of the target's logits is read once, and the draft's laws where they are given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw
from rlkernel_bench.suites.sample import STEP, TIED
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work


def _work(B: int, K: int, V: int, why: str = "", **options: Any) -> Work:
    floor = "4*B*(K + 1)*V + 4*B*K*V"
    return Work("verify", "verify", {"B": B, "K": K, "V": V}, "float32", "forward", options, floor, why=why)


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(4, 3, 500), _work(4, 3, 500, top_k=20, top_p=0.9)),
    "full": (
        *(_work(B, 4, 128256, "drafts of four, laws given") for B in (1, 16, 64)),
        _work(64, 4, 128256, "the same under filters", top_k=50, top_p=0.95),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Drafts from laws close to the target's, so that some are accepted and some are not."""
    b, k, v = (work.sizes[n] for n in "BKV")
    draw = Draw(device, seed)
    target = draw.normal(b * (k + 1), v, std=3.0)
    draft = target.view(b, k + 1, v)[:, :k].reshape(b * k, v) + 0.5 * draw.normal(b * k, v)
    law = torch.softmax(draft, -1)
    noise = -(-draw.uniform(b * k, v).clamp_min(1e-12).log()).log()
    return {
        "target_logits": target,
        "draft_ids": (draft + noise).argmax(-1),
        "cu_draft": torch.arange(0, b * k + 1, k, device=device),
        "draft_probs": law,
        "seed": torch.arange(b, device=device) + 1000 * seed,
    }


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    filters = {k: work.options[k] for k in ("top_k", "top_p") if k in work.options}

    def call(given: Inputs) -> Outputs:
        out = rlk.verify(**given, step=STEP, **filters)
        return {n: getattr(out, n) for n in ("accepted", "token", "logprob")}

    def expected(given: Inputs) -> Definition:
        return Definition(lambda _: call(given))

    def judge(_given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want = definition.of(())
        b, rows = work.sizes["B"], work.sizes["K"] + 1
        if "logprob" not in found:  # a peer: its noise is its own, the counts must be possible
            accepted = found["accepted"].cpu()
            bad = float(((accepted < 0) | (accepted >= rows)).sum())
            return {"accepted": Judgment(bad, float("inf"), bad * float("inf") if bad else 0.0)}
        have = {n: found[n].cpu() for n in want}
        other = (have["token"] != want["token"]).view(b, rows).any(-1) | (have["accepted"] != want["accepted"])
        share = float(other.double().mean())
        same = (~other).repeat_interleave(rows)
        return {
            "token": Judgment(share, float(other.sum()) / max(1.0, TIED * b)),
            "logprob": elementwise("sample", "logprob", "float32", have["logprob"][same], want["logprob"][same]),
        }

    return Problem(work, partial(make, work, device), {"": call}, expected, judge)
