"""linear_logprob@1 on Triton: logits live in registers, both ways; only their gradient is written, in blocks.

Matmuls both ways: 4 recomputing (5 for more rows than one block holds, as dX and dW then want the gradient in another
order), 3 saving; one less for each frozen operand. All accumulate in fp32 and are rounded once.

With several ids per row four small launches more forward, and backward one and one for each block.

Legend: N rows · D hidden · V vocabulary, or this rank's shard · K listed ids of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import filled
from rlkernel_core.spec.linear_logprob import LinearLogprobCall, stored_head
from rlkernel_core.spec.listed_ids import flat_ids, is_ragged, listed_shape
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.listed_rows import Listed, Lists
from rlkernel_triton.common.merge_softmax import SAVED_PLANES
from rlkernel_triton.common.row_layout import is_per_row, per_row
from rlkernel_triton.common.softmax_rows import NOWHERE, MergeSoftmax, RowShape, RowTensors, ids_of_group
from rlkernel_triton.common.support_bitmask import SupportBitmask, bitmask_like, support_bitmask
from rlkernel_triton.launchers import launcher_for
from rlkernel_triton.linear_logprob import workspace as memory
from rlkernel_triton.linear_logprob.head import Head, head_tile, saved_dtype, stats_kind, tiles_of
from rlkernel_triton.linear_logprob.head_rows import head_like, parts_of, stored, unread
from rlkernel_triton.linear_logprob.listed import Several, SeveralIds
from rlkernel_triton.linear_logprob.low_rank import InnerProduct
from rlkernel_triton.linear_logprob.operands import HeadStats, Operands, RowOrder, SavedRows


def fits(call: LinearLogprobCall) -> Reason | None:
    """The format of a quantized head is read here."""
    return unread(call.weight)


def workspace(call: LinearLogprobCall) -> int:
    """Most bytes of a call, forward and backward, beyond its results and gradients.

    Raises:
        ArgumentError: `max_workspace_bytes` is below the least, as the call itself says.
    """
    return memory.workspace(_cut(call), _size(call))


def _size(call: LinearLogprobCall) -> memory.Size:
    """What the memory of a call depends on."""
    hidden, (V, D), listed = call.hidden, call.weight.shape, listed_shape(call.ids, call.hidden)
    item = max(x.element_size() for x in (hidden, head_like(hidden, call.weight)))
    ranks = 1 if call.group is None else call.group.size()
    pieces, piece = vocab_parallel.pieces(V, ranks)
    BN = head_tile(hidden, call.weight, stats_kind(call.softcap, call.support is not None)).BN
    tiles = tiles_of(V, piece, BN)
    N, r = math.prod(hidden.shape[:-1]), 0 if call.lora is None else call.lora.A.shape[0]
    decoded = 0 if isinstance(call.weight, Tensor) else BN
    M = 0 if listed is None else listed[0] * listed[1]
    return memory.Size(N, D, V, item, tiles, call.support is not None, ranks * pieces, M, r, decoded)


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearLogprobCall) -> Callable[[LinearLogprobCall], LogprobResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `rlkernel_triton.linear_logprob.workspace.workspace` states the extra memory. Blocks of masked rows are skipped.
    """
    if gradient_wanted("linear_logprob", call):
        return LinearLogprobPair(call)
    host = _Host(call, keep=False)
    return lambda call: host.forward(call)[0]


class LinearLogprobPair(Pair[LinearLogprobCall, LogprobResult]):
    """Results from the operands of the head, with their analytic gradients."""

    op = "linear_logprob"

    def __init__(self, call: LinearLogprobCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call, keep=True)

    @classmethod
    def inputs(cls, call: LinearLogprobCall) -> Saved:
        """Hidden states, weight, bias, and A and B of LoRA."""
        return call.hidden, stored(call.weight), call.bias, *matrices(call)

    def forward(self, call: LinearLogprobCall) -> tuple[LogprobResult, Saved]:
        """Three launches for each block of rows, and with "save" the logits."""
        result, of, row_stats, stats, many = self._host.forward(call)
        T = call.temperature if isinstance(call.temperature, Tensor) else None
        ids = flat_ids(call.ids) if call.group is None else of.rows.ids
        order, kept = of.order or (None, None), of.rows.kept or (None, None)
        lists, chosen, invalid, y = (Lists(ids), None, result.invalid, None) if many is None else many
        return result, (
            call.hidden, stored(call.weight), call.bias, *matrices(call), T, *lists, invalid, *order, *kept, row_stats,
            stats.logits, stats.tile_max, chosen, y, *parts_of(call.weight),
        )  # fmt: skip

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Three launches for each block of rows and of columns, fewer with frozen operands."""
        return self._host.backward(saved, grads, self.wanted)

    @classmethod
    def saved_like(cls, call: LinearLogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Saved:
        """Operands, invalid rows, the order of rows, bits of kept ids, 6 N numbers, saved logits, and listed ids."""
        del wanted
        ids, rows, V, T = flat_ids(call.ids), call.hidden.shape[:-1], call.weight.shape[0], call.temperature
        N, invalid, (B, *rest) = math.prod(rows), result.invalid, rows or (1,)
        order: Saved = (None, None)
        logits: Saved = (None, None)
        many: Saved = (None, None)
        if listed_shape(call.ids, call.hidden) is not None:
            invalid = ids.new_empty(rows, dtype=torch.bool)
            many = ids.new_empty(N, dtype=torch.int64), ids.new_empty(ids.numel(), dtype=torch.float32)
        if call.mask is not None:
            order = ids.new_empty(N, dtype=torch.int64), ids.new_empty(1, dtype=torch.int64)
        if _cut(call).save:
            kind = saved_dtype(call.hidden, call.weight)
            logits = ids.new_empty((N, V), dtype=kind), ids.new_empty((N, _size(call).tiles), dtype=torch.float32)
        return (
            call.hidden, stored(call.weight), call.bias, *matrices(call), T if isinstance(T, Tensor) else None,
            ids if call.group is None else ids.new_empty(ids.numel(), dtype=torch.int64),
            call.ids.offsets if is_ragged(call.ids) else None, invalid, *order,
            *((None, None) if call.support is None else bitmask_like(call.support, V)),
            ids.new_empty((SAVED_PLANES * B, *rest), dtype=torch.float32), *logits, *many,
            *parts_of(call.weight),
        )  # fmt: skip


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LinearLogprobCall, *, keep: bool) -> None:
        support, group, shape = call.support, call.group, call.hidden.shape[:-1]
        N, V = shape.numel(), call.weight.shape[0]
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        row_bytes = None if support is None else -(-V // 32) * 4
        ranks, cut, launcher = 1 if group is None else group.size(), _cut(call), launcher_for(call.hidden.device)
        pieces = vocab_parallel.pieces(V, ranks)
        rows = RowShape(N, V, T, call.softcap, call.mask is not None, row_bytes)
        self.head = Head(
            launcher, call.hidden, call.weight, rows, bias=call.bias is not None, lora=call.lora,
            scale=float(call.logit_scale), moment=call.entropy, plan=cut._replace(save=cut.save and keep),
            pieces=pieces,
        )  # fmt: skip
        self._quantized = None if isinstance(call.weight, Tensor) else call.weight.flatten()[1]
        self._inner = None
        if call.lora is not None:
            self._inner, self._lora_scale = InnerProduct(launcher, call.hidden, call.lora, cut.block), call.lora.scale
        whole = V if group is None else NOWHERE
        self._merge = MergeSoftmax(
            launcher, rows, whole, ranks * pieces[0], shape, call.hidden.device, keep=keep,
            moment=call.entropy,
        )  # fmt: skip
        listed = listed_shape(call.ids, call.hidden) is not None
        self._several = SeveralIds(launcher, call, rows, whole) if listed else None
        self._keep, self._rest = keep, 0 if keep else SAVED_PLANES * N
        self._group, self._shape, self._T_given, self._partial = group, shape, T is None, call.partial_grad
        self._supported, self._masked = support is not None, call.mask is not None
        self._ids_as_they_are = flat_ids(call.ids).is_contiguous()
        self._mask_as_it_is = call.mask is None or call.mask.is_contiguous()
        self._bias_as_it_is = call.bias is None or call.bias.is_contiguous()
        self._T_as_it_is = is_per_row(call.temperature, shape)

    def forward(self, call: LinearLogprobCall) -> tuple[LogprobResult, Operands, Tensor, HeadStats, Several | None]:
        """The result, the operands as kernels read them, and what the gradient needs of the rows and of listed ids."""
        group, head, several, bias = self._group, self.head, self._several, self._bias(call.bias)
        given, mask, T, offset, order, kept = call.ids, call.mask, None, None, None, None
        ids = flat_ids(given)
        if not self._ids_as_they_are:
            ids = ids.contiguous()
        if self._masked:
            mask = mask.reshape(-1) if self._mask_as_it_is else mask.contiguous().view(-1)  # type: ignore[union-attr]
            order = RowOrder.of(mask)
        if self._T_given:
            T = self._temperatures(call.temperature)  # type: ignore[arg-type]  # a tensor
        if group is not None:
            shard = vocab_parallel.locate(group, head.V, head.N, head.D, call.hidden.device)
            ids = ids_of_group(ids, shard.V, several=several is not None)
            offset = shard.offset
            kept = support_bitmask(call.support, head.V, shard.V, shard.offset) if self._supported else None  # type: ignore[arg-type]
        elif self._supported:
            kept = support_bitmask(call.support, head.V)  # type: ignore[arg-type]  # it is there
        listed = Lists(ids, given.offsets.contiguous() if is_ragged(given) else None)
        y, lora = None, call.lora
        inner = None if self._inner is None or lora is None else self._inner(call.hidden, lora)
        if several is not None:
            here, low_rank = several.local(listed, offset), (inner, None if lora is None else lora.B)
            y = several.logits(call.hidden, stored_head(call), bias, low_rank, here, mask)
            ids = several.rows.chosen(listed, mask, y)
        local = ids if offset is None else ids - offset
        inner = inner if inner is None or order is None else inner[order.index]
        of = Operands(call.hidden, call.weight, bias, RowTensors(local, T, None, kept), order, lora, inner)
        stats = head.statistics(of, self._rest)
        every = stats.merged
        if group is not None:
            own = every[: head.planes * head.N * head.pieces].view(head.planes, head.N, head.pieces)
            every = vocab_parallel.gathered(own, group).permute(1, 2, 0, 3).contiguous()
        whole = RowTensors(ids, T, mask, kept)
        row = self._merge(every, whole, None if self._keep else stats.spare)
        values, invalid, many = row.logprob, row.invalid, None
        if several is not None and y is not None:
            values, invalid = several.rows.results(listed, whole, y, row, flat_ids(given).shape)
            here = listed._replace(ids=flat_ids(given)) if group is None else here
            many = Several(here, local, row.invalid, y)
        result = filled(
            LogprobResult, logprob=values, lse=row[1], entropy=row[2], log_kept_mass=row[3], invalid=invalid
        )
        return result, of, row.saved, stats, many

    def backward(self, saved: Saved, grads: Saved, wanted: tuple[bool, ...]) -> Saved:
        """The gradients of hidden, weight, bias, A and B that are wanted."""
        hidden, weight, bias, A, B, T, ids, offsets, invalid, index, count, *rest = saved
        bits, bad, stats, logits, tile_max, chosen, y, *parts = rest
        head: Tensor | QuantTensor | None = weight
        if self._quantized is not None:
            head = QuantTensor.unflatten(parts, self._quantized)  # type: ignore[arg-type]  # all are there
        if hidden is None or head is None or ids is None or invalid is None or stats is None:
            raise RLKernelError("linear_logprob: its backward pass got less than its forward pass saved")
        ids = ids if self._ids_as_they_are else ids.contiguous()
        rows = RowTensors(
            ids if chosen is None else chosen, None if T is None else self._temperatures(T), None,
            None if bits is None else SupportBitmask(bits, bad),  # type: ignore[arg-type]  # both are there
        )  # fmt: skip
        order = None if index is None else RowOrder(index, count)  # type: ignore[arg-type]
        lora, inner = None, None
        if A is not None and B is not None and self._inner is not None:
            lora = LoRA(A, B, self._lora_scale)
            inner = self._inner(hidden, lora)
            inner = inner if order is None else inner[order.index]
        of = Operands(hidden, head, self._bias(bias), rows, order, lora, inner)
        kept = SavedRows(invalid, stats, logits, tile_max)
        put, several = None, self._several
        if several is not None and y is not None:
            listed = Listed(Lists(ids, offsets), y)
            found = several.rows.gradient(listed, rows, stats, grads)
            if found is not None:
                grads, put = (found.sums, *grads[1:]), several.rows.putting(listed, found, of.at())
        return self.head.gradients(of, kept, grads, wanted, self._group, put, partial=self._partial)

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return bias if self._bias_as_it_is else bias.contiguous()  # type: ignore[union-attr]  # it is there

    def _temperatures(self, T: Tensor) -> Tensor:
        found: Tensor = T if self._T_as_it_is else per_row(T, self._shape)  # type: ignore[assignment]  # a tensor
        return found


def matrices(call: LinearLogprobCall) -> tuple[Tensor | None, Tensor | None]:
    """A and B of LoRA."""
    return (None, None) if call.lora is None else (call.lora.A, call.lora.B)


def _cut(call: LinearLogprobCall) -> memory.Plan:
    return memory.plan(call.backward, call.max_workspace_bytes, _size(call))
