"""Ways to plant a bug in a rollout buffer of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def counted(buffer: Any, **changes: Callable[[Any], Any]) -> Any:
    """The buffer with other counters; a class of its own, because `stats` is a property."""
    kind = type(buffer)

    class Miscounted(kind):  # type: ignore[misc, valid-type]
        @property
        def stats(self) -> Any:
            stats = super().stats
            return replace(stats, **{name: change(stats) for name, change in changes.items()})

    buffer.__class__ = Miscounted
    return buffer


def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Any:
    """Replace a method of one object; the new one is given the old one first."""
    true = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: method(true, *args, **kwargs))
    return owner
