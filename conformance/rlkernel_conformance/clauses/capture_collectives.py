"""Attack on capture@1: collectives in a captured function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.capture_side_effects import Case, cases_of, each, refused
from rlkernel_conformance.clauses.capture_state_machine import equal
from rlkernel_conformance.compare import require
from rlkernel_conformance.ranks import capturing, on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.graphed import CaptureGroup


@attack("GC-26", cases_of("all_reduce", "all_gather"), examples=each("all_reduce", "all_gather"), scale=0.2)
def collectives_are_replayed(subject: Subject, case: Case) -> None:
    """Two ranks that replay a sum and a gathering of what they hold; and a collective that nobody asked for.

    Ranks that share a lock would wait for each other: without groups of their own there is one rank. On GPUs there
    are as many as there are GPUs, up to two.
    """
    devices = capturing(subject, 2 if "group" in subject.claims else 1)
    world = len(devices)
    x = case.x(subject)

    def collective(group: Any) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            if case.word == "all_reduce":
                y = x * 2
                dist.all_reduce(y, group=group)
                return y + 1
            parts = [torch.empty_like(x) for _ in range(group.size())]
            dist.all_gather(parts, x * 2, group=group)
            return torch.cat(parts)

        return fn

    def unasked(_: int, group: Any) -> None:
        refused("a collective", lambda: subject(collective(group), (x,), on_capture_error="raise", warmup=0))

    def on_rank(rank: int, group: Any) -> list[Tensor]:
        own = {"group": CaptureGroup(f"rank {rank}")} if world > 1 else {}
        mine = x.to(devices[rank])
        g = subject(collective(group), (mine,), collectives=True, on_capture_error="raise", warmup=case.warmup, **own)
        return [g(mine * (10 * rank + salt)).to(x.device) for salt in range(3)]

    on_ranks(subject, 1, unasked, devices[:1])
    for found in on_ranks(subject, world, on_rank, devices):
        for salt, have in enumerate(found):
            each_rank = [x * (10 * rank + salt) * 2 for rank in range(world)]
            want = torch.stack(each_rank).sum(0) + 1 if case.word == "all_reduce" else torch.cat(each_rank)
            require(equal(have, want), f"replay {salt} of {case.word} gives {have.tolist()}, not {want.tolist()}")
