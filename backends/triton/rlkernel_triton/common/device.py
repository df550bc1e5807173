"""What host code asks of a tensor's device, or of the target that is planned for in its place."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import launcher_for, on_device_of, planned_target
from rlkernel_triton.launchers.specialization import aligned


def arch_of(x: Tensor) -> str:
    """The architecture that kernels on x are compiled for, or planned for: "sm90", "gfx942"; "interpreter"."""
    if (planned := planned_target()) is not None:
        return f"sm{planned.arch}" if planned.kind == "cuda" else str(planned.arch)
    if INTERPRETED:
        return "interpreter"
    with on_device_of(x):
        return _arch(x.get_device())


@cache
def _arch(device: int) -> str:
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch).partition(":")[0]


def lanes_per_warp(device: torch.device) -> int:
    """32, or 64 on AMD's data center GPUs."""
    if (target := planned_target()) is not None:
        return target.warp
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def on_nvidia(x: Tensor) -> bool:
    """Whether kernels on x are compiled for a GPU of NVIDIA's."""
    if (target := planned_target()) is not None:
        return target.nvidia
    return x.is_cuda and torch.version.hip is None


def has_pdl(x: Tensor) -> bool:
    """Whether a kernel on x may begin before the one ahead of it has ended, and wait for that end itself.

    Programmatic dependent launch of NVIDIA's, from compute capability 9.0 on.
    """
    if not launcher_for(x.device).overlaps:
        return False
    if (target := planned_target()) is not None:
        return target.nvidia and int(target.arch) >= 90
    return on_nvidia(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_tma(x: Tensor) -> bool:
    """Whether Hopper's copy engine may read x, [N, D] of 16 bits with rows at multiples of 16 bytes."""
    rows = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1]
    if not (rows and aligned(x) and x.element_size() == 2):
        return False
    if (target := planned_target()) is not None:
        return target.nvidia and target.arch == 90
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) == (9, 0)
