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
from rlkernel_triton.sampling.searched import searched
from rlkernel_triton.sampling.stream import tiles


@dataclass(frozen=True)
class Shape:
    """How the work is cut. TILE, GROUP, K, C, FEW and BLOCK decide bits and never depend on the batch."""

    TILE: int = 1024  # tokens of a tile
    GROUP: int = 64  # tokens whose maximum is kept
    K: int = 64  # groups that are read again, and the largest top-k of the quick way
    C: int = 128  # candidates that are told apart
    FEW: int = 1024  # tokens that the exact search tells apart without the row
    BLOCK: int = 8192  # tokens a step of the exact search
    stream_warps: int = 4  # decides the order of a sum too
    finish_warps: int = 8
    search_warps: int = 16
    per: int = 0  # tiles a program of the stream; 0: by the batch

    def tiles_a_program(self, N: int) -> int:
        """One tile each until the rows alone fill a large GPU; then fewer, longer programs."""
        return self.per or (1 if N < 8 else 4)


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
        with_laws=top_n > 0,
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

    def arguments(self) -> tuple[dict[str, Any], dict[str, int]]:
        """(kernel arguments, the `EACH` of every parameter)."""
        given: dict[str, Any] = {"slot": None if self.slot is None else self.slot.contiguous()}
        each: dict[str, int] = {}
        slots = 2**31
        for name, short in EACH.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = value.reshape(-1).contiguous()
                each[short] = int(value.shape[0] != 1)
                slots = slots if value.shape[0] == 1 else min(slots, value.shape[0])
            elif value is not None:
                each[short] = -1
                if name in {"seed", "step"}:
                    value = as_int64(value)
                value = max(-1, min(value, 2**31 - 1)) if name == "top_k" else value
            else:
                each[short] = -2
            given[name] = value
        given["last_slot"], given["noise_stream"] = slots - 1, self.stream
        return given, each

    def searches(self, K: int) -> bool:
        """Whether the candidates of a row, at least its K best tokens, may not tell what it keeps."""
        if self.top_k is self.top_p is self.min_p is None:
            return False
        few = isinstance(self.top_k, int) and 0 < self.top_k <= K
        by_order = self.filter_order == "topp_topk" and self.min_p is not None
        return not few or by_order or self.tie == "keep_all"


EACH: Final = {
    "temperature": "T_EACH",
    "top_k": "K_EACH",
    "top_p": "P_EACH",
    "min_p": "M_EACH",
    "seed": "SEED_EACH",
    "step": "STEP_EACH",
}


def padded(V: int, shape: Shape) -> dict[str, int]:
    """Sizes of the finish for a vocabulary, powers of two."""
    S = triton.next_power_of_2(triton.cdiv(V, shape.TILE))
    return {"SP": S, "GP": max(S * shape.TILE // shape.GROUP, shape.K), "K": shape.K, "C": shape.C}


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
    with_laws: bool = False,
    shape: Shape = SHAPE,
) -> tuple[SampleResult, Tensor | None]:
    """The draw, and [N, 5] of its laws: best logit, T, log of the kept weights; best raw logit, log of its weights."""
    N, V = x.shape
    S = triton.cdiv(V, shape.TILE)
    filters = not law.top_k is law.top_p is law.min_p is None
    search = law.searches(shape.K)
    longs = torch.empty(2, N, dtype=torch.int64, device=x.device)
    ints = torch.empty(3, N, dtype=torch.int32, device=x.device)
    floats = torch.empty(3 + (2 if entropy else raw is not None), N, dtype=torch.float32, device=x.device)
    laws = torch.empty(N, 5, dtype=torch.float32, device=x.device) if with_laws else None
    out = SampleResult(
        token=longs[0],
        logprob=floats[0],
        log_kept_mass=floats[1],
        kept_count=ints[0],
        status=ints[1],
        threshold=floats[2],
        threshold_id=longs[1],
        raw_logprob=None if raw is None else floats[3],
        entropy=floats[4] if entropy else None,
    )
    if N == 0:
        return out, laws
    given, each = law.arguments()
    numbers = S * (5 + (shape.TILE // shape.GROUP if filters else 0))
    work = torch.empty(2 if raw is not None else 1, N, numbers, dtype=torch.float32, device=x.device)
    counts = work.view(torch.int32)
    view = {"x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "V": V}
    view |= {"allowed": None if allowed is None else allowed.contiguous()}
    view |= {"allowed_stride": 0 if allowed is None else allowed.shape[1], "words": numbers, "S": S}
    flags: dict[str, Any] = {"HAS_ALLOWED": allowed is not None, "HAS_SLOT": law.slot is not None}
    flags |= {"UNIT": x.stride(1) == 1, "ENTROPY": entropy}
    sizes = padded(V, shape)
    per = shape.tiles_a_program(N)
    grid = (N * triton.cdiv(S, per),)
    cut = {"TILE": shape.TILE, "GROUP": shape.GROUP}
    tail = {"N": N, "spoiled": spoiled, "raw": raw, "invalid_token": invalid_token, "longs": longs, "ints": ints}
    tail |= {"floats": floats, "laws": laws, "raw_row_stride": 0, "raw_column_stride": 0, "raw_work": work[-1]}
    tail |= {"HAS_SPOILED": spoiled is not None, "ORDER": FILTER_ORDERS.index(law.filter_order)}
    tail |= {"KEEP_ALL": law.tie == "keep_all", "RAW": raw is not None, "LAWS": with_laws}
    with on_device_of(x):
        tiles[grid](
            **view, **given, work=work, counts=counts, **each, **flags, **cut, RAW=False, PER=per,
            num_warps=shape.stream_warps, **FUSED,
        )  # fmt: skip
        if raw is not None:
            tail |= {"raw_row_stride": raw.stride(0), "raw_column_stride": raw.stride(1)}
            as_given = view | {"x": raw, "row_stride": raw.stride(0), "column_stride": raw.stride(1), "allowed": None}
            plain = {"HAS_ALLOWED": False, "HAS_SLOT": False, "UNIT": raw.stride(1) == 1, "ENTROPY": False}
            tiles[grid](
                **as_given, **given, work=work[1], counts=counts[1], **each, **plain, **cut, RAW=True, PER=per,
                num_warps=shape.stream_warps, **FUSED,
            )  # fmt: skip
        scratch = torch.empty(N, shape.K + 2 * shape.C, dtype=torch.int32, device=x.device) if filters else None
        finish[(N,)](
            **view, **given, work=work, counts=counts, **tail, **each, **flags, **cut, **sizes, per=per,
            scratch=scratch, SEARCH=search, num_warps=shape.finish_warps, **FUSED,
        )  # fmt: skip
        if search:
            few = torch.empty(N, shape.FEW, dtype=torch.float32, device=x.device)
            searched[(N,)](
                **view, **given, work=work, counts=counts, **tail, **each, **flags, SP=sizes["SP"], few=few,
                BLOCK=shape.BLOCK, FEW=shape.FEW, num_warps=shape.search_warps, **FUSED,
            )  # fmt: skip
    return out, laws
