"""How a kernel that Triton compiled is launched without Triton's JIT: the one module that knows, version by version.

`CompiledKernel.run(gridX, gridY, gridZ, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook,
*every argument in the kernel's order, constants included)` is the same in all versions known here. It calls a launcher
in C whose form differs; `FORMS` has it, as the version's own source writes the call, so that a test can look for it
there. None of it is a public interface of Triton: an unknown version, or a compiled kernel that lacks what is expected,
is launched through the JIT, slower and right.

Imports Triton, and no operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from threading import Lock
from typing import Any, Final, NamedTuple

import triton

from rlkernel_core.errors import RLKernelWarning

# While one thread has Triton load a kernel, another would find its `run` and not yet its `function`.
_LOADING: Final = Lock()
_GRID: Final = "gridX, gridY, gridZ, stream, function"
_HOOKS: Final = "kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook"
_COOPERATIVE: Final = "self.launch_cooperative_grid"
_TOLD: Final = "self.arg_annotations, self.kernel_signature"  # from 3.7 on one launcher serves every kernel
_CUDA_37: Final = f"{_GRID}, {_COOPERATIVE}, self.launch_pdl, {_HOOKS}, global_scratch, profile_scratch, {_TOLD}, %s"
_HIP_38: Final = f"{_COOPERATIVE}, {_GRID}, global_scratch, profile_scratch, {_HOOKS}, self.warp_size, {_TOLD}, args"
# What `self.launch(…)` is given in CudaLauncher.__call__ and HIPLauncher.__call__ (triton/backends/*/driver.py of the
# released wheels). Where they end in *args, the metadata and hooks are its first four.
FORMS: Final[Mapping[tuple[int, int], Mapping[str, str]]] = {
    (3, 4): {
        "cuda": f"{_GRID}, {_COOPERATIVE}, self.launch_pdl, global_scratch, *args",
        "hip": f"{_COOPERATIVE}, *args",
    },
    (3, 5): {
        "cuda": f"{_GRID}, {_COOPERATIVE}, self.launch_pdl, global_scratch, profile_scratch, *args",
        "hip": f"{_COOPERATIVE}, {_GRID}, profile_scratch, *args",
    },
    (3, 6): {
        "cuda": f"{_GRID}, {_COOPERATIVE}, self.launch_pdl, global_scratch, profile_scratch, *args",
        "hip": f"{_COOPERATIVE}, {_GRID}, profile_scratch, *args",
    },
    (3, 7): {
        "cuda": _CUDA_37 % "args",
        "hip": f"{_COOPERATIVE}, {_GRID}, profile_scratch, {_HOOKS}, self.warp_size, {_TOLD}, args",
    },
    (3, 8): {"cuda": _CUDA_37 % "kernel_args", "hip": _HIP_38},
    (3, 9): {"cuda": _CUDA_37 % "kernel_args", "hip": _HIP_38},
}
# Where only `*args` stands in a form: what CompiledKernel.run passes on.
_PASSED: Final = {f"{_COOPERATIVE}, *args": f"{_COOPERATIVE}, {_GRID}, *args"}
ATTRIBUTES: Final = ("run", "function", "packed_metadata", "launch_metadata", "metadata")  # of a compiled kernel


class Entry(NamedTuple):
    """A compiled kernel, ready: `call(gridX, gridY, gridZ, stream, *middle, …arguments)`."""

    call: Callable[..., Any]
    middle: tuple[Any, ...]
    spread: bool  # arguments follow one by one; else as one tuple
    compiled: Any


def version_of(text: str) -> tuple[int, int]:
    """(3, 6) of "3.6.0+git1234"; (0, 0) of what is no version."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0


def entry_of(compiled: Any, version: str = triton.__version__) -> Entry | None:
    """How to launch a compiled kernel directly on the device that is current; None if it must go through the JIT.

    Loads the kernel. Warns once for a version that is not known and for a compiled kernel that lacks an attribute.
    """
    form = FORMS.get(version_of(version))
    if form is None:
        known = ", ".join(f"{a}.{b}" for a, b in FORMS)
        warn_once(f"Triton {version} is not among those whose kernels are launched directly ({known})")
        return None
    try:
        with _LOADING:
            run = compiled.run  # loads it
            found = {name: getattr(compiled, name) for name in ATTRIBUTES}
    except AttributeError as error:
        warn_once(f"a kernel compiled by Triton {version} is not as expected: {error}")
        return None
    direct = _direct(run, compiled, form.get(found["metadata"].target.backend, ""))
    if direct is not None:
        return direct
    return Entry(run, (compiled.function, compiled.packed_metadata, None, None, None), True, compiled)


def _direct(run: Any, compiled: Any, form: str) -> Entry | None:
    """The launcher in C; None where Triton's own `__call__` has more to do than to call it, or is not as expected."""
    if getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0):
        return None  # allocated at every launch
    if getattr(run, "gsan_enabled", False):
        return None
    before, _, after = _PASSED.get(form, form).partition(_GRID + ", ")
    if not after:
        return None
    *names, last = after.split(", ")
    values: dict[str, Any] = {
        "global_scratch": None, "profile_scratch": None, "kernel_metadata": compiled.packed_metadata,
        "launch_metadata": None, "launch_enter_hook": None, "launch_exit_hook": None,
    }  # fmt: skip
    if last == "*args":
        names += _HOOKS.split(", ")
    try:
        values |= {n: getattr(run, n[5:]) for n in (*names, *before.split(", ")) if n.startswith("self.")}
        call = run.launch
    except AttributeError:
        return None
    if before:
        call = partial(call, *(values[n] for n in before.split(", ") if n))
    return Entry(call, (compiled.function, *(values[n] for n in names)), last == "*args", compiled)


@cache
def warn_once(problem: str) -> None:
    """Say that kernels are launched through the JIT."""
    warnings.warn(f"{problem}. Kernels run through Triton's JIT: slower, and right.", RLKernelWarning, stacklevel=2)
