"""batch_invariant_ops of Thinking Machines: products whose rows have the same bits in any batch."""

from __future__ import annotations

from rlkernel_bench.peers import Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def linear(work: Work) -> Call:
    """The product alone, by the persistent kernel that its mode puts in the place of torch.mm."""
    del work
    from batch_invariant_ops import matmul_persistent

    def run(given: Inputs) -> Outputs:
        return {"y": matmul_persistent(given["x"], given["weight"].t())}

    return run


PEERS = (
    Peer(
        "batch_invariant_ops",
        "batch_invariant_ops",
        ("batch_invariant_ops",),
        {"linear": linear},
        "batch_invariant_ops 0.1.0 of commit f22b1fb, batch_invariant_ops.py",
        ran="H200, 0.1.0 of commit f22b1fb, torch 2.11",
        install="pip install git+https://github.com/thinking-machines-lab/batch_invariant_ops",
    ),
)
