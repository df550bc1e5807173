"""Quantized weights in the files that others write: recognized, read into QuantTensors bit for bit, and written back.

    from rlkernel import checkpoints

    with checkpoints.opened("model.safetensors") as source:
        for item in checkpoints.items(source):      # nothing is loaded yet
            weights = item.read(source)             # QuantTensor, one per expert, or a dense tensor

A scheme is how a library spells a weight: names of tensors, packing, shapes (`schemes.SCHEMES`). Reading changes no
value: `dequantize` gives the bits that the library's own definition gives. Importing this package loads no torch.
"""

from __future__ import annotations

from rlkernel.checkpoints.conversion import convert
from rlkernel.checkpoints.files import opened
from rlkernel.checkpoints.schemes import SCHEMES, Item, items

__all__ = ["SCHEMES", "Item", "convert", "items", "opened"]
