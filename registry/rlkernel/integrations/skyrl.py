"""SkyRL: the log-probabilities of its FSDP workers through `rlkernel.logprob`, by the one global that they call.

Checked against SkyRL's source; never run in SkyRL as a whole, which needs a GPU build. SkyRL has no registry, so that
this is a patch, made because the user names it: of every Ray worker of a job by

    ray.init(runtime_env={"worker_process_setup_hook": "rlkernel.integrations.skyrl.worker"})

or of one process by `with skyrl.enabled()`. SkyRL divides its logits by the temperature before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from rlkernel.integrations.host import KEPT, Active, Host, Symbol, counted, replaced

if TYPE_CHECKING:
    from torch import Tensor

SCORE: Final = Symbol(
    "skyrl.backends.skyrl_train.workers.model_wrapper", "logprobs_from_logits", "logits, labels, inplace_backward"
)
HOST: Final = Host(
    name="skyrl",
    distribution="skyrl",
    versions=">=0.3,<0.5",
    tested="0.4.0",
    does="logprob under its FSDP workers, inside a block or in the workers of a job",
    symbols=(SCORE,),
    ran=False,
)


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """Models of this process score tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: SkyRL is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = "no model scored a token there; train inside, or name worker() where Ray starts its workers"
    return replaced(HOST, SCORE, counted("logprob", logprobs_from_logits), idle=lambda: idle, force=force)


def worker() -> None:
    """`enabled()` until this process ends: what Ray calls in a worker that its `worker_process_setup_hook` names.

    Raises:
        HostError: as `enabled`; Ray then ends the worker and tells the driver.
    """
    KEPT.enter_context(enabled())


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """SkyRL's function: log-probabilities [...] in fp32 of labels [...] under logits [..., V].

    `inplace_backward` lets SkyRL's own write to its logits; this one never does.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
    """
    import rlkernel as rlk

    del inplace_backward
    return rlk.logprob(logits, labels).logprob
