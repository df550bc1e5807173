"""A call of the suite `host`: one operator's, small enough that the host decides, and its plain torch.

It gives the inputs, the call through the front door, the torch calls that do the same job with a sentence that says
which they are, and how the two results are compared. `plain` is written as one would write it by hand:
no option that is not used, no check, nothing returned that is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional

from rlkernel_bench.suites.common import Draw
from rlkernel_bench.work import Inputs, Outputs

Operator = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One operator's small call."""

    op: str
    sizes: Mapping[str, int]
    make: Callable[[Draw], Inputs]
    call: Callable[[Operator, Inputs], Any]  # the operator, or its `bind`, on the inputs
    outputs: Callable[[Any], Outputs]  # the parts of its result that are compared with plain torch's
    plain: Callable[[Inputs], Outputs]
    says: str  # what plain torch does
    goal: float | None = None  # host time over plain torch's
    wanted: tuple[str, ...] = ()  # inputs with gradients, in rows with a backward pass
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 50  # calls between two synchronizations: fewer launches than a stream's queue holds
    graphs: tuple[str, ...] = ()  # of a row of graphs: the inputs that are new in each call; () for no such row


def suffix(b: Tensor, a: Tensor) -> Tensor:
    """y_t = b_t + a_t y_{t+1} without a loop: sums of b times products of a from the start, divided by those."""
    before = functional.pad(a.cumprod(-1)[:, :-1], (1, 0), value=1.0)
    return (b * before).flip(-1).cumsum(-1).flip(-1) / before


def whitened(x: Tensor) -> Tensor:
    """Of mean 0 and variance 1."""
    return (x - x.mean()) * (x.var() + 1e-8).rsqrt()
