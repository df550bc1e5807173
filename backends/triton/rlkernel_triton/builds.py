"""Builds that modules name: kernels that no bound launch reaches yet, as the compile gate compiles them.

What operators bind is recorded of the calls of `workloads` instead (`recorded`). A module here exports `builds(arch)`,
every build that it ships for an architecture, and stands in `MODULES`; it goes when its host code binds its launches.
Imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Modules with a function `builds(arch: str) -> Iterable[Build]`; arch is "sm90", "gfx942", …
MODULES: Final[tuple[str, ...]] = (
    "rlkernel_triton.head_builds",
    "rlkernel_triton.head_draw_builds",
    "rlkernel_triton.quant.block_builds",
    "rlkernel_triton.quant.builds",
    "rlkernel_triton.verify_builds",
)


@dataclass(frozen=True)
class Build:
    """One kernel, compiled one way."""

    kernel: Any  # what triton.jit made
    label: str  # which of the kernel's builds: "bf16, entropy"
    types: Mapping[str, str]  # parameter -> Triton's type: "*bf16", "i64", "fp32"
    constants: Mapping[str, Any] = field(default_factory=dict)  # parameter -> value
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()  # parameters known to be multiples of 16, as pointers and sizes mostly are
    options: Mapping[str, Any] = field(default_factory=dict)  # of the target's compiler: "waves_per_eu"
