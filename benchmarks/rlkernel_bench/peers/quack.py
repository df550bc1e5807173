"""QuACK: cross-entropy over logits in CuTe DSL."""

from __future__ import annotations

from rlkernel_bench.peers import Peer, plain_rows, without_temperature
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def logprob(work: Work) -> Call:
    """No entropy. Its linear cross-entropy gives a sum only, so it is no log-probability."""
    plain_rows(work)
    without_temperature(work)
    from quack.cross_entropy import cross_entropy

    def run(given: Inputs) -> Outputs:
        return {"logprob": -cross_entropy(given["logits"], given["ids"], reduction="none")}

    return run


PEERS = (
    Peer(
        "quack",
        "quack-kernels",
        ("quack", "cutlass"),
        {"logprob": logprob},
        "quack-kernels 0.6.5, cross_entropy.py",
    ),
)
