"""linear@1 by cuBLASLt without a workspace, forward and back.

No algorithm can then split a sum, and on an H200 the bits of a row depended on the number of rows at none of 342 sizes
of models. That is what a library of one version did on one device: clause LN-13 attacks it on yours, and policies that
need bits ask for its report (`need = ["exact"]`).

Legend: M rows · N outputs · K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernel_core.gradients import gradient_wanted
from rlkernel_core.spec.linear import LinearCall
from rlkernel_cuda.cublaslt.library import ALIGNMENT, Matmul
from rlkernel_triton.launchers import on_device_of
from rlkernel_triton.linear.launch import LinearPair, Products, gradient_of_bias

MULTIPLE: Final = 8  # of N and K: rows of 16 bytes. Others are filled up with zeros, which takes copies of operands


def prepare(call: LinearCall) -> Callable[[LinearCall], Tensor]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.linear.LinearCall`."""
    if gradient_wanted("linear", call):
        return CublasltPair(call)
    return _Host(call).forward


class CublasltPair(LinearPair):
    """The product, and its gradients."""

    @staticmethod
    def products(call: LinearCall) -> Products:
        """By cuBLASLt."""
        return _Host(call)


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LinearCall) -> None:
        x = call.x
        (*self._rows, self._K), self._N = x.shape, call.weight.shape[0]
        self._M = x.numel() // self._K
        self._wide_K, self._wide_N = (-(-n // MULTIPLE) * MULTIPLE for n in (self._K, self._N))
        self._given = {"bias": call.bias is not None, "residual": call.residual is not None}
        self._like = torch.empty(0, dtype=x.dtype, device=x.device)

    @cached_property
    def _forward(self) -> Matmul:
        return Matmul(self._like, self._M, self._wide_N, self._wide_K, b_columns=True, **self._given)

    @cached_property
    def _of_x(self) -> Matmul:
        return Matmul(self._like, self._M, self._wide_K, self._wide_N)

    @cached_property
    def _of_weight(self) -> Matmul:
        return Matmul(self._like, self._wide_N, self._wide_K, self._M, a_columns=True)

    def forward(self, call: LinearCall) -> Tensor:
        """The result."""
        y = self._like.new_empty((*self._rows, self._wide_N))
        if self._M:
            bias, residual = (None if t is None else _filled(t.detach()) for t in (call.bias, call.residual))
            x, weight = _filled(call.x.detach()), _filled(call.weight.detach(), self._wide_N - self._N)
            with on_device_of(y):
                self._forward(x, weight, bias, residual, y)
        return self._cut(y, self._N)

    def of_x(self, g: Tensor, weight: Tensor) -> Tensor:
        """The gradient of x."""
        d_x = self._like.new_empty((*self._rows, self._wide_K))
        if self._M:
            g, weight = _filled(g), _filled(weight.detach(), self._wide_N - self._N)
            with on_device_of(g):
                self._of_x(g, weight, None, None, d_x)
        return self._cut(d_x, self._K)

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight."""
        if not self._M:
            return self._like.new_zeros((self._N, self._K))
        d_weight = self._like.new_empty((self._wide_N, self._wide_K))
        g, x = _filled(g), _filled(x.detach())
        with on_device_of(g):
            self._of_weight(g, x, None, None, d_weight)
        return self._cut(d_weight[: self._N], self._K)

    def of_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return gradient_of_bias(g, self._N)

    @staticmethod
    def _cut(wide: Tensor, columns: int) -> Tensor:
        return wide[..., :columns].contiguous() if columns < wide.shape[-1] else wide


def _filled(x: Tensor, rows: int = 0) -> Tensor:
    """The same as one piece that begins at a multiple of 16 bytes, with zeros for columns and so many rows more."""
    columns = -x.shape[-1] % MULTIPLE
    x = pad(x, (0, columns, 0, rows)) if rows else pad(x, (0, columns)) if columns else x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x
