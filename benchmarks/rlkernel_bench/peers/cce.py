"""Apple's cut cross-entropy: negative log-likelihood from hidden states, its gradient with small blocks left out."""

from __future__ import annotations

from rlkernel_bench.peers import Peer, plain_rows
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def linear_logprob(work: Work) -> Call:
    """No entropy. Gradient blocks below 2^-12 are skipped, which is its default."""
    plain_rows(work)
    from cut_cross_entropy import linear_cross_entropy

    def run(given: Inputs) -> Outputs:
        loss = linear_cross_entropy(given["hidden"], given["weight"], given["ids"], reduction="none", impl="cce")
        return {"logprob": -loss}

    return run


PEERS = (
    Peer(
        "cce",
        "cut-cross-entropy",
        ("cut_cross_entropy", "triton"),
        {"linear_logprob": linear_logprob},
        "cut-cross-entropy 25.1.1, linear_cross_entropy.py",
    ),
)
