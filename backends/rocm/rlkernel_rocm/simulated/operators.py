"""Implementations that first see to it that Triton's kernels run on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.claims import CLAIMS


def on(arch: str, op: str) -> Callable[..., Any]:
    """The Triton implementation of an operator, its kernels simulated; gradients run where the last call ran.

    Raises:
        UnknownNameError: Triton implements no such operator.
    """
    if op not in CLAIMS:
        raise UnknownNameError("simulated operator", op, CLAIMS)
    from rlkernel_rocm.simulated.driver import activate

    module, _, name = CLAIMS[op].target.partition(":")
    run: Callable[..., Any] = getattr(import_module(module), name)

    @wraps(run)
    def simulated(*args: Any, **options: Any) -> Any:
        activate(arch)
        return run(*args, **options)

    return simulated
