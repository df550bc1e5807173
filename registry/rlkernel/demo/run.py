"""One run of the demo from options to run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rlkernel as rlk
from rlkernel.demo import task
from rlkernel.demo.clock import Clock
from rlkernel.demo.exact import ExactPolicy
from rlkernel.demo.model import Policy, Shape
from rlkernel.demo.record import RunFolder
from rlkernel.demo.scale import place
from rlkernel.demo.train import Recipe, Step, fit, improve
from rlkernel_core.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """How to run the demo."""

    seed: int = 0
    out: Path | None = None  # run folder; None: runs/grpo-<time>
    order: tuple[str, ...] = ()  # backends; empty: what the configuration says
    device: str | None = None  # as torch spells it; None: a GPU if there is one, else the CPU
    exact: bool = False  # both sides by operators of exact bits, whatever the recipe says
    recipe: Recipe | None = None  # None: the device's, cut to the time that it may take there


@dataclass(frozen=True)
class Progress:
    """What an onlooker is told: the phase, how far it is, how long the run still takes, and the latest update."""

    phase: str  # "fit" | "improve"
    done: int
    total: int  # falls where the time is short
    left: float | None = None  # seconds until the run's end; None before it can be told
    loss: float | None = None
    step: Step | None = None


def run(options: Options, watch: Callable[[Progress], None] = lambda _: None) -> dict[str, Any]:
    """Run the demo; returns the summary that is also in the run folder.

    The same seed gives the same curve on the same machine; where time is short, less of it.

    Raises:
        ConfigError: an unknown backend, a device that is not here, or a run folder that exists already.
        UnknownNameError: a type of device that the demo has no scale for.
        KeyboardInterrupt: passed on after the run folder has been completed.
    """
    device, scale = place(options.device)
    recipe = options.recipe or scale.recipe
    recipe = replace(recipe, exact=recipe.exact or options.exact)
    folder = options.out or Path("runs") / time.strftime("grpo-%Y%m%d-%H%M%S")
    if folder.exists():
        raise ConfigError(f"out: {folder} exists already; name another folder, or delete it")
    started = {**asdict(options), "out": str(folder), "device": str(device), "recipe": asdict(recipe)}
    clock = Clock(recipe, None if options.recipe else scale.seconds)
    with rlk.use(*options.order), _threads(scale.threads), RunFolder(folder, started) as record:
        torch.manual_seed(options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        shape = Shape(len(task.ALPHABET), task.PROMPT + task.ANSWER, scale.hidden, scale.layers, scale.heads)
        policy = Policy(shape).to(device)
        record.summary |= {
            "device": _name(device),
            "dtype": recipe.dtype,
            "parameters": sum(p.numel() for p in policy.parameters()),
            "steps_wanted": recipe.steps,
            "seconds_wanted": clock.seconds,
        }
        for done, loss in enumerate(fit(policy, recipe, generator), 1):
            clock.tick("fit")
            total = clock.total("fit")
            watch(Progress("fit", done, total, clock.left("fit"), loss=loss))
            if done >= total:
                break
        record.summary["fit_steps"] = done
        if recipe.exact:
            policy = ExactPolicy.of(policy, recipe.weights, recipe.activations)
        for step in improve(policy, recipe, generator, options.seed, record.on):
            record.add(step)
            clock.tick("improve")
            total = clock.total("improve")
            watch(Progress("improve", step.step + 1, total, clock.left("improve"), step=step))
            if step.step + 1 >= total:
                break
        record.summary["seconds"] = round(clock.elapsed, 1)
    return record.summary


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """At most so many threads of torch inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return torch.cuda.get_device_name(device)
