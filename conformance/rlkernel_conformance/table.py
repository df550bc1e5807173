"""What the committed reports say, as tables that nobody types: operators by backends, and operators by hardware.

What was found with other sources or attacks than are there now is marked as older, operator by operator.

rlkernel conformance table                      print operators by backends
rlkernel conformance table docs/conformance.md  write each table between its markers in a file
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_conformance.documents import place, providers, read, versions
from rlkernel_conformance.evidence import changed, older, reports, sources_now
from rlkernel_conformance.hardware import hardware
from rlkernel_conformance.report import standing
from rlkernel_core.errors import ConfigError
from rlkernel_core.files import read_text, write_text
from rlkernel_core.spec import OPERATORS

RESULTS: Final = Path("benchmarks/results")
BUILDS: Final = Path("backends/triton/builds/README.md")


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row a report below a folder, by backend: where it was made, its verdict, and each operator's.

    Raises:
        ConfigError: no report there, or one that was changed.
    """
    found = [(path.parent.name, read(path)) for path in reports(folder)]
    return [
        {
            "report": name,
            "backend": content["backend"],
            "provider": providers(content),
            "place": place(content),
            "profile": content["profile"],
            "torch": versions(content, "torch"),
            "created": content["created"][:10],
            "verdict": content["verdict"],
            "operators": _cells(content),
        }
        for name, content in found
    ]


def table(folder: Path, at: Path = Path()) -> str:
    """Markdown: a column a report, a row an operator, and below where each report was made.

    Args:
        folder: the reports.
        at: the folder of the page, from which links lead.
    """
    columns = rows(folder)
    names = [f"`{c['report']}`" for c in columns]
    lines = [
        f"| Operator | {' | '.join(names)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for spec in OPERATORS.values():
        cells = [c["operators"].get(spec.id, "-") for c in columns]
        lines.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    lines.append("")
    for c in columns:
        where = f"on {c['place']}, torch {c['torch']}, {c['profile']} profile, {c['created']}"
        link = f"[`{c['report']}`]({os.path.relpath(folder / c['report'] / 'report.md', at)})"
        lines.append(f"- {link}: {c['provider']} {where}: **{c['verdict']}**")
    return "\n".join(lines)


# What a page may have between `<!-- NAME: written by ... -->` and `<!-- end of NAME -->`.
TABLES: Final[Mapping[str, Callable[[Path, Path], str]]] = {
    "conformance": table,
    "hardware": lambda folder, at: hardware(folder, RESULTS, BUILDS, at),
}


def markers(name: str) -> tuple[str, str]:
    """The lines between which a table stands."""
    return f"<!-- {name}: written by `rlkernel conformance table FILE` -->", f"<!-- end of {name} -->"


def write(path: Path, folder: Path) -> None:
    """Write each table for which a file has markers.

    Raises:
        ConfigError: the file has no markers.
        FileError: it cannot be read, or written.
    """
    write_text(path, placed(path, lambda name: TABLES[name](folder, path.parent)))


def placed(path: Path, made: Callable[[str], str]) -> str:
    """The text of a file with each table, made by name, between its markers.

    Raises:
        ConfigError: the file has no markers.
        FileError: it cannot be read.
    """
    text = read_text(path, "Name a page of Markdown.")
    written = text
    for name in TABLES:
        begin, end = markers(name)
        before, there, rest = written.partition(begin)
        _, closed, after = rest.partition(end)
        if there and closed:
            written = f"{before}{begin}\n\n{made(name)}\n\n{end}{after}"
    if written == text and not any(markers(name)[0] in text for name in TABLES):
        places = ", ".join(" and ".join(markers(name)) for name in TABLES)
        raise ConfigError(f"{path} has no place for a table: put one of these pairs on lines of their own: {places}")
    return written


def _cells(content: dict[str, Any]) -> dict[str, str]:
    """Operator -> its cell."""
    now = sources_now(content)
    found = content["operators"].items()
    return {op: _cell(operator, len(older(operator, now.get(op)) | changed(op, operator))) for op, operator in found}


def _cell(operator: dict[str, Any], others: int) -> str:
    """A verdict with what it stands for: `holds 25`, or `fails, 24 of 25 hold, 2 claims untried`.

    `holds 33 of 34`: one needs more memory than the device has. `holds 33, older`: all are of other sources or
    attacks than those of now; `holds 33, 2 older`: so many are.
    """
    said = standing(operator["verdict"], operator["clauses"])
    results = sum(bool(c["executed"] or c["fault"]) for c in operator["clauses"])
    count = f"{others} " * (others < results)
    age = f", {count}*older*" if others else ""
    untried = len(operator["unproved_claims"])
    tried = f", {untried} claim{'s' * (untried > 1)} untried" if untried else ""
    return f"{said}{tried}{age}"
