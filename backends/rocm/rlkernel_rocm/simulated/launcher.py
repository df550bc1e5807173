"""Launches on a GPU that is not there: kernels are compiled for it and run in the simulator, on CPU tensors.

    with using(SimulatorLauncher("gfx942")):
        ...  # host code plans for an MI300X, and launches its machine code

Of Triton all but the launch is the real thing; what arguments allow to assume is what every launcher of
`rlkernel_triton.launchers` assumes. Imports torch, Triton and numpy.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from cdna_simulator import Machine, Region, UnsupportedKernelError, read
from rlkernel_core.errors import UnknownNameError
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton.launchers import Binding, Build, Grid, Launcher
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.launchers.recorder import build_of
from rlkernel_triton.launchers.targets import TARGETS

# Architectures whose machine code the simulator runs.
SIMULATED: Final = tuple(name for name, a in ARCHITECTURES.items() if a.wave == 64)


class SimulatorLauncher(Launcher):
    """Binds kernels for a simulated GPU, which is planned for as the real one is.

    Args:
        arch: one of `SIMULATED`.
        order: "step", or a seed: waves of a workgroup run one after another, in an order drawn at every barrier.

    Raises:
        UnknownNameError: the architecture is not simulated.
    """

    def __init__(self, arch: str, order: int | str = "step") -> None:
        if arch not in SIMULATED:
            raise UnknownNameError("simulated architecture", arch, SIMULATED)
        self.arch, self.order, self.target = arch, order, TARGETS[arch]

    def launch_of(self, binding: Binding) -> SimulatedLaunch:
        """See `Launcher`."""
        return SimulatedLaunch(binding, self.arch, self.order)


class SimulatedLaunch:
    """A bound kernel."""

    def __init__(self, binding: Binding, arch: str, order: int | str) -> None:
        self.binding, self.arch, self._order = binding, arch, order

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`.

        Raises:
            UnsupportedKernelError: the kernel wants more LDS than the GPU has, or an instruction that is not simulated.
            SimulationError: the kernel does what the hardware forbids, such as to read beyond a tensor.
        """
        build = build_of(self.binding, args)
        values, passed = {**self.binding.fixed, **self.binding.by_name(args)}, dict(build.types)
        given = [values[p.name] for p in self.binding.parameters if p.name in passed]
        x, y, z = (*grid, 1, 1)[:3]
        machine(build, self.arch).launch((x, y, z), arguments(given), self._order)


@cache
def machine(build: Build, arch: str) -> Machine:
    """A build compiled for an architecture, read once.

    Raises:
        UnsupportedKernelError: it wants more LDS than the GPU has.
    """
    made = compile_recorded(build, arch)
    if made.shared > ARCHITECTURES[arch].lds:
        raise UnsupportedKernelError(
            f"{build.kernel} takes {made.shared} bytes of LDS; a workgroup of {arch} has {ARCHITECTURES[arch].lds}"
        )
    source, name = made.compiled.asm["amdgcn"], made.compiled.metadata.name
    return Machine(read(source, name), lds=made.shared, warps=build.num_warps)


def arguments(given: list[Any]) -> list[Any]:
    """Tensors as the stretches of memory that they span; several of one storage share theirs."""
    spans: dict[int, tuple[Any, int, int]] = {}
    for x in given:
        if isinstance(x, torch.Tensor) and x.numel():
            storage, low, high = _span(x)
            _, least, most = spans.get(storage.data_ptr(), (storage, low, high))
            spans[storage.data_ptr()] = (storage, min(low, least), max(high, most))
    regions = {at: _region(storage, low, high) for at, (storage, low, high) in spans.items()}
    out: list[Any] = []
    for x in given:
        if not isinstance(x, torch.Tensor):
            out.append(x)
        elif x.numel():
            out.append((x.data_ptr(), regions[x.untyped_storage().data_ptr()]))
        else:
            out.append(0)
    return out


def _span(x: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """Storage, and the bytes of it from a tensor's first element to behind its last."""
    storage = x.untyped_storage()
    low = x.data_ptr() - storage.data_ptr()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return storage, low, low + (last + 1) * x.element_size()


def _region(storage: torch.UntypedStorage, low: int, high: int) -> Region:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return Region(np.ctypeslib.as_array(memory), storage.data_ptr(), low, high)
