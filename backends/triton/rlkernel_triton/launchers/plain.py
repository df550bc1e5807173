"""Launches as `kernel[grid](…)` makes them: Triton's interpreter, its JIT, or a driver of its own, such as a simulator.

Every argument is asked at every launch, so that nothing need be the same from run to run but what is bound.
Imports torch, and no operator.
"""

from __future__ import annotations

from typing import Any

import torch

from rlkernel_triton.launchers.binding import Binding, Grid, Launcher


class PlainLaunch:
    """A bound kernel that Triton launches."""

    def __init__(self, binding: Binding, device: torch.device | None) -> None:
        self.binding, self._keywords, self._device = binding, binding.keywords, device

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`."""
        if self._device is None:
            self.binding.kernel[grid](**self.binding.by_name(args), **self._keywords)
            return
        with torch.cuda.device(self._device):
            self.binding.kernel[grid](**self.binding.by_name(args), **self._keywords)


class PlainLauncher(Launcher):
    """Binds kernels that Triton launches.

    Args:
        device: the GPU that they run on; None where Triton runs them elsewhere.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def launch_of(self, binding: Binding) -> PlainLaunch:
        """See `Launcher`."""
        return PlainLaunch(binding, self.device)
