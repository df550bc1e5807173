"""In which order sums are taken on AMD GPUs, derived from their machine code in the simulator.

What `rlkernel_triton.orders` does with PTX: a launcher whose floats have hashes.
"""

from __future__ import annotations

from typing import Any, Final

from cdna_simulator import SimulationError, read
from rlkernel_core.errors import UnknownNameError
from rlkernel_rocm.simulated.launcher import SIMULATED, arguments
from rlkernel_rocm.simulated.order_machine import OrderMachine
from rlkernel_triton.launchers import Binding, Grid, Launcher
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.launchers.recorder import build_of
from rlkernel_triton.launchers.targets import TARGETS
from rlkernel_triton.orders.errors import NoCertificateError
from rlkernel_triton.orders.launcher import passed
from rlkernel_triton.orders.memory import GlobalMemory
from rlkernel_triton.orders.trace import Trace


def amd(arch: str, level: str, op: str) -> Trace:
    """What derives the orders of one call on an AMD GPU.

    Args:
        arch: one of `SIMULATED`, such as "gfx942".
        level: "bits" or "order".
        op: operator.

    Raises:
        UnknownNameError: the architecture is not simulated.
    """
    return Trace(AmdOrderLauncher(arch, level), op)


class AmdOrderLauncher(Launcher):
    """Binds kernels whose machine code it runs, each float with the hash of its expression.

    Args:
        arch: one of `SIMULATED`.
        level: "bits" or "order" (`rlkernel_triton.orders`).

    Raises:
        UnknownNameError: the architecture is not simulated.
    """

    overlaps = False

    def __init__(self, arch: str, level: str) -> None:
        if arch not in SIMULATED:
            raise UnknownNameError("simulated architecture", arch, SIMULATED)
        self.arch, self.level, self.target = arch, level, TARGETS[arch]
        self.memory = GlobalMemory()
        self.fusable: Final[dict[str, int]] = {}  # machine code leaves nothing to a later compiler

    def launch_of(self, binding: Binding) -> AmdOrderLaunch:
        """See `Launcher`."""
        return AmdOrderLaunch(binding, self)


class AmdOrderLaunch:
    """A bound kernel."""

    def __init__(self, binding: Binding, launcher: AmdOrderLauncher) -> None:
        self.binding, self._launcher = binding, launcher

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`.

        Raises:
            NoCertificateError: the order cannot be derived.
        """
        launcher = self._launcher
        build = build_of(self.binding, args)
        made = compile_recorded(build, launcher.arch)
        kernel = read(made.compiled.asm["amdgcn"], made.compiled.metadata.name)
        given = passed(self.binding, build, args, launcher.memory)
        x, y, z = (*grid, 1, 1)[:3]
        machine = OrderMachine(
            kernel, lds=made.shared, warps=build.num_warps, memory=launcher.memory, level=launcher.level
        )
        try:
            machine.launch((x, y, z), arguments(given))
        except SimulationError as error:
            raise NoCertificateError(str(error)) from error
