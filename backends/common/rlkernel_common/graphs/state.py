"""What a run of fn changes outside its outputs, saved so that warm-up and verification leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor


class DeviceState:
    """Generators and mutated tensors, in one saved state."""

    def __init__(self, device: torch.device, generators: Sequence[Generator], mutated: Sequence[Tensor]) -> None:
        self._channels = _channels(device, generators)
        self._mutated = tuple(mutated)
        self._random = self.random()
        self._values = [x.detach().clone() for x in self._mutated]

    def random(self) -> list[Tensor]:
        """Generator states now."""
        return [read() for read, _ in self._channels]

    def drew(self) -> bool:
        """Whether anything was drawn since this state was saved."""
        return any(not torch.equal(a, b) for a, b in zip(self._random, self.random(), strict=True))

    def mutated(self) -> list[Tensor]:
        """Copies of the mutated tensors as they are now."""
        return [x.detach().clone() for x in self._mutated]

    def restore(self) -> None:
        """Put everything back."""
        for (_, write), state in zip(self._channels, self._random, strict=True):
            write(state)
        with torch.no_grad():
            for x, value in zip(self._mutated, self._values, strict=True):
                x.copy_(value)


Channel = tuple[Callable[[], Tensor], Callable[[Tensor], Any]]


def _channels(device: torch.device, generators: Sequence[Generator]) -> list[Channel]:
    """Ways to read and write each generator state: the host's, the device's, and the declared ones."""
    found: list[Channel] = [(torch.get_rng_state, torch.set_rng_state)]
    module = torch.get_device_module(device)
    if hasattr(module, "get_rng_state"):  # the host has no device module of its own
        found.append((lambda: module.get_rng_state(device), lambda s: module.set_rng_state(s, device)))
    return found + [(g.get_state, g.set_state) for g in generators]
