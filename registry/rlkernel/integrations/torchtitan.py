"""torchtitan: log-probabilities and entropies of its RL losses through `rlkernel.logprob`, by the one global.

torchtitan builds its loss from a configuration, in the actor that trains:

    from rlkernel.integrations.torchtitan_losses import GRPOLoss

    PolicyTrainer.Config(loss=GRPOLoss.Config())

which is torchtitan's loss; building it replaces the global in that actor. In one process, `with torchtitan.enabled()`.
torchtitan gathers logits that tensor parallelism splits over the vocabulary; here they are scored where they lie.

Legend: B sequences · L tokens of each · V ids, of this rank where they are split.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, asked_of, counted, replaced
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

SCORE: Final = Symbol("torchtitan.experiments.rl.losses.dapo", "compute_logprobs", "logits, labels, return_entropy")
SPLIT: Final = Symbol("torchtitan.distributed.spmd_types", "spmd_mesh_size", "axis_name")
MESH: Final = Symbol("torchtitan.distributed.spmd_types", "current_spmd_mesh", "")
BACKEND: Final = Symbol("torchtitan.distributed.utils", "get_spmd_backend", "")
HOST: Final = Host(
    name="torchtitan",
    distribution="torchtitan",
    versions=">=0.3,<0.4",
    tested="0.3.0",
    does="logprob under its RL losses, by their configuration or inside a block",
    symbols=(SCORE, SPLIT, MESH, BACKEND),
    ran=False,
)
IGNORED: Final = -100  # a label that is no token


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """RL losses of this process score tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: torchtitan is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = "no loss was computed there; its actors are other processes, which torchtitan_losses reaches"
    return replaced(HOST, SCORE, counted("logprob", compute_logprobs), idle=lambda: idle, force=force)


def compute_logprobs(logits: Tensor, labels: Tensor, *, return_entropy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The function of torchtitan: log-probabilities [B, L], and entropies [B, L] without a gradient; fp32.

    Args:
        logits: [B, L, V] of any floating dtype; a DTensor split over the vocabulary, or the shard of this rank where
            torchtitan's backend is spmd_types and tensor parallelism is on.
        labels: [B, L] ids in the whole vocabulary; where -100, log-probability and its gradient are 0.
        return_entropy: whether entropies are wanted.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
        HostError: a DTensor that is a sum over ranks, or split over the vocabulary along two dimensions of its mesh.
    """
    import rlkernel as rlk

    mine, group = _shard(logits)
    absent = labels == IGNORED
    out = rlk.logprob(mine, labels.masked_fill(absent, 0), entropy=return_entropy, group=group)
    scored = out.logprob.masked_fill(absent, 0.0)
    return (scored, asked_of("logprob", "entropy", out.entropy).detach()) if return_entropy else scored


def _shard(logits: Tensor) -> tuple[Tensor, Any]:
    """Logits of this rank, and the ranks that split their vocabulary; None for none."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(logits, DTensor):
        if BACKEND.find()() != "spmd_types" or SPLIT.find()("tp") == 1:
            return logits, None
        return logits, MESH.find()().get_group("tp")
    placed = logits.placements
    split = [i for i, p in enumerate(placed) if isinstance(p, Shard) and p.dim in (-1, logits.ndim - 1)]
    if len(split) > 1 or any(p.is_partial() for p in placed):
        raise HostError(
            f"torchtitan: logits are placed as {placed}, which the integration does not score; "
            "split the vocabulary along one dimension of the mesh, or train without rlkernel's loss"
        )
    return logits.to_local(), logits.device_mesh.get_group(split[0]) if split else None
