"""VeOmni: log-probabilities and entropies of hidden states through `rlkernel.linear_logprob`, by the one global.

VeOmni's models score tokens by it where `return_log_probs=True` is asked of them, as verl's VeOmni engine does. It is a
patch of one process, made because the user names it: `with veomni.enabled()`, or `veomni.worker()` in a process that
trains. Losses and the distillation of top-k stay VeOmni's.

Legend: B sequences · L tokens of each · D width · V ids.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from rlkernel.integrations.host import KEPT, Active, Host, Symbol, asked_of, counted, replaced

if TYPE_CHECKING:
    from torch import Tensor

SCORE: Final = Symbol(
    "veomni.ops.kernels.cross_entropy",
    "chunk_logprobs_function",
    "hidden_states, weights, labels, chunk_size, ignore_index, shift_labels, temperature",
)
STATE: Final = Symbol("veomni.distributed.parallel_state", "get_parallel_state", "")
HOST: Final = Host(
    name="veomni",
    distribution="veomni",
    versions=">=0.1.12,<0.2",
    tested="0.1.12",
    does="linear_logprob under the log-probabilities of its models, inside a block",
    symbols=(SCORE, STATE),
    ran=False,
)


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """Models of this process score tokens by `rlkernel.linear_logprob` inside the block.

    Raises:
        HostError: VeOmni is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = "no model was called there with return_log_probs=True; train inside, or call worker() in each trainer"
    return replaced(HOST, SCORE, counted("linear_logprob", chunk_logprobs_function), idle=lambda: idle, force=force)


def worker() -> None:
    """`enabled()` until this process ends.

    Raises:
        HostError: as `enabled`.
    """
    KEPT.enter_context(enabled())


def chunk_logprobs_function(
    hidden_states: Tensor,
    weights: Tensor,
    labels: Tensor,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """VeOmni's function: log-probabilities and entropies [B, L] or [L] of the tokens that follow; both fp32.

    Args:
        hidden_states: [B, L, D] or [L, D] of any floating dtype.
        weights: [V, D] of the same.
        labels: [B, L] or [L] ids; where it is ignore_index, results and their gradients are 0. The last place of a
            sequence, which nothing follows, has 0 as well.
        chunk_size: bounds the memory of VeOmni's own; this one's does not grow with it.
        ignore_index: a label that is no token.
        shift_labels: labels that are moved by one already, in place of labels; of VeOmni's sequence parallelism
            labels are.
        temperature: of the law, > 0.

    Raises:
        ArgumentError: as `rlkernel.linear_logprob`.
    """
    import torch

    import rlkernel as rlk

    del chunk_size
    if shift_labels is None and not STATE.find()().sp_enabled:
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    ids = labels if shift_labels is None else shift_labels
    out = rlk.linear_logprob(
        hidden_states, weights, ids, temperature=float(temperature), mask=ids != ignore_index, entropy=True
    )
    return out.logprob, asked_of("linear_logprob", "entropy", out.entropy)
