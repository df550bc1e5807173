"""Taking nested arguments apart into leaves with names, and putting them together again.

Containers are tuples, named tuples, lists, dicts and dataclasses; everything else is a leaf. A leaf's name is its
path: `x`, `batch.ids`, `caches.0`. Imports nothing outside the standard library.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from rlkernel_core import checks


class Structure(NamedTuple):
    """The shape of nested arguments without their leaves; hashable when its keys are (at every call)."""

    container: type | None  # None for a leaf
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Path of every leaf, in the order of `flatten`."""
        if self.container is None:
            return (prefix,)
        dot = "." if prefix else ""
        pairs = zip(self.keys, self.children, strict=True)
        return tuple(name for key, child in pairs for name in child.names(f"{prefix}{dot}{key}"))

    def build(self, leaves: Sequence[Any]) -> Any:
        """The nested value whose leaves, in order, are `leaves`."""
        return leaves[0] if self.container is None else self._build(iter(leaves))

    def builder(self) -> Callable[[Sequence[Any]], Any]:
        """`build`, found once for the structures that are built often: one leaf, or a flat tuple, list or dict."""
        cls, keys = self.container, self.keys
        if cls is None:
            return itemgetter(0)
        if cls in {tuple, list, dict} and all(child.container is None for child in self.children):
            return cls if cls is not dict else lambda leaves: dict(zip(keys, leaves, strict=True))
        return self.build

    def _build(self, leaves: Iterator[Any]) -> Any:
        cls = self.container
        if cls is None:
            return next(leaves)
        values = [child._build(leaves) for child in self.children]  # noqa: SLF001  same class
        if cls in {tuple, list}:
            return cls(values)
        if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields"):
            return cls(**dict(zip(self.keys, values, strict=True)))
        return cls(zip(self.keys, values, strict=True))


LEAF = Structure(None)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves of `value` in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    cls: type = type(value)
    if cls is tuple or cls is list:
        return Structure(cls, tuple(range(len(value))), tuple([_flatten(v, leaves) for v in value]))
    if cls is dict or cls is OrderedDict:
        return Structure(cls, tuple(value), tuple([_flatten(v, leaves) for v in value.values()]))
    keys = _fields(cls)
    if keys is None:
        leaves.append(value)
        return LEAF
    return Structure(cls, keys, tuple([_flatten(getattr(value, k), leaves) for k in keys]))


@cache
def _fields(cls: type) -> tuple[str, ...] | None:
    """Field names of a named tuple or dataclass; None for a leaf."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return tuple(cls._fields)
    return tuple(f.name for f in dataclasses.fields(cls) if f.init) if dataclasses.is_dataclass(cls) else None


def first_tensor(value: Any) -> Any:
    """The first tensor among the leaves of `value`, or None."""
    return next((leaf for leaf in flatten(value)[0] if checks.is_tensor(leaf)), None)
