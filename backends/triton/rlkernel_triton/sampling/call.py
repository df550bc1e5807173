"""sample@1 in Triton: two launches, no host synchronisation, no shape that depends on data.

`stream.tiles` reads the logits once; `finish.finish` merges the tiles, finds what the filters keep and draws. Bias,
banned ids and penalties are applied before, by the core's torch formulas into one fp32 copy of the logits; the bitmask
is read by the kernels. Ranked results (kept ids, top n, rank) sort the row and cost what a sort costs.

Legend: N rows · V vocabulary · S tiles a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.spec.sample import check
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, Status, TokenLists
from rlkernel_triton.sampling.extras import kept_ids, rank_of, top_of
from rlkernel_triton.sampling.plan import MANY, SHAPE, Law, Shape, as_int64, draw

__all__ = ["SHAPE", "Law", "Shape", "as_int64", "draw", "sample"]


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    step: int | Tensor,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
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
    """Draw one token per row: rlkernel_core.spec.sample.sample is the contract."""
    checked(locals())
    N, V = logits.shape[0], vocab_size or logits.shape[1]
    given = logits if V == logits.shape[1] else logits[:, :V]
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "step": step}
    x, spoiled = given, None
    if not penalties is bias is banned is None:
        wide = given.to(torch.float32)
        requests = decode(N, x.device, torch.float32, **law, penalties=penalties, slot=slot)
        edited = edit(wide, 0, requests, bias=bias, allowed=allowed, banned=banned)
        x, allowed = edited.x, None
        spoiled = (edited.nan * 1 + (requests.bad | edited.bad) * 2).to(torch.int32)
    ranked_raw = (top_n > 0 or rank) and top_n_from == "raw"
    raw = given if raw_logprob or ranked_raw else None
    out, laws = draw(
        x,
        raw,
        Law(**law, filter_order=filter_order, tie=tie, slot=slot, stream=stream),
        allowed=allowed,
        spoiled=spoiled,
        entropy=entropy,
        invalid_token=invalid_token,
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


_PASSED: Final[set[Any]] = set()


def checked(args: dict[str, Any]) -> None:
    """The checks of the contract, which look at metadata alone: not again where a call like this one passed them."""
    if not args["penalties"] is args["bias"] is args["banned"] is None:
        check(**args)
        return
    key = (torch.is_grad_enabled(), *[metadata(name, value) for name, value in args.items()])
    try:
        known = key in _PASSED
    except TypeError:  # what cannot be hashed is no argument of a draw: its check names it
        known = False
    if not known:
        check(**args)
        if len(_PASSED) >= MANY:
            _PASSED.clear()
        _PASSED.add(key)


def metadata(name: str, value: Any) -> Any:
    """All of an argument that a check may look at. Seeds and steps go on: of them alone whether they have 64 bits."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if value.__class__ is int and name in {"seed", "step"}:
        return 0 <= value < 2**64
    return value.__class__, value


def masked(x: Tensor, allowed: Tensor | None) -> Tensor:
    """[N, V] fp32 logits as the order sees them: NaN and forbidden tokens at -inf."""
    x = x.to(torch.float32)
    x = torch.where(x.isnan(), -torch.inf, x)
    if allowed is None:
        return x
    ids = torch.arange(x.shape[1], device=x.device)
    return torch.where((allowed[:, ids >> 5] >> (ids & 31)) & 1 != 0, x, -torch.inf)
