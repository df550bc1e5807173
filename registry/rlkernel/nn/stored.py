"""A layer whose quantized weight lies in a file that somebody else reads, tensor by tensor, into a module's buffers."""

from __future__ import annotations

import torch

from rlkernel.nn.linear import QuantLinear
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec, QuantTensor
from rlkernel_core.quant.codec import codec_of


class Stored(torch.nn.Module):
    """Buffers with the names, shapes and dtypes that a `QuantLinear` has in a file, and the layer once they are read.

    The buffers are made on the meta device; a reader puts a tensor in the place of each.
    """

    def __init__(self, linear: torch.nn.Linear, spec: QuantSpec) -> None:
        super().__init__()
        self.spec = spec
        self.bias = linear.bias  # [Nout] or None
        shape = (linear.out_features, linear.in_features)
        sizes = codec_of(spec).storage(spec, shape)
        parts = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in sizes.items()}
        self.weight = torch.nn.Module()
        for name, part in QuantTensor(spec, shape, linear.weight.dtype, parts).state_dict().items():
            self.weight.register_buffer(name, part.to("meta"))

    def layer(self) -> QuantLinear:
        """The layer that was read.

        Raises:
            ArgumentError: the file has another format than was expected, or a damaged weight.
        """
        weight = QuantTensor.from_state_dict(dict(self.weight.named_buffers()))
        if weight.spec != self.spec:
            raise ArgumentError("weight", weight.spec.kind, f"was to be {self.spec.kind}", "Check the configuration.")
        layer = QuantLinear(weight)
        layer.bias = self.bias
        return layer
