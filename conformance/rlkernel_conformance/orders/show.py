"""Certificates for people: a line each, and which are equal."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from rlkernel.cli.output import plain, print_json, print_table
from rlkernel_conformance.orders.certificates import Certificate, equal


def show_orders(found: Sequence[Certificate], *, json: bool) -> None:
    """Print certificates, and which have one hash."""
    groups = [same for same in equal(found).values() if len(same) > 1]
    if json:
        together = [[_name(c) for c in same] for same in groups]
        print_json({"certificates": [c.document() for c in found], "equal": together})
        return
    rows = []
    for c in found:
        outputs = ", ".join(f"{name} {value[:6]}" for name, value in (c.outputs or {}).items())
        alike = {True: "alike", False: "differ", None: ""}[c.rows_alike]
        rows.append((c.op, c.arch, c.size, c.dtype, c.hash or "none", outputs or c.why, alike))
    columns = ("operator", "architecture", "size", "dtype", "order", "of each output", "rows")
    print_table(columns, rows, title=f"orders of sums, level {found[0].level}" if found else "no certificate")
    for same in groups:
        typer.echo(plain(f"{same[0].hash}: {', '.join(_name(c) for c in same)} add in one order"))
    fusable = {f"{name} ({n})": None for c in found for name, n in (c.fusable or {}).items()}
    if fusable:
        typer.echo(plain(f"ptxas may fuse additions with the product that they add: {', '.join(fusable)}"))


def _name(c: Certificate) -> str:
    return f"{c.op} {c.arch} {c.size}"
