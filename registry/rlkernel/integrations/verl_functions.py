"""verl's functions of logits that Megatron's tensor parallelism leaves on several ranks, with `logprob` behind them.

    from rlkernel.integrations.verl_functions import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

For a loop of one's own, or in place of verl's import of them. Results are fp32; a label outside of the vocabulary gives
NaN, where verl's takes a logit of 0 for it; logits are never written to. Who wants both numbers in one pass calls
`rlkernel.logprob(logits, labels, entropy=True, group=...)`. Nothing of verl is imported or replaced.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations import verl
from rlkernel.integrations.host import Symbol, asked_of
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_MODULE: Final = "verl.utils.megatron.tensor_parallel"
# The functions of verl whose parameters these have, and a group.
FUNCTIONS: Final = replace(
    verl.HOST,
    name="verl with Megatron",
    does="log-probabilities and entropies of logits that are split over ranks",
    symbols=(
        Symbol(_MODULE, "vocab_parallel_log_probs_from_logits", "logits, labels"),
        Symbol(_MODULE, "vocab_parallel_entropy", "vocab_parallel_logits"),
    ),
    ran=False,  # in an environment with Megatron-Core
)


def vocab_parallel_log_probs_from_logits(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None = None
) -> Tensor:  # fmt: skip
    """Log-probabilities of labels, the same on every rank.

    Args:
        logits: [..., V / ranks] of any floating dtype, this rank's ids of the vocabulary.
        labels: [...] ids in the whole vocabulary, the same on every rank.
        group: the ranks, in the order of their ids; None for Megatron's tensor-parallel group.

    Returns:
        fp32 [...], differentiable with respect to logits.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
        HostError: no group is given, and Megatron-Core is not installed.
    """
    import rlkernel as rlk

    return rlk.logprob(logits, labels, group=_ranks(group)).logprob


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Entropies of rows in nats, the same on every rank.

    Args:
        vocab_parallel_logits: [..., V / ranks] of any floating dtype, this rank's ids of the vocabulary.
        group: the ranks, in the order of their ids; None for Megatron's tensor-parallel group.

    Returns:
        fp32 [...], differentiable with respect to the logits.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
        HostError: no group is given, and Megatron-Core is not installed.
    """
    import torch

    import rlkernel as rlk

    any_id = torch.zeros(vocab_parallel_logits.shape[:-1], dtype=torch.int64, device=vocab_parallel_logits.device)
    out = rlk.logprob(vocab_parallel_logits, any_id, entropy=True, group=_ranks(group))
    return asked_of("logprob", "entropy", out.entropy)


def _ranks(group: Any) -> Any:
    if group is not None:
        return group
    try:
        state = import_module("megatron.core.parallel_state")
    except ImportError as absent:
        said = "verl with Megatron: no group is given, and megatron.core is not installed"
        raise HostError(f"{said}: pass group=, or pip install megatron-core") from absent
    return state.get_tensor_model_parallel_group()
