"""lm_head_sample@1 in Triton: logits of the head tile by tile, and a draw that keeps a few numbers of each.

Without a filter no [N, V] exists: the programs of one launch hold a tile of logits each at a time. Where edits are
given as lists or penalties, a slab of columns is written, edited by the core's formulas and read once more. With a
filter, or where whole rows are asked for, the logits are stored and go through sample.

Few rows and many rows have products of two shapes where these were seen to give the same bits (sm90), of one shape
elsewhere, and every sum is over a tile of 128 tokens: a row's bits depend on the row alone.

Legend: N rows · D hidden · V vocabulary · S tiles of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.spec.lm_head_sample import check
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists
from rlkernel_triton import head_draw_kernels as kernels
from rlkernel_triton.head_calls import TYPES, tile_of
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.sampling.call import sample
from rlkernel_triton.sampling.plan import Law, each_of

TILE: Final = 128  # tokens of a tile
FEW: Final = 64  # rows for which a product is memory-bound
ROOM: Final = 1 << 23  # logits of a slab: 32 MiB, which stay in the cache of a large GPU
WARPS: Final = 4


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
    N, V = hidden.shape[0], vocab_size or weight.shape[0]
    head = _Head(hidden, weight[:V], None if bias is None else bias[:V], logit_scale, softcap)
    edits = {"bias": logit_bias, "allowed": allowed, "banned": banned}
    if not (top_k is top_p is min_p is None) or top_n or rank or entropy or kept_capacity:
        return sample(
            head.logits(0, V),
            temperature=temperature,
            seed=seed,
            step=step,
            penalties=penalties,
            slot=slot,
            **edits,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            filter_order=filter_order,
            tie=tie,
            raw_logprob=raw_logprob,
            top_n=top_n,
            top_n_from=top_n_from,
            rank=rank,
            entropy=entropy,
            kept_capacity=kept_capacity,
            invalid_token=invalid_token,
            stream=stream,
        )
    law = Law(temperature, None, None, None, seed, step, filter_order, tie, slot, stream)
    draw = _Draw(law, N, V, hidden.device, raw=raw_logprob)
    if penalties is logit_bias is banned is None:
        draw.over(head, allowed)
        return draw.result(None, invalid_token)
    asked: dict[str, Any] = {"temperature": temperature, "seed": seed, "step": step, "slot": slot}
    requests = decode(N, hidden.device, torch.float32, **asked, penalties=penalties, top_k=None, top_p=None, min_p=None)
    spoiled = requests.bad.to(torch.int32) * 2
    for first, width in slabs(N, V):
        raw = head.logits(first, width)
        edited = edit(raw, first, requests, **edits)  # type: ignore[arg-type]  the edits by name
        spoiled |= edited.nan * 1 + edited.bad * 2
        draw.take(edited.x, raw, first)
        del edited, raw  # before the next slab is made
    return draw.result(spoiled, invalid_token)


def slabs(N: int, V: int) -> Iterator[tuple[int, int]]:
    """(first, width) of the slabs: whole tiles, as many as there is room for, less than a quarter of the logits."""
    most = max(min(ROOM // max(N, 1), (V - 1) // 4) // TILE, 1)
    tiles = triton.cdiv(V, TILE)
    width = triton.cdiv(tiles, triton.cdiv(tiles, most)) * TILE  # of one size: a small last slab would cost a wave
    return ((first, min(width, V - first)) for first in range(0, V, width))


class _Head:
    """The operands of the logits."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
    ) -> None:
        self.hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        self.weight, self.bias = weight, None if bias is None else bias.contiguous()
        self.scale, self.softcap = scale, softcap
        self.tile = tile_of(hidden, weight, "few" if hidden.shape[0] <= FEW else "product")
        self.stored = self.tile if softcap is None else tile_of(hidden, weight, "rich")
        same = hidden.dtype == weight.dtype and not INTERPRETED  # the interpreter's 16-bit products are wrong
        operand = TYPES[hidden.dtype if same else torch.float32]
        self.constants = {"HAS_BIAS": bias is not None, "HAS_CAP": softcap is not None, "OPERAND": operand}

    def logits(self, first: int, width: int) -> Tensor:
        """[N, width] fp32."""
        n, D = self.hidden.shape
        out = torch.empty(n, width, dtype=torch.float32, device=self.hidden.device)
        if n == 0:
            return out
        weight = self.weight[first : first + width]
        bias = None if self.bias is None else self.bias[first:]
        grid = (triton.cdiv(n, self.stored.BM) * triton.cdiv(width, self.stored.BN),)
        with on_device_of(self.hidden):
            kernels.head_logits[grid](
                self.hidden, weight, bias, out, n, D, width, self.hidden.stride(0), *weight.stride(), self.scale,
                self.softcap or 0.0, **self.constants, **self.stored._asdict(), **FUSED,
            )  # fmt: skip
        return out


class _Draw:
    """What rows keep of their tiles, and the draw."""

    def __init__(self, law: Law, N: int, V: int, device: torch.device, *, raw: bool) -> None:
        T, _, _, _, seed, step, self.slot = law.arguments()
        self.T, self.law, self.stream, self.device = T, (T, seed, step), law.stream, device
        self.N, self.V, self.S, self.raw = N, V, triton.cdiv(V, TILE), raw
        counts = [x.shape[0] for x in self.law if isinstance(x, Tensor) and x.shape[0] != 1]
        self.last_slot = min(counts, default=2**31) - 1
        each = zip(("T_EACH", "SEED_EACH", "STEP_EACH"), map(each_of, self.law), strict=True)
        self.constants = {**dict(each), "HAS_SLOT": self.slot is not None, "RAW": raw, "TILE": TILE}
        self.parts = torch.empty(8 if raw else 4, N, self.S, dtype=torch.float32, device=device)
        self.places = torch.empty(4, N, self.S, dtype=torch.int32, device=device)

    def over(self, head: _Head, allowed: Tensor | None) -> None:
        """The whole vocabulary, by as many programs as run at a time; together they hold less than a third of it."""
        if self.N == 0:
            return
        tile = head.tile
        span = max(tile.BN, TILE)
        work = triton.cdiv(self.N, tile.BM) * triton.cdiv(self.V, span)
        programs = max(min(_at_a_time(self.device) * (2 if tile.BM * tile.BN <= 1 << 14 else 1), work // 3), 1)
        room = torch.empty(programs, min(self.N, tile.BM), span, dtype=torch.float32, device=self.device)
        words = None if allowed is None else allowed.contiguous()
        wide = 0 if words is None else words.shape[1]
        with on_device_of(head.hidden):
            kernels.head_draw[(programs,)](
                head.hidden, head.weight, head.bias, words, self.slot, *self.law, room, self.parts, self.places,
                self.N, head.hidden.shape[1], self.V, self.S, head.hidden.stride(0), *head.weight.stride(), head.scale,
                head.softcap or 0.0, wide, self.last_slot, self.stream, HAS_ALLOWED=words is not None, SPAN=span,
                R=4 * tile.num_warps, **self.constants, **head.constants, **tile._asdict(), **FUSED,
            )  # fmt: skip

    def take(self, x: Tensor, raw: Tensor, first: int) -> None:
        """One edited slab, and what it was."""
        if self.N == 0:
            return
        width, some = x.shape[1], 4 * WARPS
        with on_device_of(x):
            kernels.draw_slab[(triton.cdiv(self.N, some), triton.cdiv(width, TILE))](
                x, raw, self.slot, *self.law, self.parts, self.places, first, width, self.N, self.V, self.S,
                self.last_slot, self.stream, R=some, num_warps=WARPS, **self.constants, **FUSED,
            )  # fmt: skip

    def result(self, spoiled: Tensor | None, invalid_token: int) -> SampleResult:
        """The draw, once the vocabulary has passed. spoiled: [N] int32, 1 NaN, 2 without meaning."""
        N, device = self.N, self.device
        longs = torch.empty(2, N, dtype=torch.int64, device=device)
        ints = torch.empty(2, N, dtype=torch.int32, device=device)
        floats = torch.empty(4, N, dtype=torch.float32, device=device)
        if N:
            with on_device_of(longs):
                kernels.draw_row[(N,)](
                    self.parts, self.places, spoiled, self.slot, self.T, longs, ints, floats, N, self.S, invalid_token,
                    self.last_slot, HAS_SPOILED=spoiled is not None, HAS_SLOT=self.slot is not None, RAW=self.raw,
                    T_EACH=self.constants["T_EACH"], SP=triton.next_power_of_2(self.S), num_warps=WARPS, **FUSED,
                )  # fmt: skip
        return SampleResult(
            token=longs[0],
            logprob=floats[0],
            log_kept_mass=floats[1],
            kept_count=ints[0],
            status=ints[1],
            threshold=floats[2],
            threshold_id=longs[1],
            raw_logprob=floats[3] if self.raw else None,
        )


def _at_a_time(device: torch.device) -> int:
    """Programs that run at a time, if a multiprocessor has one; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
