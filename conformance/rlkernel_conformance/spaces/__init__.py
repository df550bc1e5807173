"""Spaces of calls, a module per operator: attacks on options together and on real sizes are made of them."""

from __future__ import annotations

from importlib import import_module

from rlkernel_conformance.spaces.space import Space
from rlkernel_core.spec.brought import BROUGHT

__all__ = ["space_of"]


def space_of(op: str) -> Space:
    """The space of an operator's calls."""
    brought = BROUGHT.get(op)
    space: Space = import_module(str(brought.attacks) if brought is not None else f"{__name__}.{op}").SPACE
    return space
