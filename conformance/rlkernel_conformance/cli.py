"""`rlkernel conformance`: hold a backend to its claims, prove the suite, read and compare reports."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel_core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from rlkernel_conformance.harness import Outcome
    from rlkernel_conformance.run import Death

EXAMPLES: Final = (
    ("rlkernel conformance run reference --op logprob", "every clause of one operator, twenty cases each"),
    ("rlkernel conformance run acme --profile standard --report reports/acme", "a backend, with its report written"),
    ("rlkernel conformance mutants --op logprob", "backends with planted bugs: does the suite find them all?"),
    ("rlkernel conformance compare reports/old reports/new", "what changed between two reports"),
)
EXITS: Final = {
    0: "every attacked clause holds; every mutant died as stated; the reports agree",
    1: "a clause is refuted or could not be attacked; a mutant lives; the reports differ",
}
_ACTIONS: Final = {"run": 1, "mutants": 0, "report": 1, "compare": 2}  # action -> how many words follow
_NEEDED: Final = ("hypothesis", "numpy", "torch")


def command(
    action: Annotated[str, typer.Argument(help="run BACKEND, mutants, report REPORT, or compare OLD NEW.")],
    words: Annotated[list[str] | None, typer.Argument(help="A backend's name, or reports (files or folders).")] = None,
    *,
    op: Annotated[
        list[str] | None, typer.Option(help="Operator; may be given several times. All, unless given.")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, standard or deep: how many cases a clause.")] = "quick",
    device: Annotated[str, typer.Option(help="torch devices with commas, such as cpu or cuda:0,cuda:1.")] = "cpu",
    jobs: Annotated[int | None, typer.Option(min=1, help="Operators at a time; half the cores unless given.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for report.json, report.md, junit.xml, badge.json.")
    ] = None,
    json: Json = False,
) -> None:
    """Hold a backend against the clauses of its operators.

    Every clause is attacked with drawn inputs that the backend's manifest
    claims to take, in a process of its own with limits on time and memory.
    A refuted clause comes with a counterexample and a script that shows it
    alone. What is not claimed is not attacked, and the report says so.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the suite needs {', '.join(missing)}: pip install 'rlkernel[cpu,conformance]'")
    if action not in _ACTIONS:
        raise UnknownNameError("action", action, _ACTIONS)
    given = words or []
    if len(given) != _ACTIONS[action]:
        raise ConfigError(
            f"{action} takes {_ACTIONS[action]} more word(s), got {given}; see rlkernel conformance --help"
        )
    if action == "run":
        holds = _run(given[0], op, profile, device, jobs or max(1, (os.cpu_count() or 2) // 2), report, json=json)
    elif action == "mutants":
        holds = _mutants(op, profile, json=json)
    elif action == "report":
        holds = _report(given[0], json=json)
    else:
        holds = _compare(*given, json=json)
    if not holds:
        raise typer.Exit(1)


def _run(
    backend: str, ops: list[str] | None, name: str, device: str, jobs: int, folder: Path | None, *, json: bool
) -> bool:
    from rlkernel_conformance.profiles import profile
    from rlkernel_conformance.report import write
    from rlkernel_conformance.run import run

    def watch(outcome: Outcome) -> None:
        if not json and outcome.status not in {"not_claimed", "not_attacked"}:
            mark = typer.style("held ", fg="green") if not outcome.failed else typer.style(outcome.status, fg="red")
            typer.echo(
                f"{mark}  {outcome.op:20} {outcome.clause}  {outcome.title}  ({outcome.executed} cases)", err=True
            )

    content = run(backend, profile(name), ops=ops or (), devices=tuple(device.split(",")), jobs=jobs, watch=watch)
    if folder is not None:
        write(content, folder)
    _show(content, json=json)
    return bool(content["verdict"] != "fails")


def _report(path: str, *, json: bool) -> bool:
    from rlkernel_conformance.report import read

    content = read(Path(path))
    _show(content, json=json)
    return bool(content["verdict"] != "fails")


def _show(content: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(content)
        return
    rows = []
    for op, found in content["operators"].items():
        counts = {s: sum(c["status"] == s for c in found["clauses"]) for s in content["summary"]}
        cells = [str(counts[s]) for s in ("held", "violated", "fault", "not_claimed", "not_attacked")]
        rows.append((op, found["verdict"], *cells))
    columns = ("operator", "verdict", "held", "violated", "fault", "not claimed", "not attacked")
    print_table(
        columns, rows, title=f"{content['provider']}: {content['verdict']}, {content['summary']['cases']} cases"
    )
    for op, found in content["operators"].items():
        for clause in found["clauses"]:
            if clause["status"] in {"violated", "fault"}:
                typer.echo(f"{op} {clause['clause']} {clause['title']}\n  {clause['fault']}: {clause['message']}")
                typer.echo("".join(f"    {line}\n" for line in clause["reproduce"].splitlines()))


def _mutants(ops: list[str] | None, name: str, *, json: bool) -> bool:
    from rlkernel_conformance.mutants import MODULES
    from rlkernel_conformance.profiles import profile
    from rlkernel_conformance.run import zoo

    def watch(death: Death) -> None:
        if not json:
            mark = typer.style("dead ", fg="green") if death.as_stated else typer.style("ALIVE", fg="red")
            by = ", ".join(death.killed_by) or "nothing"
            typer.echo(f"{mark}  {death.mutant.op:20} {death.mutant.name:36} by {by}", err=True)

    deaths = [d for op in ops or MODULES for d in zoo(op, profile(name), watch=watch)]
    dead = sum(d.as_stated for d in deaths)
    rows = [
        {"op": d.mutant.op, "mutant": d.mutant.name, "origin": d.mutant.origin, "planted": d.mutant.planted}
        | {"killed_by": list(d.killed_by), "as_stated": d.as_stated}
        for d in deaths
    ]
    if json:
        print_json({"score": f"{dead}/{len(deaths)}", "mutants": rows})
    else:
        typer.echo(f"{dead} of {len(deaths)} mutants died as stated")
    return dead == len(deaths)


def _compare(old: str, new: str, *, json: bool) -> bool:
    from rlkernel_conformance.report import compare, read

    lines = compare(read(Path(old)), read(Path(new)))
    if json:
        print_json({"differences": lines})
    else:
        typer.echo("\n".join(plain(line) for line in lines) if lines else "the reports agree")
    return not lines
