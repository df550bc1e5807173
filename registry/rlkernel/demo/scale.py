"""How large the demo is on each type of device, and how long it may take there: in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlkernel.demo.train import Recipe
from rlkernel.hardware import present
from rlkernel.probe import device_here
from rlkernel_core.errors import UnknownNameError


@dataclass(frozen=True)
class Scale:
    """Sizes of model and batch for a type of device."""

    hidden: int
    layers: int
    heads: int
    recipe: Recipe
    seconds: float  # a run without --steps ends after about this long
    threads: int | None  # of torch on the CPU; None leaves them alone


SCALES: Final[Mapping[str, Scale]] = {
    # One thread: products this small gain little from a second one, and on a busy machine threads that wait for each
    # other made the run take ten minutes instead of two.
    "cpu": Scale(64, 2, 4, Recipe(fit_rate=4e-3), seconds=105, threads=1),
    # bf16, because that is what kernels for GPUs are written for; the parameters stay in fp32.
    "cuda": Scale(
        512,
        6,
        8,
        Recipe(steps=300, fit_rate=5e-4, prompts=128, group=16, rate=1e-4, dtype="bfloat16"),
        seconds=60,
        threads=None,
    ),
}


def place(device: str | None) -> tuple[torch.device, Scale]:
    """The device to run on, the one that is here by default, and the scale of its type.

    Raises:
        ArgumentError: a device that torch does not see here, or a word for something else.
        UnknownNameError: nobody has such a device, or the demo has no scale for its type.
    """
    wanted = present(device or device_here())
    kind = wanted.partition(":")[0]
    if kind not in SCALES:
        raise UnknownNameError("device of the demo", wanted, SCALES)
    return torch.device(wanted), SCALES[kind]
