"""slime: log-probabilities and entropies of logits that Megatron splits over ranks, through `rlkernel.logprob`.

Checked against slime's source; never run in slime as a whole, which needs Megatron and a GPU. slime calls a function of
the user's in each of its trainers after Megatron is set up:

    --custom-megatron-init-path rlkernel.integrations.slime.init

which replaces the one global that its losses call; or, in one process, `with slime.enabled()`. slime divides its logits
by the temperature before.

Legend: N tokens · V ids of this rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import KEPT, Active, Host, Symbol, asked_of, counted, replaced

if TYPE_CHECKING:
    from torch import Tensor

SCORE: Final = Symbol(
    "slime.backends.megatron_utils.loss",
    "calculate_log_probs_and_entropy",
    "logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad",
)
HOST: Final = Host(
    name="slime",
    distribution="slime",
    versions=">=0.3.1,<0.4",
    tested="0.3.1",
    does="logprob(group=) under its losses, in the trainers of a job or inside a block",
    symbols=(SCORE,),
    ran=False,
    source="git+https://github.com/THUDM/slime",
)


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """Losses of this process score tokens by `rlkernel.logprob` inside the block.

    Raises:
        HostError: slime is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = "no loss was computed there; train inside, or name init in --custom-megatron-init-path"
    found = counted("logprob", calculate_log_probs_and_entropy)
    return replaced(HOST, SCORE, found, idle=lambda: idle, force=force)


def init(args: Any) -> None:
    """`enabled()` until this process ends: what slime calls that is started with `--custom-megatron-init-path`.

    Raises:
        HostError: as `enabled`.
    """
    del args
    KEPT.enter_context(enabled())


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Slime's function: log-probabilities [N, 1] and entropies [N], the same on every rank; both fp32.

    Args:
        logits: [N, V] of any floating dtype.
        tokens: [N] ids in the whole vocabulary.
        tp_group: the ranks, in the order of their ids; None for one.
        with_entropy: whether entropies are wanted.
        chunk_size: bounds the memory of slime's own; this one's does not grow with it.
        log_prob_keep_mask: bool [N, V], the ids that the filters of the rollout kept, and whatever of a token itself:
            probabilities are of these alone, as the tokens were drawn. Entropies are of all ids.
        with_entropy_grad: whether entropies have a gradient.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
    """
    del chunk_size
    if not logits.shape[0]:
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    return score(logits, tokens, tp_group, log_prob_keep_mask, with_entropy, with_entropy_grad)


def score(
    logits: Tensor,
    tokens: Tensor,
    group: Any,
    keep: Tensor | None,
    with_entropy: bool,
    with_entropy_grad: bool,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """The arguments and results of `calculate_log_probs_and_entropy`, and the temperature of the law, one or [N]."""
    import torch

    import rlkernel as rlk

    given, law = logits, {"temperature": temperature, "group": group}
    if keep is not None:
        first = logits.shape[1] * group.rank() if group is not None else 0
        ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        given = logits.masked_fill(~(keep | (tokens[:, None] == ids)), -torch.inf)
    out = rlk.logprob(given, tokens, entropy=with_entropy and keep is None, **law)
    if not with_entropy:
        return out.logprob[:, None], None
    found = out if keep is None else rlk.logprob(logits, tokens, entropy=True, **law)
    entropy = asked_of("logprob", "entropy", found.entropy)
    return out.logprob[:, None], entropy if with_entropy_grad else entropy.detach()
