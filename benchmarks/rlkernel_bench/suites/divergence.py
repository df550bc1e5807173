"""divergence: one read of both sides is the floor, one more and a write with gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.gates import elementwise
from rlkernel_bench.suites.common import Definition, Draw, double, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Inputs, Judgment, Outputs, Problem, Work

_BYTES = {"bfloat16": 2, "float32": 4}
LARGEST = 40.0  # logarithm of a ratio of probabilities, in what is drawn here


def _work(N: int, V: int, dtype: str, kind: str, task: str = "forward", *, K: int = 0, why: str = "") -> Work:
    sides = 1 if K else 2
    passes = sides if task == "forward" else 2 * sides + 1
    floor = f"{passes}*{_BYTES[dtype]}*N*V + 16*N"
    return Work("divergence", "divergence", {"N": N, "V": V}, dtype, task, {"kind": kind, "K": K}, floor, why=why)


_WHY = "8192 tokens of a Qwen-3 vocabulary"
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(32, 1000, "float32", "forward_kl"),
        _work(32, 1000, "bfloat16", "reverse_kl", "forward+backward"),
        _work(32, 1000, "float32", "jsd", "forward+backward", K=16),
    ),
    "full": (
        _work(8192, 151936, "bfloat16", "reverse_kl", why=_WHY),
        *(
            _work(8192, 151936, "bfloat16", k, "forward+backward", why=_WHY)
            for k in ("forward_kl", "reverse_kl", "jsd")
        ),
        _work(8192, 151936, "bfloat16", "reverse_kl", "forward+backward", K=64, why=_WHY),
    ),
}


def upstream(given: Inputs, n: int, device: str) -> Inputs:
    """Gradients of a mean over tokens, which is what peers return."""
    return {**given, "up_divergence": torch.full((n,), 1 / n, device=device), "up_mean": torch.ones((), device=device)}


def judged(op: str, dtype: str, found: Outputs, want: Tensor) -> dict[str, Judgment]:
    """Divergences of some rows, or a peer's mean over all."""
    if "mean" in found:
        return {"mean": elementwise(op, "divergence", dtype, found["mean"].reshape(()), want.mean(), 1 + want.mean())}
    return {"divergence": elementwise(op, "divergence", dtype, found["divergence"], want, 2 * (1 + want.abs()))}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    n, v, K, kind = work.sizes["N"], work.sizes["V"], int(work.options["K"]), str(work.options["kind"])

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        logits = draw.normal(n, v, std=3.0, dtype=work.dtype)
        teacher = logits + draw.normal(n, v, dtype=work.dtype)  # not far from it, as on-policy teachers are
        given = {"logits": logits, "teacher": teacher}
        if K:
            top = torch.log_softmax(teacher.float(), -1).topk(K, -1)
            given = {"logits": logits, "teacher": top.values, "teacher_ids": top.indices}
        return upstream(given, n, device)

    def forward(given: Inputs) -> Outputs:
        return {
            "divergence": rlk.divergence(
                given["logits"], given["teacher"], kind=kind, teacher_ids=given.get("teacher_ids")
            )
        }

    def complete(call: Call) -> Call:
        return with_gradients(call, ("logits",)) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        rows = some(n).to(device)
        few = {k: double(x[rows] if x.dim() else x) for k, x in given.items()}
        return Definition(lambda _: complete(forward)(few))

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        want, rows = definition.of(["divergence"]), some(n)
        have = {k: x[rows.to(x.device)] if x.dim() else x for k, x in found.items()}
        if "mean" in have and n > len(rows):  # no mean of a part is known
            have.pop("mean")
        values = {k: x for k, x in have.items() if k in {"divergence", "mean"}}
        out = judged("divergence", work.dtype, values, want["divergence"]) if values else {}
        if work.backward:
            scale = LARGEST / n
            grads = (have["grad_logits"], want["grad_logits"])
            out["grad_logits"] = elementwise("divergence", "grad", work.dtype, *grads, scale)
        return out

    return Problem(work, make, {"": complete(forward)}, expected, judge, complete)
