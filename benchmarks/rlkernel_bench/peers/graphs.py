"""torch's own graph, bare; and no graph at all."""

from __future__ import annotations

from rlkernel_bench.peers import Peer
from rlkernel_bench.suites import capture

PEERS = (
    Peer("launches", "torch", ("torch",), {"replay": capture.eager}, "written here", ("cpu", "cuda"), ran="CPU"),
    Peer("bare graph", "torch", ("torch",), {"replay": capture.bare}, "torch.cuda.CUDAGraph"),
)
