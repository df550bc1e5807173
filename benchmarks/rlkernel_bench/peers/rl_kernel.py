"""RL-Kernel, one of the systems rlkernel builds on: its Triton linear log-probability."""

from __future__ import annotations

from rlkernel_bench.peers import Peer, plain_rows
from rlkernel_bench.work import Call, Work


def linear_logprob(work: Work) -> Call:
    """No entropy, no temperature; it looks at the ids on the host in every call."""
    plain_rows(work)
    from rl_engine.kernels.ops.triton.loss.linear_logp import TritonLinearLogpOp

    fused = TritonLinearLogpOp()
    return lambda given: {"logprob": fused(given["hidden"], given["weight"], given["ids"])}


PEERS = (
    Peer(
        "rl-kernel",
        "rl-engine",
        ("rl_engine", "triton"),
        {"linear_logprob": linear_logprob},
        "RL-Align/RL-Kernel at 66df81c, rl_engine/kernels/ops/triton/loss/linear_logp.py",
        install="pip install git+https://github.com/RL-Align/RL-Kernel",
    ),
)
