"""OpenRLHF: the log-probabilities of its actors through `rlkernel.logprob`, by the one global that their forward uses.

Held against OpenRLHF's source and its own `Actor` on a CPU; never run in OpenRLHF as a whole, which needs a GPU build.
OpenRLHF has no registry, so that this is a patch, made because the user names it: of every Ray worker of a job by

    ray.init(runtime_env={"worker_process_setup_hook": "rlkernel.integrations.openrlhf.worker"})

before `openrlhf.cli.train_ppo_ray.train(args)`, which takes a Ray that is initialized as it is; or of one process by
`with openrlhf.enabled()`. Policy, reference and the loss's recomputation all score tokens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import KEPT, Active, Host, Symbol, replaced

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

SCORE: Final = Symbol("openrlhf.models.actor", "log_probs_from_logits", "logits, labels, temperature")
HOST: Final = Host(
    name="openrlhf",
    distribution="openrlhf",
    versions=">=0.11.2,<0.12",
    tested="0.11.2",
    does="logprob under its actors, inside a block or in the workers of a job",
    symbols=(SCORE, Symbol("openrlhf.models.actor", "Actor")),
    ran=False,
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """Actors of this process score tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: OpenRLHF is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        def log_probs_from_logits(
            logits: Tensor,  # [..., V], read and never written to
            labels: Tensor,  # [...]
            temperature: float = 1.0,
        ) -> Tensor:
            import rlkernel as rlk

            calls["logprob"] += 1
            return rlk.logprob(logits, labels, temperature=temperature).logprob

        return log_probs_from_logits

    with replaced(
        HOST,
        SCORE,
        make,
        idle=lambda: "no actor scored a token there; train inside, or name worker() where Ray starts its workers",
        force=force,
    ) as entry:
        yield entry


def worker() -> None:
    """`enabled()` until this process ends: what Ray calls in a worker that its `worker_process_setup_hook` names.

    Raises:
        HostError: as `enabled`; Ray then ends the worker and tells the driver.
    """
    KEPT.enter_context(enabled())
