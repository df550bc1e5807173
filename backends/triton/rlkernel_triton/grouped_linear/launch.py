"""grouped_linear@1 on Triton: one launch, whose programs find their expert by `ends` on the device.

With many rows of an expert, Hopper's copy engine brings rows and weights.

Backward: the same kernel with the weight as it lies for x, one over each expert's rows for the weight, and their sums
for the bias.

Legend: T rows · E experts · N outputs · K inputs · C columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.grouped_linear import GroupedLinearCall
from rlkernel_core.spec.linear import CHUNKS, GRAIN
from rlkernel_triton.common.device import takes_tma
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, Tile, options_of, tile_of
from rlkernel_triton.common.row_layout import rows_of
from rlkernel_triton.grouped_linear import kernels
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, plain_launcher_for
from rlkernel_triton.linear.launch import FEW, MANY, chunk_of, tile_of_chunks, whole

ROWS: Final = 32  # of a step of the gradient of bias
COLUMNS: Final = 128  # of a program of the same


def grouped_linear(call: GroupedLinearCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: GroupedLinearCall) -> Callable[[GroupedLinearCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.grouped_linear.GroupedLinearCall`."""
    if gradient_wanted("grouped_linear", call):
        return GroupedLinearPair(call)
    return _Host(call).forward


class GroupedLinearPair(Pair[GroupedLinearCall, Tensor]):
    """The product, and its gradients."""

    op = "grouped_linear"

    def __init__(self, call: GroupedLinearCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call)

    def forward(self, call: GroupedLinearCall) -> tuple[Tensor, Saved]:
        """The result; x is saved for the weight's gradient, the weight for that of x."""
        return self._host.forward(call), self.saved_like(call, call.x, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """dx = g weight[e], dweight[e] = g^T x and dbias[e] the sum of g, over the rows of e."""
        (x, weight, ends), (g,) = saved, grads
        if g is None or ends is None:
            raise RLKernelError("grouped_linear: its backward pass got no gradient")
        of_x, of_weight, of_bias = self.wanted
        g, ends = g.contiguous(), ends.contiguous()
        d_x = self._host.of_x(g, weight, ends) if of_x and weight is not None else None
        d_weight = self._host.of_weight(g, x, ends) if of_weight and x is not None else None
        return d_x, d_weight, self._host.of_bias(g, ends) if of_bias else None

    @classmethod
    def saved_like(cls, call: GroupedLinearCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments alone."""
        del result
        return call.x if wanted[1] else None, call.weight if wanted[0] else None, call.ends


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: GroupedLinearCall) -> None:
        x, weight = call.x, call.weight
        (self._T, self._K), (self._E, self._N, _) = x.shape, weight.shape
        self._plan = Plan(launcher_for(x.device))
        layout = rows_of(torch.empty_strided(x.shape, x.stride(), device="meta")).layout
        self._x, self._weight = (layout.inner_stride, layout.stride), weight.stride()
        self._sizes = Sizes(self._T, self._E, self._N, self._K)
        self._experts = self._sizes.experts
        self._tma = self._by_tma(x.as_strided(x.shape, self._x), weight, self._K)

    def forward(self, call: GroupedLinearCall) -> Tensor:
        """The result."""
        x, bias = call.x, None if call.bias is None else call.bias.contiguous()
        y = torch.empty(self._T, self._N, dtype=x.dtype, device=x.device)
        if self._T:
            of_expert, of_output, of_input = self._weight
            right = of_expert, of_input, of_output
            given = call.ends.contiguous(), y if bias is None else bias, y
            if self._tma:
                by_tma = self._plan.get("forward", lambda _: TmaProduct(self._sizes, x, bias is not None, turned=True))
                by_tma(x.as_strided(x.shape, self._x), call.weight, *given)
            else:
                product = self._product("forward", x, self._K, self._N, self._x, right, has_bias=bias is not None)
                product(x, call.weight, *given)
        return y

    def of_x(self, g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """The gradient of x."""
        d_x = torch.empty(self._T, self._K, dtype=g.dtype, device=g.device)
        if self._T:
            if self._by_tma(g, weight, self._N):
                by_tma = self._plan.get("x by TMA", lambda _: TmaProduct(self._sizes, g, False, turned=False))
                by_tma(g, weight, ends, d_x, d_x)
            else:
                product = self._product("x", g, self._N, self._K, (self._N, 1), self._weight, any_alignment=("a",))
                product(g, weight, ends, d_x, d_x)
        return d_x

    def of_weight(self, g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """The gradient of the weight."""
        N, K = self._N, self._K
        if not self._T:
            return torch.zeros(self._E, N, K, dtype=g.dtype, device=g.device)
        d_weight = torch.empty(self._E, N, K, dtype=g.dtype, device=g.device)

        def bound(launcher: Launcher) -> Callable[..., None]:
            tile = tile_of(g, g, "chunks")
            launch = launcher.bind(
                kernels.grouped_outer, any_alignment=("a",), M=self._T, N=N, C=K, a_stride=N, a_step=1,
                b_stride=self._x[0], b_step=self._x[1], GRAIN=GRAIN, CHUNKS=CHUNKS, **self._experts,
                **_compiled(tile, g),
            )  # fmt: skip
            return partial(launch, (self._E * triton.cdiv(N, tile.BM) * triton.cdiv(K, tile.BN), 1, 1))

        self._plan.get("weight", bound)(g, x, ends, d_weight)
        return d_weight

    def of_bias(self, g: Tensor, ends: Tensor) -> Tensor:
        """The gradient of the bias."""
        if not self._T:
            return torch.zeros(self._E, self._N, dtype=g.dtype, device=g.device)
        d_bias = torch.empty(self._E, self._N, dtype=g.dtype, device=g.device)

        def bound(launcher: Launcher) -> Callable[..., None]:
            launch = launcher.bind(
                kernels.expert_sums, any_alignment=("a",), M=self._T, C=self._N, R=ROWS, W=COLUMNS, **self._experts
            )
            return partial(launch, (self._E, triton.cdiv(self._N, COLUMNS), 1))

        self._plan.get("bias", bound)(g, ends, d_bias)
        return d_bias

    def _by_tma(self, rows: Tensor, weight: Tensor, K: int) -> bool:
        """Whether `TmaProduct` sums over K: many rows of an expert, and chunks of whole steps."""
        if self._T <= FEW * self._E or not weight.is_contiguous():
            return False
        if not (takes_tma(rows) and takes_tma(weight.flatten(0, 1))):
            return False
        return whole(K, tile_of_chunks(rows, "tma chunks", K))

    def _product(
        self, place: str, like: Tensor, K: int, C: int, a: tuple[int, int], b: tuple[int, ...], *,
        has_bias: bool = False, any_alignment: Collection[str] = (),
    ) -> Callable[..., None]:  # fmt: skip
        """The launch of `grouped_product`: a by rows and columns, b by experts, rows and columns."""

        def bound(launcher: Launcher) -> Callable[..., None]:
            T, E, chunk = self._T, self._E, chunk_of(K)
            # Few rows of an expert: tiles of as few.
            tile = tile_of_chunks(like, "chunks small_m" if T <= FEW * E else "chunks", K)
            m_tiles = self._sizes.m_tiles(tile)
            b_expert, b_step, b_stride = b
            launch: Launch = launcher.bind(
                kernels.grouped_product, any_alignment=any_alignment, M=T, C=C, K=K, a_stride=a[0], a_step=a[1],
                b_expert=b_expert, b_step=b_step, b_stride=b_stride, chunk=chunk, m_tiles=m_tiles, HAS_BIAS=has_bias,
                WHOLE=whole(K, tile), **self._experts, **_compiled(tile, like),
            )  # fmt: skip
            return partial(launch, (m_tiles * triton.cdiv(C, tile.BN), 1, 1))

        return self._plan.get(place, bound)


class Sizes(NamedTuple):
    """T rows, E experts, N outputs, K inputs."""

    T: int
    E: int
    N: int
    K: int

    @property
    def experts(self) -> dict[str, Any]:
        """E, and a power of two above it."""
        return {"E": self.E, "EB": triton.next_power_of_2(self.E + 1)}

    def m_tiles(self, tile: Tile) -> int:
        """As many tiles of rows as any ends need."""
        return self.T // tile.BM + min(self.T, self.E + 1)


class TmaProduct:
    """Rows times the weight of their expert, in the order of `grouped_product`; Hopper's copy engine brings operands.

    Args:
        sizes: of the call.
        like: the rows, [T, K], or with the weight as it lies, [T, N].
        has_bias: whether there is a bias.
        turned: rows are multiplied with weight[e]^T, as in the forward pass; else with weight[e].
    """

    def __init__(self, sizes: Sizes, like: Tensor, has_bias: bool, *, turned: bool) -> None:
        K, C = (sizes.K, sizes.N) if turned else (sizes.N, sizes.K)
        self._turned = turned
        self._tile = tile = tile_of_chunks(like, "tma chunks" if sizes.T >= MANY else "tma chunks small_m", K)
        m_tiles = sizes.m_tiles(tile)
        self._grid = (m_tiles * triton.cdiv(C, tile.BN), 1, 1)
        # Through Triton, which makes the copy engine's descriptors of what is passed.
        self._launch = plain_launcher_for(like.device).bind(
            kernels.grouped_product_tma, num_warps=tile.num_warps, num_stages=tile.num_stages, M=sizes.T, C=C, K=K,
            chunk=chunk_of(K), m_tiles=m_tiles, HAS_BIAS=has_bias, TURNED=turned, NESTED=tile.num_warps == 4,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.GROUP, **sizes.experts,
        )  # fmt: skip

    def __call__(self, rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor, out: Tensor) -> None:
        """Into `out`, [T, C] contiguous."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        tile = self._tile
        operands = (
            TensorDescriptor.from_tensor(rows, [tile.BM, tile.BK]),
            TensorDescriptor.from_tensor(
                weight.flatten(0, 1), [tile.BN, tile.BK] if self._turned else [tile.BK, tile.BN]
            ),
        )
        self._launch(self._grid, *operands, ends, bias, out)


def _compiled(tile: Tile, like: Tensor) -> dict[str, Any]:
    """How a tile's kernel is compiled."""
    return {
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "options": options_of(like), "BM": tile.BM,
        "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP,
        "OPERAND": OPERAND_TYPES[torch.float32 if INTERPRETED else like.dtype],
    }  # fmt: skip
