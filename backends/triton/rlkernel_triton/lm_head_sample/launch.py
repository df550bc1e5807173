"""lm_head_sample@1 in Triton: slabs of the logits, and a draw that keeps a few numbers of each.

Without a filter a slab of columns is multiplied while the rows draw from the one before it, which still lies in the
cache; two slabs are all that there is of the logits, and they take no more memory where rows are many. Where edits are
given as lists or penalties, a slab is edited by the core's formulas first. With a filter, or where whole rows are asked
for, the logits are stored and go through sample.

The codes of a quantized head are decoded inside its product: `decoded_logits`.

`prepare_trainer_bits` draws alike from logits in the tiles of linear_logprob, and states its numbers: `trainer_head`.

Few rows and many rows have products of two shapes where these were seen to give the same bits (sm90), of one shape
elsewhere, and every sum is over 64 tokens that no cut moves: a row's bits depend on the row alone.

Legend: N rows · D hidden · V vocabulary · S groups of V · P blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.requests import decode, edit
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_triton.common.device import on_nvidia
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.sampling_arguments import as_int64, each_of, flat
from rlkernel_triton.launchers import Launch, Launcher, launcher_for
from rlkernel_triton.linear_logprob.head_rows import unread
from rlkernel_triton.lm_head_sample import kernels
from rlkernel_triton.lm_head_sample.head import Head, Operands
from rlkernel_triton.lm_head_sample.trainer_head import TrainerHead
from rlkernel_triton.sample.launch import prepare as prepare_sample

TILE: Final = 128  # tokens of which an edited slab is a multiple
ROOM: Final = 1 << 23  # logits of an edited slab: 32 MiB, which stay in the cache of a large GPU
WARPS: Final = 4


def fits(call: LmHeadSampleCall) -> Reason | None:
    """The format of a quantized head is read here."""
    return unread(call.weight)


def lm_head_sample(call: LmHeadSampleCall) -> SampleResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LmHeadSampleCall) -> Callable[[LmHeadSampleCall], SampleResult]:
    """What runs calls of this shape: rlkernel_core.spec.lm_head_sample.LmHeadSampleCall is the contract."""
    head = Head(launcher_for(call.hidden.device), call, _vocabulary(call))
    draw = _drawing(call, head)
    return lambda call: draw(call, head.of(call))


def prepare_trainer_bits(call: LmHeadSampleCall) -> Callable[[LmHeadSampleCall], SampleResult]:
    """The same with `trainer_bits`, for stored heads: a draw states what linear_logprob@1 computes of its token.

    The law of edited logits is none of linear_logprob's; the raw one is.
    """
    edited = not all(x is None for x in (call.penalties, call.logit_bias, call.banned, call.allowed))
    if call.hidden.shape[0] == 0 or (edited and not call.raw_logprob):
        return prepare(call)
    head = TrainerHead(launcher_for(call.hidden.device), call, _vocabulary(call), law=not edited)
    draw = _drawing(call, head)

    def run(call: LmHeadSampleCall) -> SampleResult:
        of = head.of(call)
        return head.stated(of, draw(call, of))

    return run


def _vocabulary(call: LmHeadSampleCall) -> int:
    return call.vocab_size or call.weight.shape[0]


def _drawing(call: LmHeadSampleCall, head: Head) -> Callable[[LmHeadSampleCall, Operands], SampleResult]:
    """What draws from the logits of a head, in calls of this shape."""
    launcher, N, V = launcher_for(call.hidden.device), call.hidden.shape[0], head.V
    filtered = not (call.top_k is call.top_p is call.min_p is None)
    if filtered or call.top_n or call.rank or call.entropy or call.kept_capacity:
        drawing: list[Callable[[SampleCall], SampleResult]] = []  # one, made of the first logits

        def of_logits(call: LmHeadSampleCall, of: Operands) -> SampleResult:
            logits = head.logits(of, 0, V)
            drawn = SampleCall.of(call, logits=logits, bias=call.logit_bias, vocab_size=None)
            if not drawing:
                drawing.append(prepare_sample(drawn))
            return drawing[0](drawn)

        return of_logits
    if all(x is None for x in (call.penalties, call.logit_bias, call.banned)):
        draw = _Draw(launcher, call, V, head.cuts(N), softcap=head.left_to_cap, edited=False)
        allowed_as_it_is = call.allowed is None or call.allowed.is_contiguous()

        def over(call: LmHeadSampleCall, of: Operands) -> SampleResult:
            allowed = call.allowed if allowed_as_it_is else call.allowed.contiguous()  # type: ignore[union-attr]
            return draw.over(head, of, _DrawParams.of(call), allowed)

        return over
    cut = list(slabs(N, V))
    draw = _Draw(launcher, call, V, cut, softcap=None, edited=True)

    def edited(call: LmHeadSampleCall, of: Operands) -> SampleResult:
        params = _DrawParams.of(call)
        if N == 0:
            return draw.result(params, None, None)
        requests = decode(call, N, call.hidden.device, torch.float32, call.slot)
        spoiled = requests.bad.to(torch.int32) * 2
        kept, _ = draw.begin(0)
        for i, (first, width) in enumerate(cut):
            raw = head.logits(of, first, width)
            found = edit(raw, first, requests, bias=call.logit_bias, allowed=call.allowed, banned=call.banned)
            spoiled |= found.nan * 1 + found.bad * 2
            draw.take(params, kept, i, found.x, raw, None)
            del found, raw  # before the next slab is made
        return draw.result(params, kept, spoiled)

    return edited


class _DrawParams(NamedTuple):
    """What a call says of its draw, as kernels take it."""

    temperature: tuple[Tensor, ...]  # none where it is a number
    seed: int | Tensor
    step: int | Tensor
    slot: Tensor | None

    @classmethod
    def of(cls, call: LmHeadSampleCall) -> _DrawParams:
        """Tensors [n] and contiguous, numbers as 64 signed bits."""
        T, seed, step, slot = call.temperature, call.seed, call.step, call.slot
        return cls(
            (flat(T),) if isinstance(T, Tensor) else (),
            flat(seed) if isinstance(seed, Tensor) else as_int64(seed),
            flat(step) if isinstance(step, Tensor) else as_int64(step),
            None if slot is None else flat(slot),
        )


class _SlabStats(NamedTuple):
    """What rows keep of the slabs that have passed."""

    groups: Tensor  # N S 4 fp32
    raw_groups: Tensor  # the same of the raw logits; the groups themselves where it is not wanted
    blocks: Tensor  # 2 N P int32


def slabs(N: int, V: int) -> Iterator[tuple[int, int]]:
    """(first, width) of the slabs: whole tiles, as many as there is room for, less than a quarter of the logits."""
    most = max(min(ROOM // max(N, 1), (V - 1) // 4) // TILE, 1)
    tiles = triton.cdiv(V, TILE)
    width = triton.cdiv(tiles, triton.cdiv(tiles, most)) * TILE  # of one size: a small last slab would cost a wave
    return ((first, min(width, V - first)) for first in range(0, V, width))


class _Draw:
    """What rows keep of the groups and blocks of slabs, and the draw: the launches of one shape.

    Args:
        launcher: what binds the kernels.
        call: a call of the shape.
        V: size of the vocabulary.
        cut: (first, width) of the slabs.
        softcap: what is still to be done to the logits of slabs.
        edited: slabs are edited, and come with what they were before.
    """

    def __init__(
        self, launcher: Launcher, call: LmHeadSampleCall, V: int, cut: list[tuple[int, int]], *,
        softcap: float | None, edited: bool,
    ) -> None:  # fmt: skip
        self.device, self.N, self.cut, self.raw = call.hidden.device, call.hidden.shape[0], cut, call.raw_logprob
        N, S = self.N, triton.cdiv(V, kernels.GROUP.value)
        counts = [triton.cdiv(width, kernels.BLOCK.value) for _, width in cut]
        self._piece = [0, *accumulate(counts)]
        P = self._piece[-1]
        T = call.temperature if isinstance(call.temperature, Tensor) else float(call.temperature)
        given = (T, as_int64(call.seed), as_int64(call.step))
        flats = [flat(x) if isinstance(x, Tensor) else x for x in given]
        entries = [x.shape[0] for x in flats if isinstance(x, Tensor) and x.shape[0] != 1]
        each = dict(zip(("T_EACH", "SEED_EACH", "STEP_EACH"), map(each_of, flats), strict=True))
        self._groups = N * S * 4
        self._sizes = [self._groups, self._groups if self.raw else 0, -(-2 * N * P // 4) * 4]
        allowed = None if edited else call.allowed
        fixed: dict[str, Any] = {
            **({} if isinstance(T, Tensor) else {"temperature": T}), **each, "N": N, "S": S, "P": P,
            "last_slot": min(entries, default=2**31) - 1, "noise_stream": call.stream,
            "HAS_SLOT": call.slot is not None, "RAW": self.raw,
        }  # fmt: skip
        # Passed where there are several slabs.
        one: dict[str, Any] = {"first": 0, "width": V, "first_block": 0} if len(cut) == 1 else {}

        def bound(*, whole: bool) -> Launch:
            return launcher.bind(
                kernels.slab_stats, num_warps=WARPS, **fixed, **one, softcap=softcap or 0.0,
                allowed_stride=0 if allowed is None else allowed.shape[1], HAS_CAP=softcap is not None,
                HAS_ALLOWED=allowed is not None, EDITED=edited, WHOLE=whole, APPROX_LOG2=on_nvidia(call.hidden),
            )  # fmt: skip

        self._take = {whole: bound(whole=whole) for whole in {width % 16 == 0 for _, width in cut}}
        self._row = launcher.bind(
            kernels.sample_row, num_warps=2 * WARPS, **fixed, invalid_token=call.invalid_token, HAS_SPOILED=edited,
            S_PADDED=triton.next_power_of_2(S), P_PADDED=triton.next_power_of_2(P),
        )  # fmt: skip

    def begin(self, more: int) -> tuple[_SlabStats, Tensor]:
        """Room for what is kept, and for so many numbers more."""
        groups, raw_groups, blocks, rest = torch.empty(
            sum(self._sizes) + more, dtype=torch.float32, device=self.device
        ).unsafe_split_with_sizes([*self._sizes, more])  # fmt: skip
        return _SlabStats(groups, raw_groups if self.raw else groups, blocks.view(torch.int32)), rest

    def over(self, head: Head, of: Operands, params: _DrawParams, allowed: Tensor | None) -> SampleResult:
        """The draw from the whole vocabulary.

        One slab is multiplied in a stream of its own while the one before is drawn from.
        """
        if not self.cut:
            return self.result(params, None, None)
        several, size = len(self.cut) > 1, self.N * self.cut[0][1]
        if not several:
            kept, slab = self.begin(size)
            head.logits(of, 0, self.cut[0][1], slab, cap=False)
            self.take(params, kept, 0, slab, None, allowed)
            return self.result(params, kept, None)
        side = _SideStream(self.device)
        kept, rest = self.begin(0 if side.stream is None else 2 * size)
        room = [torch.empty(size, dtype=torch.float32, device=self.device)] if side.stream is None else rest.split(size)
        for i, (first, width) in enumerate(self.cut):
            slab = room[i % len(room)]
            with side.beside(i):
                head.logits(of, first, width, slab, cap=False)
            side.join(i)
            self.take(params, kept, i, slab, None, allowed)
            side.leave(i)
        return self.result(params, kept, None)

    def take(
        self,
        params: _DrawParams,
        kept: _SlabStats,
        i: int,
        x: Tensor,  # N width numbers, and maybe more
        raw: Tensor | None,  # [N, width], what it was before edits
        allowed: Tensor | None,
    ) -> None:
        """Slab number i."""
        first, width = self.cut[i]
        piece, after = self._piece[i], self._piece[i + 1]
        cut = (first, width, piece) if len(self.cut) > 1 else ()
        self._take[width % 16 == 0](
            (self.N * (after - piece), 1, 1), x, raw, allowed, params.slot, *params.temperature, params.seed,
            params.step, *kept, *cut,
        )  # fmt: skip

    def result(self, params: _DrawParams, kept: _SlabStats | None, spoiled: Tensor | None) -> SampleResult:
        """The draw, once the vocabulary has passed. spoiled: [N] int32, 1 NaN, 2 without meaning."""
        N, device = self.N, self.device
        longs = torch.empty((2, N), dtype=torch.int64, device=device)
        ints = torch.empty((2, N), dtype=torch.int32, device=device)
        floats = torch.empty((4 if self.raw else 3, N), dtype=torch.float32, device=device)
        if kept is not None:
            self._row(
                (N, 1, 1), *kept, spoiled, params.slot, *params.temperature, params.seed, params.step, longs, ints,
                floats,
            )  # fmt: skip
        token, threshold_id = longs.unbind()
        count, status = ints.unbind()
        logprob, mass, threshold, *rest = floats.unbind()
        return SampleResult(
            token=token,
            logprob=logprob,
            log_kept_mass=mass,
            kept_count=count,
            status=status,
            threshold=threshold,
            threshold_id=threshold_id,
            raw_logprob=rest[0] if rest else None,
        )


class _SideStream:
    """A stream beside the caller's, in which products run ahead of draws by one slab; nothing on a CPU.

    Of a higher priority: what draws takes the room that a product leaves. One for each stream that calls, since a
    capture of one caller takes in all that others put in its streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.drawn: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.caller = torch.cuda.current_stream(device)
            key = (self.caller.device_index, self.caller.cuda_stream)
            self.stream = _SIDES.get(key) or _SIDES.setdefault(key, torch.cuda.Stream(device, priority=-1))
            self.stream.wait_stream(self.caller)

    def beside(self, i: int) -> AbstractContextManager[object]:
        """The scope of product i, which overwrites the slab of product i - 2."""
        if self.stream is None:
            return nullcontext()
        if i > 1:
            self.stream.wait_event(self.drawn[i - 2])
        return torch.cuda.stream(self.stream)

    def join(self, i: int) -> None:  # noqa: ARG002
        """What the caller's stream does next comes after the product."""
        if self.stream is not None:
            self.caller.wait_stream(self.stream)

    def leave(self, i: int) -> None:  # noqa: ARG002
        """Draw i is under way."""
        if self.stream is not None:
            self.drawn.append(self.caller.record_event())


_SIDES: Final[dict[tuple[int, int], torch.cuda.Stream]] = {}
