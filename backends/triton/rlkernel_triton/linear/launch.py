"""linear@1 on Triton: one launch of a tile a program; for few rows one of a chunk a program, and one that adds them.

Over ranks, each computes the sums of its chunks, all are gathered, and every rank adds them: the same bits once more.

Backward: the same products, dy weight for x and dy^T x for the weight, and torch's sum over rows for the bias.

Legend: M rows · N outputs · K inputs · C columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel_common.vocab_parallel import gathered
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.linear import CHUNKS, GRAIN, LinearCall
from rlkernel_triton.common.device import has_pdl, takes_tma
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, Tile, options_of, tile_of
from rlkernel_triton.common.row_layout import rows_of
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, plain_launcher_for
from rlkernel_triton.linear import kernels
from rlkernel_triton.quant.tile_config import machine

MANY: Final = 4096  # rows from which on the copy engine's products run by 4 warps, two programs a multiprocessor
FEW: Final = 64  # rows for which a product waits for the weight alone
COLUMNS: Final = 512  # of a program that adds chunks
NARROW: Final = 32  # columns of a step, below which memory is read in short pieces


def linear(call: LinearCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearCall) -> Callable[[LinearCall], Tensor]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.linear.LinearCall`."""
    if gradient_wanted("linear", call):
        return LinearPair(call)
    return _Host(call).forward


class Products(Protocol):
    """The products of calls of one shape: the result, and from g, its gradient, those of the operands."""

    def forward(self, call: LinearCall) -> Tensor:
        """The result."""

    def of_x(self, g: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight."""

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""


class LinearPair(Pair[LinearCall, Tensor]):
    """The product, and its gradients."""

    op = "linear"

    def __init__(self, call: LinearCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = self.products(call)

    @staticmethod
    def products(call: LinearCall) -> Products:
        """What multiplies for calls of this shape."""
        return _Host(call)

    def forward(self, call: LinearCall) -> tuple[Tensor, Saved]:
        """The result; x is saved for the weight's gradient, the weight for that of x."""
        return self._host.forward(call), _saved(call, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """dx = g weight, dweight = g^T x, dbias the sum of g over the rows, dresidual = g."""
        (x, weight), (g,) = saved, grads
        if g is None:
            raise RLKernelError("linear: its backward pass got no gradient")
        of_x, of_weight, of_bias, of_residual = self.wanted
        g = g.contiguous()
        d_x = self._host.of_x(g, weight) if of_x and weight is not None else None
        d_weight = self._host.of_weight(g, x) if of_weight and x is not None else None
        d_bias = self._host.of_bias(g) if of_bias else None
        return d_x, d_weight, d_bias, g.clone() if of_residual else None

    @classmethod
    def saved_like(cls, call: LinearCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments alone."""
        del result
        return _saved(call, wanted)


def _saved(call: LinearCall, wanted: tuple[bool, ...]) -> Saved:
    return call.x if wanted[1] else None, call.weight if wanted[0] else None


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LinearCall) -> None:
        x, weight = call.x, call.weight
        (*rows, self._K), self._N = x.shape, weight.shape[0]
        self._rows, self._M = tuple(rows), x.numel() // self._K
        self._plan = Plan(launcher_for(x.device))
        layout = rows_of(torch.empty_strided(x.shape, x.stride(), device="meta")).layout
        # Rows with one stride between them are read in place; others are copied together.
        self._copied = layout.inner < self._M
        self._x = (self._K, 1) if self._copied else (layout.inner_stride, layout.stride)
        self._weight = (weight.stride(0), weight.stride(1))
        self._tma = not self._copied and takes_chunks_by_tma(self._flat(x), weight)
        self._group, several = call.group, call.group is not None and call.group.size() > 1
        self._shared_y, self._shared_dx = several and call.split == "row", several and call.split == "column"
        ranks = 1 if call.group is None else call.group.size()
        self._chunks = CHUNKS // ranks if call.split == "column" else 1

    def forward(self, call: LinearCall) -> Tensor:
        """The result."""
        y = torch.empty((*self._rows, self._N), dtype=call.x.dtype, device=call.x.device)
        if self._M:
            residual = None if call.residual is None else call.residual.contiguous()
            bias = None if call.bias is None else call.bias.contiguous()
            given = (bias is not None, residual is not None)
            sizes = Sizes(self._M, self._N, self._K)
            if self._shared_y:
                shared = self._shared("forward", call.x, sizes, self._x, self._weight, given)
                shared(self._lying(call.x), call.weight, bias, residual, y)
            elif self._tma:
                by_tma = self._plan.get("forward", lambda _: TmaProduct(call.x, sizes, given))
                by_tma(self._flat(call.x), call.weight, bias, residual, y)
            else:
                product = self._product("forward", call.x, sizes, self._x, self._weight, given)
                product(self._lying(call.x), call.weight, bias, residual, y)
        return y

    def of_x(self, g: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""
        d_x = torch.empty((*self._rows, self._K), dtype=g.dtype, device=g.device)
        if self._M:
            given = g, Sizes(self._M, self._K, self._N), (self._N, 1), self._weight[::-1]
            if self._shared_dx:
                self._shared("x", *given, any_alignment=("a",))(g, weight, None, None, d_x)
            else:
                self._product("x", *given, any_alignment=("a",))(g, weight, None, None, d_x)
        return d_x

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight."""
        if not self._M:
            return torch.zeros(self._N, self._K, dtype=g.dtype, device=g.device)
        d_weight = torch.empty(self._N, self._K, dtype=g.dtype, device=g.device)
        sizes = Sizes(self._N, self._K, self._M)
        product = self._product("weight", g, sizes, (1, self._N), self._x[::-1], any_alignment=("a",))
        product(g, self._lying(x), None, None, d_weight)
        return d_weight

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return gradient_of_bias(g, self._N, self._chunks)

    def _product(
        self, place: str, like: Tensor, sizes: Sizes, a: tuple[int, int], b: tuple[int, int],
        given: tuple[bool, bool] = (False, False), any_alignment: Collection[str] = (),
    ) -> Product:  # fmt: skip
        def bound(launcher: Launcher) -> Product:
            return Product(launcher, like, sizes, a, b, given, any_alignment)

        return self._plan.get(place, bound)

    def _shared(
        self, place: str, like: Tensor, sizes: Sizes, a: tuple[int, int], b: tuple[int, int],
        given: tuple[bool, bool] = (False, False), any_alignment: Collection[str] = (),
    ) -> SharedProduct:  # fmt: skip
        assert self._group is not None
        group = self._group

        def bound(launcher: Launcher) -> SharedProduct:
            return SharedProduct(launcher, like, sizes, a, b, given, any_alignment, group)

        return self._plan.get(place, bound)

    def _lying(self, x: Tensor) -> Tensor:
        """x with the strides of `_x`."""
        return x.contiguous() if self._copied else x

    def _flat(self, x: Tensor) -> Tensor:
        """A view of x as [M, K]."""
        return x.as_strided((self._M, self._K), self._x)


def gradient_of_bias(g: Tensor, N: int, chunks: int = 1) -> Tensor:
    """[N] sums over rows. The order in which torch adds them depends on how many columns there are."""
    parts = g.reshape(-1, N).chunk(chunks, 1)
    return torch.cat([some.contiguous().sum(0, dtype=torch.float32) for some in parts]).to(g.dtype)


class Sizes(NamedTuple):
    """[M, K] times [K, C]."""

    M: int
    C: int
    K: int


def chunk_of(K: int) -> int:
    """Columns of a chunk: K / 8 where that is a multiple of 16, so that eight ranks may each own one."""
    return GRAIN * -(-K // (CHUNKS * GRAIN))


def tile_of_chunks(like: Tensor, kind: str, K: int) -> Tile:
    """The tile of a kind of kernel that sums over K: with many rows, steps are halved where they then need no masks.

    Few rows wait for the weight, which longer steps bring faster than masks cost (an H200: 131 us to 144).
    """
    tile, chunk = tile_of(like, like, kind), chunk_of(K)
    half = tile.BK // 2
    if kind == "chunks small_m" or K % chunk or chunk % tile.BK == 0 or chunk % half or half < NARROW:
        return tile
    # As many bytes are on their way as before, but on AMD GPUs, whose compiler knows two stages.
    return tile._replace(BK=half, num_stages=tile.num_stages * (2 if tile.num_stages > 2 else 1))


def whole(K: int, tile: Tile) -> bool:
    """Whether chunks are whole steps, and K is whole chunks."""
    chunk = chunk_of(K)
    return K % chunk == 0 and chunk % tile.BK == 0


class Product:
    """a [M, K] times b [K, C] for calls of one shape.

    Args:
        launcher: what binds the kernels.
        like: a tensor of the dtype and on the device of all.
        sizes: M, C and K.
        a: strides of a, from row to row and from column to column.
        b: strides of b, from column to column and from row to row.
        given: whether there are a bias and a residual.
        any_alignment: operands whose alignment may differ from run to run.
    """

    def __init__(
        self, launcher: Launcher, like: Tensor, sizes: Sizes, a: tuple[int, int], b: tuple[int, int],
        given: tuple[bool, bool], any_alignment: Collection[str],
    ) -> None:  # fmt: skip
        (M, C, K), chunk, cores = sizes, chunk_of(sizes.K), machine(like.device).multiprocessors
        tile = tile_of_chunks(like, "chunks", K)
        tiles = triton.cdiv(M, tile.BM) * triton.cdiv(C, tile.BN)
        if few := M <= FEW or tiles < cores:
            tile = tile_of_chunks(like, "chunks small_m", K)
            tiles = triton.cdiv(M, tile.BM) * triton.cdiv(C, tile.BN)
        parts = triton.cdiv(K, chunk)
        # Few tiles leave multiprocessors without loads in flight; chunk sums of more rows cost more traffic.
        split = few and parts > 1 and (tiles < 2 * cores if M <= FEW else 2 * tiles <= cores)
        self._size, self._grid = parts * M * C, (tiles * (parts if split else 1), 1, 1)
        pdl = split and has_pdl(like)
        self._multiply = multiplication(
            launcher, like, sizes, tile, chunk, a, b, given, any_alignment, split=split, pdl=pdl
        )
        self._add = addition(launcher, sizes, parts, given, pdl=pdl) if split else None

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """Into `out`, [M, C] contiguous."""
        more = (out if bias is None else bias, out if residual is None else residual)
        if self._add is None:
            self._multiply(self._grid, a, b, *more, out)
            return
        parts = torch.empty(self._size, dtype=torch.float32, device=out.device)
        self._multiply(self._grid, a, b, *more, parts)
        self._add(parts, *more, out)


class SharedProduct:
    """`Product` over the ranks of a group, each with its chunks: their sums are gathered, and every rank adds them."""

    def __init__(
        self, launcher: Launcher, like: Tensor, sizes: Sizes, a: tuple[int, int], b: tuple[int, int],
        given: tuple[bool, bool], any_alignment: Collection[str], group: ProcessGroup,
    ) -> None:  # fmt: skip
        (M, C, K), self._group, parts = sizes, group, CHUNKS // group.size()
        tile = tile_of_chunks(like, "chunks small_m" if M <= FEW else "chunks", CHUNKS * K // parts)
        self._shape = (parts, M, C)
        self._grid = (triton.cdiv(M, tile.BM) * triton.cdiv(C, tile.BN) * parts, 1, 1)
        self._multiply = multiplication(
            launcher, like, sizes, tile, K // parts, a, b, given, any_alignment, split=True, pdl=False
        )
        self._add = addition(launcher, sizes, CHUNKS, given, pdl=False)

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """Into `out`, [M, C] contiguous, the same on every rank."""
        more = (out if bias is None else bias, out if residual is None else residual)
        parts = torch.empty(self._shape, dtype=torch.float32, device=out.device)
        self._multiply(self._grid, a, b, *more, parts)
        self._add(gathered(parts, self._group), *more, out)


def multiplication(
    launcher: Launcher, like: Tensor, sizes: Sizes, tile: Tile, chunk: int, a: tuple[int, int],
    b: tuple[int, int], given: tuple[bool, bool], any_alignment: Collection[str], *, split: bool, pdl: bool,
) -> Launch:  # fmt: skip
    """The launch of `chunked_product`; with `split` of the sums of chunks."""
    M, C, K = sizes
    strides = dict(zip(("a_stride", "a_step", "b_stride", "b_step"), (*a, *b), strict=True))
    return launcher.bind(
        kernels.chunked_product, num_warps=tile.num_warps, num_stages=tile.num_stages, options=options_of(like),
        any_alignment=any_alignment, **strides, BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.GROUP,
        HAS_BIAS=given[0], HAS_RESIDUAL=given[1], M=M, C=C, K=K, chunk=chunk, SPLIT=split,
        WHOLE=chunk % tile.BK == 0 and K % chunk == 0,
        OPERAND=OPERAND_TYPES[torch.float32 if INTERPRETED else like.dtype], USE_PDL=pdl,
    )  # fmt: skip


def addition(
    launcher: Launcher, sizes: Sizes, parts: int, given: tuple[bool, bool], *, pdl: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The launch of `add_chunks`: of the sums of chunks, bias, residual and the result."""
    M, C, _ = sizes
    launch = launcher.bind(
        kernels.add_chunks, options={"launch_pdl": True} if pdl else {}, HAS_BIAS=given[0], HAS_RESIDUAL=given[1], M=M,
        C=C, N_PARTS=parts, USE_PDL=pdl, W=COLUMNS,
    )  # fmt: skip
    return partial(launch, (M, triton.cdiv(C, COLUMNS), 1))


def takes_chunks_by_tma(x: Tensor, weight: Tensor) -> bool:
    """Whether `TmaProduct` takes these operands, [M, K] and [N, K]: many rows, and chunks of whole steps."""
    (M, K), N = x.shape, weight.shape[0]
    if M <= FEW or not (takes_tma(x) and takes_tma(weight)):
        return False
    tile = tile_of_chunks(x, "tma chunks", K)
    tiles = triton.cdiv(M, tile.BM) * triton.cdiv(N, tile.BN)
    return whole(K, tile) and tiles >= machine(x.device).multiprocessors


class TmaProduct:
    """x weight^T for calls of one shape, in the order of `Product`; Hopper's copy engine brings the operands."""

    def __init__(self, like: Tensor, sizes: Sizes, given: tuple[bool, bool]) -> None:
        M, C, K = sizes
        self._tile = tile = tile_of_chunks(like, "tma chunks" if M >= MANY else "tma chunks small_m", K)
        self._grid = (triton.cdiv(M, tile.BM) * triton.cdiv(C, tile.BN), 1, 1)
        # Through Triton, which makes the copy engine's descriptors of what is passed.
        self._launch = plain_launcher_for(like.device).bind(
            kernels.chunked_product_tma, num_warps=tile.num_warps, num_stages=tile.num_stages, M=M, C=C, K=K,
            chunk=chunk_of(K), HAS_BIAS=given[0], HAS_RESIDUAL=given[1], NESTED=tile.num_warps == 4, BM=tile.BM,
            BN=tile.BN, BK=tile.BK, GROUP=tile.GROUP,
        )  # fmt: skip

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """Into `out`, [M, C] contiguous."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        tile = self._tile
        operands = (
            TensorDescriptor.from_tensor(x, [tile.BM, tile.BK]),
            TensorDescriptor.from_tensor(weight, [tile.BN, tile.BK]),
        )
        self._launch(self._grid, *operands, out if bias is None else bias, out if residual is None else residual, out)
