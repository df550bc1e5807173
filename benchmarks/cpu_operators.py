"""What a user without a GPU waits for: operators in plain torch on one CPU core, beside the lines that one would write.

    OMP_NUM_THREADS=1 python benchmarks/cpu_operators.py                            # some minutes on a core
    OMP_NUM_THREADS=1 python benchmarks/cpu_operators.py --output operators.json

Times are medians of the process's CPU seconds, the two sides called in turn. The naive side promises less: its sums and
draws depend on the batch, its filters say nothing about ties, and it gives no kept mass. Last come the two parts that
take most of the time, as they are and by torch.compile, which needs a C++ compiler: seconds to compile, seconds a call,
and whether the bits are the same.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_common.philox import gumbel, range_words
from rlkernel_common.row_statistics import join, partial_softmax, softmax_stats, tile_width
from rlkernel_core.files import write_json

SIZES = ((64, 32000), (64, 151936), (512, 32000), (2048, 32000))
MOST_DRAWN = 64 * 151936  # a draw holds a dozen float64 numbers per logit
HIDDEN = 1024


def timed(*sides: Callable[[], object], calls: int) -> list[float]:
    """Median seconds of each side, called in turn."""
    seconds: list[list[float]] = [[] for _ in sides]
    for call in range(calls + 1):
        for side, found in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if call:
                found.append(time.process_time() - start)
    return [sorted(found)[len(found) // 2] for found in seconds]


def naive_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """[N] of [N, V] and [N]."""
    return torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]


def naive_draw(logits: Tensor, temperature: float, top_p: float | None) -> Tensor:
    """[N] of [N, V]."""
    p = torch.softmax(logits / temperature, -1)
    if top_p is None:
        return torch.multinomial(p, 1)[:, 0]
    p, order = p.sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
    return order.gather(1, torch.multinomial(p, 1))[:, 0]


def backward(loss: Callable[[], Tensor], *leaves: Tensor) -> None:
    """The gradients of a sum, thrown away."""
    loss().sum().backward()
    for leaf in leaves:
        leaf.grad = None


def row(calls: int, op: str, ours: Callable[[], object], naive: Callable[[], object], **what: Any) -> dict[str, Any]:
    """What both sides of an operator take."""
    found = {"op": op, **what, **dict(zip(("rlkernel_s", "naive_s"), timed(ours, naive, calls=calls), strict=True))}
    print(found, flush=True)
    return found


def of_logits(calls: int, N: int, V: int) -> Iterator[dict[str, Any]]:
    """Rows of logprob, with and without its gradient."""
    x, ids, size = 2 * torch.randn(N, V), torch.randint(0, V, (N,)), {"N": N, "V": V}
    y = x.clone().requires_grad_()
    yield row(calls, "logprob", lambda: rlk.logprob(x, ids), lambda: naive_logprob(x, ids), **size)
    yield row(
        calls,
        "logprob and gradient",
        lambda: backward(lambda: rlk.logprob(y, ids).logprob, y),
        lambda: backward(lambda: naive_logprob(y, ids), y),
        **size,
    )


def of_draws(calls: int, N: int, V: int, temperature: float, top_p: float | None) -> dict[str, Any]:
    """The row of sample under a law."""
    x, seed, law = 2 * torch.randn(N, V), torch.arange(N), {"temperature": temperature, "top_p": top_p}
    return row(
        calls,
        "sample",
        lambda: rlk.sample(x, **law, seed=seed, step=0),  # type: ignore[arg-type]
        lambda: naive_draw(x, temperature, top_p),
        N=N,
        V=V,
        **law,
    )


def of_heads(calls: int, N: int, V: int) -> Iterator[dict[str, Any]]:
    """Rows of linear_logprob, with and without its gradients."""
    h, w, ids = torch.randn(N, HIDDEN) / 8, torch.randn(V, HIDDEN) / 8, torch.randint(0, V, (N,))
    size = {"N": N, "V": V, "D": HIDDEN}
    yield row(
        calls, "linear_logprob", lambda: rlk.linear_logprob(h, w, ids), lambda: naive_logprob(h @ w.t(), ids), **size
    )
    x, y = h.requires_grad_(), w.requires_grad_()
    yield row(
        calls,
        "linear_logprob and gradients",
        lambda: backward(lambda: rlk.linear_logprob(x, y, ids).logprob, x, y),
        lambda: backward(lambda: naive_logprob(x @ y.t(), ids), x, y),
        **size,
    )


def operators(calls: int) -> Iterator[dict[str, Any]]:
    """One row per operator and size."""
    for N, V in SIZES:
        yield from of_logits(calls, N, V)
        if N * V <= MOST_DRAWN:
            yield of_draws(calls, N, V, 1.0, None)
            yield of_draws(calls, N, V, 0.7, 0.9)
        if N * V <= 512 * 32000:
            yield from of_heads(calls, N, V)


def compiled(calls: int) -> list[dict[str, Any]]:
    """The parts that take most of the time, by torch.compile."""
    N, V = 64, 32000
    x, ids, T, seed = 2 * torch.randn(N, V), torch.randint(0, V, (N,)), torch.ones(N), torch.arange(N)

    def noise() -> Tensor:
        return gumbel(range_words(seed, torch.zeros_like(seed), 0, V, 0), torch.float64)

    def statistics() -> Tensor:
        return softmax_stats(join(partial_softmax(x, ids, T, tile_width(V), None, moment=False), T), T).logprob

    rows = []
    for name, part in (("noise of sample", noise), ("statistics of logprob", statistics)):
        fast = torch.compile(part)
        start = time.perf_counter()
        same = torch.equal(fast(), part())
        seconds = time.perf_counter() - start
        plain, quick = timed(part, fast, calls=calls)
        rows.append({"part": name, "N": N, "V": V, "first_call_s": seconds, "plain_s": plain, "compiled_s": quick})
        rows[-1]["same_bits"] = same
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Print a line per measurement, and write all where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=9, help="measured calls of each side")
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with rlk.use("torch"):
        rows = list(operators(args.calls))
    about = {"rlkernel": rlk.__version__, "machine": platform.processor() or platform.machine(), "threads": 1}
    found = {**about, "torch": torch.__version__, "operators": rows, "compiled": compiled(args.calls)}
    if args.output:
        write_json(args.output, found)


if __name__ == "__main__":
    main()
