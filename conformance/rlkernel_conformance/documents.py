"""A report as files: JSON for machines, JUnit for CI, Markdown for people, a badge for a README."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from rlkernel_conformance.report import REFUTED, SCHEMA, STATUSES, content_hash, merged, standing, upgraded
from rlkernel_conformance.report_form import FIRST, REMEDY, checked
from rlkernel_core.documents import formed, read_json
from rlkernel_core.errors import FileError
from rlkernel_core.files import make_folder, write_text

_COLORS: Final = {
    "holds": "brightgreen",
    "partial": "yellow",
    "waived": "yellow",
    "unfinished": "orange",
    "fails": "red",
}


FILE: Final = "report.json"
_WORDS: Final = re.compile(r'\[\s*"[\w:./@+-]*"(?:,\s*"[\w:./@+-]*")*\s*\]')
_EQUAL: Final = re.compile(r"(?<![^\s(\[])(\([^()]*\)|\[[^\[\]]*\]|[^\s,()\[\]]+)(?:, \1){7,}(?=[,)\]]|$)")


def put(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write a report into a folder, in the place of what a report there says of the same clauses; returns the whole.

    Raises:
        ConfigError: the report there is of another backend or device.
        FileError: the report there is damaged or was changed, or nothing can be written.
    """
    with _alone_in(folder):
        old = found(folder)
        whole = dict(content) if old is None else merged(old, content)
        write(whole, folder)
    return whole


def found(folder: Path) -> dict[str, Any] | None:
    """The report in a folder, if it has one.

    Raises:
        FileError: it has one that is damaged or was changed.
    """
    return read(folder) if (folder / FILE).exists() else None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The scope in which no other process that asks the same writes into a folder."""
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write report.json, report.md, junit.xml and badge.json, whatever is there.

    Raises:
        FileError: one of them cannot be written.
    """
    make_folder(folder)
    files = {
        # Lists of words on a line each: a clause may need dozens of features.
        FILE: _WORDS.sub(lambda found: " ".join(found.group().split()), json.dumps(content, indent=1)) + "\n",
        "report.md": markdown(content),
        "junit.xml": junit(content),
        "badge.json": json.dumps(badge(content), indent=1) + "\n",
    }
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def read(path: Path) -> dict[str, Any]:
    """A report from a file or its folder, with its hash checked; one of schema 1 in the form of today.

    Raises:
        FileError: no such file, not a report of these schemas, or changed after it was written.
    """
    file = path / FILE if path.is_dir() else path
    content: dict[str, Any] = read_json(file, {"schema": frozenset({1, SCHEMA}), "hash": str}, REMEDY)
    if content["hash"] != content_hash(content):
        raise FileError(file, "hash", "does not cover the content: the report was changed after it was written", REMEDY)
    if content["schema"] == 1:
        content = upgraded(formed(content, FIRST, file, REMEDY))
    return checked(content, file)


def place(content: Mapping[str, Any]) -> str:
    """Where a report was made, in a few words: the cards, the processor, or an interpreter on it."""
    kind = content["device"].partition(":")[0]
    return " and ".join(sorted({_place(kind, run["environment"]) for run in content["runs"].values()}))


def versions(content: Mapping[str, Any], name: str) -> str:
    """Versions of a library that a report was made with."""
    made = (run["environment"] for run in content["runs"].values())
    return ", ".join(sorted({str(env.get(name) or env["packages"].get(name) or "none") for env in made}))


def providers(content: Mapping[str, Any]) -> str:
    """The distributions that a report is of, with their versions."""
    return ", ".join(sorted({str(run["provider"]) for run in content["runs"].values()}))


def _place(kind: str, env: Mapping[str, Any]) -> str:
    if kind == "cpu":
        interpreted = env["variables"].get("TRITON_INTERPRET") == "1"
        return f"{'Triton interpreter, ' if interpreted else ''}CPU ({env['device_arch']})"
    board = env.get("board")  # whose GPU has the name of the whole family
    return f"{board['name']} (JetPack {board['jetpack']}, {board['power_mode']})" if board else str(env["device_name"])


def counted(text: str) -> str:
    """Text of a call or a size for people: eight or more equal entries of a list in a row are one, with their count."""
    return _EQUAL.sub(lambda m: f"{(len(m[0]) + 2) // (len(m[1]) + 2)} x {m[1]}", text)


def markdown(content: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"# Conformance of {content['backend']}: {content['verdict']}",
        "",
        f"{providers(content)} on {place(content)}, profile {content['profile']},",
        f"{content['summary']['cases']} cases.",
        f"Hash `{content['hash'][:12]}`.",
        *(f"\n**{problem}**" for problem in content["problems"]),
        "",
        f"| Operator | Verdict | Profile | Date | Sources | {' | '.join(s.replace('_', ' ') for s in STATUSES)} |",
        f"|---|---|---|---|---|{'---|' * len(STATUSES)}",
    ]
    for op, found in content["operators"].items():
        clauses = found["clauses"]
        counts = Counter(c["status"] for c in clauses)
        dates, made = (sorted({str(c[key]) for c in clauses if c["executed"]}) for key in ("date", "sources"))
        about = [found["verdict"], found["profile"], " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))]
        cells = [*about, ", ".join("unknown" if s == "None" else f"`{s}`" for s in made)]
        lines.append(f"| `{op}` | {' | '.join(cells)} | " + " | ".join(str(counts[s]) for s in STATUSES) + " |")
    lines += ["", "Runs:", ""]
    for name, run in content["runs"].items():
        lines.append(f"- `{name}`: {_about(run)}")
    for op, found in content["operators"].items():
        if found["unproved_claims"]:
            lines += ["", f"`{op}` claims without an executed case: {', '.join(found['unproved_claims'])}."]
        orders = [
            f"`{o['hash']}` on {o['arch']} at {o['size']}"
            for o in found.get("orders", ())
            if {"hash", "arch", "size"} <= o.keys()
        ]
        if orders:
            lines += ["", f"`{op}` adds in the [order](../../../docs/orders.md) {', '.join(orders)}."]
        lines += [
            f"\n`{op}` {c['clause']} {c['title']} was not executed here: it {c['message']}."
            for c in found["clauses"]
            if c["status"] == "no_room"
        ]
        for clause in found["clauses"]:
            lines += _failure(op, clause) if clause["status"] in {*REFUTED, "waived", "not_run"} else []
    return "\n".join(lines) + "\n"


def _about(run: Mapping[str, Any]) -> str:
    """With what a run was made."""
    env = run["environment"]
    libraries = ", ".join(f"{name} {version}" for name, version in env["packages"].items())
    driver = next((str(x) for x in (env.get("device_driver") or [])[1:] if x), "")
    said = [
        f"{run['provider']}, profile {run['profile']['name']}, {env.get('device_name')} ({env['device_arch']})",
        f"driver {driver}" if driver else "",
        f"Python {env['python']}, torch {env['torch']}",
        libraries,
        " ".join(f"`{k}={v}`" for k, v in env["variables"].items()),
    ]
    return ", ".join(filter(None, said))


def _failure(op: str, clause: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## {op} {clause['clause']}: {clause['title']}", ""]
    if waiver := clause.get("waiver"):
        lines += [f"Waived until {waiver['expires']}: {waiver['reason']} ({waiver['issue']})", ""]
    lines.append(f"{clause['fault'] or clause['status'].replace('_', ' ')}: {counted(clause['message'])}")
    lines += ["", f"The call: `{counted(clause['call'])}`"] if clause.get("call") else []
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
                failure.text = "\n".join(filter(None, (clause.get("call"), clause["reproduce"])))
            elif clause["status"] == "not_run":
                ET.SubElement(case, "error", type="not_run", message=clause["message"])
            elif clause["status"] != "held":
                ET.SubElement(case, "skipped", message=f"{clause['status']}: {clause['message']}")
    return ET.tostring(root, encoding="unicode") + "\n"


def badge(content: Mapping[str, Any]) -> dict[str, Any]:
    """A badge in the endpoint form that badge services read."""
    clauses = [c for found in content["operators"].values() for c in found["clauses"]]
    text = standing(content["verdict"], clauses)
    return {"schemaVersion": 1, "label": "rlkernel", "message": text, "color": _COLORS[content["verdict"]]}
