"""Which module of a model is the first whose result, token by token, has other bits than over the whole sequence.

Legend: B sequences · T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel.agree.pretrained import Pretrained


@dataclass(frozen=True)
class Divergence:
    """Where bits part: every module that was called before has the same on both sides."""

    module: str  # path
    kind: str  # class
    token: int  # the first position with other bits
    largest: float  # difference, over all positions

    def __str__(self) -> str:
        return f"{self.module} ({self.kind}) is the first to differ, from token {self.token} on, by {self.largest:.3g}"


def first_difference(model: Pretrained, ids: Tensor) -> Divergence | None:
    """Run ids [B, T] at once and token by token, and compare what each module gives, in the order of calls.

    Returns:
        The first module without modules of its own, or the first attention; None where all have the same bits.
    """
    with _recorded(model.model) as whole:
        model.full(ids)
    model.start(*ids.shape)
    steps = []
    for at in range(ids.shape[1]):
        with _recorded(model.model) as step:
            model.step(ids[:, at], at)
        steps.append(step)
    for i, (path, kind, want) in enumerate(whole):
        found = torch.cat([step[i][2] for step in steps], 1)
        if not torch.equal(found, want):
            apart = (found.double() - want.double()).abs()
            token = int((found != want).flatten(2).any(2).any(0).nonzero()[0])
            return Divergence(path, kind, token, float(apart.nan_to_num(torch.inf).max()))
    return None


@contextmanager
def _recorded(model: Any) -> Iterator[list[tuple[str, str, Tensor]]]:
    """What every innermost module that gives [B, T, ...] gives in the block: path, class, tensor."""
    calls: list[tuple[str, str, Tensor]] = []

    def recording(path: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, _: Any, given: Any) -> None:
            first = given[0] if isinstance(given, tuple) else given
            if isinstance(first, Tensor) and first.dim() >= 3:
                calls.append((path, type(module).__name__, first))

        return hook

    innermost = [(p, m) for p, m in model.named_modules() if next(m.children(), None) is None]
    attentions = [(p, m) for p, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    hooks = [m.register_forward_hook(recording(p)) for p, m in (*innermost, *attentions)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
