"""Operators of plain torch as functions of their arguments, which are checked: without front door, policy or plan.

For tests and benchmarks that compare an implementation with this one. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlkernel_core.spec import OPERATORS
from rlkernel_torch import TARGETS


def _direct(op: str) -> Callable[..., Any]:
    module, _, name = TARGETS[op][0].partition(":")
    return OPERATORS[op].taking_arguments(getattr(import_module(module), name))


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in TARGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function: Callable[..., Any] = globals().setdefault(name, _direct(name))
    return function
