"""SkyRL: the log-probabilities of its FSDP workers through `rlkernel.logprob`, by the one global that they call.

Checked against SkyRL's source; never run in SkyRL as a whole, which needs a GPU build. SkyRL has no registry, so that
this is a patch, made because the user names it: of every Ray worker of a job by

    ray.init(runtime_env={"worker_process_setup_hook": "rlkernel.integrations.skyrl.worker"})

or of one process by `with skyrl.enabled()`. SkyRL divides its logits by the temperature before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import KEPT, Active, Host, Symbol, replaced

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

SCORE: Final = Symbol(
    "skyrl.backends.skyrl_train.workers.model_wrapper", "logprobs_from_logits", "logits, labels, inplace_backward"
)
HOST: Final = Host(
    name="skyrl",
    distribution="skyrl",
    versions=">=0.3,<0.4",
    tested="0.3.0",
    does="logprob under its FSDP workers, inside a block or in the workers of a job",
    symbols=(SCORE,),
    ran=False,
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """Models of this process score tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: SkyRL is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        def logprobs_from_logits(
            logits: Tensor,  # [..., V], read and never written to
            labels: Tensor,  # [...]
            inplace_backward: bool = True,  # whether stock may write to its logits; ours never does
        ) -> Tensor:
            import rlkernel as rlk

            del inplace_backward
            calls["logprob"] += 1
            return rlk.logprob(logits, labels).logprob

        return logprobs_from_logits

    idle = "no model scored a token there; train inside, or name worker() where Ray starts its workers"
    with replaced(HOST, SCORE, make, idle=lambda: idle, force=force) as entry:
        yield entry


def worker() -> None:
    """`enabled()` until this process ends: what Ray calls in a worker that its `worker_process_setup_hook` names.

    Raises:
        HostError: as `enabled`; Ray then ends the worker and tells the driver.
    """
    KEPT.enter_context(enabled())
