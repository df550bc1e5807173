"""`rlkernel doctor`: what is missing here, what that costs, and the line that fixes it."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import print_json
from rlkernel.doctor import SEVERITIES, Finding, diagnose, examine

EXAMPLES: Final = (
    ("rlkernel doctor", "Python, torch, GPUs, plugins, configuration"),
    ("rlkernel doctor --probe", "and every backend's self-test, run now on every device"),
)
EXITS: Final = {0: "no problem; there may be warnings", 1: "at least one problem"}

_MARKS: Final = {"ok": ("ok     ", "green"), "note": ("note   ", "cyan"), "warning": ("warning", "yellow")}
_PROBLEM: Final = ("PROBLEM", "red")


def command(
    *,
    probe: Annotated[bool, typer.Option("--probe", help="Run every backend's self-test now.")] = False,
    json: Json = False,
) -> None:
    """What is installed, what is missing, what that costs, and what fixes it.

    Works on a machine without torch and without a GPU. Accelerators are looked
    for through the driver's own tools, and torch is asked in a child process,
    so that a broken build is a line of the answer and not the end of it.
    """
    found = diagnose(examine(run_self_tests=probe))
    everything = [f for findings in found.values() for f in findings]
    counts = {severity: sum(f.severity == severity for f in everything) for severity in SEVERITIES}
    if json:
        print_json({"counts": counts, "findings": {t: [f.as_dict() for f in fs] for t, fs in found.items()}})
    else:
        for title, findings in found.items():
            typer.secho(title, bold=True)
            for finding in findings:
                _print(finding)
            typer.echo()
        typer.echo(f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['note']} note(s)")
    if counts["problem"]:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    mark, color = _MARKS.get(finding.severity, _PROBLEM)
    typer.echo(f"  {typer.style(mark, fg=color)}  {finding.text}")
    if finding.severity == "ok":
        return
    if finding.cost:
        typer.echo(f"           costs: {finding.cost}")
    if finding.fix:
        typer.echo(f"           {typer.style('fix:', fg='cyan')}   {finding.fix}")
