"""Judgments on results: what a violation is, and how close is close."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.subject import Subject

__all__ = ["Violation", "close", "norm_within", "require", "same_bits", "within"]


class Violation(AssertionError):
    """A clause does not hold; the message says what was found and what should have been."""


def require(holds: bool, message: str) -> None:
    """Raise a Violation with this `message` unless it holds."""
    if not holds:
        raise Violation(message)


def close(
    subject: Subject,
    output: str,
    found: Tensor,
    expected: Any,
    dtype: str,
    *,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """`found` is within the spec's tolerance of the float64 `expected`; NaN must meet NaN, infinities themselves.

    Args:
        subject: whose spec holds the tolerances.
        output: name of the tolerance rows.
        found: [...] a result of the subject.
        expected: array of the same shape.
        dtype: dtype of the inputs.
        scale: multiplies the absolute tolerance: what the error is relative to, where that is not 1.
        name: of the result in messages, where that is not `output`: "stats.clip_low".
    """
    atol, rtol = subject.tolerance(output, dtype)
    want = np.asarray(expected, np.float64)
    within(subject, output, found, want, atol * np.asarray(scale, np.float64) + rtol * np.abs(want), name=name)


def within(
    subject: Subject, output: str, found: Tensor, expected: Any, allowed: Any, *, name: str | None = None
) -> None:
    """`found` is no further from the float64 `expected` than `allowed`; NaN must meet NaN, infinities themselves.

    What may lie beyond the largest number of `found`'s dtype may be rounded to infinity. The largest error over what is
    allowed is kept in `subject.measures` under `output`.

    Args:
        subject: whose result it is.
        output: its name.
        found: [...] the result.
        expected: array of the same shape.
        allowed: largest absolute error, a number or an array of that shape; infinity: anything will do, NaN too.
        name: of the result in messages, where that is not `output`.
    """
    shown = name or output
    have = plain(found, shown).astype(np.float64)
    want, allowed = np.asarray(expected, np.float64), np.asarray(allowed, np.float64)
    require(have.shape == want.shape, f"{shown} has shape {have.shape}, not {want.shape}")
    same = (have == want) | (np.isnan(have) & np.isnan(want))
    finite = np.isfinite(have) & np.isfinite(want)
    with np.errstate(invalid="ignore", divide="ignore"):
        same |= np.isinf(have) & (np.sign(have) * want + allowed >= _overflow(found.dtype))
        error = np.where(finite, np.abs(have - want), np.inf)
        ratio = np.where(same | (np.isposinf(allowed) & np.isfinite(want)), 0.0, error / allowed)
        ratio[np.isnan(ratio)] = np.inf  # a bound that is NaN allows nothing
    worst = float(ratio.max(initial=0.0))
    subject.measures[output] = max(worst, subject.measures.get(output, 0.0))
    if worst > 1:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        place = tuple(int(i) for i in at)
        found_there, expected_there = have[at].item(), want[at].item()
        text = f"is {found_there!r}, expected {expected_there!r}: {worst:.3g} times the tolerance"
        raise Violation(f"{shown}{list(place) if place else ''} {text}")


def norm_within(subject: Subject, output: str, found: Tensor, expected: Any, allowed: float) -> None:
    """The Frobenius norm of the error of `found` is no larger than `allowed`.

    Args:
        subject: whose result it is.
        output: its name.
        found: [...] the result.
        expected: array of the same shape.
        allowed: largest norm of the error.
    """
    have, want = plain(found, output).astype(np.float64), np.asarray(expected, np.float64)
    require(have.shape == want.shape, f"{output} has shape {have.shape}, not {want.shape}")
    rounded = np.isinf(have) & (np.sign(have) * want + allowed >= _overflow(found.dtype))  # to infinity
    error = float(np.linalg.norm(np.where(rounded, want, have) - want))
    ratio = 0.0 if error == 0 else error / allowed if allowed else math.inf
    subject.measures[output] = max(ratio, subject.measures.get(output, 0.0))
    require(ratio <= 1, f"{output} is off by {error:.3g} in all, {ratio:.3g} times the tolerance")


def _overflow(dtype: torch.dtype) -> float:
    """The least number that rounds to infinity: half a step above the largest."""
    if not dtype.is_floating_point:
        return math.inf
    kind = torch.finfo(dtype)
    return kind.max + kind.eps * math.ldexp(0.25, math.frexp(kind.max)[1])


def same_bits(output: str, found: Tensor, expected: Tensor, when: str) -> None:
    """Two results [...] of one `output`, `found` and `expected`, are equal bit by bit; `when` ends the message."""
    require(
        found.shape == expected.shape, f"{output} has shape {list(found.shape)}, not {list(expected.shape)}, {when}"
    )
    # A view as bytes needs strides in order, also where a size of 1 leaves them free.
    kept = (x.detach().reshape(-1).clone(memory_format=torch.contiguous_format) for x in (found, expected))
    a, b = (x.view(torch.uint8) if x.numel() else x for x in kept)
    if not torch.equal(a, b):
        raise Violation(f"{output}{_first_difference(found.detach(), expected.detach(), when)}")


def _first_difference(found: Tensor, expected: Tensor, when: str) -> str:
    """Where two results of one shape differ first in their bits, and in how many places."""
    if found.dtype != expected.dtype:
        return f" is {found.dtype}, not {expected.dtype}, {when}"
    size = found.element_size()
    kept = (x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (found, expected))
    apart = torch.ne(*kept).view(-1, size).any(1).nonzero().view(-1).tolist()
    place = [int(i) for i in np.unravel_index(apart[0], tuple(found.shape))]
    a, b = (x.reshape(-1)[apart[0]].item() for x in (found, expected))
    return f"{place or ''} differs {when}: {a!r} is not {b!r} ({len(apart)} of {found.numel()} differ)"


def plain(x: Any, name: str) -> np.ndarray[Any, Any]:
    """The values of a result; anything but a plain, strided tensor is a violation (lazy results hide work)."""
    require(type(x) in {Tensor, torch.nn.Parameter}, f"{name} is a {type(x).__name__}, not a torch.Tensor")
    require(x.layout is torch.strided, f"{name} has layout {x.layout}")
    x = x.detach().cpu()
    values: np.ndarray[Any, Any] = (x.double() if x.is_floating_point() else x).numpy()
    return values
