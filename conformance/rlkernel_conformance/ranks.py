"""Ranks as threads of this process: real gloo groups of several ranks, without starting processes.

The default process group is left alone; a backend asks the group it is given for its size and its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed as dist

from rlkernel_conformance.subject import Subject

PATIENCE = timedelta(seconds=20)  # a rank that never calls its collective is a failure of the others after this


@cache
def _groups(world: int) -> tuple[Any, ...]:
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        return tuple(pool.map(lambda rank: _group(store, rank, world), range(world)))


def _group(store: Any, rank: int, world: int) -> Any:
    group = dist.ProcessGroup(store, rank, world)
    gloo = dist.ProcessGroupGloo(store, rank, world, PATIENCE)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # noqa: SLF001
    return group


def on_ranks(subject: Subject, world: int, call: Callable[[int, Any], Any]) -> list[Any]:
    """What `call(rank, group)` gives on every rank, all at once, with the subject chosen in every thread."""
    groups = _groups(world)

    def rank(i: int) -> Any:
        with subject.chosen():
            return call(i, groups[i])

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(rank, range(world)))
    except RuntimeError:
        _groups.cache_clear()  # a group whose ranks disagree about their collectives is of no further use
        raise
