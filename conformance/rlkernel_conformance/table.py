"""What the committed reports say, as one table: operators by backends. Nobody types a verdict by hand.

rlkernel conformance table             print it
rlkernel conformance table README.md   write it between the markers of a file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rlkernel_conformance.documents import place, read
from rlkernel_core.errors import ConfigError
from rlkernel_core.spec import OPERATORS

BEGIN: Final = "<!-- conformance: written by `rlkernel conformance table README.md` -->"
END: Final = "<!-- end of conformance -->"


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row a report below a folder, by backend: where it was made, its verdict, and each operator's.

    Raises:
        ConfigError: no report there, or one that was changed.
    """
    found = [(path.parent.name, read(path)) for path in sorted(folder.glob("*/report.json"))]
    if not found:
        raise ConfigError(
            f"no report in {folder}/*/report.json; rlkernel conformance run BACKEND --report {folder}/NAME"
        )
    return [
        {
            "report": name,
            "backend": content["backend"],
            "provider": content["provider"],
            "place": place(content),
            "profile": content["profile"],
            "torch": content["environment"]["torch"],
            "created": content["created"][:10],
            "verdict": content["verdict"],
            "operators": {op: _cell(operator) for op, operator in content["operators"].items()},
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
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for the table: put {BEGIN} and {END} on lines of their own")
    path.write_text(f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{after}", encoding="utf-8")


def _cell(operator: dict[str, Any]) -> str:
    """A verdict with what it stands for: `holds 25`, or `fails, 24 of 25 hold, 2 claims untried`.

    `holds 33 of 34`: one needs more memory than the device has.
    """
    statuses = [c["status"] for c in operator["clauses"] if c["status"] != "not_claimed"]
    held = statuses.count("held")
    verdict = operator["verdict"]
    if verdict == "holds":
        return f"holds {held}" if held == len(statuses) else f"holds {held} of {len(statuses)}"
    untried = len(operator["unproved_claims"])
    claims = f", {untried} claim{'s' * (untried > 1)} untried" if untried else ""
    return f"{verdict}, {held} of {len(statuses)} hold{claims}"
