"""Planted bugs in what sample@1 draws and in the log-probability of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from rlkernel_common import philox
from rlkernel_conformance.mutants import mutant

_FILTERS: Final = ("top_k", "top_p", "min_p")


def _noise(gumbel: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    """Other noise in the reference."""
    return patch("rlkernel_torch.sample.gumbel", gumbel)


@mutant(
    "SA-01",
    "SA-02",
    "SA-03",
    "SA-07",
    "SA-17",
    "SA-30",
    origin="the draw is made before the filters, of the whole vocabulary",
)
def draws_before_it_filters(reference: Any, logits: Tensor, **rest: Any) -> Any:
    free = reference(logits, **{**rest, **dict.fromkeys(_FILTERS)})
    return replace(reference(logits, **rest), token=free.token)


@mutant(
    "SA-02",
    "SA-04",
    "SA-30",
    "SA-38",
    origin="a generator of its own: every law holds, no noise is that of the contract",
)
def another_generator(reference: Any, logits: Tensor, **rest: Any) -> Any:
    seed = rest["seed"]
    return reference(logits, **{**rest, "seed": seed ^ 0x5DEECE66D})


@mutant("SA-03", "SA-02", "SA-04", "SA-30", origin="fixed seed (WebGPU kernels): all requests draw alike")
def fixed_seed(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "seed": torch.full_like(torch.as_tensor(rest["seed"]), 42)})


@mutant(
    "SA-03",
    "SA-02",
    "SA-04",
    "SA-30",
    origin="two draws from one block of random words: neighbouring steps are the same draw",
)
def shared_blocks(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "step": rest["step"] >> 1})


@mutant("SA-03", "SA-02", "SA-30", "SA-38", origin="only the low word of the step is used")
def short_counter(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "step": rest["step"] & 0xFFFFFFFF})


@mutant("SA-04", origin="24-bit uniforms (vLLM #51367): no mass beyond 17 nats")
def noise_of_24_bits(reference: Any, logits: Tensor, **rest: Any) -> Any:
    def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
        return -torch.log(-torch.log1p(-((words >> 8).double() + 0.5) * 2.0**-24))

    with _noise(gumbel):
        return reference(logits, **rest)


@mutant("SA-04", "SA-02", "SA-30", origin="u rounds to 1 in fp32: infinite noise (RL.cu, vLLM #43249)")
def uniform_of_one(reference: Any, logits: Tensor, **rest: Any) -> Any:
    def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
        u = philox.uniform(words).float()
        return -torch.log(-torch.log(u)).double()

    with _noise(gumbel):
        return reference(logits, **rest)


@mutant("SA-04", origin="noise in bfloat16 (Liger): tails in steps of 0.06 nats")
def noise_in_bfloat16(reference: Any, logits: Tensor, **rest: Any) -> Any:
    with _noise(lambda words, dtype: philox.gumbel(words, torch.float64).bfloat16().double()):
        return reference(logits, **rest)


@mutant(
    "SA-05",
    "SA-06",
    "SA-07",
    "SA-17",
    "SA-18",
    "SA-19",
    "SA-20",
    origin="log p of the raw law for a truncated, tempered draw (vLLM's default)",
)
def raw_for_processed(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **{**rest, "raw_logprob": True})
    raw = out.raw_logprob if rest.get("raw_logprob") else None
    return replace(out, logprob=torch.where(out.logprob.isfinite(), out.raw_logprob, out.logprob), raw_logprob=raw)


@mutant("SA-05", "SA-06", "SA-17", "SA-18", "SA-19", "SA-20", origin="z - lse in half precision")
def half_precision(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    return replace(out, logprob=out.logprob.bfloat16().to(out.logprob.dtype))


@mutant("SA-06", origin="the kept mass forgotten: off by S for every token (trl #6789)")
def no_kept_mass(reference: Any, logits: Tensor, **rest: Any) -> Any:
    out = reference(logits, **rest)
    return replace(out, log_kept_mass=torch.where(out.log_kept_mass.isfinite(), 0.0, out.log_kept_mass))


@mutant("SA-07", "SA-09", "SA-15", "SA-30", "SA-38", origin="T = 0 clamped to 1e-5: ties are drawn, log p is not 0")
def greedy_is_almost_greedy(reference: Any, logits: Tensor, **rest: Any) -> Any:
    T = torch.as_tensor(rest.get("temperature", 1.0), device=logits.device)
    seed = rest["seed"]
    return reference(logits, **{**rest, "temperature": torch.where(T == 0, 1e-5, T), "seed": seed})


@mutant("SA-30", origin="stream accepted and ignored: drafts and acceptance share noise")
def stream_ignored(reference: Any, logits: Tensor, **rest: Any) -> Any:
    return reference(logits, **{**rest, "stream": 0})


@mutant(
    "SA-31",
    "SA-02",
    "SA-04",
    "SA-16",
    "SA-22",
    "SA-30",
    "SA-32",
    "SA-38",
    origin="the row number enters the noise (FlashInfer)",
)
def noise_of_the_row(reference: Any, logits: Tensor, **rest: Any) -> Any:
    step = rest["step"]
    rows = torch.arange(logits.shape[0], device=logits.device)
    return reference(logits, **{**rest, "step": step + rows if rest.get("slot") is None else step})


@mutant("SA-35", "SA-02", "SA-08", "SA-30", origin="noise by place in the sorted order, not by token id")
def noise_of_the_place(reference: Any, logits: Tensor, **rest: Any) -> Any:
    filtered = any(rest.get(n) is not None for n in _FILTERS)
    return reference(logits, **{**rest, "stream": rest.get("stream", 0) ^ (filtered << 20)})
