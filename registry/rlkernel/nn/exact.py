"""Layers of a decoder by the operators whose bits do not depend on the batch.

Each replaces a module and holds that module's own parameters: names in the state dict, optimizers and tied weights stay
as they are.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.nn.linear import QuantLinear
from rlkernel_core.errors import HostError

# torch's function -> the operator's activation
ACTIVATIONS: Final = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def activation_of(path: str, act_fn: torch.nn.Module) -> str:
    """The name that `glu` has for an activation of torch.

    Raises:
        HostError: it has none.
    """
    found = type(act_fn).__name__
    if found not in ACTIVATIONS:
        raise HostError(f"{path} is a {found}; glu computes {', '.join(ACTIVATIONS)}. Nothing was changed")
    return ACTIVATIONS[found]


class ExactLinear(torch.nn.Linear):
    """`torch.nn.Linear` by `rlkernel.linear`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self.__dict__ = linear.__dict__  # one state for both: what moves, casts or hooks one does so to the other

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """`x weight^T + bias`, rounded once; `x` [..., K] gives [..., N]."""
        result: Tensor = rlk.linear(x, self.weight, bias=self.bias)
        return result


class ExactQuantLinear(QuantLinear):
    """`QuantLinear` by `rlkernel.linear` on the dequantized weight, which is made anew in each call."""

    def __init__(self, linear: QuantLinear) -> None:
        self.__dict__ = linear.__dict__  # as in `ExactLinear`

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """As `ExactLinear` of `dequantize(weight)`, with LoRA as its residual; no gradient reaches the weight.

        LoRA is two products of their own, in the wider of the dtypes of x and of the adapter, rounded to that of x
        before it is added: one rounding more than in `qmatmul`.
        """
        added = None
        if self.lora is not None:
            wide = torch.promote_types(x.dtype, self.lora.A.dtype)
            low = rlk.linear(x.to(wide), self.lora.A.to(wide))
            added = (rlk.linear(low, self.lora.B.to(wide)) * self.lora.scale).to(x.dtype)
        result: Tensor = rlk.linear(x, rlk.dequantize(self.weight, dtype=x.dtype), bias=self.bias, residual=added)
        return result


class ExactRMSNorm(torch.nn.Module):
    """An RMS norm by `rlkernel.rms_norm`."""

    def __init__(self, weight: torch.nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """`x` [..., D] over its root mean square, times `offset + weight`."""
        result: Tensor = rlk.rms_norm(x, self.weight, eps=self.eps, offset=self.offset).y
        return result

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}"


class ExactGatedMLP(torch.nn.Module):
    """A gated MLP by `rlkernel.glu` between three products."""

    def __init__(self, mlp: torch.nn.Module, activation: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """`down(act(gate(x)) up(x))`, the product of both halves rounded once; `x` [..., D] gives [..., D]."""
        halves = torch.cat([self.gate_proj(x), self.up_proj(x)], -1)  # type: ignore[operator]  # modules
        result: Tensor = self.down_proj(rlk.glu(halves, activation=self.activation))  # type: ignore[operator]
        return result

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return self.activation
