"""The law that a token is drawn from, as a whole: after edits, temperature and filters, renormalized.

It is what `sample` draws from, number by number, because `sample` gives it: its best V tokens under the processed
law, put to their ids. So edits, the order of the filters, ties and rows without a meaning are those of `sample@1`
(rlkernel_core.spec.sampling), on whichever backend the policy chooses.

Legend: N rows · V vocabulary · W stored columns, W >= V. Imports torch when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.errors import RLKernelError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.spec.sampling import LogitBias, Penalties, TokenLists

__all__ = ["processed_law"]


def processed_law(
    logits: Tensor,  # [N, W]
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    allowed: Tensor | None = None,
    banned: TokenLists | None = None,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
    vocab_size: int | None = None,
) -> Tensor:  # [N, V]
    """Log-probabilities of every token under the law that `sample` draws from with the same arguments.

    For tests of samplers, for speculative decoding of your own, and as `draft_logits` of `verify`. It sorts rows and
    makes [N, V] numbers: to score one token a row, `logprob(support=...)` needs neither.

    Args:
        logits: [N, W] floating; never written to, and without gradient (differentiate `logprob` with a support).
        temperature: as in sample, a number or [N]; 0 gives the best token log-probability 0.
        top_k: as in sample, a number or [N] integer; None or <= 0 keeps all.
        top_p: as in sample, a number or [N]; None or >= 1 keeps all.
        min_p: as in sample, a number or [N]; None or <= 0 keeps all.
        penalties: as in sample, on tokens that occurred.
        bias: as in sample, values added to some logits.
        allowed: as in sample, [N, >= ceil(V / 32)] int32 bitmask.
        banned: as in sample, ids that may not be drawn.
        filter_order: as in sample, "topk_topp", "topp_topk" or "joint".
        tie: as in sample, "lowest_id" or "keep_all".
        vocab_size: V where the rows are padded, W > V.

    Returns:
        [N, V] log-probabilities in nats, fp32 (float64 for float64 logits); -inf where a filter dropped the token, and
        everywhere in a row whose status EMPTY or PARAM says that nothing can be drawn.

    Raises:
        ArgumentTypeError: another dtype than the ones above.
        ArgumentError: what `sample` refuses, logits that ask for a gradient among it.
        RLKernelError: the backend breaks its claim and returns no best tokens.
    """
    import torch

    from rlkernel import sample

    checks.tensor("logits", logits, ndim=2, kind="floating")
    N, V = logits.shape[0], logits.shape[1]
    if vocab_size is not None:
        V = checks.integer("vocab_size", vocab_size, at_least=1, at_most=V)
    best = sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=torch.arange(N, device=logits.device),  # of a draw that nobody reads
        step=0,
        penalties=penalties,
        bias=bias,
        allowed=allowed,
        banned=banned,
        filter_order=filter_order,
        tie=tie,
        vocab_size=vocab_size,
        top_n=V,
        top_n_from="processed",
    )
    ids, values = best.top_ids, best.top_logprobs
    if ids is None or values is None:
        raise RLKernelError("sample: gave no best tokens, which were asked for")
    law = values.new_full((N, V + 1), -torch.inf)  # the last column takes what no token has
    return law.scatter_(1, torch.where(ids < 0, V, ids), values)[:, :V]
