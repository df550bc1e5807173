"""TRL: its fused log-softmax over logits, and its chunked log-probability over hidden states."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec

from rlkernel_bench.peers import Peer, plain_rows
from rlkernel_bench.peers.files import load
from rlkernel_bench.work import Call, Inputs, Outputs, Work

CHUNK = 32768  # columns of a tile, TRL's default


def logprob(work: Work) -> Call:
    """Log-probability and entropy in one read; the entropy always comes along."""
    plain_rows(work)
    fused = load("trl", "kernels/logprob_entropy.py").selective_log_softmax_and_entropy
    temperature = float(work.options.get("temperature", 1.0))

    def run(given: Inputs) -> Outputs:
        found, entropy = fused(given["logits"], given["ids"], temperature)
        return {"logprob": found, "entropy": entropy} if work.options.get("entropy") else {"logprob": found}

    return run


def linear_logprob(work: Work) -> Call:
    """CuBLAS tiles whose statistics a Triton kernel merges."""
    plain_rows(work)
    # All it wants of transformers, and of TRL's trainer in the backward pass: nothing is sharded here.
    stubs = {"transformers": {}, "transformers.utils": {"is_triton_available": lambda: find_spec("triton") is not None}}
    beside = {"trainer/utils.py": {"maybe_gather_lm_head_ctx": lambda *_: nullcontext()}}
    chunked = load("trl", "kernels/chunked_logprob.py", stubs=stubs, beside=beside).ChunkedLogProbFunction
    outputs = ("entropy",) if work.options.get("entropy") else ()

    def run(given: Inputs) -> Outputs:
        made = chunked.apply(given["hidden"], given["weight"], None, given["ids"], 1.0, CHUNK, None, 1.0, outputs)
        return {"logprob": made[0], "entropy": made[1]} if outputs else {"logprob": made[0]}

    return run


PEERS = (
    Peer(
        "trl",
        "trl",
        ("trl", "triton"),
        {"logprob": logprob, "linear_logprob": linear_logprob},
        "trl 1.16.0, kernels/logprob_entropy.py and kernels/chunked_logprob.py",
        ran="trl 1.16.0: log-softmax on an H200, tiles on a CPU",
    ),
)
