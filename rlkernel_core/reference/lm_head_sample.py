"""lm_head_sample@1 in plain torch: tiles of the vocabulary pass by, each row keeps its best noised token and its sums.

Tiles come from the same matmuls as those of linear_logprob, so the two operators see the same logits.

Legend: N rows · D hidden · V vocabulary · n ids of a tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_core.reference.head import Head
from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.reference.row_statistics import accumulator, cap
from rlkernel_core.reference.running_draw import RunningDraw
from rlkernel_core.reference.sample import sample
from rlkernel_core.spec.lm_head_sample import check
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists


def lm_head_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    step: int | Tensor,
    penalties: Penalties | None = None,
    logit_bias: LogitBias | None = None,
    allowed: Tensor | None = None,
    banned: TokenLists | None = None,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
    vocab_size: int | None = None,
    slot: Tensor | None = None,
    raw_logprob: bool = False,
    top_n: int = 0,
    top_n_from: str = "raw",
    rank: bool = False,
    entropy: bool = False,
    kept_capacity: int = 0,
    invalid_token: int = 0,
    stream: int = 0,
) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.lm_head_sample.lm_head_sample is the contract."""
    check(**locals())
    V = vocab_size or weight.shape[0]
    dtype = accumulator(hidden, weight, bias)
    head = Head(hidden, weight[:V], None if bias is None else bias[:V], logit_scale, None, None, dtype)
    if not (top_k is top_p is min_p is None) or top_n or rank or entropy or kept_capacity:
        tiles = [_tile(head, ids, softcap) for ids in head.tiles()]
        return sample(
            torch.cat(tiles, 1),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            step=step,
            penalties=penalties,
            bias=logit_bias,
            allowed=allowed,
            banned=banned,
            filter_order=filter_order,
            tie=tie,
            slot=slot,
            raw_logprob=raw_logprob,
            top_n=top_n,
            top_n_from=top_n_from,
            rank=rank,
            entropy=entropy,
            kept_capacity=kept_capacity,
            invalid_token=invalid_token,
            stream=stream,
        )
    requests = decode(
        hidden.shape[0],
        hidden.device,
        dtype,
        temperature=temperature,
        top_k=None,
        top_p=None,
        min_p=None,
        seed=seed,
        step=step,
        penalties=penalties,
        slot=slot,
    )
    running = RunningDraw.start(requests)
    for ids in head.tiles():
        logits = _tile(head, ids, softcap)
        edited = edit(logits, ids.start, requests, bias=logit_bias, allowed=allowed, banned=banned)
        running = running.after(logits, edited, ids.start, requests, stream)
    drawn = running.draw(requests)
    result = drawn.result(invalid_token)
    return replace(result, raw_logprob=drawn.rows(running.raw_logprob(requests), torch.nan)) if raw_logprob else result


def _tile(head: Head, ids: slice, softcap: float | None) -> Tensor:
    """[N, n] capped logits."""
    blocks = [head.logits(head.block(rows), ids)[: rows.stop - rows.start] for rows in head.rows()]
    if not blocks:
        return torch.zeros(0, ids.stop - ids.start, dtype=head.dtype, device=head.hidden.device)
    return cap(torch.cat(blocks), softcap)
