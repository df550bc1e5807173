"""Tiles of logits out of hidden states and an output head, and the matmuls that lead back.

Every matmul has one shape, a block of `ROWS` rows (the last one filled up with zeros) by a tile of the vocabulary:
libraries choose the order of their sums by shape, so a row's bits do not depend on how many rows there are.

A low-rank addition makes the operands wider: h W^T + s (h A^T) B^T = [h, s h A^T] [W, B]^T. So blocks have the columns
s h A^T after those of hidden, and tiles those of B after those of weight, and one product is the sum of both.

Legend: N rows · D hidden · V vocabulary · R rows of a block · w ids of a tile · r rank of the low-rank addition, or 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernel_common.precision import full_precision
from rlkernel_common.row_statistics import tile_width
from rlkernel_common.row_views import take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.quant import layouts
from rlkernel_core.quant.convert import decode_rows
from rlkernel_core.quant.tensor import QuantTensor, check_layout
from rlkernel_core.spec.qmatmul import LoRA

ROWS = 64  # rows of a block: the smallest at which a CPU matmul of [R, D] x [D, 1024] runs near full speed


COLUMNS = 16  # below so many, a row's place shows in its bits (seen at 2, 3 and 7 columns, not at 16)


def stored(weight: Tensor | QuantTensor) -> Tensor | None:
    """A head that is a tensor; None for a quantized one."""
    return weight if isinstance(weight, Tensor) else None


def readable_head(weight: Tensor | QuantTensor) -> Tensor | QuantTensor:
    """A head as `Head` reads it: a quantized one is unpacked.

    Raises:
        LayoutError: it is packed for another implementation.
    """
    if isinstance(weight, Tensor):
        return weight
    check_layout("weight", weight, layouts.KNOWN)
    return layouts.unpack(weight)


class Head(NamedTuple):
    """The operands of the logits; operands are brought to the accumulator's type block by block."""

    hidden: Tensor  # [N, D], or [..., D] of any layout
    weight: Tensor | QuantTensor  # [V, D]; a quantized one is canonical
    bias: Tensor | None  # [V]
    scale: float
    active: Tensor | None  # [n] rows that are worked on, ascending; None: all
    counted: Tensor | None  # [n] bool, rows to be taken as zeros where it is False; None: none
    dtype: torch.dtype  # of all arithmetic
    piece: int | None = None  # ids after which a tile begins anew; None: nowhere
    lora: LoRA | None = None  # its B is this head's: [V, r]
    vocab: int | None = None  # V, where weight, bias and B have more rows

    @property
    def D(self) -> int:  # noqa: N802  as in the legend
        """Hidden size."""
        return self.hidden.shape[-1]

    @property
    def width(self) -> int:
        """Columns of blocks and tiles, D + r."""
        return self.D + (0 if self.lora is None else self.lora.A.shape[0])

    @property
    def n(self) -> int:
        """Number of rows that are worked on."""
        return self.hidden.shape[:-1].numel() if self.active is None else self.active.shape[0]

    def rows(self) -> Iterator[slice]:
        """Blocks of rows."""
        return (slice(r, min(r + ROWS, self.n)) for r in range(0, self.n, ROWS))

    def place(self, rows: slice) -> slice | Tensor:
        """Where a block's rows stand among all N."""
        return rows if self.active is None else self.active[rows]

    def tiles(self) -> Iterator[slice]:
        """Tiles of the vocabulary."""
        V = self.vocab or self.weight.shape[0]
        w = tile_width(V)
        piece = V if self.piece is None else self.piece
        begins = ((v, min(v + piece, V)) for v in range(0, V, piece))
        return (slice(v, min(v + w, end)) for begin, end in begins for v in range(begin, end, w))

    def block(self, rows: slice) -> Tensor:
        """[R, D + r] of hidden, and of its product with A; zeros below the last row."""
        some = take(self.hidden, self.place(rows))
        if self.counted is not None:
            some = torch.where(self.counted[rows, None], some, 0.0)
        return self._wide(some)

    def at(self, rows: Tensor) -> Tensor:
        """The same of up to R rows, counted among all N, whether they are worked on or not."""
        return self._wide(take(self.hidden, rows))

    def _wide(self, some: Tensor) -> Tensor:
        x = torch.zeros(ROWS, self.D, dtype=self.dtype, device=self.hidden.device)
        x[: some.shape[0]] = some
        if self.lora is None:
            return x
        return torch.cat((x, self.lora.scale * product(x, self._factor(self.lora).T)), 1)

    def tile(self, ids: slice | Tensor) -> Tensor:
        """[w, D + r] of weight, and of B."""
        if isinstance(self.weight, Tensor):
            rows = self.weight[ids]
        elif isinstance(ids, slice):
            rows = decode_rows(self.weight, ids.start, ids.stop)
        else:
            raise RLKernelError("a quantized head is decoded by ranges of its rows")
        if self.lora is None:
            return rows.to(self.dtype).contiguous()
        return torch.cat((rows.to(self.dtype), self.lora.B[ids].to(self.dtype)), 1)

    def to_hidden(self, dx: Tensor) -> Tensor:
        """[R, D] gradient of hidden, from that of a block [R, D + r]."""
        if self.lora is None:
            return dx
        return dx[:, : self.D] + product(self.lora.scale * dx[:, self.D :], self._factor(self.lora))

    def add_to_factor(self, into: Tensor, dx: Tensor, x: Tensor) -> None:
        """Add to the gradient of A, [r, D], from that of a block and the block."""
        if self.lora is not None:
            with full_precision(x):
                into += self.lora.scale * (dx[:, self.D :].T @ x[:, : self.D])

    def _factor(self, lora: LoRA) -> Tensor:
        return lora.A.to(self.dtype).contiguous()

    def logits(self, x: Tensor, ids: slice) -> Tensor:
        """[R, w] logits of a block, before the cap."""
        y = product(x, self.tile(ids).T)
        if self.bias is not None:
            y += self.bias[ids]
        return y.mul_(self.scale)


def product(a: Tensor, b: Tensor) -> Tensor:
    """[R, k] @ [k, n], in which the bits of a row do not depend on its place.

    MKL has paths of its own for few columns, and in float64 for rows that begin at no multiple of 16 bytes. These sum
    some rows in another order; zeros fill them up.
    """
    (k, n), even = b.shape, 2 if a.dtype == torch.float64 else 1
    more, wide = -k % even, max(COLUMNS - n, -n % even)
    if more or wide:
        a, b = pad(a, (0, more)), pad(b, (0, wide, 0, more))
    with full_precision(a):
        y = a @ b
    return y[:, :n].contiguous() if wide else y


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `product(a, b)` in place."""
    if b.shape[1] >= COLUMNS and a.dtype != torch.float64:
        into.addmm_(a, b)
    else:
        into += product(a, b)
