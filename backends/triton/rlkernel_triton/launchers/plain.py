"""Launches as `kernel[grid](…)` makes them: Triton's interpreter, its JIT, or a driver of its own, such as a simulator.

Imports no operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rlkernel_triton.launchers.binding import Binding, Grid

_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class PlainLaunch:
    """A bound kernel that Triton launches."""

    def __init__(self, binding: Binding) -> None:
        self.binding, self._keywords = binding, binding.keywords

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`."""
        self.binding.kernel[grid](**self.binding.by_name(args), **self._keywords)


class PlainLauncher:
    """Binds kernels that Triton launches; the current device is the tensors'."""

    def bind(
        self,
        kernel: Any,
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        options: Mapping[str, Any] = _NO_OPTIONS,
        **fixed: Any,
    ) -> PlainLaunch:
        """See `Launcher`."""
        return PlainLaunch(Binding(kernel, num_warps, num_stages, options, fixed))


class InterpreterLauncher(PlainLauncher):
    """Kernels run on the CPU by Triton's interpreter (TRITON_INTERPRET=1)."""
