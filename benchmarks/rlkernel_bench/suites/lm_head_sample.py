"""lm_head_sample: a decode step reads the head once; what drawing costs beyond cuBLAS's logits is the question."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.suites import linear_logprob as head
from rlkernel_bench.suites.common import Definition, some
from rlkernel_bench.suites.sample import STEP, judge_draws, results
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work


def _work(B: int, D: int, V: int, dtype: str = "bfloat16", why: str = "", **options: Any) -> Work:
    return Work(
        "lm_head_sample",
        "lm_head_sample",
        {"B": B, "D": D, "V": V},
        dtype,
        "forward",
        options,
        f"{4 if dtype == 'float32' else 2}*(V*D + B*D)",
        "2*B*D*V",
        dtype,
        ruler="cublas",
        why=why,
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_work(4, 32, 500, "float32"), _work(4, 32, 500, "float32", top_k=20, top_p=0.9)),
    "full": (
        *(_work(B, 4096, 128256, why="Llama-3 8B, no filter") for B in (1, 64, 256)),
        *(_work(B, 4096, 128256, why="Llama-3 8B", top_k=50, top_p=0.95) for B in (1, 64, 256)),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Hidden states and a head with skewed logits."""
    b, d, v = (work.sizes[k] for k in "BDV")
    given = head.make(Work("", "", {"N": b, "D": d, "V": v}, work.dtype), device, seed)
    return {
        "hidden": given["hidden"],
        "weight": given["weight"],
        "seed": torch.arange(b, device=device) + 1000 * seed,
    }


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    rows = some(work.sizes["B"], 64)
    filters = {k: work.options[k] for k in ("top_k", "top_p") if k in work.options}

    def draw(given: Inputs) -> Any:
        return rlk.lm_head_sample(given["hidden"], given["weight"], seed=given["seed"], step=STEP, **filters)

    def expected(given: Inputs) -> Definition:
        at = rows.to(given["seed"].device)
        few = {"hidden": given["hidden"][at], "weight": given["weight"], "seed": given["seed"][at]}

        def call(_names: tuple[str, ...]) -> Outputs:
            out = draw(few)
            logits = few["hidden"].float() @ few["weight"].float().t()
            return {**results(out), "threshold": out.threshold, "threshold_id": out.threshold_id, "logits": logits}

        return Definition(call)

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        if "logits" in found:
            return {"logits": head.judge_logits(given, found["logits"])}
        want = definition.of(())
        judged = judge_draws("sample", work.dtype, found, want, rows)
        if "logprob" not in found:
            return judged
        # Sums of D products in another order: the same tolerance as log-probabilities from a head.
        for name in ("logprob", "log_kept_mass"):
            loose = judged[name].error / 2e-4
            judged[name] = Judgment(judged[name].error, loose, loose)
        return judged

    return Problem(work, partial(make, work, device), {"": lambda given: results(draw(given))}, expected, judge)
