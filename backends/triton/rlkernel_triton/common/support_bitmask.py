"""The kept ids of a truncated law as bits, one for each id of each row: V / 8 bytes a row, a sixteenth of bf16 logits.

Made without host synchronization; an id kept twice sets one bit twice.

Legend: N rows · V vocabulary · nnz kept ids in all.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.spec.logprob import Support
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.launchers import plain_launcher_for

ENTRIES: Final = 256  # kept ids that one program places at a time
WARPS: Final = 4


class SupportBitmask(NamedTuple):
    """Which ids each row keeps."""

    bits: Tensor  # [N, B] int32 words of 32 ids, lowest bit first
    bad: Tensor  # [N] bool: a kept id lies outside of the whole vocabulary

    @property
    def bytes(self) -> Tensor:
        """[N, 4 B] uint8."""
        return self.bits.view(torch.uint8)

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row."""
        return 4 * self.bits.shape[1]


@triton.jit(do_not_specialize=["nnz"])
def set_bits(
    ids,  # [nnz] kept ids of all rows
    offsets,  # [N + 1]: those of row i are offsets[i] .. offsets[i + 1]
    first,  # [1] first id of this shard
    bits,  # [N, words] int32, zeros before
    bad,  # [N] int8
    nnz,
    V,  # ids of this shard
    whole,  # [1] size of the whole vocabulary
    words,
    ENTRIES: tl.constexpr,
):
    """Set the bits of one row, and tell whether it holds an id that is none."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(offsets + row).to(tl.int64), 0)
    stop = tl.minimum(tl.load(offsets + row + 1).to(tl.int64), nnz)
    offset = tl.load(first)
    size = tl.load(whole)
    wrong = tl.zeros([ENTRIES], tl.int32)
    for begin in range(start, stop, ENTRIES):
        at = begin + tl.arange(0, ENTRIES)
        inside = at < stop
        id = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        wrong = wrong | (inside & ((id < 0) | (id >= size))).to(tl.int32)
        id -= offset
        here = inside & (id >= 0) & (id < V)
        id = tl.where(here, id, 0)
        tl.atomic_or(bits + row * words + id // 32, (1 << (id % 32)).to(tl.int32), mask=here, sem="relaxed")
    tl.store(bad + row, tl.max(wrong, axis=0).to(tl.int8))


def support_bitmask(
    support: Support, V: int, whole: Tensor | None = None, first: Tensor | None = None
) -> SupportBitmask:
    """Place every kept id.

    Args:
        support: kept ids per row; entries beyond the last offset are ignored.
        V: size of the vocabulary, or of this rank's shard.
        whole: 0-dim, size of the whole vocabulary where it is split over ranks.
        first: 0-dim, first id of this rank's shard.
    """
    offsets, ids = support.offsets.contiguous(), support.ids.contiguous()
    bits, bad = bitmask_like(support, V)
    N, words = bits.zero_().shape
    size = torch.full((), V, dtype=torch.int64, device=ids.device) if whole is None else whole
    begin = torch.zeros((), dtype=torch.int64, device=ids.device) if first is None else first
    if N:
        launch = plain_launcher_for(ids.device).bind(set_bits, num_warps=WARPS, V=V, words=words, ENTRIES=ENTRIES)
        launch((N,), ids, offsets, begin, bits, bad.view(torch.int8), ids.shape[0], size)
    return SupportBitmask(bits, bad)


def bitmask_like(support: Support, V: int) -> SupportBitmask:
    """Room for the bits of a support; nothing is launched."""
    ids, N = support.ids, support.offsets.shape[0] - 1
    return SupportBitmask(ids.new_empty((N, -(-V // 32)), dtype=torch.int32), ids.new_empty(N, dtype=torch.bool))
