"""Attacks on capture@1: how many graphs are held, and that calls leave no memory behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.capture_side_effects import Scaled
from rlkernel_conformance.clauses.capture_state_machine import SIZES, Machine, Program, calls, programs
from rlkernel_conformance.compare import require
from rlkernel_conformance.memory import growth
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.graphed import Bucket, GraphedCallable


@attack(
    "GC-13",
    lambda s: programs(s, calls(), longest=14, graphs=(1, 2, 3)),
    examples=(
        Program(tuple(("call", n, t, 1, "plain") for t in (1.0, 0.5) for n in (8, 4, 2, 8)), max_graphs=2),
        Program((("call", 4, 1.0, 1, "plain"), ("replay", 1000))),
        Program((("backward", 200),)),
    ),
    scale=0.5,
)
def graphs_are_bounded(subject: Subject, case: Program) -> None:
    """Few graphs and many keys: never too many, survivors right; and a thousand replays that grow nothing."""
    machine = Machine(subject, case)
    for word, *given in case.steps:
        if word == "replay":
            _grows_nothing(subject, machine.captured, partial(machine.captured, *machine.example), *given)
            continue
        if word == "backward":
            _backwards_grow_nothing(subject, *given)
            continue
        getattr(machine, word)(*given)
        held = machine.captured.stats.graphs
        require(held <= case.max_graphs, f"{held} graphs, max_graphs is {case.max_graphs}")
        require("result" not in machine.wrong, f"after an eviction: {machine.wrong.get('result')}")


def _backwards_grow_nothing(subject: Subject, times: int) -> None:
    """Calls with a gradient to their input, a new tensor each time, and to a weight."""
    if "grad" not in subject.claims:
        return
    model = Scaled(subject.device).requires_grad_()
    shape = {"buckets": (Bucket({"x": 0}, SIZES),)} if "buckets" in subject.claims else {}

    def x() -> Tensor:
        return torch.ones(3, 3, device=subject.device, requires_grad=True)

    g = subject(model, (x(),), autograd=True, warmup=1, **shape)

    def call() -> None:
        g(x()).sum().backward()

    kept = growth(subject, call, times=1)  # for the backward of the latest call, until the next call
    _grows_nothing(subject, g, call, times, kept=kept)


def _grows_nothing(
    subject: Subject, captured: GraphedCallable, call: Callable[[], Any], times: int, *, kept: int = 0
) -> None:
    call()
    before = captured.stats
    measured = times // 20  # a growth at every replay shows in any of them
    for _ in range(times - measured):
        call()
    grown = growth(subject, call, times=measured)
    after = captured.stats
    require(grown <= kept, f"{measured} replays leave {grown} bytes behind, the latest alone {kept}")
    require((after.graphs, after.pool_bytes) == (before.graphs, before.pool_bytes), f"{before} became {after}")
