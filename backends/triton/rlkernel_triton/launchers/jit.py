"""Kernels that Triton's JIT compiles at their first run, and that are then launched without it.

At every launch the JIT asks of every argument what may be assumed of it: 27 µs for 14 arguments on one H100 machine.
A bound launch belongs to a plan, made for one shape: types, sizes, strides and alignments of tensors are the same at
every run. So only numbers passed at run time are asked, and the compiled kernel's own launcher is called: 9 µs
(benchmarks/notes/host.md).

As through the JIT: the current stream of the tensors' device, whichever device is current; graph capture; launch hooks
(profilers such as proton). Unlike there, a kernel whose Python globals change after it was compiled is not refused.

Imports no operator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
import triton

from rlkernel_core.environment import variable
from rlkernel_core.errors import RLKernelError
from rlkernel_triton.launchers import triton_abi
from rlkernel_triton.launchers.binding import Binding, Grid, Launcher
from rlkernel_triton.launchers.specialization import Specialization, specialization_of, specialization_of_number

CHECKED: Final = "RLKERNEL_TRITON_CHECK_LAUNCHES"  # set: every launch is compared with what its kernel was compiled for
_HOOKS: Final = triton.knobs.runtime


class LaunchError(RLKernelError, RuntimeError):
    """A launch breaks what its kernel was compiled for; raised only where launches are checked."""


class Device(NamedTuple):
    """One GPU as launches see it."""

    index: int  # type: ignore[assignment]  # a field, in place of the method of tuples
    current: Callable[[], int]  # index of the current device
    stream: Callable[[int], int]  # handle of the current stream of a device
    guard: Callable[[int], AbstractContextManager[object]]  # the scope in which a device is current


def gpu(device: torch.device) -> Device:
    """A CUDA or HIP device, through torch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return Device(index, torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch.cuda.device)  # noqa: SLF001 what Triton's own driver calls


class JitLaunch:
    """A bound kernel, with a compiled one for each kind of numbers that it was run with."""

    __slots__ = (
        "_checked",
        "_current",
        "_entries",
        "_index",
        "_inspected",
        "_ordered",
        "_stream",
        "_tail",
        "binding",
        "device",
    )  # fmt: skip

    def __init__(self, binding: Binding, device: Device, *, checked: bool) -> None:
        self.binding, self.device, self._checked = binding, device, checked
        self._tail, self._ordered = binding.tail, binding.ordered
        self._index, self._current, self._stream = device.index, device.current, device.stream
        self._entries: dict[tuple[Specialization, ...] | None, _Entry] = {}
        # Run-time arguments that are asked at every run, known from the first: numbers, and pointers of any alignment.
        self._inspected: tuple[_Inspected, ...] | None = None

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`.

        Raises:
            LaunchError: launches are checked, and an argument is not what the kernel was compiled for.
        """
        if self._current() != self._index:
            with self.device.guard(self._index):
                self(grid, *args)
            return
        key: tuple[Specialization, ...] | None = None
        if self._inspected:
            key = tuple([inspect(args[i], specialize=s, align=a) for i, inspect, s, a in self._inspected])
        found = self._entries.get(key)
        if found is None:
            self._first(grid, args)
            return
        if self._checked:
            self._check(found, args)
        entry, _ = found
        full = args + self._tail
        if self._ordered is not None:
            full = self._ordered(full)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
        # None up to Triton 3.4, a chain of calls since, unless a function was put in its place
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled, stream = entry.compiled, self._stream(self._index)
            said = compiled.launch_metadata((x, y, z), stream, *full)
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, said, enter, leave, *full)
        elif entry.spread:
            entry.call(x, y, z, self._stream(self._index), *entry.middle, *full)
        else:
            entry.call(x, y, z, self._stream(self._index), *entry.middle, full)

    def _first(self, grid: Grid, args: tuple[Any, ...]) -> None:
        """Compile for these arguments and run; through the JIT where the kernel cannot be launched directly."""
        kernel, named, keywords = self.binding.kernel, self.binding.by_name(args), self.binding.keywords
        entry = None
        if not kernel.pre_run_hooks:
            compiled = kernel.warmup(grid=grid, **named, **keywords)
            compiled = getattr(compiled, "result", lambda: compiled)()  # a future where Triton compiles in threads
            entry = None if compiled is None else triton_abi.entry_of(compiled)
        if entry is None:
            kernel[grid](**named, **keywords)
            return
        if self._inspected is None:
            self._inspected = tuple(
                _Inspected(
                    i,
                    specialization_of_number if isinstance(x, int | float) else specialization_of,
                    p.specialize,
                    p.align,
                )
                for i, (p, x) in enumerate(zip(self.binding.passed, args, strict=True))
                if isinstance(x, int | float) or p.name in self.binding.any_alignment
            )
        key = tuple(inspect(args[i], specialize=s, align=a) for i, inspect, s, a in self._inspected) or None
        self._entries[key] = _Entry(entry, self._specializations(args))
        self(grid, *args)

    def _specializations(self, args: tuple[Any, ...]) -> tuple[Specialization, ...]:
        pairs = zip(self.binding.passed, args, strict=True)
        return tuple(specialization_of(x, specialize=p.specialize, align=p.align) for p, x in pairs)

    def _check(self, found: _Entry, args: tuple[Any, ...]) -> None:
        self.binding.by_name(args)
        for p, x, is_, was in zip(self.binding.passed, args, self._specializations(args), found.assumed, strict=True):
            if is_ != was:
                raise LaunchError(
                    f"{self.binding.name} was compiled for {p.name} as {was}, and is launched with {is_}. A launch is "
                    "bound for one shape: bind it again for another, and pass numbers that change at run time."
                )
            if isinstance(x, torch.Tensor) and x.is_cuda and x.device.index != self._index:
                raise LaunchError(f"{self.binding.name} is bound for device {self._index}; {p.name} is on {x.device}.")


class _Inspected(NamedTuple):
    position: int  # among the run-time arguments
    inspect: Callable[..., Specialization]
    specialize: bool
    align: bool


class _Entry(NamedTuple):
    entry: triton_abi.Entry
    assumed: tuple[Specialization, ...]  # of every run-time argument


class JitLauncher(Launcher):
    """Binds kernels for one GPU.

    Args:
        device: the GPU.
        checked: compare every launch with what its kernel was compiled for; None: if RLKERNEL_TRITON_CHECK_LAUNCHES is
            set.
    """

    def __init__(self, device: Device, *, checked: bool | None = None) -> None:
        self.device = device
        self.checked = variable(CHECKED) is not None if checked is None else checked

    def launch_of(self, binding: Binding) -> JitLaunch:
        """See `Launcher`."""
        return JitLaunch(binding, self.device, checked=self.checked)
