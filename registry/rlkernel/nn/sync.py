"""After an update of the policy: every weight of a quantized model renewed on its device, in place, and how fast."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.nn.linear import QuantLinear
from rlkernel_core.errors import ArgumentError, UnknownNameError


@dataclass(frozen=True)
class SyncReport:
    """What a renewal moved."""

    quantized: int  # weights
    copied: int  # tensors that are not quantized
    bytes_read: int  # of the full-precision weights
    bytes_written: int  # into the model's storage
    seconds: float  # the device's, waited for at both ends

    @property
    def gb_per_s(self) -> float:
        """Bytes read and written, in 10^9, per second."""
        return (self.bytes_read + self.bytes_written) / 1e9 / max(self.seconds, 1e-9)


def requantize_(model: torch.nn.Module, weights: Mapping[str, Tensor], *, partial: bool = False) -> SyncReport:
    """Renew a model of QuantLinear layers from full-precision weights by name, such as a trainer's state dict.

    Weights of QuantLinear are quantized into the storage they have, whatever its layout; other parameters and buffers
    are copied. No address changes: graphs that were recorded see the new policy. A tensor on another device is copied
    over first, one at a time. LoRA's A and B are copied where `weights` has them and stay where it has not.

    Args:
        model: what `quantize_model` returned.
        weights: name -> tensor [...] of the layer's shape; a quantized layer's name ends in `.weight`, as it did
            before it was quantized.
        partial: weights that are missing stay; otherwise they are an error.

    Raises:
        UnknownNameError: a name that the model has not.
        ArgumentError: a weight is missing, or of another shape. Both are told before anything is written.
    """
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    others = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    _check(layers, others, weights, partial=partial)
    devices = {t.device for t in others.values()} | {layer.weight.device for layer in layers.values()}
    read = written = 0
    _wait(devices)
    start = time.perf_counter()
    with torch.no_grad():
        for name, weight in weights.items():
            read += weight.numel() * weight.element_size()
            if name in layers:
                layers[name].update_(weight.to(layers[name].weight.device))
                written += layers[name].weight.nbytes
            else:
                others[name].copy_(weight)
                written += others[name].numel() * others[name].element_size()
    _wait(devices)
    quantized = len(layers.keys() & weights.keys())
    return SyncReport(quantized, len(weights) - quantized, read, written, time.perf_counter() - start)


def _check(
    layers: Mapping[str, QuantLinear], others: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, partial: bool
) -> None:
    """Names and shapes."""
    for name, weight in weights.items():
        if name not in layers and name not in others:
            raise UnknownNameError("weight of the model", name, [*layers, *others])
        shape = layers[name].weight.shape if name in layers else tuple(others[name].shape)
        if tuple(weight.shape) != shape:
            raise ArgumentError(f"weights[{name!r}]", list(weight.shape), f"must be {list(shape)}", "Check its name.")
    own = {name for name in others if name.rpartition(".")[2] in {"lora_A", "lora_B"}}
    missing = sorted((layers.keys() | others.keys()) - own - weights.keys())
    if missing and not partial:
        remedy = "Pass them, or partial=True."
        raise ArgumentError("weights", f"{len(weights)} tensors", f"lacks {', '.join(missing[:3])}", remedy)


def _wait(devices: set[torch.device]) -> None:
    """Until the devices have done what they were asked for."""
    for device in devices:
        if device.type not in {"cpu", "meta"}:
            torch.accelerator.synchronize(device)
