"""Modules: a linear layer on a quantized weight, a model made of them, and its weights renewed in place.

    from rlkernel import nn

    report = nn.quantize_model(model, nn.QuantPolicy("int4_g128", lora_rank=16))
    ...
    nn.requantize_(model, trainer.state_dict())     # after every update of the policy; addresses stay

`nn.weight_delta` and `nn.apply_delta_` send what changed in a weight in place of all of it.

Where the model does not fit twice, `nn.load_quantized` fills it from its file, one weight at a time.

Importing this package loads torch.
"""

from __future__ import annotations

from rlkernel.nn.delta import apply_delta_, weight_delta
from rlkernel.nn.linear import QuantLinear
from rlkernel.nn.load import LoadReport, load_quantized
from rlkernel.nn.model import QuantPolicy, quantize_model, selected
from rlkernel.nn.sync import SyncReport, requantize_

__all__ = [
    "LoadReport",
    "QuantLinear",
    "QuantPolicy",
    "SyncReport",
    "apply_delta_",
    "load_quantized",
    "quantize_model",
    "requantize_",
    "selected",
    "weight_delta",
]
