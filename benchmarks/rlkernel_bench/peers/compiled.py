"""The plain versions under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlkernel_bench.peers import Peer, plain
from rlkernel_bench.work import Call, Work


def compiled(make: Callable[[Work], Call]) -> Callable[[Work], Call]:
    """The same call, compiled for the sizes of the workload."""

    def call(work: Work) -> Call:
        if "gae" in str(work.options.get("kind")):
            raise NotImplementedError("a loop over time would be unrolled step by step")
        torch.compiler.reset()
        run: Call = torch.compile(make(work), dynamic=False)
        return run

    return call


PEERS = (
    Peer(
        "torch.compile",
        "torch",
        ("torch",),
        {name: compiled(make) for name, make in plain.PEERS[0].calls.items()},
        "written here",
        ("cpu", "cuda"),
        ran="CPU, torch 2.13",
    ),
)
