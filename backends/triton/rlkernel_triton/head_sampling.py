"""lm_head_sample@1 in Triton: slabs of the logits, and a draw that keeps a few numbers of each.

Without a filter a slab of columns is multiplied while the rows draw from the one before it, which still lies in the
cache; two slabs are all that there is of the logits, and they take no more memory where rows are many. Where edits are
given as lists or penalties, a slab is edited by the core's formulas first. With a filter, or where whole rows are asked
for, the logits are stored and go through sample.

Few rows and many rows have products of two shapes where these were seen to give the same bits (sm90), of one shape
elsewhere, and every sum is over 64 tokens that no cut moves: a row's bits depend on the row alone.

Legend: N rows · D hidden · V vocabulary · S groups of V · P blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_triton import head_draw_kernels as kernels
from rlkernel_triton.head_calls import TYPES, tile_of
from rlkernel_triton.head_product_kernels import described_logits, head_logits
from rlkernel_triton.head_tiles import Tile
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.sampling.call import sample
from rlkernel_triton.sampling.plan import Law, each_of, on_nvidia

TILE: Final = 128  # tokens of which an edited slab is a multiple
FEW: Final = 64  # rows for which a product is memory-bound
ROOM: Final = 1 << 23  # logits of an edited slab: 32 MiB, which stay in the cache of a large GPU
WARPS: Final = 4
COPIED: Final = 32  # rows from which on the copy engine brings operands: it took a fifth longer for one row


def lm_head_sample(call: LmHeadSampleCall) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.lm_head_sample.LmHeadSampleCall is the contract."""
    hidden, penalties, allowed, slot = call.hidden, call.penalties, call.allowed, call.slot
    temperature, seed, step, invalid_token = call.temperature, call.seed, call.step, call.invalid_token
    N, V = hidden.shape[0], call.vocab_size or call.weight.shape[0]
    head = _Head(hidden, call.weight[:V], None if call.bias is None else call.bias[:V], call.logit_scale, call.softcap)
    edits = {"bias": call.logit_bias, "allowed": allowed, "banned": call.banned}
    filtered = not (call.top_k is call.top_p is call.min_p is None)
    if filtered or call.top_n or call.rank or call.entropy or call.kept_capacity:
        return sample(SampleCall.of(call, logits=head.logits(0, V), bias=call.logit_bias, vocab_size=None))
    law = Law(temperature, None, None, None, seed, step, call.filter_order, call.tie, slot, call.stream)
    draw = _Draw(law, N, V, hidden.device, raw=call.raw_logprob)
    if N == 0:
        return draw.result(None, invalid_token)
    if penalties is call.logit_bias is call.banned is None:
        draw.over(head, None if allowed is None else allowed.contiguous())
        return draw.result(None, invalid_token)
    asked: dict[str, Any] = {"temperature": temperature, "seed": seed, "step": step, "slot": slot}
    requests = decode(N, hidden.device, torch.float32, **asked, penalties=penalties, top_k=None, top_p=None, min_p=None)
    spoiled = requests.bad.to(torch.int32) * 2
    cut = list(slabs(N, V))
    draw.begin([width for _, width in cut])
    for i, (first, width) in enumerate(cut):
        raw = head.logits(first, width)
        edited = edit(raw, first, requests, **edits)  # type: ignore[arg-type]  the edits by name
        spoiled |= edited.nan * 1 + edited.bad * 2
        draw.take(i, first, edited.x, raw)
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
        kind = "few" if hidden.shape[0] <= FEW else "product"
        described = (
            hidden.shape[0] >= COPIED
            and describable(self.hidden)
            and describable(weight)
            and hidden.dtype == weight.dtype
        )
        self.tile = tile_of(hidden, weight, f"described {kind}" if described else kind)
        self.capped = self.tile if softcap is None else tile_of(hidden, weight, "rich")
        self.operands: tuple[Any, Any] | None = None
        if described:
            from triton.tools.tensor_descriptor import TensorDescriptor

            tile = self.tile
            self.operands = (
                TensorDescriptor.from_tensor(self.hidden, [tile.BM, tile.BK]),
                TensorDescriptor.from_tensor(weight, [tile.BN, tile.BK]),
            )
        same = hidden.dtype == weight.dtype and not INTERPRETED  # the interpreter's 16-bit products are wrong
        self.operand = TYPES[hidden.dtype if same else torch.float32]

    def logits(self, first: int, width: int, out: Tensor | None = None, *, cap: bool = True) -> Tensor:
        """[N, width] fp32, in `out` if it is given; without the softcap unless `cap`."""
        n, D = self.hidden.shape
        if out is None:
            out = torch.empty(n, width, dtype=torch.float32, device=self.hidden.device)
        if n == 0:
            return out
        has_cap = cap and self.softcap is not None
        tile = self.capped if has_cap else self.tile
        grid = (triton.cdiv(n, tile.BM) * triton.cdiv(width, tile.BN),)
        with on_device_of(self.hidden):
            if self.operands is not None and not has_cap:
                described_logits[grid](
                    *self.operands, self.bias, out, n, D, first, width, self.scale, HAS_BIAS=self.bias is not None,
                    **tile._asdict(), **FUSED,
                )  # fmt: skip
                return out
            weight = self.weight[first : first + width]
            bias = None if self.bias is None else self.bias[first:]
            head_logits[grid](
                self.hidden, weight, bias, out, n, D, width, self.hidden.stride(0), *weight.stride(), self.scale,
                self.softcap or 0.0, HAS_BIAS=bias is not None, HAS_CAP=has_cap, OPERAND=self.operand,
                **tile._asdict(), **FUSED,
            )  # fmt: skip
        return out


def describable(x: Tensor) -> bool:
    """Whether Hopper's copy engine may read x, [N, D] of 16 bits with rows at multiples of 16 bytes."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) >= x.shape[1]
    if not (x.is_cuda and aligned and x.element_size() == 2 and torch.version.hip is None):
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


class _Draw:
    """What rows keep of their groups and blocks, and the draw."""

    def __init__(self, law: Law, N: int, V: int, device: torch.device, *, raw: bool) -> None:
        T, _, _, _, seed, step, self.slot = law.arguments()
        self.T, self.law, self.stream, self.device = T, (T, seed, step), law.stream, device
        self.N, self.V, self.S, self.raw = N, V, triton.cdiv(V, kernels.GROUP.value), raw
        counts = [x.shape[0] for x in self.law if isinstance(x, Tensor) and x.shape[0] != 1]
        self.last_slot = min(counts, default=2**31) - 1
        self.each = dict(zip(("T_EACH", "SEED_EACH", "STEP_EACH"), map(each_of, self.law), strict=True))

    def begin(self, widths: list[int]) -> None:
        """Make room for what is kept of slabs of these widths."""
        counts = [triton.cdiv(width, kernels.BLOCK.value) for width in widths]
        self.piece = [0, *accumulate(counts)]
        self.groups = torch.empty(2 if self.raw else 1, self.N, self.S, 4, dtype=torch.float32, device=self.device)
        self.blocks = torch.empty(2, self.N, self.piece[-1], dtype=torch.int32, device=self.device)

    def over(self, head: _Head, allowed: Tensor | None) -> None:
        """The whole vocabulary: one slab is multiplied in a stream of its own while the one before is drawn from.

        A slab is as many tiles as run at a time, or what takes their memory where rows are few: two of them take the
        same however many rows there are.
        """
        tile = head.tile
        columns = max(_at_a_time(self.device, tile, self.N) // triton.cdiv(self.N, tile.BM), 1) * tile.BN
        block, group = kernels.BLOCK.value, kernels.GROUP.value
        if columns >= block:
            columns -= columns % block  # no piece is begun for a rest
        else:  # so many rows that a slab would be less than what a draw looks at together
            columns = max(columns, min(block, self.V // 8) // group * group)
        if self.N <= FEW and 2 * columns >= self.V:  # two slabs would hold the whole head
            columns = self.V
        cut = [(first, min(columns, self.V - first)) for first in range(0, self.V, columns)]
        self.begin([width for _, width in cut])
        lane = _Lane(self.device)
        rooms = cut[: 1 if lane.side is None else 2]
        room = [torch.empty(self.N * cut[0][1], dtype=torch.float32, device=self.device) for _ in rooms]
        for i, (first, width) in enumerate(cut):
            slab = room[i % len(room)][: self.N * width].view(self.N, width)
            with lane.beside(i):
                head.logits(first, width, slab, cap=False)
            lane.join(i)
            self.take(i, first, slab, None, allowed=allowed, softcap=head.softcap)
            lane.leave(i)

    def take(
        self,
        i: int,
        first: int,
        x: Tensor,  # [N, width]
        raw: Tensor | None,  # [N, width], what it was before edits
        *,
        allowed: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Slab number i."""
        width = x.shape[1]
        grid = (self.N * (self.piece[i + 1] - self.piece[i]),)
        with on_device_of(x):
            kernels.draw_slab[grid](
                x, raw, allowed, self.slot, *self.law, self.groups, self.groups[-1], self.blocks, first, width,
                self.piece[i], self.N, self.S, self.piece[-1], softcap or 0.0,
                0 if allowed is None else allowed.shape[1], self.last_slot, self.stream, HAS_CAP=softcap is not None,
                HAS_ALLOWED=allowed is not None, EDITED=raw is not None, HAS_SLOT=self.slot is not None, RAW=self.raw,
                **self.each, WHOLE=width % 16 == 0, QUICK=on_nvidia(x), num_warps=WARPS, **FUSED,
            )  # fmt: skip

    def result(self, spoiled: Tensor | None, invalid_token: int) -> SampleResult:
        """The draw, once the vocabulary has passed. spoiled: [N] int32, 1 NaN, 2 without meaning."""
        N, device = self.N, self.device
        longs = torch.empty(2, N, dtype=torch.int64, device=device)
        ints = torch.empty(2, N, dtype=torch.int32, device=device)
        floats = torch.empty(4, N, dtype=torch.float32, device=device)
        if N:
            P = self.piece[-1]
            with on_device_of(longs):
                kernels.draw_row[(N,)](
                    self.groups, self.groups[-1], self.blocks, spoiled, self.slot, *self.law, longs, ints,
                    floats, N, self.S, P, invalid_token, self.last_slot, self.stream, HAS_SPOILED=spoiled is not None,
                    HAS_SLOT=self.slot is not None, RAW=self.raw, **self.each,
                    SP=triton.next_power_of_2(self.S), PP=triton.next_power_of_2(P), num_warps=2 * WARPS, **FUSED,
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


class _Lane:
    """A stream beside the caller's, in which products run ahead of draws by one slab; nothing on a CPU.

    Of a higher priority: what draws takes the room that a product leaves. One for each stream that calls, since a
    capture of one caller takes in all that others put in its streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.side: torch.cuda.Stream | None = None
        self.drawn: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.caller = torch.cuda.current_stream(device)
            key = (self.caller.device_index, self.caller.cuda_stream)
            self.side = _SIDES.get(key) or _SIDES.setdefault(key, torch.cuda.Stream(device, priority=-1))
            self.side.wait_stream(self.caller)

    def beside(self, i: int) -> AbstractContextManager[object]:
        """The scope of product i, which overwrites the slab of product i - 2."""
        if self.side is None:
            return nullcontext()
        if i > 1:
            self.side.wait_event(self.drawn[i - 2])
        return torch.cuda.stream(self.side)

    def join(self, i: int) -> None:  # noqa: ARG002
        """What the caller's stream does next comes after the product."""
        if self.side is not None:
            self.caller.wait_stream(self.side)

    def leave(self, i: int) -> None:  # noqa: ARG002
        """Draw i is under way."""
        if self.side is not None:
            self.drawn.append(self.caller.record_event())


_SIDES: Final[dict[tuple[int, int], torch.cuda.Stream]] = {}


def _at_a_time(device: torch.device, tile: Tile, N: int) -> int:
    """Tiles of a slab: programs of a product that run at a time, more of them the fewer rows there are.

    One in the interpreter.
    """
    if device.type != "cuda":
        return 1
    a_processor = 1 if tile.num_warps > 4 else 2
    return torch.cuda.get_device_properties(device).multi_processor_count * a_processor * max(FEW // N, 1)
