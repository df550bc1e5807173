"""A low-rank addition to the head, s (X A^T) B^T: its inner product, and the way back to hidden states, A and B.

    U = s X A^T,   logits = X W^T + U B^T
    dU = s dz B,   dX = dz W + dU A,   dA = dU^T X,   dB = dz^T U

All of it are products by `head_matmul`, small beside those of the head, and nothing as large as the head is made.

Legend: N rows · n rows of a block · D hidden · V vocabulary · r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.row_views import free_rows, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, Tile, options_of, tile_of
from rlkernel_triton.launchers import Launch, Launcher
from rlkernel_triton.linear_logprob import kernels
from rlkernel_triton.linear_logprob.operands import Operands

Bind = Callable[..., Launch]
FP32 = OPERAND_TYPES[torch.float32]


def strides(lora: LoRA | None) -> dict[str, Any]:
    """What kernels that make logits are bound with."""
    if lora is None:
        return {"HAS_LORA": False, "rank": None, "factor_stride": None, "factor_step": None}
    B = lora.B
    return {"HAS_LORA": True, "rank": B.shape[1], "factor_stride": B.stride(0), "factor_step": B.stride(1)}


def _grid(tile: Tile, M: int, C: int) -> tuple[int, int, int]:
    return -(-M // tile.BM) * -(-C // tile.BN), 1, 1


class InnerProduct:
    """U = s X A^T, [N, r] fp32, of calls of one shape; every sum has one order, whatever rows there are.

    Args:
        launcher: what binds the kernel.
        hidden: [..., D], of which no value is read.
        lora: of it, too.
        block: rows that are copied together at a time, where they do not lie so.
    """

    def __init__(self, launcher: Launcher, hidden: Tensor, lora: LoRA, block: int) -> None:
        like, A = free_rows(torch.empty_strided(hidden.shape, hidden.stride(), device="meta")), lora.A
        self._in_place = like.dim() == 2 and like.stride(1) == 1
        self._tile, (self._r, D), self._block = tile_of(hidden, A, "product"), A.shape, block
        same = hidden.dtype == A.dtype and not INTERPRETED  # the interpreter's 16-bit products are wrong
        self._launch = launcher.bind(
            kernels.head_matmul, num_warps=self._tile.num_warps, num_stages=self._tile.num_stages,
            options=options_of(hidden), first=0, C=self._r, K=D, a_stride=like.stride(0) if self._in_place else D,
            a_step=1, b_stride=A.stride(1), b_step=A.stride(0), LIMIT="none", ADD=False,
            OPERAND=OPERAND_TYPES[hidden.dtype if same else torch.float32], BM=self._tile.BM, BN=self._tile.BN,
            BK=self._tile.BK, GROUP=self._tile.GROUP,
        )  # fmt: skip

    def __call__(self, hidden: Tensor, lora: LoRA) -> Tensor:
        """[N, r]; rows that do not count have numbers that no other row sees."""
        x = free_rows(hidden)
        N = x.shape[:-1].numel()
        u = torch.empty(N, self._r, dtype=torch.float32, device=hidden.device)
        step = max(N if self._in_place else self._block, 1)
        for first in range(0, N, step):
            n = min(step, N - first)
            rows = x if self._in_place else take(x, slice(first, first + n)).contiguous()
            self._launch(_grid(self._tile, n, self._r), rows, lora.A, u, u[first:], n)
        return u if lora.scale == 1.0 else u.mul_(lora.scale)


class LowRankBackward:
    """The launches of the way back, of calls of one shape.

    Args:
        bind: `Head._bind`.
        hidden: [..., D], of which no value is read.
        lora: of it, too.
        tile: of products with the gradient of the logits.
        operand: what operands of these become; those of dU stay in fp32.
        x_stride: of rows of a block of hidden states.
        masked: some rows do not count.
    """

    def __init__(
        self, bind: Bind, hidden: Tensor, lora: LoRA, tile: Tile, operand: Any, x_stride: int, *, masked: bool
    ) -> None:
        (self.r, self.D), self.device, self.split = lora.A.shape, hidden.device, operand != FP32
        self.tile, self.fine = tile, tile_of(hidden, lora.A, "fp32")
        rows, sums = ("rows", "sum") if masked else ("none", "none")
        add, A, B = {"ADD": True}, lora.A, lora.B
        of_head = {**add, "C": self.r, "OPERAND": operand}
        self.take = bind(
            kernels.head_matmul, tile, **of_head, a_step=1, b_stride=B.stride(0), b_step=B.stride(1), LIMIT=rows
        )  # fmt: skip
        self.to_columns = bind(
            kernels.head_matmul, tile, **of_head, a_stride=1, b_stride=self.r, b_step=1, LIMIT=sums
        )  # fmt: skip
        of_inner = {**add, "C": self.D, "OPERAND": FP32}
        self.to_hidden = bind(
            kernels.head_matmul, self.fine, **of_inner, K=self.r, a_stride=self.r, a_step=1, b_stride=A.stride(0),
            b_step=A.stride(1), LIMIT=rows,
        )  # fmt: skip
        self.to_factor = bind(
            kernels.head_matmul, self.fine, **of_inner, M=self.r, a_stride=1, a_step=self.r, b_stride=x_stride,
            b_step=1, LIMIT=sums,
        )  # fmt: skip

    def begin(self, of: Operands, wanted: tuple[bool, ...]) -> LowRankGradients:
        """Room for the gradients of a call; which are wanted of hidden, weight, bias, A and B."""
        return LowRankGradients(self, of, wanted)


class LowRankGradients:
    """The gradients of one call, to which every block of rows and columns adds."""

    def __init__(self, launches: LowRankBackward, of: Operands, wanted: tuple[bool, ...]) -> None:
        (of_hidden, _, _, of_A, of_B), lora, count = wanted, of.lora, of.at()[1]
        if lora is None:
            raise RLKernelError("linear_logprob: its backward pass got less than its forward pass saved")
        self._launches, self._of, self._lora, self._count = launches, of, lora, count
        self.of_rows, self.of_columns = of_hidden or of_A, of_B
        self._du: Tensor | None = None  # [n, r] of a block of rows
        self._dA = torch.zeros(lora.A.shape, dtype=torch.float32, device=launches.device) if of_A else None
        self._dB = torch.empty_like(lora.B, memory_format=torch.contiguous_format) if of_B else None

    def take(self, dz: Tensor, first: int, n: int, start: int, width: int) -> None:
        """Add dz B to the gradient of the inner product, where that is wanted; dz [n, width]."""
        at = self._launches
        if not self.of_rows:
            return
        if self._du is None:
            self._du = torch.zeros(n, at.r, dtype=torch.float32, device=at.device)
        B = self._lora.B[start:] if start else self._lora.B
        at.take(_grid(at.tile, n, at.r), dz, B, self._count, self._du, first, n, width, width)

    def finish_rows(self, x: Tensor, first: int, n: int, acc: Tensor | None) -> None:
        """Take the gradient of the inner product of a block to its rows x [n, D], in acc, and to A."""
        at, du, self._du = self._launches, self._du, None
        if du is None:
            return
        du.mul_(self._lora.scale)
        if acc is not None:
            at.to_hidden(_grid(at.fine, n, at.D), du, self._lora.A, self._count, acc, first, n)
        if self._dA is not None:
            at.to_factor(_grid(at.fine, at.r, at.D), du, x, self._count, self._dA, first, n)

    def columns(self, width: int) -> Tensor:
        """Room for the gradient of so many rows of B."""
        return torch.zeros(width, self._launches.r, dtype=torch.float32, device=self._launches.device)

    def add_columns(self, into: Tensor, dz: Tensor, first: int, n: int, width: int) -> None:
        """Add dz.T U. U is two numbers of 16 bits where dz has 16, so that none is rounded."""
        at, (u, _) = self._launches, self._of.low_rank(first, n)
        if u is None:
            return
        high = u.to(dz.dtype)
        for part in (high, (u - high.float()).to(dz.dtype)) if at.split else (u,):
            at.to_columns(_grid(at.tile, width, at.r), dz, part, self._count, into, first, width, n, width)

    def put_columns(self, found: Tensor, start: int) -> None:
        """Round the gradient of some rows of B to its place."""
        if self._dB is not None:
            self._dB[start : start + found.shape[0]] = found

    def finish(self, group: dist.ProcessGroup | None) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of A, summed over ranks and rounded, and that of B."""
        if self._dA is not None and group is not None:
            dist.all_reduce(self._dA, group=group)
        return None if self._dA is None else self._dA.to(self._lora.A.dtype), self._dB
