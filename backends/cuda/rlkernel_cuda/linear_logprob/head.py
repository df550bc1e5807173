"""An output head on the device: operands as the kernels read them, and the launches, bound once a shape.

Legend: N rows · V vocabulary · D hidden · P = N up to a multiple of 128.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.vocab_parallel import gathered
from rlkernel_cuda.common import tiles
from rlkernel_cuda.linear_logprob import logits
from rlkernel_cuda.linear_logprob.logits import LOG2E, Form, Into, Kind, Operands
from rlkernel_cuda.linear_logprob.logits_kernel import GRAD, SAVE, STATS
from rlkernel_cuda.linear_logprob.plan import COLS, ROWS, count_of, round_up
from rlkernel_cuda.linear_logprob.row_kernels import (
    LEAST_BIAS,
    chosen_kernel,
    clear_kernel,
    coefficient_kernel,
    gather_kernel,
    merge_tiles_kernel,
    results_kernel,
    rows_kernel,
    saved_kernel,
    scatter_kernel,
    upstream_kernel,
)
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for

SAVED: Final = (4, 16)  # tiles that a program of the saved logits' kernel takes at a time, and how many times
PLANES: Final = 7  # [P] each, fp32: what backward reads of the rows; see `Rows`
_BLOCK: Final = 256  # rows of a program that goes through rows one by one
_MERGED: Final = 32  # rows, and tiles, of a program that merges tiles
_COPIED: Final = 1024  # columns of a program that copies rows
_ALIGNED: Final = 4  # numbers of 4 bytes in 16


class Given(NamedTuple):
    """The tensors of a call, flat."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    ids: Tensor  # [N] contiguous, counted from the first id of this shard; others are out of range
    T: Tensor | None  # [N] fp32 contiguous; None: one number for all
    mask: Tensor | None  # [N] bool contiguous


class Results(NamedTuple):
    """Where results go: tensors of N numbers, contiguous."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    invalid: Tensor  # bool


class SoftmaxStats(NamedTuple):
    """Softmax statistics of each row: tensors of N numbers or more, in the head's order."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    lse2: Tensor  # in base-2 units
    mean2: Tensor  # the mean of the logits, weighted by their probabilities, in base-2 units
    missed: Tensor  # 1 - p of the chosen id
    chosen: Tensor  # the chosen id's logit


class Rows(NamedTuple):
    """What backward reads of the rows: new tensors, of sizes that the shape of the call tells."""

    planes: Tensor  # [PLANES P] fp32: logprob, lse2, mean2, missed, chosen, row_scale, inverse
    marks: Tensor  # [P + 4] int32: the chosen ids, and then how many rows count
    order: Tensor | None  # [2 N] int64: place, position; None: all rows count
    x: Tensor | None  # [N, D up to a multiple of 8] rows that count first; None: they are the caller's


class Saved(NamedTuple):
    """Logits that are saved for backward."""

    logits: Tensor  # [rows, pitch] of 16 bits: fp16(y - tile max)
    tops: Tensor  # [tiles, P] fp32, the tile maxima


class Ranks(NamedTuple):
    """The other shards of a vocabulary."""

    group: dist.ProcessGroup
    ids: Tensor  # [N] in the whole vocabulary; -1: none


class ForwardState(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    of: Operands
    rows: Rows
    stats: SoftmaxStats
    target: Tensor  # [N] int32 ids, in the head's order: in the whole vocabulary where it is split; -1: none


def aligned(x: Tensor) -> bool:
    """Whether TMA can read the rows of x, [N, D]."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) >= x.shape[1]


def readable(x: Tensor) -> Tensor:
    """X, [N, D], or a copy whose rows start at multiples of 16 bytes and are filled up with zeros."""
    if aligned(x):
        return x
    out = x.new_zeros(x.shape[0], round_up(x.shape[1], 8))
    out[:, : x.shape[1]] = x
    return out


def rows_like(like: Tensor, N: int, D: int, *, masked: bool) -> Rows:
    """What `Head.forward` saves of the rows, as empty tensors; N may be a symbol."""
    P = round_up(N, ROWS)
    return Rows(
        like.new_empty(PLANES * P, dtype=torch.float32),
        like.new_empty(P + 4, dtype=torch.int32),
        like.new_empty(2 * N, dtype=torch.int64) if masked else None,
        like.new_empty(N, round_up(D, 8)) if masked else None,
    )


def saved_like(like: Tensor, N: int, V: int) -> Saved:
    """Logits that are saved for backward, as empty tensors; sizes may be symbols."""
    tops = like.new_empty(count_of(V, COLS), round_up(N, ROWS), dtype=torch.float32)
    return Saved(like.new_empty(N, round_up(V, 8)), tops)


def room_to_save(like: Tensor, rows: int, V: int, numbers: int) -> Saved:
    """Room for logits, out of a buffer of `numbers` or more, and for the maxima of their tiles."""
    pitch = round_up(V, 8)
    buffer = like.new_empty(max(numbers, rows * pitch))
    tops = like.new_empty(count_of(V, COLS), round_up(rows, ROWS), dtype=torch.float32)
    return Saved(buffer[: rows * pitch].view(rows, pitch), tops)


class Head:
    """The launches of calls of one shape.

    Args:
        kind: what they are bound for.
        launch_rows: rows of one launch on the way forward, which bounds the memory of the partial sums.
        keep: gradients are wanted, so results are apart from what backward reads.
        entropy: whether results have the entropy.
    """

    def __init__(self, kind: Kind, launch_rows: int, *, keep: bool, entropy: bool) -> None:
        self.kind, self.P, self.tiles = kind, round_up(kind.N, ROWS), count_of(kind.V, COLS)
        self._plan, self._keep, self._entropy = Plan(launcher_for(kind.device)), keep, entropy
        self._direct = not (keep or kind.masked)  # results are written where they belong at once
        self._most = min(launch_rows, kind.N)
        self._blocks = [slice(r, min(r + launch_rows, kind.N)) for r in range(0, kind.N, launch_rows)]
        self._by_rows = (count_of(kind.N, _BLOCK), 1, 1)
        self._x_width = round_up(kind.D, 8)

    def forward(
        self, given: Given, into: Results, saved: Saved | None = None, ranks: Ranks | None = None
    ) -> ForwardState:
        """Write the results of every row; logits are saved where there is room for them.

        With ranks, one all-gather of four numbers a row; the kernel that merges the tiles of a rank then merges the
        ranks, in their order.
        """
        kind, P, N = self.kind, self.P, self.kind.N
        planes, scratch = self._room(into, save=saved is not None)
        own_logprob, lse2, mean2, missed, chosen, row_scale, inverse = planes.unsafe_split_with_sizes([P] * PLANES)
        own_lse, own_entropy, sums, tops = scratch
        marks = torch.empty(P + 4, dtype=torch.int32, device=kind.device)
        target, count = marks.unsafe_split_with_sizes([P, 4])
        order, place, position, mask, before = None, given.ids, given.ids, given.ids, given.ids
        if given.mask is not None:
            order = torch.empty(2 * N, dtype=torch.int64, device=kind.device)
            place, position = order.unsafe_split_with_sizes([N, N])
            before, mask = given.mask.cumsum(0), given.mask.view(torch.uint8)
        self._plan.get("rows", self._bind_rows)(
            self._by_rows, given.ids, row_scale if given.T is None else given.T, mask, before, target, row_scale,
            inverse, into.invalid.view(torch.int8), place, position, count,
        )  # fmt: skip
        rows = Rows(planes, marks, order, None if order is None else self._gathered(given.hidden, place, count))
        x, w, bias, as_given = self._readable(given.hidden, given.weight, given.bias, rows.x)
        counted = (None, None) if order is None else (count, place)
        of = Operands(x, w, bias, as_given, target, row_scale, inverse, *counted)
        if self._direct:
            own_logprob, own_lse = into.logprob, into.lse
            own_entropy = own_entropy if into.entropy is None else into.entropy
        stats = SoftmaxStats(own_logprob, own_lse, own_entropy, lse2, mean2, missed, chosen)
        self._partial_softmax(of, stats, saved, sums, tops, part=ranks is not None)
        whole = target if ranks is None else self._merge_ranks(of, stats, ranks)
        if not self._direct:
            entropy = into.lse if into.entropy is None else into.entropy
            self._plan.get("results", self._bind_results)(
                self._by_rows, stats.logprob, stats.lse, stats.entropy, mask, position, into.logprob, into.lse, entropy
            )
        return ForwardState(of, rows, stats, whole)

    def restore(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> tuple[Operands, SoftmaxStats]:
        """Operands and statistics from [N, D], [V, D] and [V] of a call and what forward saved of its rows.

        lse and entropy are not saved; the tensors of that name hold the log-probabilities.
        """
        planes = rows.planes.unsafe_split_with_sizes([self.P] * PLANES)
        target, count = rows.marks.unsafe_split_with_sizes([self.P, 4])
        counted = (None, None)
        if rows.order is not None:
            counted = (count, rows.order.unsafe_split_with_sizes([self.kind.N] * 2)[0])  # type: ignore[assignment]
        x, w, bias, as_given = self._readable(hidden, weight, bias, rows.x)
        stats = SoftmaxStats(planes[0], planes[0], planes[0], *planes[1:5])
        return Operands(x, w, bias, as_given, target, planes[5], planes[6], *counted), stats

    def coefficients(self, state: ForwardState, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """[4, P] coefficients of the gradient of a row's logits: lse2, ca, cb, and the chosen id's own gradient.

        Args:
            state: from forward; lse and entropy of its statistics are not read.
            upstream: gradients of (logprob, lse, entropy), each N numbers in the caller's order.
        """
        of, stats, P = state.of, state.stats, self.P
        count = of.target if of.counted is None else of.counted
        coef, arrived = torch.empty(7 * P, dtype=torch.float32, device=self.kind.device).unsafe_split_with_sizes(
            [4 * P, 3 * P]
        )
        there = tuple([g is not None for g in upstream])
        self._plan.get(f"upstream {there}", lambda launcher: self._bind_upstream(launcher, there))(
            self._by_rows, *[arrived if g is None else g.contiguous() for g in upstream], state.target,
            state.target if of.place is None else of.place, count, arrived,
        )  # fmt: skip
        self._plan.get("coefficients", self._bind_coefficients)(
            self._by_rows, *arrived.unsafe_split_with_sizes([P, P, P]), stats.chosen, of.row_scale, of.inverse,
            stats.logprob, stats.lse2, stats.mean2, stats.missed, coef, count,
        )  # fmt: skip
        return coef.view(4, P)

    def recompute_dlogits(self, of: Operands, coef: Tensor, rows: slice, ids: slice, dz: Tensor) -> None:
        """Recompute the logits of some rows and a slice of the vocabulary; write their gradient to dz, [n, width]."""
        n, width = dz.shape
        form = Form(GRAD, tiles.GRADIENT, n, width, coef.stride(0))
        self._logits(form)(of, rows, ids, Into(coef=coef[0, rows.start :] if rows.start else coef, out=dz))
        if of.counted is not None:
            clear = self._plan.get(
                f"clear {n} {width}",
                lambda launcher: launcher.bind(
                    clear_kernel, N=n, pitch=dz.stride(0), width=width, BM=ROWS, ROWS=64, COLS=256
                ),
            )
            clear((count_of(n, 64), count_of(width, 256), 1), dz, of.counted, rows.start)
        self._put_chosen(of, coef, rows, ids.start, dz)

    def save_again(self, of: Operands, saved: Saved) -> None:
        """Save the logits anew, which their gradient has overwritten: the launches of forward, so the same bits."""
        sums, chosen = self._empty(2 * self.tiles * self._most), self._empty(self.P)
        for rows in self._blocks:
            at = saved.tops[0, rows.start :], saved.tops.stride(0), sums, chosen[rows]
            self._sum_tiles(of, rows, saved, at)

    def dlogits_from_saved(self, of: Operands, coef: Tensor, saved: Saved) -> Tensor:
        """The gradient of the saved logits, in place: [N, V]."""
        kind, (tiles, loop) = self.kind, SAVED
        launch = self._plan.get(
            "saved",
            lambda launcher: launcher.bind(
                saved_kernel, V=kind.V, pitch=saved.logits.stride(0), top_stride=saved.tops.stride(0),
                stride=coef.stride(0), cap=float(kind.softcap or 1.0), BN=COLS, TILES=tiles, LOOP=loop,
                CAP=kind.softcap is not None, COUNTED=kind.masked,
            ),
        )  # fmt: skip
        dz, count = saved.logits, of.target if of.counted is None else of.counted
        grid = (kind.N, count_of(kind.V, COLS * tiles * loop), 1)
        launch(grid, dz, saved.tops, of.row_scale, coef, count)
        dz = dz if dz.shape[1] == kind.V else dz[:, : kind.V]
        self._put_chosen(of, coef, slice(0, kind.N), 0, dz)
        return dz

    def scatter(self, x: Tensor, of: Operands, first: int, out: Tensor) -> None:
        """Rows of x, [n, D], that stand at `first` and after, to where they belong in out, [N, D]; 0 where masked."""
        if of.place is None:
            out[first : first + x.shape[0]] = x
            return
        n, D = x.shape
        launch = self._plan.get(
            f"scatter {x.dtype} {out.dtype}",
            lambda launcher: launcher.bind(scatter_kernel, D=D, x_stride=x.stride(0), COLS=_COPIED),
        )
        place = of.place[first:] if first else of.place
        launch((n, count_of(D, _COPIED), 1), x, place, of.counted, first, out)

    def _room(self, into: Results, *, save: bool) -> tuple[Tensor, list[Tensor]]:
        """What backward reads, and room for lse, entropy, partial sums and maxima: apart, for a gradient."""
        P, most = self.P, self._most
        entropy = 0 if self._direct and into.entropy is not None else P
        sizes = [PLANES * P, 0 if self._direct else P, entropy, 2 * self.tiles * most, 0 if save else self.tiles * most]
        sizes = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        if not self._keep:
            planes, *scratch = self._empty(sum(sizes)).unsafe_split_with_sizes(sizes)
            return planes, scratch
        return self._empty(sizes[0]), list(self._empty(sum(sizes[1:])).unsafe_split_with_sizes(sizes[1:]))

    def _empty(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=torch.float32, device=self.kind.device)

    def _readable(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered_rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, w, bias and given_bias of `Operands`."""
        x, w = readable(hidden) if gathered_rows is None else gathered_rows, readable(weight)
        if bias is None:
            return x, w, None, None
        given = bias.to(torch.float32).contiguous()
        return x, w, torch.where(given == float("-inf"), given, given.clamp_min(LEAST_BIAS)), given

    def _gathered(self, x: Tensor, place: Tensor, count: Tensor) -> Tensor:
        """[N, D] in the order of `place`, zeros from `count` on."""
        N, D = x.shape
        out = x.new_empty(N, self._x_width)
        x = x if x.stride(1) == 1 else x.contiguous()
        launch = self._plan.get(
            "gather",
            lambda launcher: launcher.bind(
                gather_kernel, D=D, x_stride=x.stride(0), out_stride=self._x_width, COLS=_COPIED
            ),
        )
        launch((N, count_of(self._x_width, _COPIED), 1), x, place, count, out)
        return out

    def _partial_softmax(
        self, of: Operands, stats: SoftmaxStats, saved: Saved | None, sums: Tensor, tops: Tensor, *, part: bool
    ) -> None:  # fmt: skip
        """Sum each tile of the logits, block by block, and merge the tiles of a row; a part is left as sums."""
        kind = self.kind
        for rows in self._blocks:
            n = rows.stop - rows.start
            some = stats if n == kind.N else SoftmaxStats(*[x.view(-1)[rows] for x in stats])
            top, stride = (tops, n) if saved is None else (saved.tops[0, rows.start :], saved.tops.stride(0))
            self._sum_tiles(of, rows, saved, (top, stride, sums, some.chosen))
            parts = self.tiles, stride
            self._merge_tiles(of, some, rows, of.target, top, sums, parts, bias=of.given_bias, part=part)

    def _sum_tiles(
        self, of: Operands, rows: slice, saved: Saved | None, into: tuple[Tensor, int, Tensor, Tensor]
    ) -> None:
        """Sum each tile of a block of rows into (maxima, numbers between those of two tiles, sums, chosen logits)."""
        top, stride, sums, chosen = into
        out = None if saved is None else saved.logits[rows, : self.kind.V].view(torch.float16)
        form = Form(STATS if saved is None else SAVE, tiles.FORWARD, rows.stop - rows.start, self.kind.V, stride)
        self._logits(form)(of, rows, _all(self.kind.V), Into(top, sums, chosen, None, out))

    def _merge_ranks(self, of: Operands, stats: SoftmaxStats, ranks: Ranks) -> Tensor:
        """Merge the statistics of all ranks; returns ids in the whole vocabulary, in the head's order."""
        N = self.kind.N
        ids = ranks.ids if of.place is None else ranks.ids[of.place]
        whole = ids.to(torch.int32)
        chosen = torch.where(of.target[:N] >= 0, stats.chosen[:N], -torch.inf)
        own = [x.view(-1)[:N] for x in stats[:3]]
        every = gathered(torch.stack((*own, chosen)), ranks.group)  # [ranks, 4, N]
        stats.chosen[:N].copy_(every[:, 3].amax(0))
        top, sums = every[:, 0].contiguous(), every[:, 1:3].contiguous()
        self._merge_tiles(of, stats, slice(0, N), whole, top, sums, (len(every), N), bias=None, part=False)
        return whole

    def _merge_tiles(
        self, of: Operands, stats: SoftmaxStats, rows: slice, target: Tensor, tops: Tensor, sums: Tensor,
        parts: tuple[int, int], *, bias: Tensor | None, part: bool,
    ) -> None:  # fmt: skip
        n, (tiles, stride) = rows.stop - rows.start, parts
        row_scale = of.row_scale
        if n != self.kind.N:
            target, row_scale = target[rows], row_scale[rows]
        launch = self._plan.get(
            f"merge {n} {tiles} {stride} {part} {bias is None}",
            lambda launcher: launcher.bind(
                merge_tiles_kernel, N=n, tiles=tiles, stride=stride, ROWS=_MERGED, TILES=_MERGED, PART=part,
                BIAS=bias is not None,
            ),
        )  # fmt: skip
        given = row_scale if bias is None else bias
        launch((count_of(n, _MERGED), 1, 1), tops, sums, stats.chosen, target, row_scale, given, *stats[:6])

    def _logits(self, form: Form) -> logits.LogitsLaunch:
        return self._plan.get(
            f"logits {form.mode} {form.n} {form.width} {form.stride}",
            lambda launcher: logits.bind(launcher, self.kind, form),
        )

    def _put_chosen(self, of: Operands, coef: Tensor, rows: slice, first: int, dz: Tensor) -> None:
        n, width = dz.shape
        launch = self._plan.get(
            f"chosen {n} {width}",
            lambda launcher: launcher.bind(
                chosen_kernel, N=n, pitch=dz.stride(0), width=width, ROWS=_BLOCK, COUNTED=of.counted is not None
            ),
        )
        target = of.target[rows] if rows.start else of.target
        count = of.target if of.counted is None else of.counted
        own = coef[3, rows.start :] if rows.start else coef[3]
        launch((count_of(n, _BLOCK), 1, 1), dz, target, own, count, rows.start, first)

    def _bind_rows(self, launcher: Launcher) -> Launch:
        kind = self.kind
        return launcher.bind(
            rows_kernel, V=kind.V, number=1.0 if kind.T is None else float(kind.T), scale=float(kind.logit_scale),
            factor=LOG2E if kind.softcap is not None else LOG2E * kind.logit_scale, N=kind.N, EACH=kind.T is None,
            COUNTED=kind.masked, ROWS=_BLOCK,
        )  # fmt: skip

    def _bind_results(self, launcher: Launcher) -> Launch:
        kind = self.kind
        return launcher.bind(
            results_kernel, N=kind.N, ENTROPY=self._entropy, COUNTED=kind.masked, ROWS=_BLOCK
        )  # fmt: skip

    def _bind_upstream(self, launcher: Launcher, there: tuple[bool, ...]) -> Launch:
        kind = self.kind
        return launcher.bind(
            upstream_kernel, any_alignment=("g_logprob", "g_lse", "g_entropy"), N=kind.N, stride=self.P, G=there[0],
            G_LSE=there[1], G_ENTROPY=there[2], COUNTED=kind.masked, ROWS=_BLOCK,
        )  # fmt: skip

    def _bind_coefficients(self, launcher: Launcher) -> Launch:
        kind = self.kind
        return launcher.bind(
            coefficient_kernel, N=kind.N, stride=self.P, cap=float(kind.softcap or 1.0), CAP=kind.softcap is not None,
            COUNTED=kind.masked, ROWS=_BLOCK,
        )  # fmt: skip


def _all(size: int) -> slice:
    return slice(0, size)
