"""logprob: one read of the logits is the floor, one more read and a write with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, double, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

_READ = "e*N*V + 16*N"
_READ_TWICE_WRITE = "3*e*N*V + 24*N"
_LISTED = 64  # ids of a row, where it has several


def _work(N: int, V: int, dtype: str = "bfloat16", task: str = "forward", why: str = "", **more: Any) -> Work:
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    floor = (_READ if task == "forward" else _READ_TWICE_WRITE).replace("e*", f"{size}*")
    options = {"entropy": True, **more.pop("options", {})}
    return Work("logprob", "logprob", {"N": N, "V": V}, dtype, task, options, floor, why=why, **more)


_PEERS = "log-probabilities of 8192 tokens of a Llama-3 vocabulary"
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(32, 1000, "float32", memory_at=("N", (8, 32))),
        _work(32, 1000, "bfloat16", "forward+backward"),
        _work(32, 1000, "float32", "forward+backward", options={"K": 8}),
    ),
    "full": (
        _work(8192, 128256, goals=(Goal(530, "us", "H200"),), why=_PEERS, memory_at=("N", (2048, 4096, 8192))),
        # Three passes over the logits at the bandwidth of the goal above, and 5 %.
        _work(8192, 128256, task="forward+backward", goals=(Goal(1540, "us", "H200"),), why=_PEERS),
        _work(8192, 151936, why="Qwen-3 vocabulary"),
        _work(128, 128256, why="one decode step's worth of rows"),
        _work(8192, 128256, "float32", why="fp32 logits"),
        *(
            _work(8192, 128256, task=task, why="a teacher's 64 most likely ids", options={"K": _LISTED})
            for task in ("forward", "forward+backward")
        ),
        _work(65536, 32000, why="many rows, N * V above 2^31 - 2^25", options={"temperature": 0.7}),
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    n, v, K = work.sizes["N"], work.sizes["V"], int(work.options.get("K", 0))
    options = {k: x for k, x in work.options.items() if k in {"entropy", "temperature"}}

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        logits, ids = draw.normal(n, v, std=3.0, dtype=work.dtype), draw.ids(v, n)
        quarter = max(1, n // 4)  # rows a trained model is sure of: their token leads by up to 30 nats
        lead = logits[:quarter].amax(-1) + 30 * draw.uniform(quarter).to(logits.dtype)
        logits[:quarter].scatter_(1, ids[:quarter, None], lead[:, None])
        if K:  # of a teacher that is not far from it
            ids = (logits + draw.normal(n, v, dtype=work.dtype)).topk(K, -1).indices
        up = draw.normal(n, K) if K else draw.normal(n)
        return {"logits": logits, "ids": ids, "up_logprob": up, "up_entropy": draw.normal(n)}

    def forward(given: Inputs) -> Outputs:
        out = rlk.logprob(given["logits"], given["ids"], **options)
        return {"logprob": out.logprob} | ({"entropy": out.entropy} if work.options["entropy"] else {})

    def complete(call: Call) -> Call:
        return with_gradients(call, ("logits",)) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        rows = some(n).to(given["ids"].device)
        few = {k: double(x[rows]) for k, x in given.items()}

        def call(names: tuple[str, ...]) -> Outputs:
            return complete(lambda g: {k: x for k, x in forward(g).items() if k in names})(few)

        return Definition(call)

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        values = [name for name in ("logprob", "entropy") if name in found]
        want, rows = definition.of(values), some(n)
        out = {k: elementwise("logprob", k, work.dtype, found[k][rows.to(found[k].device)], want[k]) for k in values}
        if work.backward:
            have = found["grad_logits"][rows.to(found["grad_logits"].device)]
            ups = (given[f"up_{k}"][rows.to(have.device)].abs().double().cpu() for k in values)
            scale = sum(up.reshape(len(up), -1).sum(1) for up in ups)[:, None]
            # The entropy's own gradient carries the logit, of up to 40 nats here.
            scale = scale * (40.0 if "entropy" in values else 1.0)
            out["grad_logits"] = elementwise("logprob", "grad_logits", work.dtype, have, want["grad_logits"], scale)
        return out

    return Problem(work, make, {"": complete(forward)}, expected, judge, complete)
