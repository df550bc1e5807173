"""Spaces of calls, a module per operator: attacks on options together and on real sizes are made of them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from rlkernel_conformance.spaces.space import Space

__all__ = ["space_of"]


def space_of(op: str) -> Space | None:
    """The space of an operator's calls; None where none is written."""
    name = f"{__name__}.{op}"
    if find_spec(name) is None:
        return None
    space: Space = import_module(name).SPACE
    return space
