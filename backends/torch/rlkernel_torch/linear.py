"""linear@1 in plain torch: blocks of rows, all of one height, times tiles of the weight, in fp32 and rounded once.

Libraries choose the order of their sums by shape, so rows are multiplied in blocks of `ROWS`, the last of which is
filled up with zeros: a row's bits do not depend on how many rows there are. The order is the library's and has no name.

With `split`, every product is made chunk by chunk of the dimension that is split, since a library's order depends on
all sizes. Sums over that dimension are gathered over the ranks and added in the order of the chunks. The bits are those
of any number of ranks, and others than without `split`.

Extra memory is one fp32 copy of x, a tile of the weight and the fp32 result. Where torch uses TF32 for fp32 products
(`torch.backends.cuda.matmul.allow_tf32`), so does this backend.

Legend: M rows · S columns that are summed over · C columns of a product.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from rlkernel_common.precision import full_precision
from rlkernel_common.row_statistics import accumulator
from rlkernel_common.row_views import shaped
from rlkernel_common.vocab_parallel import gathered
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.linear import CHUNKS, LinearCall

ROWS = 64  # of a block: the fewest at which a CPU's product runs near full speed
GRAIN = 16  # columns and inputs are filled up to a multiple: seen to differ at 11 columns, and at 17 inputs
TILE = 4096  # columns of a product whose operand is brought to fp32 at once


def linear(call: LinearCall) -> Tensor:
    """See `rlkernel_core.spec.linear.LinearCall`."""
    if gradient_wanted("linear", call):
        return LinearPair(call)(call)
    with torch.no_grad():
        return _forward(call)


class LinearPair(Pair[LinearCall, Tensor]):
    """The product, and its gradients."""

    op = "linear"

    def __init__(self, call: LinearCall) -> None:
        """Keep how the weight is split."""
        super().__init__(call)
        self._split = Split.of(call)

    def forward(self, call: LinearCall) -> tuple[Tensor, Saved]:
        """The result; x is saved for the weight's gradient, the weight for that of x."""
        return _forward(call), _saved(call, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Dx = g weight, dweight = g^T x, dbias the sum of g over the rows, dresidual = g."""
        (x, weight), (g,) = saved, grads
        if g is None:
            raise RLKernelError("linear: its backward pass got no gradient")
        of_x, of_weight, of_bias, of_residual = self.wanted
        state, rows = accumulator(g), g.reshape(-1, g.shape[-1])
        d_x = d_weight = d_bias = None
        if of_x and weight is not None:
            d_rows = self._split.product(rows, weight.contiguous(), over="column")
            d_x = d_rows.to(g.dtype).reshape(*g.shape[:-1], weight.shape[1])
        if of_weight and x is not None:
            with full_precision(g):
                d_weight = self._split.outer(rows.to(state), x.reshape(-1, x.shape[-1]).to(state)).to(g.dtype)
        if of_bias:
            d_bias = self._split.rows_sum(rows, state).to(g.dtype)
        return d_x, d_weight, d_bias, g.clone() if of_residual else None

    @classmethod
    def saved_like(cls, call: LinearCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments alone."""
        del result
        return _saved(call, wanted)


def _saved(call: LinearCall, wanted: tuple[bool, ...]) -> Saved:
    return call.x if wanted[1] else None, call.weight if wanted[0] else None


def _forward(call: LinearCall) -> Tensor:
    x = call.x
    y = Split.of(call).product(x.reshape(-1, x.shape[-1]), call.weight.contiguous().t(), over="row")
    if call.bias is not None:
        y += call.bias
    if call.residual is not None:
        y += call.residual.reshape(y.shape)
    return shaped(y.to(x.dtype), torch.Size((*x.shape[:-1], y.shape[1])))


class Split(NamedTuple):
    """How a weight is split over ranks, of which this one has a share."""

    kind: str  # "none", "row", "column"
    size: int  # of a chunk of the dimension that is split; 0 where none is
    group: ProcessGroup | None

    @classmethod
    def of(cls, call: LinearCall) -> Self:
        """That of a call."""
        if call.split == "none":
            return cls("none", 0, None)
        share = call.weight.shape[1 if call.split == "row" else 0]
        return cls(call.split, share * (1 if call.group is None else call.group.size()) // CHUNKS, call.group)

    def product(self, a: Tensor, b: Tensor, *, over: str) -> Tensor:  # [M, S], [S, C] -> [M, C] fp32, or float64
        """A @ b, where S is the dimension that a split of the kind `over` splits, and C that of the other."""
        if self.kind == "none":
            return row_products(a, b)
        # Chunks are copied, since a library may choose its order by the distance between rows too.
        if self.kind != over:
            return torch.cat([row_products(a, some.contiguous()) for some in b.split(self.size, 1)], 1)
        shares = zip(a.split(self.size, 1), b.split(self.size), strict=True)
        sums = torch.stack([row_products(some, other.contiguous()) for some, other in shares])
        total, *others = (sums if self.group is None else gathered(sums, self.group).flatten(0, 1)).unbind()
        total = total.clone()
        for chunk in others:
            total += chunk
        return total

    def outer(self, g: Tensor, x: Tensor) -> Tensor:  # [M, N], [M, K] -> [N, K]
        """The gradient of the weight."""
        if self.kind == "row":
            return torch.cat([g.t() @ some.contiguous() for some in x.split(self.size, 1)], 1)
        if self.kind == "column":
            return torch.cat([some.contiguous().t() @ x for some in g.split(self.size, 1)])
        return g.t() @ x

    def rows_sum(self, g: Tensor, state: torch.dtype) -> Tensor:  # [M, N] -> [N]
        """The gradient of the bias. The order in which a GPU sums rows depends on how many columns there are."""
        chunks = g.split(self.size, 1) if self.kind == "column" else (g,)
        return torch.cat([some.contiguous().sum(0, dtype=state) for some in chunks])


def row_products(a: Tensor, b: Tensor) -> Tensor:  # [M, S], [S, C] -> [M, C] fp32, or float64
    """A product in which the bits of a row do not depend on the others, nor on its place or how many there are.

    A BLAS has paths of its own for what is beyond its vectors, in which a row's place shows: zeros fill all sizes up.
    """
    (M, S), C, state = a.shape, b.shape[1], accumulator(a)
    blocks = a.new_zeros(_filled(M, ROWS), _filled(S, GRAIN), dtype=state)
    blocks[:M, :S] = a
    y = torch.empty(M, C, dtype=state, device=a.device)
    for first in range(0, C, TILE):
        tile = b[:, first : first + TILE].to(state)
        width = tile.shape[1]
        if S % GRAIN or width % GRAIN:
            tile = pad(tile, (0, -width % GRAIN, 0, -S % GRAIN))
        with full_precision(a):
            for row in range(0, M, ROWS):
                some = min(ROWS, M - row)
                y[row : row + some, first : first + width] = (blocks[row : row + ROWS] @ tile)[:some, :width]
    return y


def _filled(n: int, of: int) -> int:
    """The next multiple."""
    return -(-n // of) * of
