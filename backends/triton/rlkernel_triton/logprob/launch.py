"""logprob@1 on Triton: one read of the logits forward, one read and one write back.

Two launches forward, one back; with several ids per row three more forward and two more back; with a group one more
forward, where this rank has several parts of a row. What depends on a call's shape and flags alone is done by
`prepare`, once a shape; a call then allocates, launches and builds its result.
Where no gradient is wanted there is no autograd node.

Legend: N rows · V vocabulary · K listed ids of a row, M of all · P parts of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.row_selection import check_values
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.form import filled
from rlkernel_core.spec.listed_ids import flat_ids, is_ragged, listed_shape
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.listed_ids import ENTRIES, WARPS
from rlkernel_triton.common.listed_rows import Listed, ListedRows, Lists, local_ids
from rlkernel_triton.common.merge_softmax import SAVED_PLANES
from rlkernel_triton.common.row_layout import RowLayout, is_per_row, layout_of, per_row, rows_of
from rlkernel_triton.common.softmax import PLANES
from rlkernel_triton.common.softmax_rows import NOWHERE, MergeSoftmax, RowShape, RowTensors, ids_of_group
from rlkernel_triton.common.support_bitmask import SupportBitmask, bitmask_like, support_bitmask
from rlkernel_triton.launchers import Launch, Launcher, launcher_for, plain_launcher_for
from rlkernel_triton.logprob import kernels
from rlkernel_triton.logprob.shards import Shards
from rlkernel_triton.logprob.stored_logits import MANTISSA, Coded, coded_of, readable
from rlkernel_triton.logprob.top_ids import best_ids, log_probabilities


def logprob(call: LogprobCall) -> LogprobResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LogprobCall) -> Callable[[LogprobCall], LogprobResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.logprob.LogprobCall`.

    Memory beyond results and gradient: 16 bytes (32 with a support) per row and 32768 columns, 24 per row; a bit per
    logit with a support; with top_logprobs some blocks of 64 MiB; 8 bytes per listed id; with a group 32 bytes (64 with
    a support) per row and rank.
    """
    if gradient_wanted("logprob", call):
        return LogprobPair(call)
    host = _Host(call, keep=False)
    return lambda call: host.forward(call)[0]


class LogprobPair(Pair[LogprobCall, LogprobResult]):
    """Results of [..., V] logits, with their analytic gradient."""

    op = "logprob"

    def __init__(self, call: LogprobCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call, keep=True)

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Saved]:
        """Two launches, or five."""
        result, ids, saved, kept, many = self._host.forward(call)
        T = call.temperature if isinstance(call.temperature, Tensor) else None
        chosen, invalid, y = (None, result.invalid, None) if many is None else many
        offsets = call.ids.offsets if is_ragged(call.ids) else None
        return result, (call.logits, ids, offsets, T, call.mask, invalid, saved, *(kept or (None, None)), chosen, y)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One launch, or three."""
        logits, ids, offsets, T, mask, invalid, of_rows, *bits, chosen, y = saved
        lists = Lists(ids, None if offsets is None else offsets.contiguous())  # type: ignore[arg-type]  # ids are there
        return (self._host.backward(logits, lists, T, mask, invalid, of_rows, bits, chosen, y, grads),)  # type: ignore[arg-type]

    @classmethod
    def saved_like(cls, call: LogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, invalid rows, 6 N numbers, bits of kept ids, and of listed ids those chosen and the logits."""
        del wanted
        rows, T, given = call.logits.shape[:-1], call.temperature, flat_ids(call.ids)
        B, *rest = rows or (1,)
        of_rows = call.logits.new_empty((SAVED_PLANES * B, *rest), dtype=torch.float32)
        kept = (None, None) if call.support is None else bitmask_like(call.support, call.logits.shape[-1])
        invalid = result.invalid
        many: Saved = (None, None)
        if listed_shape(call.ids, call.logits) is not None:
            N, new = math.prod(rows), given.new_empty
            invalid, many = new(rows, dtype=torch.bool), (new(N, dtype=torch.int64), of_rows.new_empty(given.numel()))
        ids = given if call.group is None else given.new_empty(given.numel(), dtype=torch.int64)
        offsets = call.ids.offsets if is_ragged(call.ids) else None
        return (
            call.logits,
            ids,
            offsets,
            T if isinstance(T, Tensor) else None,
            call.mask,
            invalid,
            of_rows,
            *kept,
            *many,
        )


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LogprobCall, *, keep: bool) -> None:
        V, supported, device = call.logits.shape[-1], call.support is not None, call.logits.device
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        self._shape = call.logits.shape[:-1]
        self._rows = rows = RowShape(
            self._shape.numel(), V, T, call.softcap, call.mask is not None, -(-V // 32) * 4 if supported else None
        )
        self._device, self._keep = device, keep
        self._n, self._validate = call.top_logprobs, call.validate
        launcher, (layout, self._copied) = launcher_for(device), layout_of(call.logits)
        mantissa = 0 if call.logits_scale is None else MANTISSA[call.logits.dtype]
        self._partial = PartialSoftmax(launcher, rows, layout, moment=call.entropy, mantissa=mantissa)
        self._shards, P, whole = None, self._partial.P, V
        if call.group is not None:
            self._shards = Shards(launcher, call, rows, P, call.group)
            P, whole = self._shards.R, NOWHERE
        self._merge = MergeSoftmax(launcher, rows, whole, P, self._shape, device, keep=keep, moment=call.entropy)
        self._backward = SoftmaxBackward(launcher, rows, layout)
        self._room = (self._partial.numbers, SAVED_PLANES * rows.N)
        self._ids_as_they_are = flat_ids(call.ids).is_contiguous()
        self._mask_as_it_is = call.mask is None or call.mask.is_contiguous()
        self._T_as_it_is = T is not None or is_per_row(call.temperature, self._shape)
        sizes, ragged = listed_shape(call.ids, call.logits), is_ragged(call.ids)
        self._several = None
        if sizes is not None:
            self._several = SeveralIds(launcher, rows, layout, mantissa, sizes, whole, self._shards, ragged=ragged)

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Tensor, Tensor, SupportBitmask | None, Several | None]:
        """The result, and what the gradient needs of the ids, the rows, the kept ids and the listed ones."""
        shards, several, V, y, given = self._shards, self._several, self._rows.V, None, flat_ids(call.ids)
        offsets = call.ids.offsets.contiguous() if is_ragged(call.ids) else None
        shard = None if shards is None else shards.locate()
        if self._validate:
            check_values(call, V if shard is None else int(shard.V))
        whole = () if shard is None else (shard.V, shard.offset)
        T = call.temperature if self._rows.T is None else None
        kept = None if call.support is None else support_bitmask(call.support, V, *whole)
        ids = given if shard is None else ids_of_group(given, shard.V, several=several is not None)
        of = self._read(ids, T, call.mask, kept)  # type: ignore[arg-type]  # a tensor where there is no number
        ids, logits, coded = of.ids, readable(self._lying(call.logits)), coded_of(call)
        local = of if shard is None else of._replace(ids=local_ids(ids, shard.offset))
        here = given if shard is None else local.ids
        if several is not None:
            y = several.logits(logits, coded, local, offsets)
            of = of._replace(ids=several.rows.chosen(Lists(ids, offsets), of.mask, y))
            local = of if shard is None else of._replace(ids=of.ids - shard.offset)
        if self._keep:
            parts, saved = torch.empty(self._room[0], dtype=torch.float32, device=self._device), None
        else:
            room = torch.empty(sum(self._room), dtype=torch.float32, device=self._device)
            parts, saved = room.unsafe_split_with_sizes(self._room)
        self._partial(logits, local, parts, coded.scales)
        if shards is not None:
            parts = shards.gathered(parts)
        row = self._merge(parts, of, saved)
        values, invalid, many = row.logprob, row.invalid, None
        if several is not None and y is not None:
            values, invalid = several.rows.results(Lists(ids, offsets), of, y, row, given.shape)
            many = Several(local.ids, row.invalid, y)
        best, of_best, n = None, None, self._n
        if n:
            best, of_best = _top_logprobs(readable(call.logits.detach()), coded, n, self._rows, of)
            best, of_best = best.view(*self._shape, n), of_best.view(*self._shape, n)
        result = filled(
            LogprobResult, logprob=values, lse=row[1], entropy=row[2], top_ids=best, top_logprobs=of_best,
            log_kept_mass=row[3], invalid=invalid,
        )  # fmt: skip
        return result, here, row.saved, kept, many

    def backward(
        self, logits: Tensor, lists: Lists, T: Tensor | None, mask: Tensor | None, invalid: Tensor, saved: Tensor,
        bits: list[Tensor | None], chosen: Tensor | None, y: Tensor | None, grads: Saved,
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""
        kept = None if self._rows.kept_row_bytes is None else SupportBitmask(*bits)  # type: ignore[arg-type]
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        of, several = self._read(lists.ids, T, mask, kept), self._several
        if several is None or chosen is None or y is None:
            self._backward(self._lying(logits), of, invalid, saved, grads, out)
            return out
        listed, of = Listed(lists._replace(ids=of.ids), y), of._replace(ids=chosen)
        found = several.rows.gradient(listed, of, saved, grads)
        if found is None:
            self._backward(self._lying(logits), of, invalid, saved, grads, out)
            return out
        self._backward(self._lying(logits), of, invalid, saved, (found.sums, *grads[1:]), out)
        several.rows.putting(listed, found, (chosen, chosen), of.mask)(out, self._rows.N, 0, 0, self._rows.V)
        return out

    def _lying(self, logits: Tensor) -> Tensor:
        """Logits as the kernels' layout has them."""
        return logits.clone(memory_format=torch.contiguous_format) if self._copied else logits

    def _read(self, ids: Tensor, T: Tensor | None, mask: Tensor | None, kept: SupportBitmask | None) -> RowTensors:
        """Ids, temperatures and mask as kernels read them."""
        if not self._ids_as_they_are:
            ids = ids.contiguous()
        if not self._mask_as_it_is:
            mask = mask.contiguous()  # type: ignore[union-attr]  # it is there
        if not self._T_as_it_is:
            T = per_row(T, self._shape)  # type: ignore[arg-type,assignment]  # a tensor, as it was
        return RowTensors(ids, T, mask, kept)


class Several(NamedTuple):
    """What the gradient needs of rows that list several ids."""

    chosen: Tensor  # [N] int64, counted from a shard's first
    invalid: Tensor  # N bool: rows without a chosen id
    y: Tensor  # [M] fp32


class SeveralIds:
    """The launch that reads the logits of listed ids, beside those for logits of any origin."""

    def __init__(
        self, launcher: Launcher, rows: RowShape, layout: RowLayout, mantissa: int, sizes: tuple[int, int], whole: int,
        shards: Shards | None, *, ragged: bool,
    ) -> None:  # fmt: skip
        self.rows = ListedRows(launcher, rows, sizes, whole, ragged=ragged, sharded=shards is not None)
        self._shards, self._grid, K = shards, (rows.N, 1, 1), 0 if ragged else sizes[1]
        self._launch = launcher.bind(
            kernels.listed_logits, num_warps=WARPS, **layout._asdict(), softcap=rows.softcap or 0.0, V=rows.V, K=K,
            HAS_MASK=rows.masked, HAS_CAP=rows.softcap is not None, EIGHT_BITS=mantissa, RAGGED=ragged, ENTRIES=ENTRIES,
        )  # fmt: skip

    def logits(self, logits: Tensor, coded: Coded, of: RowTensors, offsets: Tensor | None) -> Tensor:
        """[M] fp32 logits under the cap, of which those of masked rows are not written.

        With a group ids are counted from this rank's first.
        """
        y = torch.empty(self.rows.M, dtype=torch.float32, device=logits.device)
        if self._grid[0]:
            self._launch(self._grid, logits, coded.scales, *Lists(of.ids, offsets).pointers, of.mask_or_any, y)
        if self._shards is not None:
            self._shards.add(y)
        return y


class PartialSoftmax:
    """The launch that reads logits: statistics of each part of each row. mantissa: of `Coded`."""

    def __init__(
        self, launcher: Launcher, rows: RowShape, layout: RowLayout, *, moment: bool, mantissa: int = 0
    ) -> None:
        self.P = triton.cdiv(rows.V, kernels.PART)
        self.planes = PLANES[rows.kept_row_bytes is not None]
        self.numbers = self.planes * rows.N * self.P  # of what it writes
        self._grid = (rows.N, self.P, 1)
        self._launch = launcher.bind(
            kernels.partial_softmax, num_warps=kernels.STATS_WARPS, **_fixed(rows, layout), MOMENT=moment,
            EIGHT_BITS=mantissa, PART=kernels.PART, TILE=kernels.TILE,
        )  # fmt: skip

    def __call__(self, logits: Tensor, of: RowTensors, parts: Tensor, scales: Tensor | None = None) -> None:
        """Write [planes, N, P] statistics. scales: of `Coded`."""
        if self._grid[0]:
            self._launch(self._grid, logits, scales, of.ids, of.mask_or_any, *of.temperatures, of.bits_or_any, parts)


class SoftmaxBackward:
    """The launch that writes the gradient of the logits, bound for each set of results that gradients arrive at."""

    def __init__(self, launcher: Launcher, rows: RowShape, layout: RowLayout) -> None:
        self._launcher, self._fixed = launcher, _fixed(rows, layout)
        self._launches: dict[tuple[bool, ...], Launch] = {}
        self._repeats = next(k for fewest, k in reversed(kernels.REPEATS) if fewest <= rows.N)
        self._grid = (rows.N, triton.cdiv(rows.V, self._repeats * kernels.COLUMNS), 1)

    def __call__(
        self, logits: Tensor, of: RowTensors, invalid: Tensor, saved: Tensor, upstream: tuple[Tensor | None, ...],
        out: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradient of logits whose results have these gradients; None: none."""
        if not self._grid[0]:
            return
        wanted = tuple([g is not None for g in upstream])
        launch = self._launches.get(wanted)
        if launch is None:
            launch = self._launches[wanted] = self._bound(wanted)
        launch(
            self._grid, logits, of.ids, of.mask_or_any, invalid.view(torch.int8), *of.temperatures, of.bits_or_any,
            saved, *[saved if g is None else g.contiguous() for g in upstream], out,
        )  # fmt: skip

    def _bound(self, wanted: tuple[bool, ...]) -> Launch:
        flags: dict[str, Any] = dict(zip(("G", "G_LSE", "G_ENTROPY", "G_MASS"), wanted, strict=True))
        return self._launcher.bind(
            kernels.softmax_backward, num_warps=kernels.GRADIENT_WARPS,
            any_alignment=("g", "g_lse", "g_entropy", "g_mass"), **self._fixed, **flags, COLUMNS=kernels.COLUMNS,
            REPEATS=self._repeats,
        )  # fmt: skip


def _fixed(rows: RowShape, layout: RowLayout) -> dict[str, Any]:
    """Arguments by name of both kernels that read logits."""
    return {
        **rows.fixed, **layout._asdict(), "softcap": rows.softcap or 0.0, "N": rows.N, "V": rows.V,
        "kept_stride": rows.kept_row_bytes or 0, "HAS_MASK": rows.masked, "HAS_CAP": rows.softcap is not None,
    }  # fmt: skip


def _top_logprobs(logits: Tensor, coded: Coded, n: int, rows: RowShape, of: RowTensors) -> tuple[Tensor, Tensor]:
    """[N, n] most likely ids and their log-probabilities, by one more read with the best id as the chosen one.

    So the best one keeps its precision; the others have p <= 1/2. Launches are bound for this call alone.
    """
    x, N, device = rows_of(logits), rows.N, logits.device
    counted, T = (None if t is None else t.view(-1) for t in (of.mask, of.T))
    ids = best_ids(x, coded, rows.V, N, n)
    number = rows.T or 1.0
    rows = rows._replace(T=number if T is None else None, kept_row_bytes=None)
    of = RowTensors(ids[:, 0].contiguous(), T, counted)
    launcher = plain_launcher_for(device)
    partial = PartialSoftmax(launcher, rows, x.layout, moment=False, mantissa=coded.mantissa)
    parts = torch.empty(partial.planes, N, partial.P, dtype=torch.float32, device=device)
    partial(x.data, of, parts, coded.scales)
    merge = MergeSoftmax(launcher, rows, rows.V, partial.P, of.ids.shape, device, keep=True, moment=False)
    found = merge(parts, of, None)
    values = log_probabilities(
        x,
        coded,
        ids,
        number if T is None else T,
        counted,
        rows.softcap,
        found.logprob,
        found.saved.view(SAVED_PLANES, N),
    )
    return ids if counted is None else torch.where(counted[:, None], ids, -1), values
