"""prime-rl: the log-probabilities of its trainer through `rlkernel.logprob`, by the one global that it calls.

Checked against prime-rl's source; never run in prime-rl as a whole, which needs a GPU build. It is a patch of one
process, made because the user names it: `with prime_rl.enabled()` around the trainer's `train(config)`. Models with
prime-rl's fused output layer do not call it, and leaving the block then is an error. prime-rl divides its logits by the
temperature before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from rlkernel.integrations.host import Active, Host, Symbol, counted, replaced
from rlkernel.integrations.trl_functions import selective_log_softmax

SCORE: Final = Symbol("prime_rl.trainer.rl.train", "selective_log_softmax", "logits, index")
HOST: Final = Host(
    name="prime-rl",
    distribution="prime-rl",
    versions=">=0.8,<0.9",
    tested="0.8.0",
    does="logprob under its trainer, inside a block",
    symbols=(SCORE,),
    ran=False,
    source="git+https://github.com/PrimeIntellect-ai/prime-rl",
)


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """The trainer of this process scores tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: prime-rl is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = "no token was scored there; the model has prime-rl's fused output layer, or train() was called elsewhere"
    return replaced(HOST, SCORE, counted("logprob", selective_log_softmax), idle=lambda: idle, force=force)
