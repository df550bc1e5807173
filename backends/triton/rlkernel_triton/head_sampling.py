"""lm_head_sample@1 in Triton: the logits of the head slab by slab, and a draw that keeps a few numbers a tile.

Without a filter no [N, V] exists: a slab of columns is written, edited if the call has edits, and read once more from
the cache. With a filter, or where whole rows are asked for, the logits are stored and go through sample. Products are
those of linear_logprob's kernels, in one tile shape whatever N, so a row's bits depend on the row alone.

Legend: N rows · D hidden · V vocabulary · S tiles of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.requests import Requests, decode, edit
from rlkernel_core.spec.lm_head_sample import check
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists
from rlkernel_triton import head_draw_kernels as kernels
from rlkernel_triton.head_calls import TYPES, tile_of
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.sampling.call import sample

TILE: Final = 1024  # tokens of a tile
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
    V = vocab_size or weight.shape[0]
    head = _Head(hidden, weight[:V], None if bias is None else bias[:V], logit_scale, softcap)
    law: dict[str, Any] = {"temperature": temperature, "seed": seed, "step": step, "penalties": penalties}
    law |= {"slot": slot}
    edits = {"bias": logit_bias, "allowed": allowed, "banned": banned}
    if not (top_k is top_p is min_p is None) or top_n or rank or entropy or kept_capacity:
        return sample(
            head.logits(0, V),
            **law,
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
    N, device = hidden.shape[0], hidden.device
    requests = decode(N, device, torch.float32, **law, top_k=None, top_p=None, min_p=None)
    running = _Running(requests, N, V, device)
    for first, width in slabs(N, V):
        raw = head.logits(first, width)
        if penalties is logit_bias is banned is None:
            running.take(raw, None, allowed, first, stream)
        else:
            edited = edit(raw, first, requests, **edits)  # type: ignore[arg-type]  the edits by name
            running.flags |= edited.nan * 1 + edited.bad * 2
            running.take(edited.x, raw, None, first, stream)
            del edited
        del raw  # before the next slab is made
    result = running.draw(invalid_token)
    return result if raw_logprob else SampleResult(**{**vars(result), "raw_logprob": None})


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
        self.tile = tile_of(hidden, weight, "sweep" if softcap is None else "rich")
        same = hidden.dtype == weight.dtype and not INTERPRETED  # the interpreter's 16-bit products are wrong
        self.operand = TYPES[hidden.dtype if same else torch.float32]

    def logits(self, first: int, width: int) -> Tensor:
        """[N, width] fp32."""
        n, D = self.hidden.shape
        out = torch.empty(n, width, dtype=torch.float32, device=self.hidden.device)
        if n == 0:
            return out
        weight = self.weight[first : first + width]
        bias = None if self.bias is None else self.bias[first:]
        grid = (triton.cdiv(n, self.tile.BM) * triton.cdiv(width, self.tile.BN),)
        with on_device_of(self.hidden):
            kernels.head_logits[grid](
                self.hidden, weight, bias, out, n, D, width, self.hidden.stride(0), *weight.stride(), self.scale,
                self.softcap or 0.0, HAS_BIAS=bias is not None, HAS_CAP=self.softcap is not None,
                OPERAND=self.operand, INTERPRETED=INTERPRETED, **self.tile._asdict(), **FUSED,
            )  # fmt: skip
        return out


class _Running:
    """What rows keep of the tiles that have passed."""

    def __init__(self, requests: Requests, N: int, V: int, device: torch.device) -> None:
        self.requests, self.N, self.V, self.S = requests, N, V, triton.cdiv(V, TILE)
        self.parts = torch.empty(8, N, self.S, dtype=torch.float32, device=device)
        self.places = torch.empty(4, N, self.S, dtype=torch.int32, device=device)
        padding = requests.bad.new_zeros(N) if requests.padding is None else requests.padding
        self.flags = (requests.bad * 2 + padding * 4).to(torch.int32)
        self.T = requests.temperature.contiguous()
        self.seed, self.step = requests.seed.contiguous(), requests.step.contiguous()

    def take(self, x: Tensor, raw: Tensor | None, allowed: Tensor | None, first: int, stream: int) -> None:
        """One more slab."""
        if self.N == 0:
            return
        width = x.shape[1]
        with on_device_of(x):
            kernels.draw_tile[(self.N, triton.cdiv(width, TILE))](
                x, raw, None if allowed is None else allowed.contiguous(), self.T, self.seed, self.step, self.parts,
                self.places, first, width, self.N, self.V, self.S, 0 if allowed is None else allowed.shape[1], stream,
                HAS_ALLOWED=allowed is not None, EDITED=raw is not None, TILE=TILE, num_warps=WARPS, **FUSED,
            )  # fmt: skip

    def draw(self, invalid_token: int) -> SampleResult:
        """The draw, once the vocabulary has passed."""
        N, device = self.N, self.T.device
        longs = torch.empty(2, N, dtype=torch.int64, device=device)
        ints = torch.empty(2, N, dtype=torch.int32, device=device)
        floats = torch.empty(4, N, dtype=torch.float32, device=device)
        if N:
            with on_device_of(self.T):
                kernels.draw_row[(N,)](
                    self.parts, self.places, self.T, self.requests.greedy.to(torch.int32), self.flags, longs, ints,
                    floats, N, self.S, invalid_token, SP=triton.next_power_of_2(self.S), num_warps=WARPS, **FUSED,
                )  # fmt: skip
        return SampleResult(
            token=longs[0],
            logprob=floats[0],
            log_kept_mass=floats[1],
            kept_count=ints[0],
            status=ints[1],
            threshold=floats[2],
            threshold_id=longs[1],
            raw_logprob=floats[3],
        )
