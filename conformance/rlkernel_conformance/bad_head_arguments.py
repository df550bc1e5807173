"""Bad arguments that several operators on logits or on a head refuse alike, and of groups of rows."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.example_calls import D, N, V, draw, ids
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import TokenLists


def leaf(*shape: int) -> Tensor:
    """A tensor that requires a gradient."""
    return torch.ones(shape, requires_grad=True)


# Of both operators that give log-probabilities.
BAD_SCORES: Final = (
    ("ids", {"ids": torch.zeros(N, 0, dtype=torch.int64)}),
    ("ids", {"ids": torch.zeros(N + 1, 3, dtype=torch.int64)}),
    ("support", {"ids": ids(N, 3), "support": Support(ids(N), torch.arange(N + 1))}),
    ("temperature", {"temperature": 0.0}),
    ("temperature", {"temperature": leaf(N)}),
    ("group", {"group": "tp"}),
)
LISTS = TokenLists(ids(9), torch.arange(N + 1))
BAD_LISTS: Final = (
    ("ids.ids", {"ids": TokenLists(draw(9), LISTS.offsets)}),
    ("ids.ids", {"ids": TokenLists(ids(3, 3), LISTS.offsets)}),
    ("ids.offsets", {"ids": TokenLists(LISTS.ids, LISTS.offsets[1:])}),
    ("ids.offsets", {"ids": TokenLists(LISTS.ids, LISTS.offsets.float())}),
    ("ids.offsets", {"ids": TokenLists(LISTS.ids, LISTS.offsets.to("meta"))}),
    ("support", {"ids": LISTS, "support": Support(LISTS.ids, LISTS.offsets)}),
)
# Of all operators with a weight [V, D].
BAD_LORA: Final = (
    ("lora", {"lora": LoRA(draw(2, D), draw(V, 2), math.nan)}),
    ("lora.A", {"lora": LoRA(draw(D, 2), draw(V, 2))}),
    ("lora.B", {"lora": LoRA(draw(2, D), draw(2, V))}),
    ("lora.B", {"lora": LoRA(draw(2, D), draw(V, 2).to("meta"))}),
)


def _stacked(groups: int) -> LoRA:
    """Low-rank additions of groups of rows."""
    return LoRA(draw(groups, 2, D), draw(groups, V, 2))


_ENDS = torch.tensor([2, 3], dtype=torch.int32)
# Of qmatmul's experts and adapters.
BAD_ENDS: Final = (
    ("ends", {"ends": _ENDS.long()}),
    ("ends", {"ends": torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)}),
    ("ends", {"ends": _ENDS[:0]}),
    ("x", {"x": draw(N, 1, D), "ends": _ENDS}),
    ("lora", {"lora": LoRA(draw(2, D), draw(V, 2)), "ends": _ENDS}),
    ("lora", {"lora": _stacked(2)}),
    ("lora_ends", {"lora_ends": _ENDS}),
    ("lora_ends", {"lora": _stacked(2), "lora_ends": _ENDS, "ends": _ENDS}),
    ("lora_ends", {"lora": _stacked(3), "lora_ends": _ENDS}),
    ("lora_ends", {"lora": _stacked(2), "lora_ends": _ENDS.long()}),
    ("lora_ends", {"lora": _stacked(0), "lora_ends": _ENDS[:0]}),
    ("activation", {"activation": "swiglu", "ends": torch.arange(1, V + 1, dtype=torch.int32)}),
)
