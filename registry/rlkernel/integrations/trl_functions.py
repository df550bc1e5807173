"""TRL's functions of logits, with `logprob` behind them: for a loop of one's own, or in place of TRL's import of them.

    from rlkernel.integrations.trl import selective_log_softmax_and_entropy

Results are fp32, where TRL's have the dtype of the logits; an id outside of the vocabulary gives NaN, where TRL's reads
another number or fails. Nothing of TRL is imported or replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rlkernel.integrations.host import Symbol
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
    assert out.entropy is not None
    return out.logprob, out.entropy if entropy_requires_grad else out.entropy.detach()


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of ids.

    Args:
        logits: [..., V] of any floating dtype.
        index: [...] ids.
        temperature: of the law, > 0.
        row_mask: as in `selective_log_softmax_and_entropy`.

    Returns:
        fp32, of the shape of index, differentiable with respect to logits.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
    """
    import rlkernel as rlk

    return rlk.logprob(logits, index, temperature=temperature, mask=_counted(row_mask)).logprob


def _counted(row_mask: Tensor | None) -> Tensor | None:
    return None if row_mask is None else row_mask != 0
