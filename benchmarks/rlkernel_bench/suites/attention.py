"""attention: a token of many sequences behind a cache in pages, prompts, and a training step, beside FlashInfer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.gates import frobenius, tolerance
from rlkernel_bench.suites.common import Draw, some, with_gradients, without_gradients
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

_FAST = Goal(1 / 0.7, "times", "H")  # H100, H200: of FlashInfer's throughput, a token of each sequence
_BOTH: Final = "forward+backward"
_PAIRS: Final = "(M*S - M*(M-1)//2)"  # a query and a key that it sees
_LEAVES: Final = ("q", "k", "v")


def _work(
    B: int, M: int, S: int, page: int = 0, task: str = "forward", heads: tuple[int, int, int] = (32, 8, 128),
    dtype: str = "bfloat16", why: str = "",
) -> Work:  # fmt: skip
    sizes = {"B": B, "M": M, "S": S, **dict(zip(("Hq", "Hk", "D"), heads, strict=True))}
    size = {"bfloat16": 2, "float32": 4}[dtype]
    # Backward: all of forward's, the upstream gradient, out and lse once more, and three gradients.
    moved = f"{size}*(2*B*S*Hk*D + 2*B*M*Hq*D)"
    twice = f"{size}*(6*B*S*Hk*D + 6*B*M*Hq*D) + 8*B*M*Hq"
    products = 14 if task == _BOTH else 4
    return Work(
        "attention", "attention", sizes, dtype, task, {"page": page} if page else {}, twice if task == _BOTH else moved,
        f"{products}*B*Hq*D*{_PAIRS}", dtype, (_FAST,) if M == 1 else (),
        "torch" if task == _BOTH else "flashinfer", why=why,
    )  # fmt: skip


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(2, 1, 48, 16, heads=(4, 2, 16)),
        _work(2, 24, 24, heads=(4, 2, 16), dtype="float32"),
        _work(2, 24, 24, 0, _BOTH, (4, 2, 16), "float32"),
    ),
    "full": (
        _work(64, 1, 4096, 16, why="Qwen-3 8B, a token of 64 sequences"),
        _work(64, 1, 4096, 256, why="the same in large pages"),
        _work(8, 1, 4096, 16, why="of 8"),
        _work(1, 1, 32768, 16, why="of one long"),
        _work(8, 64, 4096, 16, why="parts of prompts behind a cache"),
        _work(1, 8192, 8192, why="a prompt"),
        _work(16, 1024, 1024, why="packed prompts"),
        _work(8, 2048, 2048, 0, _BOTH, why="a training step"),
    ),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    B, M, S, Hq, Hk, D = (work.sizes[s] for s in ("B", "M", "S", "Hq", "Hk", "D"))
    page = int(work.options.get("page", 0))

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        given: Inputs = {
            "q": draw.normal(B * M, Hq, D, dtype=work.dtype),
            "k": draw.normal(B * S, Hk, D, dtype=work.dtype),
            "v": draw.normal(B * S, Hk, D, dtype=work.dtype),
            "up_out": draw.normal(B * M, Hq, D, dtype=work.dtype),
            "cu_q": torch.arange(B + 1, dtype=torch.int32, device=device) * M,
            "cu_k": torch.arange(B + 1, dtype=torch.int32, device=device) * S,
        }
        if page:  # in pages that lie anywhere
            table = torch.randperm(B * S // page, device=device, generator=draw.generator)
            for name in "kv":
                pool = given[name].unflatten(0, (-1, page))
                given[f"{name}_pages"] = torch.empty_like(pool).index_copy_(0, table, pool)
            given["page_table"] = table.view(B, -1).int()
            given["seqused_k"] = torch.full((B,), S, dtype=torch.int32, device=device)
        return given

    def call(given: Inputs) -> Outputs:
        if page:
            keys: dict[str, Any] = {n: given[n] for n in ("page_table", "seqused_k")}
            return {
                "out": rlk.attention(given["q"], *(given[f"{n}_pages"] for n in "kv"), cu_q=given["cu_q"], **keys).out
            }
        return {"out": rlk.attention(*(given[n] for n in _LEAVES), cu_q=given["cu_q"], cu_k=given["cu_k"]).out}

    def complete(forward: Call) -> Call:
        return with_gradients(forward, _LEAVES) if work.backward else without_gradients(forward)

    def judge(_given: Inputs, want: dict[str, Tensor], found: Outputs) -> dict[str, Judgment]:
        each = Hq // Hk
        rows = (torch.arange(M) if work.backward else some(M, 16)).to(found["out"].device)
        have = found["out"][-M:][rows, :each].double()
        atol, rtol = tolerance(work.op, "out", work.dtype)
        error = (have - want["out"]).abs()
        over = float((error / (rtol * want["out"].abs() + atol * want["size"])).nan_to_num(nan=float("inf")).max())
        judged = {"out": Judgment(float(error.max()), over, over / 8)}
        if work.backward:
            _, rtol = tolerance(work.op, "grad", work.dtype)
            parts = {"q": found["grad_q"][-M:, :each], "k": found["grad_k"][-S:, 0], "v": found["grad_v"][-S:, 0]}
            judged |= {f"grad_{n}": frobenius(x, want[f"grad_{n}"], rtol) for n, x in parts.items()}
        return judged

    return Problem(work, make, {"": complete(call)}, partial(_last_sequence, work), judge, complete)


def _last_sequence(work: Work, given: Inputs) -> dict[str, Tensor]:
    """The last sequence in float64: some of its queries, or with gradients all, of one head of keys."""
    M, S, Hq, Hk, D = (work.sizes[s] for s in ("M", "S", "Hq", "Hk", "D"))
    device, each = given["q"].device, Hq // Hk
    rows = torch.arange(M) if work.backward else some(M, 16)
    leaf = {
        "q": given["q"][-M:][rows.to(device), :each].double().requires_grad_(),
        "k": given["k"][-S:, 0].double().requires_grad_(),
        "v": given["v"][-S:, 0].double().requires_grad_(),
    }
    s = torch.einsum("ihd,jd->hij", leaf["q"], leaf["k"]) * D**-0.5
    at = S - M + rows.to(device)
    s = s.masked_fill(torch.arange(S, device=device) > at[:, None], -torch.inf)
    p = s.softmax(-1)
    out = torch.einsum("hij,jd->ihd", p, leaf["v"])
    size = torch.einsum("hij,jd->ihd", p.detach(), leaf["v"].detach().abs())
    want = {"out": out.detach(), "size": size}
    if work.backward:
        up = given["up_out"][-M:, :each].double()
        grads = torch.autograd.grad(out, list(leaf.values()), up)
        want |= {f"grad_{n}": x for n, x in zip(_LEAVES, grads, strict=True)}
    return want
