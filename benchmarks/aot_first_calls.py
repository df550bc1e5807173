"""The first calls of six operators with their gradients, in a process that has torch and a context: a line of JSON.

    python benchmarks/aot_first_calls.py rlkernel_triton.aot.backend logprob,sample cuda
    python benchmarks/aot_first_calls.py rlkernel_jetson.elsewhere logprob,sample cuda confined
    python benchmarks/aot_first_calls.py jit logprob,sample cuda

What runs them is a module with operators as attributes, or `jit` for the backend `triton`. Over bundles a call's check
is asked before it, as dispatch asks it. `confined`: on the multiprocessors and memory that `aot_board` leaves. Seconds
begin before the import and end with the last result.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

VOCABULARY, HEAD = 128256, 151936


class Calls:
    """What one update on a GPU calls."""

    def __init__(self, device: str) -> None:
        g = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device)

        self.logits, self.hidden, self.head, self.weight = (
            normal(*shape).bfloat16() for shape in ((8, VOCABULARY), (8, 64), (HEAD, 64), (1024, 1024))
        )
        self.rewards, self.values = normal(8, 1024), normal(8, 1024)
        self.mask = torch.ones(8, 1024, dtype=torch.bool, device=device)
        self.rows = torch.arange(8, device=device)
        self.T, self.P = torch.full((8,), 0.8, device=device), torch.full((8,), 0.95, device=device)
        self.run: Callable[..., Any] = print

    def logprob(self) -> Iterable[Tensor]:
        """Log-probabilities and entropies, and the gradient of both."""
        x = self.logits.clone().requires_grad_()
        r = self.run("logprob", logits=x, ids=self.rows, temperature=0.8, entropy=True)
        (r.logprob.sum() + r.entropy.sum()).backward()
        return r.logprob.sum(), r.entropy.sum(), x.grad.float().abs().sum()

    def sample(self) -> Iterable[Tensor]:
        """A draw of requests with parameters of their own."""
        law = {"temperature": self.T, "top_p": self.P, "seed": self.rows, "step": self.rows}
        r = self.run("sample", logits=self.logits, **law)
        return r.token.sum(), r.logprob.sum()

    def linear_logprob(self) -> Iterable[Tensor]:
        """The same of a head, with gradients of hidden states and weights."""
        x, w = self.hidden.clone().requires_grad_(), self.head.clone().requires_grad_()
        r = self.run("linear_logprob", hidden=x, weight=w, ids=self.rows, entropy=True)
        (r.logprob.sum() + r.entropy.sum()).backward()
        return r.logprob.sum(), x.grad.float().abs().sum()

    def advantage(self) -> Iterable[Tensor]:
        """GAE."""
        given = {"mask": self.mask, "values": self.values, "gamma": 0.99, "lam": 0.95}
        return (self.run("advantage", rewards=self.rewards, kind="gae", **given).advantages.sum(),)

    def policy_loss(self) -> Iterable[Tensor]:
        """GRPO's loss and its gradient."""
        x = self.values.clone().requires_grad_()
        given = {"old_logprob": self.values + 0.1, "advantages": self.rewards[:, 0].contiguous()}
        r = self.run("policy_loss", logprob=x, **given, kind="grpo", mask=self.mask)
        r.loss.backward()
        return r.loss, x.grad.abs().sum()

    def qmatmul(self) -> Iterable[Tensor]:
        """A weight quantised, packed, multiplied, dequantised."""
        w = self.run("prepack", w=self.run("quantize", weight=self.weight, format="int4_g128"))
        y = self.run("qmatmul", x=self.weight[:4].contiguous(), w=w)
        return y.float().abs().sum(), self.run("dequantize", w=w).float().abs().sum()


def compiled_on_the_spot() -> Callable[..., Any]:
    """Run an operator of the backend `triton`."""
    from rlkernel_core.spec import OPERATORS
    from rlkernel_triton.claims import CLAIMS

    def run(op: str, **given: Any) -> Any:
        module, _, name = CLAIMS[op].target.partition(":")
        return getattr(import_module(module), name)(OPERATORS[op].call(**given))

    return run


def from_bundles(name: str) -> Callable[..., Any]:
    """Run an operator of a module over bundles, as dispatch does."""
    from rlkernel_core.spec import OPERATORS

    module = import_module(name)

    def run(op: str, **given: Any) -> Any:
        call = OPERATORS[op].call(**given)
        refused = getattr(module, f"{op}_fits")(call) if hasattr(module, "_found") else None
        if refused is not None:
            raise RuntimeError(f"{op}: {refused}")
        prepared = getattr(module, op)(call)
        return prepared(call) if hasattr(module, "_found") else prepared  # a recording's is the result

    return run


def main(kind: str, ops: list[str], device: str, *more: str) -> dict[str, Any]:
    """Seconds, results, and how much of a GPU there is."""
    confined = {}
    if more:
        import aot_board

        confined = aot_board.confined()
    torch.mm(torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device))
    calls, on_gpu = Calls(device), device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    results: dict[str, list[float]] = {}
    took: dict[str, float] = {}
    begun = time.perf_counter()
    calls.run = compiled_on_the_spot() if kind == "jit" else from_bundles(kind)
    for op in ("logprob", "sample", "linear_logprob", "advantage", "policy_loss", "qmatmul"):
        if op in ops:
            start = time.perf_counter()
            results[op] = [float(v.detach()) for v in getattr(calls, op)()]
            if on_gpu:
                torch.cuda.synchronize()
            took[op] = time.perf_counter() - start
    found = {"seconds": time.perf_counter() - begun, "by": took, "results": results, **confined}
    if on_gpu:
        found |= {"device": torch.cuda.get_device_name(), "product_s": product()}
        found["peak"] = torch.cuda.max_memory_reserved()
    return found


def product() -> float:
    """Seconds of a product of 4096 x 4096 bf16 matrices: tells how many multiprocessors there are."""
    a, seconds = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda"), 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","), *sys.argv[3:])))
