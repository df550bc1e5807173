"""An output head on the device: operands as the kernels read them, and the launches.

Legend: N rows · V vocabulary · D hidden.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel_common.vocab_parallel import gathered
from rlkernel_cuda import driver, variants
from rlkernel_cuda.logits_kernel import GRAD, SAVE, STATS, logits_kernel
from rlkernel_cuda.plan import COLS, ROWS, round_up
from rlkernel_cuda.row_kernels import (
    chosen_kernel,
    clear_kernel,
    coefficient_kernel,
    gather_kernel,
    join_kernel,
    saved_kernel,
    scatter_kernel,
)
from rlkernel_cuda.variants import Tile
from rlkernel_triton.launch import FUSED, on_device_of

SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("pair.cuh", "head.cu"))
SAVED: Final = (4, 16)  # tiles that a program of the saved logits' kernel takes at a time, and how many times
LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True)
class Head:
    """Operands and rows of one call, in the order in which they are worked on: rows that count first."""

    TENSORS: ClassVar[int] = 9  # fields that autograd keeps

    x: Tensor  # [N, D] bf16, 16-byte rows
    w: Tensor  # [V, D] bf16, 16-byte rows
    bias: Tensor | None  # [V] fp32
    target: Tensor  # [N] int32; -1: none
    row_scale: Tensor  # [N] a logit times this is in base-2 units
    inverse: Tensor  # [N] logit_scale / T
    count: Tensor | None  # [] int32: rows that count; None: all
    place: Tensor | None  # [N] which row of the caller each one is
    position: Tensor | None  # [N] where each row of the caller stands
    D: int  # columns of the caller's operands; those of x and w may be filled up with zeros
    softcap: float | None
    logit_scale: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that autograd should keep."""
        return tuple(getattr(self, f.name) for f in fields(self)[: self.TENSORS])

    @classmethod
    def of(cls, tensors: tuple[Any, ...], D: int, softcap: float | None, logit_scale: float) -> Head:
        """From what `tensors` gave."""
        return cls(*tensors, D=D, softcap=softcap, logit_scale=logit_scale)


@dataclass(frozen=True)
class Law:
    """What each row says, [N], in the head's order."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    lse2: Tensor  # in base-2 units
    mean2: Tensor  # the mean of the logits under the law, in base-2 units
    missed: Tensor  # 1 - p of the chosen id
    chosen: Tensor  # the chosen id's logit

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return tuple(getattr(self, f.name) for f in fields(self))


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


def order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that count first: their number, the row at each place, and the place of each row; nothing waits."""
    before = mask.cumsum(0)
    count = before[-1]
    index = torch.arange(mask.shape[0], device=mask.device)
    position = torch.where(mask, before - 1, count + index - before)
    return count.to(torch.int32), torch.empty_like(position).scatter_(0, position, index), position


def gather_rows(x: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """[N, D] in the order of `place`, zeros from `count` on."""
    rows, D = x.shape
    out = x.new_empty(rows, round_up(D, 8))
    grid = (rows, triton.cdiv(out.shape[1], 1024))
    x = x if x.stride(1) == 1 else x.contiguous()
    with on_device_of(x):
        gather_kernel[grid](x, place, count, out, D, x.stride(0), out.stride(0), COLS=1024, **FUSED)
    return out


def head_of(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    ids: Tensor,  # [N]; -1: none
    T: Tensor,  # [N]
    mask: Tensor | None,  # [N]
    softcap: float | None,
    logit_scale: float,
) -> Head:
    """The operands of a call as the kernels read them; rows that count are gathered."""
    target, place, position, count = ids.to(torch.int32), None, None, None
    if mask is not None:
        count, place, position = order(mask)
        x = gather_rows(hidden, place, count)
        target, T = target[place], torch.where(mask, T, 1.0)[place]
    else:
        x = readable(hidden)
    return Head(
        x=x,
        w=readable(weight),
        bias=None if bias is None else bias.to(torch.float32, copy=True).contiguous(),
        target=target,
        row_scale=(LOG2E if softcap is not None else LOG2E * logit_scale) / T,
        inverse=logit_scale / T,
        count=count,
        place=place,
        position=position,
        D=hidden.shape[1],
        softcap=softcap,
        logit_scale=logit_scale,
    )


def room_to_save(head: Head, rows: int, numbers: int) -> tuple[Tensor, Tensor]:
    """[rows, pitch] for fp16(y - tile max), out of a buffer of `numbers` or more, and [tiles, rows] for the maxima."""
    V = head.w.shape[0]
    pitch = round_up(V, 8)
    buffer = head.x.new_empty(max(numbers, rows * pitch))
    tops = head.row_scale.new_empty(triton.cdiv(V, COLS), round_up(rows, ROWS))
    return buffer[: rows * pitch].view(rows, pitch), tops


def scatter_rows(x: Tensor, head: Head, first: int, out: Tensor) -> None:
    """Rows of x, [n, D], that stand at `first` and after, to where they belong in out, [N, D]; 0 where masked."""
    if head.place is None:
        out[first : first + x.shape[0]] = x
        return
    grid = (x.shape[0], triton.cdiv(x.shape[1], 1024))
    with on_device_of(x):
        scatter_kernel[grid](
            x, head.place[first:], head.count, first, out, x.shape[1], x.stride(0), COLS=1024, **FUSED
        )  # fmt: skip


def _described(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, cols], gl.NVMMASharedLayout(128, 16, 2))


def _launch(
    head: Head, mode: int, rows: slice, ids: slice, tile: Tile, out: Tensor | None, vectors: dict[str, Any], stride: int
) -> None:
    x, w = head.x[rows], head.w[ids]
    anything = head.row_scale  # an argument that this mode does not read still needs a pointer
    c = 1.0 if head.softcap is None else float(head.softcap)
    given = {
        "target": head.target[rows],
        "bias": anything if head.bias is None else head.bias[ids],
        "row_scale": head.row_scale[rows],
        **dict.fromkeys(("tops", "sums", "chosen", "coef"), anything),
        **vectors,
        "count": head.target if head.count is None else head.count,
        "first_row": rows.start,
        "N": x.shape[0],
        "V": w.shape[0],
        "stride": stride,
        "cap": c,
        "cap_in": 2.0 * LOG2E * head.logit_scale / c,
        "k_tiles": triton.cdiv(x.shape[1], tile.depth),
    }
    flags = {
        "MODE": mode,
        "BIAS": head.bias is not None,
        "CAP": head.softcap is not None,
        "COUNTED": head.count is not None,
    }
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    if tile.cluster == 1:
        _launch_single(x, w, out, tile, blocks, given, flags)
    else:
        _launch_pair(x, w, out, tile, blocks, given, flags)


def _launch_single(
    x: Tensor, w: Tensor, out: Tensor | None, tile: Tile, blocks: int, given: dict[str, Any], flags: dict[str, Any]
) -> None:
    """The kernel of logits_kernel.py."""
    logits_kernel[(blocks,)](
        _described(x, tile.rows, tile.depth),
        _described(w, tile.cols, tile.depth),
        _described(x, tile.rows, tile.depth) if out is None else _described(out, tile.rows, tile.cols // 2),
        **given,
        NC=tile.consumers,
        BM=tile.rows,
        BN=tile.cols,
        BK=tile.depth,
        STAGES=tile.stages,
        GROUP_M=tile.group,
        **flags,
        num_warps=4,
        **FUSED,
    )


def _launch_pair(
    x: Tensor, w: Tensor, out: Tensor | None, tile: Tile, blocks: int, given: dict[str, Any], flags: dict[str, Any]
) -> None:
    """The kernel of head.cu; its arguments stand in the order of `given`."""
    rows = tile.consumers * tile.rows
    shared = tile.stages * (rows + tile.cols) * tile.depth * 2
    options = tuple(f"-D{n}={int(v)}" for n, v in {**flags, **driver.shape(tile)}.items())
    kernel = driver.function(SOURCES, options, "head", shared, x.device.index)
    pitch = {"pitch": 0 if out is None else out.stride(0)}
    numbers = {**given, **pitch}
    order = (
        "target", "bias", "row_scale", "tops", "sums", "chosen", "coef", "count", "first_row", "N", "V", "stride",
        "pitch", "cap", "cap_in", "k_tiles",
    )  # fmt: skip
    arguments = [driver.described(x, rows, tile.depth), driver.described(w, tile.cols // 2, tile.depth)]
    arguments += [given["target"] if out is None else out]
    for name in order:
        value = numbers[name]
        kind = ctypes.c_float if isinstance(value, float) else ctypes.c_int
        arguments.append(value if isinstance(value, Tensor) else kind(value))
    driver.launch(kernel, blocks // 2 * 2, 384, shared, arguments)


class Ranks(NamedTuple):
    """The other shards of a vocabulary."""

    group: dist.ProcessGroup
    target: Tensor  # [N] ids in the whole vocabulary, in the head's order; -1: none


def statistics(
    head: Head,
    launch_rows: int,
    saved: Tensor | None = None,
    tops: Tensor | None = None,
    ranks: Ranks | None = None,
) -> Law:
    """The law of every row; logits are saved as fp16(y - tile max) where there is room for them.

    Args:
        head: the operands.
        launch_rows: rows of one launch, which bounds the memory of the partial sums.
        saved: [N, pitch] of 16 bits each, or None.
        tops: [tiles, N] fp32 tile maxima beside `saved`.
        ranks: those that hold the rest of the vocabulary. Each is then what a tile is within a rank: one all-gather of
            four numbers a row, joined in rank order by the kernel that joins tiles.
    """
    N, V = head.x.shape[0], head.w.shape[0]
    tiles = triton.cdiv(V, COLS)
    law = Law(*torch.empty(7, round_up(N, ROWS), dtype=torch.float32, device=head.x.device)[:, :N])
    most = min(launch_rows, N)
    sums = torch.empty(2 * tiles * most, dtype=torch.float32, device=head.x.device)
    own_tops = torch.empty(tiles * most, dtype=torch.float32, device=head.x.device) if tops is None else None
    with on_device_of(head.x):
        for first in range(0, N, launch_rows):
            rows = slice(first, min(first + launch_rows, N))
            n = rows.stop - rows.start
            top, stride = (own_tops, n) if tops is None else (tops[0, first:], tops.stride(0))
            vectors = {"tops": top, "sums": sums, "chosen": law.chosen[rows]}
            out = None if saved is None else saved[rows, :V].view(torch.float16)
            _launch(head, STATS if saved is None else SAVE, rows, slice(0, V), variants.FORWARD, out, vectors, stride)
            _join(head, law, rows, head.target, top, sums, tiles, stride, part=ranks is not None)
        if ranks is not None:
            chosen = torch.where(head.target >= 0, law.chosen, -torch.inf)
            every = gathered(torch.stack((law.logprob, law.lse, law.entropy, chosen)), ranks.group)  # [ranks, 4, N]
            law.chosen.copy_(every[:, 3].amax(0))
            top, sums = every[:, 0].contiguous(), every[:, 1:3].contiguous()
            _join(head, law, slice(0, N), ranks.target, top, sums, len(every), N, part=False)
    return law


def _join(
    head: Head,
    law: Law,
    rows: slice,
    target: Tensor,
    tops: Tensor,
    sums: Tensor,
    tiles: int,
    stride: int,
    *,
    part: bool,
) -> None:
    n = rows.stop - rows.start
    results = [x[rows] for x in law.tensors()[:6]]
    join_kernel[(triton.cdiv(n, 32),)](
        tops, sums, law.chosen[rows], target[rows], head.row_scale[rows], *results, n, tiles, stride,
        ROWS=32, TILES=32, PART=part, num_warps=4, **FUSED,
    )  # fmt: skip


def coefficients(head: Head, law: Law, upstream: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """[4, N] what makes the gradient of a row's logits, from the gradients of (logprob, lse, entropy), each [N]."""
    N = head.x.shape[0]
    coef = torch.empty(4, round_up(N, ROWS), dtype=torch.float32, device=head.x.device)[:, :N]
    with on_device_of(head.x):
        coefficient_kernel[(triton.cdiv(N, 256),)](
            *upstream, law.chosen, head.row_scale, head.inverse, law.logprob, law.lse2, law.mean2,
            law.missed, coef, head.target if head.count is None else head.count, N, coef.stride(0),
            float(head.softcap or 1.0), CAP=head.softcap is not None, COUNTED=head.count is not None, ROWS=256, **FUSED,
        )  # fmt: skip
    return coef


def made_again(head: Head, coef: Tensor, rows: slice, ids: slice, dz: Tensor) -> None:
    """The gradient of a block of rows' logits of a slice of the vocabulary, into dz, [n, width]."""
    n, width = dz.shape
    with on_device_of(head.x):
        _launch(head, GRAD, rows, ids, variants.GRADIENT, dz, {"coef": coef[0, rows.start :]}, coef.stride(0))
        if head.count is not None:
            grid = (triton.cdiv(n, 64), triton.cdiv(width, 256))
            clear_kernel[grid](
                dz, head.count, rows.start, n, dz.stride(0), width, BM=ROWS, ROWS=64, COLS=256, **FUSED
            )  # fmt: skip
        _put_chosen(head, coef, rows, ids.start, dz)


def from_saved(head: Head, coef: Tensor, saved: Tensor, tops: Tensor) -> Tensor:
    """The gradient of the saved logits, in place: [N, V]."""
    N, V = head.x.shape[0], head.w.shape[0]
    tiles, loop = SAVED
    grid = (N, triton.cdiv(V, COLS * tiles * loop))
    count = head.target if head.count is None else head.count
    with on_device_of(head.x):
        saved_kernel[grid](
            saved, tops, head.row_scale, coef, count, V, saved.stride(0), tops.stride(0), coef.stride(0),
            float(head.softcap or 1.0), BN=COLS, TILES=tiles, LOOP=loop, CAP=head.softcap is not None,
            COUNTED=head.count is not None, num_warps=4, **FUSED,
        )  # fmt: skip
        _put_chosen(head, coef, slice(0, N), 0, saved[:, :V])
    return saved[:, :V]


def _put_chosen(head: Head, coef: Tensor, rows: slice, first: int, dz: Tensor) -> None:
    n, width = dz.shape
    chosen_kernel[(triton.cdiv(n, 256),)](
        dz, head.target[rows], coef[3, rows.start :], head.target if head.count is None else head.count, rows.start, n,
        dz.stride(0), first, width, ROWS=256, COUNTED=head.count is not None, **FUSED,
    )  # fmt: skip
