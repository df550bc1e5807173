"""What a run of drawn mutants found, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Final

import typer

from rlkernel.cli.output import print_json, print_table
from rlkernel_conformance.source_mutants.run import KILLED, Findings

_COLUMNS: Final = ("killed", "of", "share", "equivalent", "trivial")


def show(found: Findings, *, json: bool) -> None:
    """Print the share killed, by operator and by kind of change, and every mutant that no clause killed."""
    if json:
        print_json(found.content())
        return
    for name, title in (("op", "operator"), ("kind", "kind of change")):
        rows = [(key, *_cells(statuses)) for key, statuses in sorted(found.by(name).items())]
        print_table((title, *_COLUMNS), rows)
    for status, title in (("survived", "No clause kills"), ("equivalent", "Ruled out")):
        listed = [m for m in found.mutants if m.status == status]
        if listed:
            typer.secho(f"{title}:", bold=True)
        for m in listed:
            text = "\n".join(f"    {line}" for line in m.diff.splitlines())
            typer.echo(f"  {m.op}, {m.kind}, {m.file}:{m.line}: {m.why}\n{text}")
    for op, clauses in found.broken.items():
        for clause, message in clauses.items():
            typer.secho(f"{op}: the unchanged copy fails {clause}, which killed nothing: {message}", fg="red")
    counted = [m for m in found.mutants if m.counts]
    killed = sum(m.killed for m in counted)
    typer.echo(
        f"{killed} of {len(counted)} mutants killed ({found.share:.1%}) with seed {found.seed} at {found.profile}"
    )


def _cells(statuses: Counter[str]) -> tuple[str, ...]:
    killed = sum(statuses[status] for status in KILLED)
    of = killed + statuses["survived"]
    share = f"{killed / of:.0%}" if of else "-"
    return str(killed), str(of), share, str(statuses["equivalent"]), str(statuses["trivial"])
