"""Checks of a single call, whatever it computes: arguments stay as they were, bits repeat, errors name arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.compare import Violation, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError
from rlkernel_core.tree import flatten

# Operators whose results may be memory of an argument, as their pages say.
SHARED: Final = {"prepack": ("w",)}


def leaves(value: Any) -> dict[str, Tensor]:
    """The tensors of a nested value by path."""
    found, structure = flatten(value)
    return {n: x for n, x in zip(structure.names(), found, strict=True) if isinstance(x, Tensor)}


def same_results(found: Any, expected: Any, when: str) -> None:
    """Every tensor of two results is equal bit by bit."""
    a, b = leaves(found), leaves(expected)
    require(a.keys() == b.keys(), f"{sorted(a)} is not {sorted(b)} {when}")
    for name, x in a.items():
        same_bits(name, x, b[name], when)


def untouched(given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    """What `call` returns; it writes to none of its arguments `given` and changes no global state."""
    before = {n: x.detach().clone() for n, x in leaves(dict(given)).items()}
    state = torch.get_rng_state()
    out = call()
    for name, x in leaves(dict(given)).items():
        same_bits(name, x, before[name], "after the call")
    require(torch.equal(torch.get_rng_state(), state), "the global generator moved")
    require(torch.get_default_dtype() == torch.float32, "the default dtype changed")
    require(torch.is_grad_enabled(), "gradients were switched off")
    return out


def refused(subject: Subject, argument: str, given: Mapping[str, Any], good: Mapping[str, Any] | None = None) -> None:
    """The call raises ArgumentError that names the argument.

    The first call of a shape is checked, before a backend is chosen. A good call before it shows that a plan which lies
    there already is not taken for one of another shape.
    """
    if good is not None:
        subject(**good)
    try:
        subject(**given)
    except ArgumentError as error:
        require(error.argument.startswith(argument), f"a bad {argument} is blamed on {error.argument}")
        return
    raise Violation(f"a bad {argument} is accepted")
