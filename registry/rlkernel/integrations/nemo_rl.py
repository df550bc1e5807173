"""NeMo-RL: log-probabilities of vocabulary-parallel logits through `rlkernel.logprob`, under its own functions.

All that NeMo-RL computes from logits of Megatron or DTensor ends in one of two autograd functions of one module, of
which one works in chunks. These are replaced, so that shifted targets, context parallelism, packed sequences and
padding stay NeMo-RL's. What it filters by top-k or top-p, and its losses of whole distributions, stay NeMo-RL's too.

NeMo-RL takes a class of the user's for its policy workers (`worker_extension_cls_fqn`), which calls `nemo_rl.worker()`
before it builds its model; in one process, `with nemo_rl.enabled()`. Logits are divided by the temperature before.

Legend: B sequences · S tokens of each, of this rank where they are split · V ids of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import KEPT, Active, Host, Make, Symbol, counted, replaced
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

MODULE: Final = "nemo_rl.distributed.model_utils"
WHOLE: Final = Symbol(MODULE, "DistributedLogprob")
CHUNKED: Final = Symbol(MODULE, "ChunkedDistributedLogprob")
_GIVEN: Final = "ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index"
HOST: Final = Host(
    name="nemo-rl",
    distribution="nemo-rl",
    versions=">=0.6,<0.8",
    tested="0.7.0",
    does="logprob(group=) under its vocabulary-parallel log-probabilities, in its policy workers or inside a block",
    symbols=(
        WHOLE,
        CHUNKED,
        Symbol(
            MODULE,
            "DistributedLogprob.forward",
            f"{_GIVEN}, group, inference_only",
        ),
        Symbol(
            MODULE,
            "ChunkedDistributedLogprob.forward",
            f"{_GIVEN}, chunk_size, tp_group, inference_only",
        ),
    ),
    ran=False,
    source="git+https://github.com/NVIDIA-NeMo/RL",
)


def enabled(*, force: bool = False) -> AbstractContextManager[Active]:
    """Logits of this process are scored by `rlkernel.logprob` inside the block.

    Raises:
        HostError: NeMo-RL is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """
    idle = (
        "its policy workers are other processes, which call worker(); or it filters by top-k or top-p, "
        "or its output layer is fused with the log-probabilities, and scores by functions of its own"
    )
    return replaced(
        HOST, WHOLE, _applied(scored), also=[(CHUNKED, _applied(scored_in_chunks))], idle=lambda: idle, force=force
    )


def worker() -> None:
    """`enabled()` until this process ends: what a policy worker calls before it builds its model.

    Raises:
        HostError: as `enabled`.
    """
    KEPT.enter_context(enabled())


def scored(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
) -> Tensor:
    """`DistributedLogprob.apply`: log-probabilities [B, S], the same on every rank; fp32.

    Args:
        vocab_parallel_logits: [B, S, V] of any floating dtype.
        target: [B, S] ids in the whole vocabulary; one that is not in it gives NaN, where NeMo-RL's gives 0.
        vocab_start_index: the first id of this rank, V times its rank.
        vocab_end_index: the id after the last of this rank.
        group: the ranks, in the order of their ids.
        inference_only: whether no gradient is wanted.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
        HostError: ids of this rank that do not begin at V times its rank.
    """
    import torch

    import rlkernel as rlk

    del vocab_end_index
    first = vocab_parallel_logits.shape[-1] * torch.distributed.get_rank(group)
    if vocab_start_index != first:
        raise HostError(
            f"nemo-rl: vocab_start_index is {vocab_start_index}, not {first}, V times the rank, and the integration "
            "scores vocabularies that are split evenly; pad the vocabulary to a multiple of the ranks"
        )
    with torch.no_grad() if inference_only else nullcontext():
        return rlk.logprob(vocab_parallel_logits, target, group=group).logprob


def scored_in_chunks(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    """`ChunkedDistributedLogprob.apply`: as `scored`; `chunk_size` bounds the memory of NeMo-RL's own alone."""
    del chunk_size
    return scored(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only)


def _applied(function: Callable[..., Any]) -> Make:
    """In the place of an autograd function, of which NeMo-RL calls `apply` alone."""
    made = counted("logprob", function)
    return lambda stock, calls: SimpleNamespace(apply=made(stock, calls))
