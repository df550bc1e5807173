"""What is installed, what is missing, what that costs, and the line that fixes it.

`examine()` gathers facts into a Machine; each check is a small function from a Machine to findings, so that all of
them can be tried on machines that are not here. Nothing of this imports torch: a child process is asked about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rlkernel.doctor.finding import SEVERITIES as SEVERITIES
from rlkernel.doctor.finding import Finding as Finding
from rlkernel.doctor.jetson import CHECKS as _JETSON
from rlkernel.doctor.machine import Machine as Machine
from rlkernel.doctor.machine import examine as examine
from rlkernel.doctor.plugins import CHECKS as _PLUGINS
from rlkernel.doctor.rocm import CHECKS as _ROCM
from rlkernel.doctor.software import CHECKS as _SOFTWARE
from rlkernel.doctor.system import CHECKS as _SYSTEM

# section -> its checks, in the order in which they are printed
SECTIONS: Final[dict[str, tuple[Callable[[Machine], Iterator[Finding]], ...]]] = {
    "Machine": (*_SYSTEM, *_JETSON),
    "Packages": (*_SOFTWARE, *_ROCM),
    "rlkernel": _PLUGINS,
}


def diagnose(machine: Machine) -> dict[str, list[Finding]]:
    """Section -> findings of all its checks."""
    return {title: [f for check in checks for f in check(machine)] for title, checks in SECTIONS.items()}
