"""The form in which `argument_changes` says how an argument of an operator shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Change:
    """Another value of an argument, and what has to be given for it to have a meaning."""

    value: Any
    given: Mapping[str, Any] = field(default_factory=dict)


Changes = dict[str, Change]


def starts(*lengths: int) -> torch.Tensor:
    """Bounds of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokens end to end."""
    return {name: x.flatten(0, 1) for name, x in tensors.items()}
