"""Implementations that first see to it that Triton's kernels run on a simulated GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Final

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.claims import CLAIMS

# What modules of kernels keep for a device: compiled code and what they know of it. One CPU stands for several GPUs.
_KEPT: Final = (
    ("rlkernel_triton.head_calls", "_arch", "cache_clear"),
    ("rlkernel_triton.quant.product", "_machine_of", "cache_clear"),
)
_kept_for: Final[list[str]] = []  # the architecture that it was kept for


def on(arch: str, op: str) -> Callable[[Any], Any]:
    """The Triton implementation of an operator, its kernels simulated; gradients run where the last call ran.

    Raises:
        UnknownNameError: Triton implements no such operator.
    """
    if op not in CLAIMS:
        raise UnknownNameError("simulated operator", op, CLAIMS)
    from rlkernel_rocm.simulated.driver import activate

    claim = CLAIMS[op]
    module, _, name = claim.target.partition(":")
    run: Callable[..., Any] = getattr(import_module(module), name)

    @wraps(run)
    def simulated(call: Any) -> Any:
        activate(arch)
        if _kept_for != [arch]:
            forget()
            _kept_for[:] = [arch]
        return run(call)(call) if claim.prepared else run(call)

    return simulated


def forget() -> None:
    """Let no module launch what it compiled for another GPU."""
    for module, name, clear in _KEPT:
        if module in sys.modules:
            getattr(getattr(sys.modules[module], name), clear)()
