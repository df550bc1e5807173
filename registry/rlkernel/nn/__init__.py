"""Modules: a linear layer on a quantised weight, a model made of them, and its weights renewed in place.

    from rlkernel import nn

    report = nn.quantize_model(model, nn.QuantPolicy("int4_g128", lora_rank=16))
    ...
    nn.requantize_(model, trainer.state_dict())     # after every update of the policy; addresses stay

Importing this package loads torch.
"""

from __future__ import annotations

from rlkernel.nn.linear import QuantLinear
from rlkernel.nn.model import QuantPolicy, quantize_model, selected
from rlkernel.nn.sync import SyncReport, requantize_

__all__ = ["QuantLinear", "QuantPolicy", "SyncReport", "quantize_model", "requantize_", "selected"]
