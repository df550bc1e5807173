"""The tables of workloads, one module a suite: `WORKS` by size, where it has one, and `problem(work, device)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Final

from rlkernel_bench.work import Problem, Work
from rlkernel_core.errors import UnknownNameError

# suite -> what it measures
SUITES: Final[Mapping[str, str]] = {
    "logprob": "log-probabilities and entropy from logits",
    "linear_logprob": "the same from hidden states and the head, held against cuBLAS's logits",
    "divergence": "KL, reverse KL and JSD to a teacher, from logits and from lists",
    "linear_divergence": "the same from hidden states and heads of both",
    "policy_loss": "losses over log-probabilities",
    "linear_policy_loss": "head, log-probability and loss with its gradients",
    "advantage": "scans over tokens, statistics over groups",
    "sample": "drawing tokens",
    "lm_head_sample": "drawing tokens from hidden states",
    "verify": "speculative decoding",
    "qmatmul": "products with quantized weights",
    "adapters": "products with a quantized weight and several LoRAs in one batch",
    "experts": "a layer of a mixture of experts on quantized weights",
    "quantize": "quantizing weights on the device",
    "linear": "products of a layer whose bits do not depend on the batch, beside cuBLAS",
    "grouped_linear": "products of experts whose bits do not depend on the batch, beside torch's grouped_mm",
    "attention": "attention of prompts, of a token behind a cache in pages, and of a training step",
    "layer": "rms_norm and glu, between those products",
    "capture": "replaying graphs",
    "rollout": "a decode chain under one graph, tokens a second",
    "dispatch": "what an operator costs in a compiled graph, and importing",
    "host": "host time of every operator beside plain torch: eager, bound, captured; first calls",
    "ranks": "operators that several GPUs of a host take part in",
    "trainers": "a step of TRL and of verl, by their own code and with rlkernel inside",
    "seeds": "the workloads of the systems rlkernel builds on",
}
SIZES: Final = ("toy", "full", "sweep")  # sweep: many sizes, formats or kinds of one call


def module(suite: str) -> ModuleType:
    """The module of a suite.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if suite not in SUITES:
        raise UnknownNameError("suite", suite, SUITES)
    return import_module(f"{__name__}.{suite}")


def works(suites: Iterable[str], size: str, ops: Iterable[str] = ()) -> list[Work]:
    """Workloads of suites at a size, of some operators where any are named.

    Raises:
        UnknownNameError: no such suite or size.
    """
    if size not in SIZES:
        raise UnknownNameError("size", size, SIZES)
    wanted = set(ops)
    found = [work for suite in suites for work in module(suite).WORKS.get(size, ())]
    return [w for w in found if not wanted or wanted & set(w.op.split(","))]


def problem(work: Work, device: str) -> Problem:
    """A workload made ready for a device."""
    made: Problem = module(work.suite).problem(work, device)
    return made
