"""torchtitan's RL losses, for its configurations: built in an actor, `torchtitan.enabled()` until that actor ends.

    from rlkernel.integrations.torchtitan_losses import GRPOLoss

    PolicyTrainer.Config(loss=ChunkedLossWrapper.Config(num_chunks=8, loss_fn=GRPOLoss.Config(clip_eps=0.2)))

Importing it imports torchtitan, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl import losses

from rlkernel.integrations.host import KEPT
from rlkernel.integrations.torchtitan import enabled


class DAPOLoss(losses.DAPOLoss):
    """torchtitan's DAPO loss, by `rlkernel.logprob`."""

    @dataclass(kw_only=True, slots=True)
    class Config(losses.DAPOLoss.Config):
        """torchtitan's configuration of it."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        KEPT.enter_context(enabled())
        super().__init__(config, **kwargs)


class GRPOLoss(losses.GRPOLoss):
    """torchtitan's GRPO loss, by `rlkernel.logprob`."""

    @dataclass(kw_only=True, slots=True)
    class Config(losses.GRPOLoss.Config):
        """torchtitan's configuration of it."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        KEPT.enter_context(enabled())
        super().__init__(config, **kwargs)
