"""What suites share: random inputs on a device, gradients around a forward call, definitions computed when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel
from rlkernel_bench.work import Call, Inputs, Outputs
from rlkernel_core.errors import ResolutionError
from rlkernel_core.quant import QuantTensor

# Bits that a weight takes with its scales, by format.
BITS: Final[Mapping[str, float]] = {
    "int4_g128": 4 + 16 / 128, "int4_g64": 4 + 16 / 64, "int4_g32_asym": 4.75, "nf4": 4 + 32 / 64, "fp4": 4.5,
    "q4l": 4.5, "hqq4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5, "gguf_q4_0": 4.5, "gguf_q8_0": 8.5, "mxfp8": 8.25,
    "int8_channel": 8.0, "fp8_channel": 8.0, "fp8_block128": 8.0,
}  # fmt: skip


class Draw:
    """Random tensors on a device, from a seed."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: str = "float32") -> Tensor:
        """Normal values; drawn in fp32, a slice of rows at a time."""
        out = torch.empty(shape, device=self.device, dtype=getattr(torch, dtype))
        rows = max(1, (1 << 28) // max(1, out[0].numel() if out.dim() and len(out) else 1))
        for part in out.split(rows) if out.dim() else ():
            part.copy_(std * torch.randn(part.shape, device=self.device, generator=self.generator))
        return out

    def ids(self, below: int, *shape: int) -> Tensor:
        """Integers in [0, below)."""
        return torch.randint(below, shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Values in [0, 1)."""
        return torch.rand(shape, device=self.device, generator=self.generator)


def some(n: int, most: int = 128) -> Tensor:
    """Indices of up to `most` rows, evenly spread, first and last among them: what is held against float64."""
    return torch.linspace(0, n - 1, min(n, most)).round().long()


def with_gradients(forward: Call, wanted: Sequence[str]) -> Call:
    """The forward call and the gradients of its outputs, weighed by the inputs named `up_<output>`."""

    def run(given: Inputs) -> Outputs:
        leaves = {name: given[name].detach().requires_grad_() for name in wanted}
        with torch.enable_grad():
            out = forward({**given, **leaves})
        used = [n for n, x in out.items() if f"up_{n}" in given and x.requires_grad]
        ups = [given[f"up_{n}"].to(out[n].dtype) for n in used]
        grads = torch.autograd.grad([out[n] for n in used], list(leaves.values()), ups)
        return {n: x.detach() for n, x in out.items()} | {f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}

    return run


def without_gradients(forward: Call) -> Call:
    """The forward call alone."""

    def run(given: Inputs) -> Outputs:
        with torch.no_grad():
            return forward(given)

    return run


class Definition:
    """The reference on float64 inputs, computed for the outputs that somebody gave, once each.

    What has a gradient depends on the outputs it is the gradient of: a peer without an entropy is held against the
    gradient without one.
    """

    def __init__(self, call: Callable[[tuple[str, ...]], Outputs], *, large: bool = False) -> None:
        self._call = call
        self._large = large  # stays on the device: gradients of a head are gigabytes in float64
        self._known: dict[tuple[str, ...], Outputs] = {}

    def of(self, names: Sequence[str]) -> Outputs:
        """By the names of the outputs that weigh in."""
        key = tuple(sorted(names))
        if key not in self._known:
            with rlkernel.use("reference", fallback="error"):
                found = self._call(key)
            self._known[key] = found if self._large else {k: x.cpu() for k, x in found.items()}
        return self._known[key]


def double(x: Any) -> Any:
    """Floating tensors in float64, everything else as it is."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def prepacked(given: Inputs) -> Inputs:
    """The weight `w` as the chosen backend reads it fastest."""
    return {**given, "w": packed(given["w"])}


def packed(w: Any) -> Any:
    """A weight as the chosen backend reads it fastest; itself where it packs nothing."""
    try:
        return rlkernel.prepack(w) if isinstance(w, QuantTensor) else w
    except ResolutionError:  # the canonical layout is what it takes
        return w
