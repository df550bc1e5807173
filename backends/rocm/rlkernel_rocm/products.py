"""Products of 8-bit weights with inputs that are quantized as they come in: what libraries are given, what fits them.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.reasons import Reason


class Operands(NamedTuple):
    """Both sides as codes and scales."""

    x: Tensor  # [M, K]
    w: Tensor  # [N, K]
    x_scale: Tensor  # [M, 1], or [M, K / 128] for blocks; fp32
    w_scale: Tensor  # [1, N], or [N / 128, K / 128]; fp32


def operands(x: Tensor, w: QuantTensor) -> Operands:  # x [..., K]
    """Inputs quantized as the weight's format says."""
    given = quantize_activation(x.reshape(-1, x.shape[-1]).float(), w.spec)
    scale = w.parts["scale"].float()
    blocks = w.spec.act == "block128_fp8"
    return Operands(
        given.codes.contiguous(),
        w.parts["codes"],
        given.scale.float().contiguous(),
        scale.contiguous() if blocks else scale.reshape(1, -1),
    )


def misfit(library: str, elements: tuple[str, ...], multiple: int, x: Tensor, w: QuantTensor) -> Reason | None:
    """Why a library does not take a product, if it does not.

    Args:
        library: its name.
        elements: of the weights that the device multiplies.
        multiple: what K and N are multiples of.
        x: [..., K]
        w: [N, K]
    """
    outputs, inputs = w.shape
    said, fix = None, ""
    if w.layout != CANONICAL:
        said, fix = f"the weight is packed as {w.layout}", "use it as quantize made it"
    elif w.spec.act == "none":
        said, fix = f"{library} multiplies inputs of 8 bits", "use a format with an act, such as int8_w8a8"
    elif w.spec.element not in elements:
        said = f"this device multiplies {' and '.join(elements)}, not {w.spec.element}"
        fix = "rlkernel_rocm.fp8 converts weights"
    elif outputs % multiple or inputs % multiple:
        said, fix = f"a weight of {outputs} x {inputs}", f"multiples of {multiple}"
    elif not x.numel():
        said = "no token comes in"
    return Reason("shape", "unsupported", said, fix) if said else None
