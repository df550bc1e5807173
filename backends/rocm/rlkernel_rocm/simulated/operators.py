"""The Triton implementations of operators, prepared and run with the launcher of a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.claims import CLAIMS

if TYPE_CHECKING:
    from rlkernel_rocm.simulated.launcher import SimulatorLauncher


@cache
def launcher(arch: str) -> SimulatorLauncher:
    """The launcher of an architecture, one a process.

    Raises:
        UnknownNameError: the architecture is not simulated.
    """
    from rlkernel_rocm.simulated.launcher import SimulatorLauncher

    return SimulatorLauncher(arch)


def on(arch: str, op: str) -> Callable[[Any], Any]:
    """What a manifest names: prepares the first call of a shape, and runs calls of that shape, on simulated kernels.

    Raises:
        UnknownNameError: Triton implements no such operator.
    """
    if op not in CLAIMS:
        raise UnknownNameError("simulated operator", op, CLAIMS)
    from rlkernel_triton.launchers import Scope
    from rlkernel_triton.prepared import prepared

    return prepared(op, Scope(launcher(arch), launcher(arch).target))
