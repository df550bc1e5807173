"""Triton's driver for a GPU that is not there: kernels are compiled for it and run in the simulator, on CPU tensors.

    with simulated("gfx942"):
        kernel[grid](x, out, n, BLOCK=1024)

All of Triton but the launch is the real thing: argument specialisation, compilation for the target, the check of LDS
against the target's limit. Imports torch, Triton and numpy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from rlkernel_core.errors import UnknownNameError
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_rocm.simulator import Bank, Machine, SimulationError, UnsupportedKernelError, read

# Architectures whose machine code the simulator runs.
SIMULATED: Final = tuple(name for name, a in ARCHITECTURES.items() if a.wave == 64)
_THREADS: Final = 1024  # of a workgroup, on every AMD GPU


class _Loader:
    """What Triton asks of a driver's utilities: the device's limits, and to load a binary."""

    def __init__(self, arch: str) -> None:
        self._properties = {
            "max_shared_mem": ARCHITECTURES[arch].lds,
            "multiprocessor_count": ARCHITECTURES[arch].units,
            "warpSize": ARCHITECTURES[arch].wave,
            "arch": arch,
        }

    def get_device_properties(self, _: object) -> Mapping[str, Any]:
        return self._properties

    def load_binary(self, *_: object) -> tuple[object, object, int, int, int]:
        """(module, function, registers, spills, threads at most); the launcher has read the assembly already."""
        return None, None, 0, 0, _THREADS


@cache
def _machine(key: str, source: str, name: str, lds: int, warps: int) -> Machine:
    """A compiled kernel, read once: Triton makes a launcher anew wherever a kernel is launched through its grid.

    Raises:
        UnsupportedKernelError: Triton's cache no longer has the assembly.
    """
    group = get_cache_manager(key).get_group(f"{source[:150]}.json") or {}
    assembly = next((Path(path) for file, path in group.items() if file.endswith(".amdgcn")), None)
    if assembly is None:
        raise UnsupportedKernelError(f"Triton's cache holds no assembly of {name}; delete it, try again")
    return Machine(read(assembly.read_text(), name), lds=lds, warps=warps)


class Launcher:
    """One compiled kernel on the simulator."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._kinds = list(source.signature.values())
        self.machine = _machine(metadata.hash, source.name, metadata.name, metadata.shared, metadata.num_warps)

    def __call__(self, x: int, y: int, z: int, _stream: Any, _function: Any, _packed: Any, *rest: Any) -> None:
        """Triton's calling convention: launch metadata and two hooks, then the arguments of the function."""
        given = [v for kind, v in zip(self._kinds, rest[3:], strict=True) if kind != "constexpr"]
        active: Any = triton.runtime.driver.active
        arch = self.machine.kernel.arch
        if active.arch != arch:
            raise SimulationError(f"{self.machine.kernel.name} was compiled for {arch}, and {active.arch} is simulated")
        self.machine.launch((x, y, z), _arguments(given), active.order)


class SimulatedDriver(DriverBase):  # type: ignore[misc]
    """A driver whose device is a simulated GPU and whose memory is the CPU's."""

    launcher_cls = Launcher

    def __init__(self, arch: str, order: int | str = "step") -> None:
        super().__init__()
        self.arch, self.order = arch, order
        self.utils = _Loader(arch)

    @classmethod
    def is_active(cls) -> bool:
        """Never found by itself: it is set."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise SimulationError(f"a simulated device has no C++ launcher, and so no C++ type for {ty}")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, ARCHITECTURES[self.arch].wave)

    def get_current_device(self) -> str:
        """The key of Triton's caches of kernels."""
        return f"simulated-{self.arch}"

    def get_current_stream(self, _: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise SimulationError("a simulator has no clock: nothing measured on it means anything")


@cache
def _driver(arch: str) -> SimulatedDriver:
    if arch not in SIMULATED:
        raise UnknownNameError("simulated architecture", arch, SIMULATED)
    return SimulatedDriver(arch)


def activate(arch: str, order: int | str = "step") -> None:
    """Let all kernels of this process run on a simulated GPU, until another driver is set.

    Args:
        arch: one of `SIMULATED`.
        order: "step", or a seed: waves of a workgroup run one after another, in an order drawn at every barrier.

    Raises:
        UnknownNameError: the architecture is not simulated.
    """
    driver = _driver(arch)
    driver.order = order
    triton.runtime.driver.set_active(driver)


@contextmanager
def simulated(arch: str, order: int | str = "step") -> Iterator[SimulatedDriver]:
    """`activate` for the scope of a with statement."""
    before = triton.runtime.driver._active  # noqa: SLF001 Triton has no public way to ask without creating one
    activate(arch, order)
    try:
        yield _driver(arch)
    finally:
        triton.runtime.driver._active = before  # noqa: SLF001 the same


def _arguments(given: list[Any]) -> list[Any]:
    """Tensors as the stretches of memory that they span; several of one storage share theirs."""
    spans: dict[int, tuple[Any, int, int]] = {}
    for x in given:
        if isinstance(x, torch.Tensor) and x.numel():
            storage, low, high = _span(x)
            _, least, most = spans.get(storage.data_ptr(), (storage, low, high))
            spans[storage.data_ptr()] = (storage, min(low, least), max(high, most))
    banks = {at: _bank(storage, low, high) for at, (storage, low, high) in spans.items()}
    out: list[Any] = []
    for x in given:
        if not isinstance(x, torch.Tensor):
            out.append(x)
        elif x.numel():
            out.append((x.data_ptr(), banks[x.untyped_storage().data_ptr()]))
        else:
            out.append(0)
    return out


def _span(x: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """Storage, and the bytes of it from a tensor's first element to behind its last."""
    storage = x.untyped_storage()
    low = x.data_ptr() - storage.data_ptr()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return storage, low, low + (last + 1) * x.element_size()


def _bank(storage: torch.UntypedStorage, low: int, high: int) -> Bank:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return Bank(np.ctypeslib.as_array(memory), storage.data_ptr(), low, high)
