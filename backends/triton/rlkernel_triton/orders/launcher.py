"""Launches that derive in which order sums are taken.

Kernels are compiled for a GPU that need not be here, their PTX runs on CPU tensors, and every float in memory has the
hash of the expression that made it.

    with using(OrderLauncher("sm_90")) ...

Imports Triton, and no operator.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import torch

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.launchers import Binding, Build, Grid, Launcher
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.launchers.recorder import build_of
from rlkernel_triton.launchers.specialization import is_descriptor
from rlkernel_triton.launchers.targets import TARGETS
from rlkernel_triton.orders.instructions import bind
from rlkernel_triton.orders.machine import Machine, Value
from rlkernel_triton.orders.memory import GlobalMemory
from rlkernel_triton.orders.ptx import PtxKernel, read_ptx
from rlkernel_triton.orders.tensor_copy import box_of


class OrderLauncher(Launcher):
    """Binds kernels whose PTX it runs.

    Args:
        target: of `rlkernel_triton.launchers.targets.TARGETS`, one of NVIDIA's: "sm_90".
        level: "bits" or "order" (`rlkernel_triton.orders`).

    Raises:
        UnknownNameError: there is no such target.
    """

    overlaps = False

    def __init__(self, target: str, level: str) -> None:
        if target not in TARGETS or not TARGETS[target].nvidia:
            raise UnknownNameError("NVIDIA target", target, [name for name, t in TARGETS.items() if t.nvidia])
        self.name, self.level, self.target = target, level, TARGETS[target]
        self.memory = GlobalMemory()
        self.fusable: dict[str, int] = {}  # kernel -> additions that ptxas may fuse with a product

    def launch_of(self, binding: Binding) -> OrderLaunch:
        """See `Launcher`."""
        return OrderLaunch(binding, self)


class OrderLaunch:
    """A bound kernel."""

    def __init__(self, binding: Binding, launcher: OrderLauncher) -> None:
        self.binding, self._launcher = binding, launcher

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`.

        Raises:
            NoCertificateError: the order cannot be derived.
        """
        launcher = self._launcher
        build = build_of(self.binding, args)
        kernel, shared, boxes = code(build, launcher.name)
        given = passed(self.binding, build, args, launcher.memory)
        launcher.fusable[kernel.name] = kernel.fusable
        x, y, z = (*grid, 1, 1)[:3]
        parameters, described = _parameters(kernel, given), {}
        for i, about in zip((i for i, x in enumerate(given) if is_descriptor(x)), boxes, strict=True):
            described[_address(i)] = box_of(given[i], launcher.memory.of(given[i].base), about)
        Machine(kernel, bind, shared, launcher.level).launch((x, y, z), parameters, launcher.memory, described)


def passed(binding: Binding, build: Build, args: tuple[Any, ...], memory: GlobalMemory) -> list[Any]:
    """What a launch passes to the code of a build, in its order; tensors have a place in `memory` then."""
    values, compiled = {**binding.fixed, **binding.by_name(args)}, dict(build.types)
    given = []
    for x in (values[p.name] for p in binding.parameters if p.name in compiled):
        given += [x, *x.shape, *x.strides] if is_descriptor(x) else [x]
        tensor = x.base if is_descriptor(x) else x
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            memory.of(tensor)
    return given


def _address(i: int) -> int:
    """Where the i-th parameter would lie, if it is a structure."""
    return (i + 1) << 12


@cache
def code(build: Build, target: str) -> tuple[PtxKernel, int, tuple[dict[str, Any], ...]]:
    """A build's PTX, read once, the bytes of shared memory of a block, and what descriptors are of, in their order."""
    made = compile_recorded(build, target)
    boxes = getattr(made.compiled.metadata, "tensordesc_meta", None) or ()
    return read_ptx(made.compiled.asm["ptx"]), made.shared, tuple(boxes)


def _parameters(kernel: PtxKernel, given: list[Any]) -> dict[str, Value]:
    """Arguments as parameters of the code; pointers that Triton adds are null."""
    found = {}
    for i, (name, _, size) in enumerate(kernel.parameters):
        value = given[i] if i < len(given) else 0
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        if is_descriptor(value):
            found[name] = Value(np.uint64(_address(i)))
            continue
        if isinstance(value, float):
            bits = np.frombuffer(np.float32(value).tobytes() if size == 4 else np.float64(value).tobytes(), f"u{size}")[
                0
            ]
        else:
            bits = np.dtype(f"u{size}").type(int(value) & ((1 << 8 * size) - 1))
        found[name] = Value(bits)
    return found


def target_name(arch: str) -> str:
    """Triton's name of an architecture: "sm_90" of "sm90"."""
    return re.sub(r"^sm_?", "sm_", arch)
