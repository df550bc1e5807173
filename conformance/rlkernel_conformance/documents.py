"""A report as files: JSON for machines, JUnit for CI, Markdown for people, a badge for a README."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from rlkernel_conformance.report import REFUTED, SCHEMA, STATUSES, content_hash
from rlkernel_core.errors import ConfigError

_COLOURS: Final = {
    "holds": "brightgreen",
    "partial": "yellow",
    "waived": "yellow",
    "unfinished": "orange",
    "fails": "red",
}


def write(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write report.json, report.md, junit.xml and badge.json."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "report.json": json.dumps(content, indent=1) + "\n",
        "report.md": markdown(content),
        "junit.xml": junit(content),
        "badge.json": json.dumps(badge(content), indent=1) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def read(path: Path) -> dict[str, Any]:
    """A report from a file or its folder, with its hash checked.

    Raises:
        ConfigError: no such file, not a report of this schema, or changed after it was written.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        schema, said = content["schema"], content["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a conformance report: {error!r}") from error
    if schema != SCHEMA:
        raise ConfigError(f"{file} has schema {schema}, this rlkernel reads {SCHEMA}")
    if said != content_hash(content):
        raise ConfigError(f"{file} was changed after it was written: its hash does not cover its content")
    return content


def place(content: Mapping[str, Any]) -> str:
    """Where a report was made, in a few words: the card, the processor, or an interpreter on it."""
    env = content["environment"]
    if content["device"].partition(":")[0] == "cpu":
        interpreted = env["variables"].get("TRITON_INTERPRET") == "1"
        return f"{'Triton interpreter, ' if interpreted else ''}CPU ({env['device_arch']})"
    board = env.get("board")  # whose GPU has the name of the whole family
    return f"{board['name']} (JetPack {board['jetpack']}, {board['power_mode']})" if board else str(env["device_name"])


def markdown(content: Mapping[str, Any]) -> str:
    """The report for people."""
    env = content["environment"]
    cases, variables = content["summary"]["cases"], [f"`{k}={v}`" for k, v in env["variables"].items()]
    made = f"Python {env['python']}, torch {env['torch']}, tolerances {content['tolerances']}"
    lines = [
        f"# Conformance of {content['backend']}: {content['verdict']}",
        "",
        f"{content['provider']} on {place(content)}, profile {content['profile']}, {cases} cases.",
        f"{made}. Hash `{content['hash'][:12]}`.",
        *([f"Environment: {' '.join(variables)}"] if variables else []),
        *(f"\n**{problem}**" for problem in content["problems"]),
        "",
        f"| Operator | Verdict | {' | '.join(s.replace('_', ' ') for s in STATUSES)} |",
        f"|---|---|{'---|' * len(STATUSES)}",
    ]
    for op, found in content["operators"].items():
        counts = Counter(c["status"] for c in found["clauses"])
        lines.append(f"| `{op}` | {found['verdict']} | " + " | ".join(str(counts[s]) for s in STATUSES) + " |")
    for op, found in content["operators"].items():
        if found["unproved_claims"]:
            lines += ["", f"`{op}` claims without an executed case: {', '.join(found['unproved_claims'])}."]
        lines += [
            f"\n`{op}` {c['clause']} {c['title']} was not executed here: it {c['message']}."
            for c in found["clauses"]
            if c["status"] == "no_room"
        ]
        for clause in found["clauses"]:
            lines += _failure(op, clause) if clause["status"] in {*REFUTED, "waived", "not_run"} else []
    return "\n".join(lines) + "\n"


def _failure(op: str, clause: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## {op} {clause['clause']}: {clause['title']}", ""]
    if waiver := clause.get("waiver"):
        lines += [f"Waived until {waiver['expires']}: {waiver['reason']} ({waiver['issue']})", ""]
    lines.append(f"{clause['fault'] or clause['status'].replace('_', ' ')}: {clause['message']}")
    return [*lines, *(["", "```python", clause["reproduce"].rstrip(), "```"] if clause["reproduce"] else [])]


def junit(content: Mapping[str, Any]) -> str:
    """The report for CI systems: one test per clause. What could not be run is an error, what is not due is skipped."""
    root = ET.Element("testsuites")
    for op, found in content["operators"].items():
        suite = ET.SubElement(root, "testsuite", name=op, tests=str(len(found["clauses"])))
        for clause in found["clauses"]:
            case = ET.SubElement(suite, "testcase", classname=op, name=f"{clause['clause']} {clause['title']}")
            if clause["status"] in REFUTED:
                failure = ET.SubElement(case, "failure", type=clause["fault"], message=clause["message"])
                failure.text = clause["reproduce"]
            elif clause["status"] == "not_run":
                ET.SubElement(case, "error", type="not_run", message=clause["message"])
            elif clause["status"] != "held":
                ET.SubElement(case, "skipped", message=f"{clause['status']}: {clause['message']}")
    return ET.tostring(root, encoding="unicode") + "\n"


def badge(content: Mapping[str, Any]) -> dict[str, Any]:
    """A badge in the endpoint form that badge services read."""
    text = f"{content['verdict']} ({content['summary']['held']} clauses)"
    return {"schemaVersion": 1, "label": "rlkernel", "message": text, "color": _COLOURS[content["verdict"]]}
