"""A process group without other processes, and processes for one with several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import multiprocessing as mp

# What every rank imports: those of one test process are forked from one process that has imported it.
IMPORTED = ["torch", "torch.distributed", "hypothesis", "pytest", "rlkernel", "rlkernel.distributed", "rlkernel_torch"]


@pytest.fixture(scope="module")
def alone():
    """The group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def in_ranks(ranks: int, fn: Callable[..., None], *args: Any) -> None:
    """Calls `fn` with its rank and the arguments in a process for each rank, and raises what one of them raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    mp.start_processes(fn, args=args, nprocs=ranks, start_method="forkserver")
