"""Ranks as threads of this process: real groups of several ranks, without starting processes.

They speak through gloo, whatever device the tensors are on; or, where a graph is to hold what they say, through NCCL
(RCCL on AMD) with a GPU each. The default process group is left alone; a backend asks the group it is given for its
size and its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed as dist

from rlkernel_conformance.subject import Subject

# A rank that never calls its collective is a failure of the others after this, and compiling takes its time.
PATIENCE = timedelta(seconds=50)


@cache
def _groups(world: int, devices: tuple[torch.device, ...] = ()) -> tuple[Any, ...]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
    make = _nccl if devices else _gloo
    with ThreadPoolExecutor(world) as pool:
        return tuple(pool.map(lambda rank: make(store, rank, world), range(world)))


def _nccl(store: Any, rank: int, world: int) -> Any:
    group = dist.ProcessGroup(store, rank, world)
    nccl = dist.ProcessGroupNCCL(store, rank, world, PATIENCE)  # type: ignore[arg-type]  # it takes a time limit, too
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)  # noqa: SLF001
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)  # noqa: SLF001
    return group


def _gloo(store: Any, rank: int, world: int) -> Any:
    group = dist.ProcessGroup(store, rank, world)
    gloo = dist.ProcessGroupGloo(store, rank, world, PATIENCE)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # noqa: SLF001
    return group


def capturing(subject: Subject, world: int) -> tuple[torch.device, ...]:
    """A device for each of up to `world` ranks whose collectives a graph can hold: as many as there are GPUs."""
    device = torch.device(subject.device)
    if device.type != "cuda":
        return (device,) * world
    first, there = device.index or 0, torch.cuda.device_count()
    return tuple(torch.device("cuda", (first + rank) % there) for rank in range(min(world, there)))


def on_ranks(
    subject: Subject, world: int, call: Callable[[int, Any], Any], devices: tuple[torch.device, ...] = ()
) -> list[Any]:
    """What `call(rank, group)` gives on every rank, all at once, with the subject chosen in every thread.

    With `devices` (of `capturing`), each rank has its own current, and on GPUs the ranks speak through NCCL.
    """
    wanted = world, devices if devices and devices[0].type == "cuda" else ()
    groups = _groups(*wanted)

    def rank(i: int) -> Any:
        device = torch.cuda.device(devices[i]) if wanted[1] else nullcontext()
        # Ranks that share a GPU would share autograd's one thread for it, and wait there for each other's collectives.
        with subject.chosen(), torch.autograd.set_multithreading_enabled(False), device:
            return call(i, groups[i])

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(rank, range(world)))
    except RuntimeError:
        _groups.cache_clear()  # a group whose ranks disagree about their collectives is of no further use
        raise


def collectives(group: Any) -> int:
    """How many collectives a rank has begun in a group that speaks through gloo."""
    return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())  # noqa: SLF001


def on_shares(subject: Subject, given: Mapping[str, Any], bounds: Sequence[int], **whole: Any) -> list[Any]:
    """Results of a process group: rank i has rows bounds[i] to bounds[i + 1] of every tensor of `given`."""

    def share(rank: int, group: Any) -> Any:
        rows = slice(bounds[rank], bounds[rank + 1])
        mine = {name: x[rows] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        return subject(**mine, **whole, process_group=group)

    return on_ranks(subject, len(bounds) - 1, share)
