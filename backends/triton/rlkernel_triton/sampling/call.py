"""sample@1 in Triton: two launches, no host synchronisation, no shape that depends on data.

`stream.tiles` reads the logits once; `finish.finish` merges the tiles, finds what the filters keep and draws. Bias,
banned ids and penalties are applied before, by the core's torch formulas into one fp32 copy of the logits; the bitmask
is read by the kernels. Ranked results (kept ids, top n, rank) sort the row and cost what a sort costs.

Legend: N rows · V vocabulary · S tiles a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.spec.sample import check
from rlkernel_core.spec.sampling import FILTER_ORDERS, LogitBias, Penalties, SampleResult, Status, TokenLists
from rlkernel_triton.launch import FUSED, on_device_of
from rlkernel_triton.sampling.extras import kept_ids, rank_of, top_of
from rlkernel_triton.sampling.finish import finish
from rlkernel_triton.sampling.stream import tiles


@dataclass(frozen=True)
class Shape:
    """How the work is cut. TILE, GROUP, K, C and BLOCK decide bits and never depend on the batch."""

    TILE: int = 1024  # tokens of a tile
    GROUP: int = 128  # tokens whose maximum is kept
    K: int = 64  # groups that are read again, and the largest top-k of the quick way
    C: int = 256  # candidates that are sorted
    BLOCK: int = 4096  # tokens a step of the exact search
    stream_warps: int = 4
    finish_warps: int = 8

    def tiles_a_program(self, N: int) -> int:
        """One tile each until the rows alone fill a large GPU; then fewer, longer programs."""
        return 1 if N < 64 else 4


SHAPE: Final = Shape()


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
    check(**locals())
    N, V = logits.shape[0], vocab_size or logits.shape[1]
    given = logits[:, :V]
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "step": step}
    x, spoiled = given, None
    if not penalties is bias is banned is None:
        wide = given.to(torch.float32)
        requests = decode(N, x.device, torch.float32, **law, penalties=penalties, slot=slot)
        edited = edit(wide, 0, requests, bias=bias, allowed=allowed, banned=banned)
        x, allowed = edited.x, None
        spoiled = (edited.nan * 1 + (requests.bad | edited.bad) * 2).to(torch.int32)
    ranked_raw = (top_n > 0 or rank) and top_n_from == "raw"
    out, laws = draw(
        x,
        given if raw_logprob or ranked_raw else None,
        Law(**law, filter_order=filter_order, tie=tie, slot=slot, stream=stream),
        allowed=allowed,
        spoiled=spoiled,
        entropy=entropy,
        invalid_token=invalid_token,
    )
    padding = torch.zeros_like(out.status, dtype=torch.bool) if slot is None else slot < 0
    extra: dict[str, Tensor] = {}
    if kept_capacity or top_n or rank:
        x = masked(x, allowed)
        none = (out.kept_count == 0) | padding
    if kept_capacity:
        extra["kept_ids"] = kept_ids(x, out.kept_count, none, kept_capacity)
        over = (out.kept_count > kept_capacity) & ~none
        extra["status"] = out.status + over.to(torch.int32) * Status.KEPT_OVERFLOW.value
    if rank:
        extra["rank"] = torch.where(none, -1, rank_of(masked(given, None) if ranked_raw else x, out.token))
    if top_n:
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


@dataclass(frozen=True)
class Law:
    """The parameters of a draw, as the operator takes them."""

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    seed: int | Tensor
    step: int | Tensor
    filter_order: str
    tie: str
    slot: Tensor | None
    stream: int

    def arguments(self, unused: Tensor) -> tuple[dict[str, Any], dict[str, int]]:
        """(kernel arguments, the `EACH` of every parameter)."""
        names = {"temperature": "T", "top_k": "K", "top_p": "P", "min_p": "M", "seed": "SEED", "step": "STEP"}
        numbers = {
            "temperature": "temperature",
            "top_k": "k",
            "top_p": "p",
            "min_p": "m",
            "seed": "seed",
            "step": "step",
        }
        given: dict[str, Any] = {}
        each: dict[str, int] = {}
        slots = 2**31
        for name, short in names.items():
            value = getattr(self, name)
            number: float = 0 if name in {"top_k", "seed", "step"} else 0.0
            tensor = unused
            if isinstance(value, Tensor):
                tensor = value.reshape(-1).contiguous()
                each[f"{short}_EACH"] = int(tensor.shape[0] != 1)
                slots = slots if tensor.shape[0] == 1 else min(slots, tensor.shape[0])
            elif value is not None:
                number = as_int64(value) if name in {"seed", "step"} else value
                number = max(-1, min(value, 2**31 - 1)) if name == "top_k" else number
                each[f"{short}_EACH"] = -1
            else:
                each[f"{short}_EACH"] = -2
            given[name], given[f"{numbers[name]}_number"] = tensor, number
        given["slot"] = unused if self.slot is None else self.slot.contiguous()
        given["last_slot"], given["noise_stream"] = slots - 1, self.stream
        return given, each


def padded(V: int, shape: Shape) -> dict[str, int]:
    """Sizes of the finish for a vocabulary, powers of two."""
    S = triton.next_power_of_2(triton.cdiv(V, shape.TILE))
    GP = max(S * shape.TILE // shape.GROUP, shape.K)
    return {"SP": S, "GP": GP, "K": shape.K, "C": shape.C, "BLOCK": shape.BLOCK}


def as_int64(number: int) -> int:
    """The bits of an unsigned 64-bit number as a signed one."""
    return number - 2**64 if number >= 2**63 else number


def draw(
    x: Tensor,  # [N, V]
    raw: Tensor | None,  # [N, V]
    law: Law,
    *,
    allowed: Tensor | None = None,
    spoiled: Tensor | None = None,
    entropy: bool = False,
    invalid_token: int = 0,
    shape: Shape = SHAPE,
) -> tuple[SampleResult, Tensor]:
    """The draw, and [N, 5] of its laws: best logit, T, log of the kept weights; best raw logit, log of its weights."""
    N, V = x.shape
    S = triton.cdiv(V, shape.TILE)
    G = shape.TILE // shape.GROUP

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device)

    token, kept, status = new(N, dtype=torch.int64), new(N, dtype=torch.int32), new(N, dtype=torch.int32)
    out = SampleResult(
        token=token,
        logprob=new(N),
        log_kept_mass=new(N),
        kept_count=kept,
        status=status,
        threshold=new(N),
        threshold_id=new(N, dtype=torch.int64),
        raw_logprob=None if raw is None else new(N),
        entropy=new(N) if entropy else None,
    )
    laws = new(N, 5)
    if N == 0:
        return out, laws
    given, each = law.arguments(token)
    filters = any(each[f"{name}_EACH"] > -2 for name in "KPM")
    best, total, best_id, count = new(N, S), new(N, S), new(N, S, dtype=torch.int32), new(N, S, dtype=torch.int32)
    partial = {"best": best, "best_id": best_id, "count": count, "total": total}
    partial |= {"moment": new(N, S) if entropy else total, "group_best": new(N, S * G) if filters else total}
    partial |= {"winners": new(N, S, 2, dtype=torch.int32)}
    view = {"x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "V": V}
    view |= {"allowed": token if allowed is None else allowed.contiguous()}
    view |= {"allowed_stride": 0 if allowed is None else allowed.shape[1]}
    flags: dict[str, Any] = {"HAS_ALLOWED": allowed is not None, "HAS_SLOT": law.slot is not None}
    flags |= {"TILE": shape.TILE, "GROUP": shape.GROUP, "ENTROPY": entropy}
    per = shape.tiles_a_program(N)
    grid = (N, triton.cdiv(S, per))
    with on_device_of(x):
        tiles[grid](
            **view, **given, **partial, S=S, **each, **flags, RAW=False, PER=per, num_warps=shape.stream_warps, **FUSED
        )
        of_raw = {"raw": token, "raw_row_stride": 0, "raw_column_stride": 0, "raw_best": best, "raw_total": total}
        if raw is not None:
            of_raw |= {"raw": raw, "raw_row_stride": raw.stride(0), "raw_column_stride": raw.stride(1)}
            of_raw |= {"raw_best": new(N, S), "raw_total": new(N, S)}
            as_given = view | {"x": raw, "row_stride": raw.stride(0), "column_stride": raw.stride(1)}
            sums = partial | {"best": of_raw["raw_best"], "total": of_raw["raw_total"]}
            plain = flags | {"HAS_ALLOWED": False, "HAS_SLOT": False, "ENTROPY": False}
            tiles[grid](
                **as_given,
                **given,
                **sums,
                S=S,
                **each,
                **plain,
                RAW=True,
                PER=per,
                num_warps=shape.stream_warps,
                **FUSED,
            )
        finish[(N,)](
            **view,
            **given,
            **partial,
            S=S,
            scratch=new(N, 2 * shape.C, dtype=torch.int64) if filters else token,
            spoiled=status if spoiled is None else spoiled,
            **of_raw,
            invalid_token=invalid_token,
            token=token,
            logprob=out.logprob,
            log_kept_mass=out.log_kept_mass,
            kept_count=kept,
            status=status,
            threshold=out.threshold,
            threshold_id=out.threshold_id,
            raw_logprob=out.logprob if raw is None else out.raw_logprob,
            entropy=out.logprob if out.entropy is None else out.entropy,
            laws=laws,
            **each,
            **flags,
            HAS_SPOILED=spoiled is not None,
            ORDER=FILTER_ORDERS.index(law.filter_order),
            KEEP_ALL=law.tie == "keep_all",
            RAW=raw is not None,
            **padded(V, shape),
            num_warps=shape.finish_warps,
            **FUSED,
        )
    return out, laws
