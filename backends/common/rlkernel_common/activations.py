"""Activations of a product as functions of torch, by the names of `rlkernel_core.spec.qmatmul.ACTIVATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from torch import Tensor
from torch.nn import functional

_gelu_tanh = partial(functional.gelu, approximate="tanh")
# Those of a pair take gate and value.
ACTIVATIONS: Final[Mapping[str | None, Callable[..., Tensor]]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": lambda gate, value: functional.silu(gate) * value,
    "geglu_tanh": lambda gate, value: _gelu_tanh(gate) * value,
}
