"""linear_divergence: compute-bound, a product of each side forward, three more and one more for a training step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import rlkernel as rlk
from rlkernel_bench.gates import frobenius, tolerance
from rlkernel_bench.suites.common import Definition, Draw, double, with_gradients, without_gradients
from rlkernel_bench.suites.divergence import judged, upstream
from rlkernel_bench.suites.linear_logprob import judge_logits
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

_AS_FOUR_PRODUCTS = Goal(4.2, "times", "H", "save")  # H100, H200: of cuBLAS's logits of one head
_STUDENT, _TEACHER = "2*N*D*V", "2*N*E*V"
_HEADS = "2*V*D + 2*N*D + 2*V*E + 2*N*E + 16*N"


def _work(N: int, D: int, E: int, V: int, dtype: str, kind: str, task: str = "forward", why: str = "") -> Work:
    both = task != "forward"
    flops = f"3*{_STUDENT} + {_TEACHER}" if both else f"{_STUDENT} + {_TEACHER}"
    return Work(
        "linear_divergence",
        "linear_divergence",
        {"N": N, "D": D, "E": E, "V": V},
        dtype,
        task,
        {"kind": kind},
        f"2*({_HEADS})" if both else _HEADS,
        flops,
        dtype,
        (_AS_FOUR_PRODUCTS,) if both and D == E else (),
        "cublas",
        why=why,
        memory_at=("N", (16, 64) if N < 2048 else (2048, 4096, 8192)),
    )


_WHY = "a Qwen-3 1.7B student of an 8B teacher"
_SAME = "a Qwen-3 8B student of a teacher of its size"
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(64, 32, 48, 500, "float32", "forward_kl"),
        _work(64, 32, 48, 500, "bfloat16", "jsd", "forward+backward"),
    ),
    "full": (
        _work(8192, 4096, 4096, 151936, "bfloat16", "reverse_kl", "forward+backward", why=_SAME),
        _work(8192, 2048, 4096, 151936, "bfloat16", "reverse_kl", why=_WHY),
        *(
            _work(8192, 2048, 4096, 151936, "bfloat16", kind, "forward+backward", why=_WHY)
            for kind in ("forward_kl", "reverse_kl", "jsd")
        ),
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    sizes, kind = work.sizes, str(work.options["kind"])
    n, v = sizes["N"], sizes["V"]

    def make(seed: int) -> Inputs:
        draw, given = Draw(device, seed), {}
        for side, head, d in (("hidden", "weight", sizes["D"]), ("teacher", "teacher_weight", sizes["E"])):
            given[side] = draw.normal(n, d, dtype=work.dtype)
            given[head] = draw.normal(v, d, std=2 / d**0.5, dtype=work.dtype)
        return upstream(given, n, device)

    def forward(given: Inputs, backward: str = "recompute") -> Outputs:
        more = {name: given[name] for name in ("hidden", "weight", "teacher", "teacher_weight")}
        return {"divergence": rlk.linear_divergence(**more, kind=kind, backward=backward)}

    def complete(call: Call) -> Call:
        return with_gradients(call, ("hidden", "weight")) if work.backward else without_gradients(call)

    def expected(given: Inputs) -> Definition:
        exact = {k: double(x) for k, x in given.items()}
        return Definition(lambda _: complete(forward)(exact), large=True)

    def judge(given: Inputs, definition: Definition, found: Outputs) -> dict[str, Judgment]:
        if "logits" in found:
            return {"logits": judge_logits(given, found["logits"])}
        want = definition.of(["divergence"])
        out = judged("linear_divergence", work.dtype, found, want["divergence"])
        if work.backward:
            for name in ("grad_hidden", "grad_weight"):
                _, rtol = tolerance("linear_divergence", name, work.dtype)
                out[name] = frobenius(found[name], want[name], rtol)
        return out

    ways = ("save", "recompute") if work.backward else ("",)
    ours = {way: complete(partial(forward, backward=way or "recompute")) for way in ways}
    return Problem(work, make, ours, expected, judge, complete)
