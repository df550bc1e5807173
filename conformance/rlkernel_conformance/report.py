"""What a run found, as a file: JSON for machines, JUnit for CI, Markdown for people, a badge for a README.

Two runs of one backend at one profile on one machine give the same report but for `created` and the seconds; `hash`
covers all the rest.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from rlkernel import policy
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.subject import Subject
from rlkernel_core import __version__
from rlkernel_core.errors import ConfigError

SCHEMA: Final = 1
STATUSES: Final = ("held", "violated", "fault", "not_claimed", "not_attacked")
_VOLATILE: Final = ("created", "seconds", "hash")
_COLOURS: Final = {"holds": "brightgreen", "partial": "yellow", "fails": "red"}


def report(outcomes: Mapping[Subject, list[Outcome]], profile: str) -> dict[str, Any]:
    """The report of a run: one subject per operator, all of one backend and device."""
    first = next(iter(outcomes))
    operators = {s.spec.id: _operator(s, found) for s, found in outcomes.items()}
    counts = Counter(o.status for found in outcomes.values() for o in found)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": first.backend,
        "provider": policy.installed()[first.backend].provider,
        "device": first.device,
        "profile": profile,
        "environment": environment(first.device),
        "operators": operators,
        "summary": {status: counts[status] for status in STATUSES}
        | {"cases": sum(o.executed for found in outcomes.values() for o in found)},
    }
    content["verdict"] = _verdict([op["verdict"] for op in operators.values()])
    content["hash"] = content_hash(content)
    content["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    content["seconds"] = round(sum(o.seconds for found in outcomes.values() for o in found), 1)
    return content


def _operator(subject: Subject, outcomes: list[Outcome]) -> dict[str, Any]:
    attacked = {o.clause for o in outcomes if o.status == "held" and o.executed}
    named = {c.feature for c in subject.spec.clauses if c.id in attacked}
    clauses = [{k: v for k, v in asdict(o).items() if k not in {"op", "seconds"}} for o in outcomes]
    unproved = sorted(subject.claims - named)
    failed = any(o.failed or (o.status == "held" and not o.executed) for o in outcomes)
    whole = not any(o.status == "not_attacked" for o in outcomes)
    return {
        "implementations": sorted(i.target for i in subject.impls),
        "claims": sorted(subject.claims),
        "unproved_claims": unproved,  # no clause that names the feature was attacked and held
        "verdict": "fails" if failed else "holds" if whole else "partial",
        "clauses": sorted(clauses, key=lambda c: str(c["clause"])),
    }


def _verdict(verdicts: list[str]) -> str:
    """The worst of them."""
    return next((v for v in ("fails", "partial") if v in verdicts), "holds")


def environment(device: str) -> dict[str, Any]:
    """What a result may depend on."""
    import hypothesis
    import torch

    from rlkernel.probe import device_facts

    return {
        "rlkernel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hypothesis": hypothesis.__version__,
        "torch": torch.__version__,
        **{f"device_{k}": v for k, v in device_facts(device).items() if k != "torch"},
    }


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash of a report without what differs between two runs that found the same."""
    rest = {k: v for k, v in content.items() if k not in _VOLATILE}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


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


def markdown(content: Mapping[str, Any]) -> str:
    """The report for people."""
    env = content["environment"]
    where = f"{content['provider']} on {content['device']}, profile {content['profile']}"
    lines = [
        f"# Conformance of {content['backend']}: {content['verdict']}",
        "",
        f"{where}, {content['summary']['cases']} cases.",
        f"Python {env['python']}, torch {env['torch']}. Hash `{content['hash'][:12]}`.",
        "",
        "| Operator | Verdict | held | violated | fault | not claimed | not attacked |",
        "|---|---|---|---|---|---|---|",
    ]
    for op, found in content["operators"].items():
        counts = Counter(c["status"] for c in found["clauses"])
        lines.append(f"| `{op}` | {found['verdict']} | " + " | ".join(str(counts[s]) for s in STATUSES) + " |")
    for op, found in content["operators"].items():
        for clause in found["clauses"]:
            if clause["status"] in {"violated", "fault"}:
                lines += [
                    "",
                    f"## {op} {clause['clause']}: {clause['title']}",
                    "",
                    f"{clause['fault']}: {clause['message']}",
                ]
                lines += ["", "```python", clause["reproduce"].rstrip(), "```"] if clause["reproduce"] else []
    return "\n".join(lines) + "\n"


def junit(content: Mapping[str, Any]) -> str:
    """The report for CI systems: one test per clause."""
    root = ET.Element("testsuites")
    for op, found in content["operators"].items():
        suite = ET.SubElement(root, "testsuite", name=op, tests=str(len(found["clauses"])))
        for clause in found["clauses"]:
            case = ET.SubElement(suite, "testcase", classname=op, name=f"{clause['clause']} {clause['title']}")
            if clause["status"] in {"violated", "fault"}:
                ET.SubElement(case, "failure", type=clause["fault"], message=clause["message"])
            elif clause["status"] != "held":
                ET.SubElement(case, "skipped", message=clause["message"])
    return ET.tostring(root, encoding="unicode") + "\n"


def badge(content: Mapping[str, Any]) -> dict[str, Any]:
    """A badge in the endpoint form that badge services read."""
    text = f"{content['verdict']} ({content['summary']['held']} clauses)"
    return {"schemaVersion": 1, "label": "rlkernel", "message": text, "color": _COLOURS[content["verdict"]]}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is different between two reports, a line a clause; empty where they agree."""
    before, after = (
        {(op, c["clause"]): c["status"] for op, found in r["operators"].items() for c in found["clauses"]}
        for r in (old, new)
    )
    keys = sorted({*before, *after})
    return [
        f"{op} {clause}: {before.get((op, clause), 'absent')} -> {after.get((op, clause), 'absent')}"
        for op, clause in keys
        if before.get((op, clause)) != after.get((op, clause))
    ]
