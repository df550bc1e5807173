"""Reports and tolerances on the terminal, for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import typer

from rlkernel.cli.output import plain, print_json, print_table
from rlkernel_conformance import tolerances
from rlkernel_conformance.documents import counted, place, providers
from rlkernel_conformance.report import NOT_ASKED, REFUTED, STATUSES

_FAILING: Final = ("fails", "unfinished")
_SHOWN: Final = 5  # combinations without a case; the report has more
_TOLD: Final = (*REFUTED, "waived", "no_room", "not_run")


def passes(content: dict[str, Any]) -> bool:
    """Whether a command that shows this report ends well."""
    return content["verdict"] not in _FAILING


def show(content: dict[str, Any], *, json: bool) -> None:
    """A table of operators, then every clause that did not hold, with its script."""
    if json:
        print_json(content)
        return
    rows = []
    for op, found in content["operators"].items():
        counts = {s: sum(c["status"] == s for c in found["clauses"]) for s in STATUSES}
        rows.append((op, found["verdict"], _covered(found), *(str(counts[s]) for s in STATUSES)))
    columns = ("operator", "verdict", "combinations", *(s.replace("_", " ") for s in STATUSES))
    about = f"{providers(content)} on {place(content)}, profile {content['profile']}"
    title = f"{about}: {content['verdict']}, {content['summary']['cases']} cases"
    print_table(columns, rows, title=title)
    for problem in content["problems"]:
        typer.echo(problem)
    for op, found in content["operators"].items():
        if found["unproved_claims"]:
            typer.echo(f"{op} claims without an executed case: {', '.join(found['unproved_claims'])}")
        for clause in found["clauses"]:
            if clause["status"] in _TOLD and clause["message"] != NOT_ASKED:
                typer.echo("\n".join(_lines(op, clause)))
            missed = clause.get("coverage", {}).get("missed", ())
            thorough = content["runs"][clause["run"]]["profile"]["thorough"]
            if missed and thorough and clause["status"] == "held":
                told = [f"{op} {clause['clause']} {clause['title']}: not executed", *map(counted, missed[:_SHOWN])]
                typer.echo("\n  ".join(told))


def _covered(found: dict[str, Any]) -> str:
    """The share of combinations and sizes that were executed; empty where none was due."""
    tables = [c["coverage"] for c in found["clauses"] if c.get("coverage", {}).get("possible")]
    possible = sum(t["possible"] for t in tables)
    return f"{sum(t['executed'] for t in tables) / possible:.0%}" if possible else ""


def _lines(op: str, clause: dict[str, Any]) -> list[str]:
    waiver = clause.get("waiver")
    excuse = [f"  waived until {waiver['expires']}: {waiver['reason']} ({waiver['issue']})"] if waiver else []
    return [
        f"{op} {clause['clause']} {clause['title']}",
        *excuse,
        f"  {clause['fault'] or clause['status'].replace('_', ' ')}: {counted(clause['message'])}",
        *([f"  the call: {counted(clause['call'])}"] if clause.get("call") else []),
        *(f"    {line}" for line in clause["reproduce"].splitlines()),
    ]


def show_tolerances(ops: Iterable[str], *, json: bool) -> None:
    """The table of tolerances with its version."""
    ops = tuple(ops)
    rows, version = tolerances.table(ops), tolerances.version(ops)
    if json:
        print_json({"version": version, "tolerances": rows})
        return
    cells = [
        [plain(f"{row[c]:.3g}" if isinstance(row[c], float) else row[c]) for c in tolerances.COLUMNS] for row in rows
    ]
    print_table(tolerances.COLUMNS, cells, title=f"tolerances, version {version}")
