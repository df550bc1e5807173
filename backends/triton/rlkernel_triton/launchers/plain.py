"""Launches as `kernel[grid](…)` makes them: Triton's interpreter, its JIT, or a driver of its own, such as a simulator.

Every argument is asked at every launch, so that nothing need be the same from run to run but what is bound.
Imports torch, and no operator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Final

import torch

from rlkernel_triton.launchers.binding import Binding, Grid, Launcher

# Triton's interpreter patches `triton.language` and counts programs for the whole process, and so does a simulator:
# threads (ranks of a test, or autograd's) launch one after another.
_ONE_AT_A_TIME: Final = RLock()


class PlainLaunch:
    """A bound kernel that Triton launches."""

    def __init__(self, binding: Binding, device: torch.device | None) -> None:
        self.binding, self._keywords, self._device = binding, binding.keywords, device

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`."""
        on_cpu = self._device is None
        scope: AbstractContextManager[Any] = _ONE_AT_A_TIME if on_cpu else torch.cuda.device(self._device)
        with scope:
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
