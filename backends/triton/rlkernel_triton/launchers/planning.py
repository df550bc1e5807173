"""For which GPU host code plans where none is asked: that of a scope, with tensors of any device.

    with planning_for("sm_90"), using(Recorder()):
        ...  # what is recorded is what an H100 would launch

Host code that decides by warps, multiprocessors or architecture asks `planned_target` before it asks the device.
Imports no operator, no torch and no Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.aot.targets import TARGETS, Target

_PLANNED: Final[ContextVar[Target | None]] = ContextVar("planned target", default=None)


@contextmanager
def planning_for(name: str) -> Iterator[None]:
    """Within this scope host code plans for one of `rlkernel_triton.aot.targets.TARGETS`, whatever the device.

    Raises:
        UnknownNameError: there is no such target.
    """
    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    token = _PLANNED.set(TARGETS[name])
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planned_target() -> Target | None:
    """The target of the innermost scope; None: what the device is."""
    return _PLANNED.get()
