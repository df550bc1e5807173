"""sample@1 in Triton: two launches, no host synchronisation, no shape that depends on data.

`stream.tiles` reads the logits once; `finish.finish` merges the tiles, finds what the filters keep and draws. Bias,
banned ids and penalties are applied before, by the core's torch formulas into one fp32 copy of the logits; the bitmask
is read by the kernels. Ranked results (kept ids, top n, rank) sort the row and cost what a sort costs.

Legend: N rows · V vocabulary · S tiles a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_common.requests import decode, edit
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult, Status
from rlkernel_triton.sampling.extras import kept_ids, rank_of, top_of
from rlkernel_triton.sampling.plan import SHAPE, Law, Shape, as_int64, draw

__all__ = ["SHAPE", "Law", "Shape", "as_int64", "draw", "sample"]


def sample(call: SampleCall) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.sample.SampleCall is the contract."""
    logits, allowed, slot, raw_logprob = call.logits, call.allowed, call.slot, call.raw_logprob
    top_n, rank, kept_capacity = call.top_n, call.rank, call.kept_capacity
    N, V = logits.shape[0], call.vocab_size or logits.shape[1]
    given = logits if V == logits.shape[1] else logits[:, :V]
    law = {
        "temperature": call.temperature,
        "top_k": call.top_k,
        "top_p": call.top_p,
        "min_p": call.min_p,
        "seed": call.seed,
        "step": call.step,
    }
    x, spoiled = given, None
    if not call.penalties is call.bias is call.banned is None:
        wide = given.to(torch.float32)
        requests = decode(call, N, x.device, torch.float32, slot)
        edited = edit(wide, 0, requests, bias=call.bias, allowed=allowed, banned=call.banned)
        x, allowed = edited.x, None
        spoiled = (edited.nan * 1 + (requests.bad | edited.bad) * 2).to(torch.int32)
    ranked_raw = (top_n > 0 or rank) and call.top_n_from == "raw"
    raw = given if raw_logprob or ranked_raw else None
    out, laws = draw(
        x,
        raw,
        Law(**law, filter_order=call.filter_order, tie=call.tie, slot=slot, stream=call.stream),
        allowed=allowed,
        spoiled=spoiled,
        entropy=call.entropy,
        invalid_token=call.invalid_token,
        with_laws=top_n > 0,
    )
    if not (kept_capacity or top_n or rank):
        return out if raw_logprob or raw is None else replace(out, raw_logprob=None)
    padding = torch.zeros_like(out.status, dtype=torch.bool) if slot is None else slot < 0
    extra: dict[str, Tensor] = {}
    x = masked(x, allowed)
    none = (out.kept_count == 0) | padding
    if kept_capacity:
        extra["kept_ids"] = kept_ids(x, out.kept_count, none, kept_capacity)
        over = (out.kept_count > kept_capacity) & ~none
        extra["status"] = out.status + over.to(torch.int32) * Status.KEPT_OVERFLOW.value
    if rank:
        extra["rank"] = torch.where(none, -1, rank_of(masked(given, None) if ranked_raw else x, out.token))
    if laws is not None:
        source = masked(given, None) if ranked_raw else x
        count = None if ranked_raw else out.kept_count
        extra["top_ids"], extra["top_logprobs"] = top_of(
            source, laws[:, 3:] if ranked_raw else laws[:, :3], count, padding, top_n
        )
    return replace(out if raw_logprob else replace(out, raw_logprob=None), **extra)


def masked(x: Tensor, allowed: Tensor | None) -> Tensor:
    """[N, V] fp32 logits as the order sees them: NaN and forbidden tokens at -inf."""
    x = x.to(torch.float32)
    x = torch.where(x.isnan(), -torch.inf, x)
    if allowed is None:
        return x
    ids = torch.arange(x.shape[1], device=x.device)
    return torch.where((allowed[:, ids >> 5] >> (ids & 31)) & 1 != 0, x, -torch.inf)
