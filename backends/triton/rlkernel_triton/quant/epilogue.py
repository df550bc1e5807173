"""What follows a product: bias, LoRA, activation and residual, as the kernels take them.

Legend: M tokens · K inputs · N rows of the weight · R = N, or N / 2 for a pair · r LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.spec.qmatmul import PAIRS, LoRA
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, planned
from rlkernel_triton.quant.epilogue_kernels import ADDED, epilogue_kernel
from rlkernel_triton.quant.grouped_lora import add_low_rank

MOST_RANK: Final = 64  # of a LoRA that the kernels add themselves


@dataclass(frozen=True)
class Epilogue:
    """act(product + lora + bias) + residual."""

    bias: Tensor | None = None  # [N]
    lora: LoRA | None = None
    activation: str | None = None
    residual: Tensor | None = None  # [M, R]
    groups: Tensor | None = None  # [G] int32: where the rows of each end, if `lora` is a stack of G
    addition: Tensor | None = None  # [M, N] fp32: what `lora` comes to, if it is a stack
    x: Tensor | None = None  # [M, K]: what `lora` multiplies, where the product has other values of x
    x_scale: Tensor | None = None  # [M] fp32: of tokens, still to be multiplied with

    @property
    def pair(self) -> bool:
        """The rows of the weight are a gate's and a value's."""
        return self.activation in PAIRS

    @property
    def empty(self) -> bool:
        """The result is the product."""
        return self.activation is None and not self.has_tensors

    @property
    def has_tensors(self) -> bool:
        """A kernel reads more than x and the weight."""
        return any(part is not None for part in (self.bias, self.lora, self.residual))

    @property
    def rank(self) -> int:
        """Of the low-rank addition that the kernels multiply themselves; 0 for none."""
        return 0 if self.lora is None or self.groups is not None else self.lora.B.shape[1]

    def with_addition(self, x: Tensor, plan: Plan | None = None) -> Epilogue:
        """The same with what a stack of low-rank additions comes to; itself where there is none."""
        if self.lora is None or self.groups is None:
            return self
        addition = torch.empty(x.shape[0], self.lora.B.shape[1], dtype=torch.float32, device=x.device)
        add_low_rank(x, self.lora, self.groups, addition, plan)
        return replace(self, addition=addition)

    def constants(self, x: Tensor) -> dict[str, Any]:
        """What the kernels are bound with."""
        rank, x = self.rank, x if self.x is None else self.x
        given: dict[str, Any] = {
            "BIAS": self.bias is not None, "RESIDUAL": self.residual is not None, "PAIR": self.pair,
            "ACTIVATION": self.activation or "none", "INTERPRETED": INTERPRETED, "RANK": triton.cdiv(rank, 16) * 16,
            "WIDE_LORA": False, "residual_row": 0, "lora_row": rank, "lora_rank": rank, "lora_scale": 0.0,
        }  # fmt: skip
        if self.residual is not None:
            given["residual_row"] = _row_major(self.residual).stride(0)
        if self.lora is not None and self.groups is not None:
            given |= {"RANK": ADDED.value, "lora_rank": self.lora.B.shape[1]}
        elif rank and self.lora is not None:
            B, same = self.lora.B.dtype, _same_type(x, self.lora.A)
            wide = INTERPRETED or B == torch.float32 or not same or x.dtype != B
            given |= {"lora_scale": float(self.lora.scale), "WIDE_LORA": wide}
        return given

    def tensors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernels are passed: bias, x A^T (or the addition), B, residual; `x` stands for what is not there."""
        bias = x if self.bias is None else self.bias.contiguous()
        residual = x if self.residual is None else _row_major(self.residual)
        if self.addition is not None:
            return bias, self.addition, x, residual
        if self.lora is None or not self.rank:
            return bias, x, x, residual
        return bias, lora_inner(x if self.x is None else self.x, self.lora.A), self.lora.B.contiguous(), residual


NO_EPILOGUE: Final = Epilogue()


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _same_type(x: Tensor, A: Tensor) -> bool:
    """They are multiplied as they are, not in fp32."""
    return x.dtype == A.dtype and not INTERPRETED


def lora_inner(x: Tensor, A: Tensor) -> Tensor:  # [M, K], [r, K] -> [M, r]
    """x A^T, accumulated in fp32; rounded to the dtype of x where both have it."""
    same = _same_type(x, A)
    x, A = (_aligned(t if same else t.float()) for t in (x, A))
    return torch.nn.functional.linear(x, A)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and aligned: a BLAS adds up in another order where strides or alignment are others."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def apply_epilogue(x: Tensor, h: Tensor, epilogue: Epilogue, y: Tensor, plan: Plan | None = None) -> None:
    """What follows a product h [M, N] fp32 that lies in memory, into y [M, R]."""
    M, N = h.shape

    def bound(launcher: Launcher) -> Launch:
        return launcher.bind(epilogue_kernel, **epilogue.constants(x), M=M, N=N, BM=32, BN=64)

    launch = planned(plan, "epilogue", x.device, bound)
    launch((triton.cdiv(M, 32) * triton.cdiv(y.shape[1], 64), 1, 1), h, y, *epilogue.tensors(x))
