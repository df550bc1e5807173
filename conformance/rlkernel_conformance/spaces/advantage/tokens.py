"""What the kinds of advantage@1 have in common: arguments, where tokens are, what is estimated.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rlkernel_core.spec.advantage import AdvantageCall
from rlkernel_core.spec.advantage_kinds import KINDS

Given = Mapping[str, Any]  # arguments of a call, all of them, tensors as arrays
ROUNDING: Final = 2.0**-22  # of a sum of a few fp32 numbers, over the sum of their sizes


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of sequences are: rows [B, T] here, whatever the layout of the call."""

    inside: Any  # [B, T] bool: a token of the sequence
    valid: Any  # [B, T] bool: one that counts
    at: Any = None  # [B, T] its place among N packed ones; None where they are padded
    packed: int = 0  # N

    @classmethod
    def of(cls, n: Given, shape: tuple[int, ...]) -> Tokens:
        """Of token-level tensors of a shape."""
        if n["cu_seqlens"] is None:
            valid = np.ones(shape, bool) if n["mask"] is None else n["mask"]
            if n["lengths"] is not None:
                valid = np.arange(shape[1]) < n["lengths"].astype(np.int64)[:, None]
            return cls(np.ones(shape, bool), valid)
        bounds = n["cu_seqlens"].astype(np.int64)
        at = bounds[:-1, None] + np.arange(np.diff(bounds).max(initial=0))
        inside = at < bounds[1:, None]
        at = np.where(inside, at, 0)
        return cls(inside, inside if n["mask"] is None else inside & n["mask"][at], at, shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of token-level tensors."""
        return self.inside.shape if self.at is None else (self.packed,)

    def rows(self, x: Any) -> Any:
        """A token-level array as rows."""
        return x if self.at is None else x[self.at]

    def tokens(self, x: Any, outside: Any = 0.0) -> Any:
        """Rows as they are in the call; `outside` at packed tokens of no sequence."""
        if self.at is None:
            return x
        flat = np.zeros(self.packed, np.asarray(x).dtype) + outside
        flat[self.at[self.inside]] = x[self.inside]
        return flat


@dataclass(frozen=True)
class Estimate:
    """Advantages before whitening and weights, and how far a result may be from them."""

    values: Any  # [B] or rows [B, T]
    scale: Any  # what a rounding error is relative to, of the shape of `values`
    invalid: Any  # [B] bool
    exact: Any  # bool of that shape: 0 without a rounding error
    undecided: Any  # [B] bool: rounding decides
    returns: Any = None  # rows [B, T]
    raw: Any = 0.0  # [B] what an invalid sequence gets
    stats: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # values, largest error


def every_argument(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with those that are not given, and choices that its kind makes."""
    call = AdvantageCall(**given)
    n: dict[str, Any] = call.as_dict()
    return n | {c: getattr(KINDS[call.kind], c) for c in ("scale", "whiten") if n[c] == "auto"}


def sequence_lengths(n: Given, tokens: Tokens | None, *, by_token: bool) -> Any:
    """Valid tokens of each sequence [B]; None where no layout says how many."""
    described = by_token or any(n[x] is not None for x in ("mask", "lengths", "cu_seqlens"))
    if tokens is not None:
        return tokens.valid.sum(1) if described else None
    if n["lengths"] is not None:
        return n["lengths"].astype(np.int64)
    return None if n["cu_seqlens"] is None else np.diff(n["cu_seqlens"].astype(np.int64))


def groups_of(group: Any, sequences: int, *more: Any) -> list[Any]:
    """Indices of each group, by its size or by ids [B], and by more ids."""
    if not sequences:
        return []
    if np.ndim(group) == 0 and not more:
        return list(np.arange(sequences).reshape(-1, group))
    ids = [np.arange(sequences) // group if np.ndim(group) == 0 else group.astype(np.int64), *more]
    _, name, size = np.unique(np.stack(ids, 1), axis=0, return_inverse=True, return_counts=True)
    return np.split(np.argsort(name.reshape(-1), kind="stable"), np.cumsum(size)[:-1])
