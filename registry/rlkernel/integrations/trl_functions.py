"""TRL's functions of logits, with `logprob` behind them: for a loop of one's own, or in place of TRL's import of them.

    from rlkernel.integrations.trl import selective_log_softmax_and_entropy

Results are fp32, where TRL's have the dtype of the logits; an id outside of the vocabulary gives NaN, where TRL's reads
another number or fails. Nothing of TRL is imported or replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rlkernel.integrations.host import Symbol, asked_of
from rlkernel.integrations.trl_head import HOST

if TYPE_CHECKING:
    from torch import Tensor

# The functions of TRL whose parameters these have.
FUNCTIONS: Final = replace(
    HOST,
    does="log-probabilities and entropies of logits",
    symbols=(
        Symbol(
            "trl.trainer.utils",
            "selective_log_softmax_and_entropy",
            "logits, index, entropy_requires_grad, temperature, row_mask",
        ),
        Symbol("trl.trainer.utils", "selective_log_softmax", "logits, index, temperature, row_mask"),
    ),
)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,  # the parameters are TRL's
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids and the entropies of their rows, in one pass over the logits.

    Args:
        logits: [..., V] of any floating dtype.
        index: [...] ids.
        entropy_requires_grad: whether the entropy has a gradient.
        temperature: of the law, > 0.
        row_mask: [...]; where it is 0 a row is not read, and its results and gradients are 0.

    Returns:
        fp32 [...] twice, differentiable with respect to logits.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
    """
    import rlkernel as rlk

    out = rlk.logprob(logits, index, temperature=temperature, mask=_counted(row_mask), entropy=True)
    entropy = asked_of("logprob", "entropy", out.entropy)
    return out.logprob, entropy if entropy_requires_grad else entropy.detach()


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of ids, one per row or several.

    Args:
        logits: [..., V] of any floating dtype.
        index: [...] ids, or [..., K].
        temperature: of the law, > 0.
        row_mask: of the shape of index; where it is 0, results and gradients are 0.

    Returns:
        fp32, of the shape of index, differentiable with respect to logits.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
    """
    import rlkernel as rlk

    counted = _counted(row_mask)
    if counted is not None and index.dim() == logits.dim():  # an entry of each id: those that do not count are absent
        index, counted = index.where(counted, -1), None
    return rlk.logprob(logits, index, temperature=temperature, mask=counted).logprob


def _counted(row_mask: Tensor | None) -> Tensor | None:
    return None if row_mask is None else row_mask != 0
