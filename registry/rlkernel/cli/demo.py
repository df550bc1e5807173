"""`rlkernel demo`: watch a small model learn arithmetic by GRPO through the operators."""

from __future__ import annotations

import dataclasses
import importlib.util
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
    ("rlkernel demo", "two minutes at the most on two CPU cores"),
    ("rlkernel demo --steps 20 --seed 1 --json", "a short run, its summary as JSON"),
    ("rlkernel demo --order torch", "on the reference alone"),
)
EXITS: Final = {0: "the run is complete"}
_NEEDED: Final = ("torch", "numpy", "matplotlib")
_EVERY: Final = {"fit": 50, "improve": 5}  # a line of progress where output is no terminal


def command(
    *,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO updates; 100 unless given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same curve on one machine.")] = 0,
    order: Order = None,
    config: Annotated[Path | None, typer.Option(help="A rlkernel.toml to use instead of the one in effect.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create; runs/grpo-TIME unless given.")] = None,
    json: Json = False,
) -> None:
    """Watch a small model learn arithmetic by GRPO, every step through the operators.

    A transformer of 400 thousand parameters is fitted to the text of a
    careless writer, then improved on problems whose answers can be verified.
    Rollouts run on int4 weights under capture and sample; the trainer uses
    linear_logprob, advantage and policy_loss; the gap between the two is
    measured at every update and corrected. The run folder holds metrics,
    plots, and which backend served each operator.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"the demo needs {', '.join(lacking)}: {extras('cpu', 'demo')}")
    if config is not None and not config.is_file():
        raise ConfigError(f"--config: {missing(config)}")
    if config is not None:
        os.environ["RLKERNEL_CONFIG"] = str(config)
        policy.refresh()
    from rlkernel.demo.run import Options, run
    from rlkernel.demo.train import Recipe

    recipe = Recipe() if steps is None else dataclasses.replace(Recipe(), steps=steps)
    names = backends_named(order)
    with _Display(quiet=json) as display:
        try:
            summary = run(Options(seed=seed, out=out, order=names, recipe=recipe), display.show)
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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        err = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, TextColumn("{task.fields[news]}"), console=err, disable=not err.is_terminal)
        self.lines = not err.is_terminal and not quiet
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, progress: Progress) -> None:
        """Show how far a phase is."""
        news = f"loss {progress.loss:.3f}" if progress.step is None else _news(progress.step)
        title = {"fit": "fitting to careless text", "improve": "improving by GRPO"}[progress.phase]
        if progress.phase not in self.tasks:
            self.tasks[progress.phase] = self.bar.add_task(title, total=progress.total, news="")
        self.bar.update(self.tasks[progress.phase], completed=progress.done, news=news)
        if self.lines and (progress.done % _EVERY[progress.phase] == 0 or progress.done == progress.total):
            typer.echo(f"{title} {progress.done}/{progress.total}  {news}", err=True)


def _news(step: Any) -> str:
    return f"reward {step.reward:.3f}  drift {step.drift_mean:.4f}  {step.tokens_per_second:.0f} tokens/s"


def _tell(summary: dict[str, Any]) -> None:
    rows = [(row["op"], row["backend"], row["target"], row["provider"]) for row in summary["served"]]
    print_table(("operator", "served by", "implementation", "from"), rows)
    first, last = summary["reward_first"], summary["reward_last"]
    drift = f"max {summary['drift_max']:.3f}, mean {summary['drift_mean']:.4f}, KL {summary['drift_kl']:.5f}"
    lines = (
        f"reward     {first:.3f} -> {last:.3f}  ({summary['reward_rise']:+.3f} in {summary['steps']} updates)",
        f"drift      {drift} nats per token, int4 rollout against fp32 trainer",
        f"decisions  {summary['decisions_hash']}",
        f"run folder {summary['folder']}  (curves.png, metrics.jsonl, decisions.json)",
    )
    console().print("\n".join(lines), markup=False)
