"""What the committed reports say, as one table: operators by backends. Nobody types a verdict by hand.

What was found with other sources than are there now is marked as older, operator by operator.

rlkernel conformance table             print it
rlkernel conformance table README.md   write it between the markers of a file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rlkernel_conformance.documents import place, providers, read, versions
from rlkernel_conformance.evidence import manifest_of, older, reports, sources
from rlkernel_core.errors import ConfigError
from rlkernel_core.paths import missing
from rlkernel_core.spec import OPERATORS

BEGIN: Final = "<!-- conformance: written by `rlkernel conformance table README.md` -->"
END: Final = "<!-- end of conformance -->"


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


def table(folder: Path) -> str:
    """Markdown: a column a report, a row an operator, and below where each report was made."""
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
        link = f"[`{c['report']}`](conformance/reports/{c['report']}/report.md)"
        lines.append(f"- {link}: {c['provider']} {where}: **{c['verdict']}**")
    return "\n".join(lines)


def write(path: Path, folder: Path) -> None:
    """Write the table between the markers of a file.

    Raises:
        ConfigError: the file has no markers, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(missing(path)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for the table: put {BEGIN} and {END} on lines of their own")
    path.write_text(f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{after}", encoding="utf-8")


def _cells(content: dict[str, Any]) -> dict[str, str]:
    """Operator -> its cell."""
    found = content["operators"]
    told = {c["sources"] for operator in found.values() for c in operator["clauses"]} - {None}
    manifest = manifest_of(content) if told else None
    now = {} if manifest is None else sources(manifest, content["device"])
    return {op: _cell(operator, len(older(operator, now.get(op)))) for op, operator in found.items()}


def _cell(operator: dict[str, Any], others: int) -> str:
    """A verdict with what it stands for: `holds 25`, or `fails, 24 of 25 hold, 2 claims untried`.

    `holds 33 of 34`: one needs more memory than the device has. `holds 33, older`: all are of other sources than those
    of now; `holds 33, 2 older`: so many are.
    """
    statuses = [c["status"] for c in operator["clauses"] if c["status"] != "not_claimed"]
    held = statuses.count("held")
    verdict = operator["verdict"]
    results = sum(bool(c["executed"] or c["fault"]) for c in operator["clauses"])
    count = f"{others} " * (others < results)
    age = f", {count}*older*" if others else ""
    if verdict == "holds":
        return (f"holds {held}" if held == len(statuses) else f"holds {held} of {len(statuses)}") + age
    untried = len(operator["unproved_claims"])
    tried = f", {untried} claim{'s' * (untried > 1)} untried" if untried else ""
    return f"{verdict}, {held} of {len(statuses)} hold{tried}{age}"
