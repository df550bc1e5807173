"""The rows of a call that asks for log-probabilities: their shape and tensors, and the launch that merges their parts.

Legend: N rows · V vocabulary · P parts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_triton.common.language import triton
from rlkernel_triton.common.merge_softmax import SAVED_PLANES, WARPS, merge_softmax, rows_per_program
from rlkernel_triton.common.support_bitmask import SupportBitmask
from rlkernel_triton.launchers import Launcher

NOWHERE: Final = 1 << 62  # size of a vocabulary that is split: `ids_of_group` has told which ids lie outside
_ALIGNED: Final = 4  # numbers of 4 bytes in 16


def ids_of_group(ids: Tensor, V: Tensor | int, *, several: bool) -> Tensor:
    """Ids in one dimension, below 0 where they lie outside of [0, V): -1, or -2 where -1 is padding of a list."""
    ids = ids.reshape(-1).to(torch.int64)
    none = torch.where(ids == -1, -1, -2) if several else -1
    return torch.where((ids >= 0) & (ids < V), ids, none)


class RowShape(NamedTuple):
    """What of a call the kernels of its rows are compiled and launched for, beside the layout of logits."""

    N: int
    V: int
    T: float | None  # None: one a row, in a tensor
    softcap: float | None
    masked: bool
    kept_row_bytes: int | None  # None: no support

    @property
    def fixed(self) -> dict[str, Any]:
        """Arguments by name that all kernels of rows take, and those over a head."""
        number = {} if self.T is None else {"T": self.T}
        support = self.kept_row_bytes is not None
        return {**number, "HAS_T": self.T is None, "SUPPORT": support}


class RowTensors(NamedTuple):
    """What a call says of its rows."""

    ids: Tensor  # N, contiguous
    T: Tensor | None = None  # [N] fp32; None: a number
    mask: Tensor | None = None  # N, contiguous
    kept: SupportBitmask | None = None

    # Where a tensor is not there, the kernel gets the pointer of another and does not read it.
    @property
    def mask_or_any(self) -> Tensor:
        """The mask."""
        return self.ids if self.mask is None else self.mask

    @property
    def bits_or_any(self) -> Tensor:
        """The bits of the kept ids, as bytes."""
        return self.ids if self.kept is None else self.kept.bytes

    @property
    def bad_or_any(self) -> Tensor:
        """The rows whose support holds an id that is none."""
        return self.ids if self.kept is None else self.kept.bad

    @property
    def temperatures(self) -> tuple[Tensor, ...]:
        """What a launch is passed for T: nothing where it is a number, which is bound."""
        return () if self.T is None else (self.T,)


class SoftmaxStats(NamedTuple):
    """What the rows say, each of the shape of the ids, and what the gradient needs of it."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None
    invalid: Tensor  # bool
    saved: Tensor  # SAVED_PLANES * N numbers


class MergeSoftmax:
    """The launch that merges the parts of each row, in their order, and says what they mean.

    Args:
        launcher: what binds it.
        rows: of the call.
        whole: size of the whole vocabulary.
        P: parts of a row.
        shape: of the results.
        device: of the results.
        keep: what the gradient needs lies with the results; else the caller gives a place for it.
        moment: whether the entropy is wanted.
    """

    def __init__(
        self, launcher: Launcher, rows: RowShape, whole: int, P: int, shape: torch.Size, device: torch.device, *,
        keep: bool, moment: bool,
    ) -> None:  # fmt: skip
        width = triton.next_power_of_2(P)
        block = rows_per_program(width)
        self._shape, self._device, self._moment = shape, device, moment
        self._mass, self._keep = rows.kept_row_bytes is not None, keep
        self._planes = planes((1, 1, *[1] * moment, *[1] * self._mass, *[SAVED_PLANES] * keep), shape, device)
        self._grid = (triton.cdiv(rows.N, block), 1, 1)
        self._launch = launcher.bind(
            merge_softmax, num_warps=WARPS, **rows.fixed, N=rows.N, P=P, whole=whole, HAS_MASK=rows.masked,
            MOMENT=moment, ROWS=block, WIDTH=width,
        )  # fmt: skip

    def __call__(self, parts: Tensor, of: RowTensors, saved: Tensor | None) -> SoftmaxStats:
        """What [planes, N, P] statistics mean; what the gradient needs goes to `saved` unless it is kept."""
        value, lse, *rest = self._planes()
        if self._keep:
            saved = rest.pop()
        mass = rest.pop() if self._mass else None
        H = rest.pop() if self._moment else None
        invalid = torch.empty(self._shape, dtype=torch.bool, device=self._device)
        if self._grid[0]:
            self._launch(
                self._grid, parts, of.ids, of.mask_or_any, of.bad_or_any, *of.temperatures, value, lse,
                value if H is None else H, value if mass is None else mass, invalid.view(torch.int8), saved,
            )  # fmt: skip
        return SoftmaxStats(value, lse, H, mass, invalid, saved)  # type: ignore[arg-type]  # given where it is not kept


def planes(counts: tuple[int, ...], shape: torch.Size, device: torch.device) -> Callable[[], list[Tensor]]:
    """What allocates fp32 tensors of [count * B, ...] for results of [B, ...], each aligned to 16 bytes.

    One allocation and one split that autograd takes for no views, where the sizes allow it.
    """
    B, *rest = shape or (1,)
    if shape and prod(shape) % _ALIGNED == 0:
        sizes = [count * B for count in counts]
        whole = (sum(sizes), *rest)
        return lambda: list(torch.empty(whole, dtype=torch.float32, device=device).unsafe_split_with_sizes(sizes))
    each = [(count * B, *rest) if shape or count > 1 else shape for count in counts]
    return lambda: [torch.empty(size, dtype=torch.float32, device=device) for size in each]
