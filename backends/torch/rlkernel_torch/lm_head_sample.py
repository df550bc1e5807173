"""lm_head_sample@1 in plain torch: tiles of the vocabulary pass by, each row keeps its best noised token and its sums.

Tiles come from the same matmuls as those of linear_logprob, so the two operators see the same logits, and what it says
of the drawn token is added as it adds.

Legend: N rows · D hidden · V vocabulary · n ids of a tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_common.requests import decode, edit
from rlkernel_common.row_statistics import accumulator, cap
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_torch.head import Head, readable_head, stored
from rlkernel_torch.running_draw import RunningDraw
from rlkernel_torch.sample import finite_or, sample, with_trainer_bits
from rlkernel_torch.trainer_sums import TrainerSums, piece_of, tempered_in_pieces


def lm_head_sample(call: LmHeadSampleCall) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.lm_head_sample.LmHeadSampleCall is the contract."""
    hidden, weight, bias = call.hidden, call.weight, call.bias
    V = call.vocab_size or weight.shape[0]
    dtype = accumulator(hidden, stored(weight), bias)
    head = Head(
        hidden, readable_head(weight), bias, call.logit_scale, None, None, dtype, piece_of(V), call.lora, V
    )  # fmt: skip
    filtered = not (call.top_k is call.top_p is call.min_p is None)
    if filtered or call.top_n or call.rank or call.entropy or call.kept_capacity:
        tiles = [_tile(head, ids, call.softcap) for ids in head.tiles()]
        logits = torch.cat(tiles, 1)
        stored_call = SampleCall.of(call, logits=logits, bias=call.logit_bias, vocab_size=None)
        return sample(stored_call, trainer=tempered_in_pieces)
    requests = decode(call, hidden.shape[0], hidden.device, dtype, call.slot)
    running, T = RunningDraw.start(requests), requests.temperature
    of_law, of_raw = TrainerSums(V, T), TrainerSums(V, torch.ones_like(T))
    for ids in head.tiles():
        logits = _tile(head, ids, call.softcap)
        edited = edit(logits, ids.start, requests, bias=call.logit_bias, allowed=call.allowed, banned=call.banned)
        running, column = running.after(logits, edited, ids.start, requests, call.stream)
        of_law.take(edited.x, ids.start, column)
        if call.raw_logprob:
            of_raw.take(torch.where(logits.isnan(), -torch.inf, logits), ids.start, column)
    drawn = running.draw(requests)
    token = drawn.token
    result = with_trainer_bits(drawn.result(call.invalid_token), drawn, requests, of_law.logprob(token))
    if not call.raw_logprob:
        return result
    raw = finite_or(of_raw.logprob(token), running.raw_logprob(requests))
    return replace(result, raw_logprob=drawn.rows(raw, torch.nan))


def _tile(head: Head, ids: slice, softcap: float | None) -> Tensor:
    """[N, n] capped logits."""
    blocks = [head.logits(head.block(rows), ids)[: rows.stop - rows.start] for rows in head.rows()]
    if not blocks:
        return torch.zeros(0, ids.stop - ids.start, dtype=head.dtype, device=head.hidden.device)
    return cap(torch.cat(blocks), softcap)
