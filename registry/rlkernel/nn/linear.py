"""A linear layer whose weight is a QuantTensor, with LoRA in full precision beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec, QuantTensor

_WEIGHT = "weight."


class QuantLinear(torch.nn.Module):
    """`y = x w'^T + s (x A^T) B^T + bias` by `rlkernel.qmatmul`, of a `weight` [Nout, K] and a `bias` [Nout] or None.

    The weight is no parameter: it has no gradient and does not follow `module.half()`, only devices. Its tensors are in
    the state dict under `weight.`, named as `QuantTensor.state_dict` names them, which is how `rlkernel quant convert`
    writes them too. LoRA's A and B are parameters.
    """

    def __init__(self, weight: QuantTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight  # [Nout, K]
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone())  # [Nout]
        self.lora_A: torch.nn.Parameter | None = None  # [r, K]
        self.lora_B: torch.nn.Parameter | None = None  # [Nout, r]
        self.lora_scale = 0.0

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, format: str | QuantSpec) -> QuantLinear:  # noqa: A002  as quantize
        """The layer `linear` with its weight quantized to `format`.

        Prepack it by `layer.weight = rlkernel.prepack(layer.weight)`.
        """
        with torch.no_grad():
            return cls(rlk.quantize(linear.weight, format), linear.bias)

    def add_lora(self, rank: int, alpha: float, dtype: torch.dtype = torch.bfloat16) -> None:
        """Start a LoRA of `dtype` and rank r: A [r, K] normal with variance 1 / r, B [Nout, r] zeros, s = alpha / r.

        Raises:
            ArgumentError: a rank below 1.
        """
        if rank < 1:
            raise ArgumentError("rank", rank, "must be at least 1", "Leave LoRA out instead.")
        outputs, inputs = self.weight.shape
        device = self.weight.device
        first = torch.randn(rank, inputs, device=device) * rank**-0.5
        self.lora_A = torch.nn.Parameter(first.to(dtype))
        self.lora_B = torch.nn.Parameter(torch.zeros(outputs, rank, device=device, dtype=dtype))
        self.lora_scale = alpha / rank

    @property
    def lora(self) -> rlk.LoRA | None:
        """The addition that the next call uses."""
        if self.lora_A is None or self.lora_B is None:
            return None
        return rlk.LoRA(self.lora_A, self.lora_B, self.lora_scale)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., Nout]
        """One call of the operator: `x` [..., K] gives [..., Nout]."""
        result: Tensor = rlk.qmatmul(x, self.weight, bias=self.bias, lora=self.lora)
        return result

    def update_(self, weight: Tensor) -> None:  # [Nout, K]
        """Quantize a new weight [Nout, K] into the storage of the old one; graphs that were recorded see it."""
        with torch.no_grad():
            rlk.quantize(weight, self.weight.spec, out=self.weight)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        rank = f", lora_rank={self.lora_A.shape[0]}" if self.lora_A is not None else ""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {self.weight.spec}, bias={self.bias is not None}{rank}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        # A cast is for parameters: codes and scales have the dtypes of their format.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = self.weight.to(fn(torch.empty(0, device=self.weight.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(self.weight.state_dict(prefix + _WEIGHT))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        held = {name: t for name, t in state_dict.items() if name.startswith(prefix + _WEIGHT)}
        rest = {name: t for name, t in state_dict.items() if name not in held}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not held:
            missing_keys.append(prefix + _WEIGHT)
            return
        found = QuantTensor.from_state_dict(held, prefix + _WEIGHT)
        mine = (self.weight.spec, self.weight.shape, self.weight.layout)
        if (found.spec, found.shape, found.layout) != mine:
            error_msgs.append(f"{prefix}weight is {found!r}, the module's is {self.weight!r}")
            return
        for name, part in found.parts.items():
            self.weight.parts[name].copy_(part)
