"""One run of the demo from options to run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import rlkernel as rlk
from rlkernel.demo import task
from rlkernel.demo.model import Policy, Shape
from rlkernel.demo.record import RunFolder
from rlkernel.demo.train import Recipe, Step, fit, improve
from rlkernel_core.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """How to run the demo."""

    seed: int = 0
    out: Path | None = None  # run folder; None: runs/grpo-<time>
    order: tuple[str, ...] = ()  # backends; empty: what the configuration says
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Progress:
    """What an onlooker is told: the phase, how far it is, and the latest update."""

    phase: str  # "fit" | "improve"
    done: int
    total: int
    loss: float | None = None
    step: Step | None = None


def run(options: Options, watch: Callable[[Progress], None] = lambda _: None) -> dict[str, Any]:
    """Run the demo; returns the summary that is also in the run folder.

    The same seed gives the same curve on the same machine and number of threads.

    Raises:
        ConfigError: an unknown backend, or a run folder that exists already.
        KeyboardInterrupt: passed on after the run folder has been completed.
    """
    folder = options.out or Path("runs") / time.strftime("grpo-%Y%m%d-%H%M%S")
    if folder.exists():
        raise ConfigError(f"out: {folder} exists already; name another folder, or delete it")
    recipe = options.recipe
    with rlk.use(*options.order), RunFolder(folder, {**asdict(options), "out": str(folder)}) as record:
        began = time.perf_counter()
        torch.manual_seed(options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        policy = Policy(Shape(vocab=len(task.ALPHABET), context=task.PROMPT + task.ANSWER))
        for i, loss in enumerate(fit(policy, recipe, generator), 1):
            watch(Progress("fit", i, recipe.fit_steps, loss=loss))
        record.summary["parameters"] = sum(p.numel() for p in policy.parameters())
        for step in improve(policy, recipe, generator, options.seed):
            record.add(step)
            watch(Progress("improve", step.step + 1, recipe.steps, step=step))
        record.summary["seconds"] = round(time.perf_counter() - began, 1)
    return record.summary
