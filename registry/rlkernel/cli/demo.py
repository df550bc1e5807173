"""`rlkernel demo`: watch a small model learn arithmetic by GRPO through the operators."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from rlkernel import policy
from rlkernel.cli.options import Json, Order, backends_named
from rlkernel.cli.output import console, print_json, print_table
from rlkernel.installation import extras
from rlkernel_core.errors import ConfigError
from rlkernel_core.paths import missing

if TYPE_CHECKING:
    from rlkernel.demo.run import Progress

EXAMPLES: Final = (
    ("rlkernel demo", "on the GPU if there is one, in about a minute; else on one CPU core, in about two"),
    ("rlkernel demo --device cpu --out runs/first", "on the CPU in any case"),
    ("rlkernel demo --steps 20 --seed 1 --json", "so many updates, however long they take; the summary as JSON"),
    ("rlkernel demo --order torch", "on the reference alone"),
    ("rlkernel demo --exact --steps 10", "both sides by operators of exact bits: no log-probability differs"),
)
EXITS: Final = {0: "the run is complete"}
_NEEDED: Final = ("torch", "numpy")
_NO_PICTURE: Final = "none without matplotlib: pip install matplotlib && python -m rlkernel.demo.picture {}"
_EVERY: Final = {"fit": 20, "improve": 5}  # a line of progress where output is no terminal
_FIRST: Final = 3  # and one as soon as the time that is left can be told
_TITLES: Final = {"fit": "1/2 fitting to careless text", "improve": "2/2 improving by GRPO"}


def command(
    *,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cpu, cuda (ROCm too), cuda:1; a GPU if there is one."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="GRPO updates; unless given, as many as fit into the time.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same curve on one machine.")] = 0,
    exact: Annotated[
        bool, typer.Option("--exact", help="Trainer and rollout share every bit; slow where plain torch attends.")
    ] = False,
    order: Order = None,
    config: Annotated[Path | None, typer.Option(help="A rlkernel.toml to use instead of the one in effect.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create; runs/grpo-TIME unless given.")] = None,
    json: Json = False,
) -> None:
    """Watch a small model learn arithmetic by GRPO, every step through the operators.

    A small transformer is fitted to the text of a careless writer, then
    improved on problems whose answers can be verified. Rollouts run on int4
    weights under capture and sample; the trainer uses linear_logprob,
    advantage and policy_loss; the gap between the two is measured at every
    update and corrected. The run folder holds metrics, a picture of reward
    and drift, and which backend served each operator.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"the demo needs {', '.join(lacking)}: {extras('cpu')}")
    if config is not None and not config.is_file():
        raise ConfigError(f"--config: {missing(config)}")
    if config is not None:
        os.environ["RLKERNEL_CONFIG"] = str(config)
        policy.refresh()
    from rlkernel.demo.run import Options, run
    from rlkernel.demo.scale import place

    _, scale = place(device)
    recipe = dataclasses.replace(scale.recipe, steps=steps) if steps is not None else None
    names = backends_named(order)
    with _Display(quiet=json) as display:
        try:
            options = Options(seed=seed, out=out, order=names, device=device, exact=exact, recipe=recipe)
            summary = run(options, display.show)
        except KeyboardInterrupt:
            typer.echo("interrupted; the run folder is complete up to the last update", err=True)
            raise typer.Exit(130) from None
    if json:
        print_json(summary)
    else:
        _tell(summary)


class _Display:
    """A progress bar on a terminal, a line now and then elsewhere; on standard error, so that output stays clean."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        err = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        fields = (TextColumn("{task.fields[left]}"), TextColumn("{task.fields[news]}"))
        self.bar = Progress(*columns, *fields, console=err, disable=not err.is_terminal or quiet)
        self.lines = not err.is_terminal and not quiet
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, progress: Progress) -> None:
        """Show how far a phase is, and how long the whole run still takes."""
        phase, done, total = progress.phase, progress.done, progress.total
        news = f"loss {progress.loss:.3f}" if progress.step is None else _news(progress.step)
        left = "" if phase == "fit" and done == total else time_left(progress.left)
        if phase not in self.tasks:
            self.tasks[phase] = self.bar.add_task(_TITLES[phase], total=total, news="", left="")
        self.bar.update(self.tasks[phase], completed=done, total=total, news=news, left=left)
        if self.lines and (done % _EVERY[phase] == 0 or done in {_FIRST, total}):
            typer.echo(f"{_TITLES[phase]} {done}/{total}  {time_left(progress.left)}  {news}", err=True)


def time_left(seconds: float | None) -> str:
    """`about 1 min 20 s left`, rounded up to five seconds; None before it can be told."""
    if seconds is None:
        return "measuring the pace"
    minutes, rest = divmod(5 * math.ceil(seconds / 5), 60)
    parts = [f"{n} {unit}" for n, unit in ((minutes, "min"), (rest, "s")) if n]
    return f"about {' '.join(parts)} left" if parts else "done"


def _news(step: Any) -> str:
    return f"reward {step.reward:.3f}  drift {step.drift_mean:.4f}  {step.tokens_per_second:.0f} tokens/s"


def _tell(summary: dict[str, Any]) -> None:
    rows = [tuple(row[name] for name in ("side", "op", "backend", "target", "provider")) for row in summary["served"]]
    print_table(("side", "operator", "served by", "implementation", "from"), rows)
    first, last = summary["reward_first"], summary["reward_last"]
    differ = summary["tokens_that_differ"]
    drift = f"max {summary['drift_max']:.3f}, mean {summary['drift_mean']:.4f}, KL {summary['drift_kl']:.5f}"
    done, wanted = summary["steps"], summary["steps_wanted"]
    cut = f"; {wanted} did not fit into {summary['seconds_wanted']:g} s" if done < wanted else ""
    folder = summary["folder"]
    lines = (
        f"reward     {first:.3f} -> {last:.3f}  ({summary['reward_rise']:+.3f} in {done} updates{cut})",
        f"drift      {drift} nats per token, int4 rollout against {summary['dtype']} trainer",
        f"bits       {differ or 'no'} of {summary['tokens']} log-probabilities differ",
        f"time       {summary['seconds']:.0f} s on {summary['device']}",
        f"decisions  {summary['decisions_hash']}",
        f"run folder {folder}  (metrics.jsonl, decisions.json, summary.json)",
        f"picture    {summary['picture'] or _NO_PICTURE.format(folder)}",
    )
    console().print("\n".join(lines), markup=False)
