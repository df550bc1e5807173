"""Operators by hardware, in three states of the kernels: measured, executed in a simulator, compiled.

measured    clauses of a report, or a benchmark, ran on a card of this family
simulated   clauses of a report ran the machine code of this family in a simulator on a CPU
compiled    every build of the operator was compiled for a target of this family; PTX of it may have run on another card

From the reports, the files of `rlkernel bench` and the table of builds. Plain torch runs anywhere and does not count.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlkernel_conformance.documents import place, read
from rlkernel_conformance.evidence import changed, older, reports, sources_now
from rlkernel_core.documents import read_json
from rlkernel_core.files import read_text
from rlkernel_core.spec import OPERATORS

KERNELS: Final = ("cuda", "triton", "rocm", "jetson")  # our backends with kernels
_TIMES: Final = {
    "environment": {"device_arch": str, "device_name": str},
    "results": [{"op": str, "candidates": [{"name": str, "status": str}]}],
}
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {  # newest first, maker by maker
    "NVIDIA Blackwell": ("sm100", "sm120"),
    "NVIDIA Hopper": ("sm90",),
    "NVIDIA Ampere, Ada": ("sm80", "sm86", "sm89"),
    "Jetson Thor": ("sm110",),
    "Jetson Orin": ("sm87",),
    "AMD CDNA 2 to 4": ("gfx90a", "gfx942", "gfx950"),
    "AMD RDNA 3, 4": ("gfx1100", "gfx1201"),
}
ELSEWHERE: Final = {"orin-ptx": "sm87"}  # backends that run the PTX of another architecture on the card that is there
_SIMULATED: Final = re.compile(r"simulated-(gfx\w+)")
_CARD: Final = re.compile(
    r"^(?:NVIDIA|AMD) (?:GeForce |Instinct )?(.+?)(?: \d+GB.*)?$"
)  # "NVIDIA H100 80GB HBM3": "H100"


class _Seen(NamedTuple):
    """What is known of an operator on a family of architectures."""

    cards: set[str]
    failing: dict[str, str]  # backend -> how many clauses do not hold, and whether its sources were others than now
    simulated: set[str]  # architectures
    elsewhere: set[str]  # cards of another family, which ran its PTX
    builds: dict[str, tuple[int, int]]  # architecture -> compiled, of how many


def hardware(folder: Path, results: Path, builds: Path, at: Path) -> str:
    """Markdown: a row an operator, a column a family of architectures of which anything is known, and the reports.

    Args:
        folder: the reports.
        results: files of `rlkernel bench`.
        builds: the table of what was compiled, in Markdown.
        at: the folder of the page, from which links lead.

    Raises:
        ConfigError: no report there, or one that was changed.
    """
    seen: defaultdict[tuple[str, str], _Seen] = defaultdict(lambda: _Seen(set(), {}, set(), set(), {}))
    links = []
    for path in reports(folder):
        content = read(path)
        known, now = _known(content), None
        if known:
            link = os.path.relpath(path.with_name("report.md"), at)
            links.append(f"[`{path.parent.name}`]({link}) ({content['created'][:10]})")
        for family, one in known:
            for op, found in content["operators"].items():
                there = seen[op.partition("@")[0], family]
                there.cards.update(one.cards)
                there.simulated.update(one.simulated)
                there.elsewhere.update(one.elsewhere)
                if one.cards and found["verdict"] == "fails":
                    now = sources_now(content) if now is None else now
                    there.failing[content["backend"]] = _failing(content["backend"], op, found, now.get(op))
    for name, arch, card in _timed(results):
        seen[name, _family(arch)].cards.update(_cards(card))
    for name, arch, done, of in _compiled(builds):
        seen[name, _family(arch)].builds[arch] = (done, of)
    cells = {key: text for key, one in seen.items() if (text := _cell(one))}
    families = [family for family in FAMILIES if any(key[1] == family for key in cells)]
    lines = [f"| Operator | {' | '.join(families)} |", f"|---|{'---|' * len(families)}"]
    lines += [
        f"| `{name}` | {' | '.join(cells.get((name, family), '-') for family in families)} |"
        for name in (spec.name for spec in OPERATORS.values())
        if any((name, family) in cells for family in families)
    ]
    without = [f"`{s.name}`" for s in OPERATORS.values() if not any((s.name, family) in cells for family in families)]
    if without:
        lines += ["", f"Plain torch on every device: {', '.join(without)}."]
    return "\n".join([*lines, "", f"Reports: {', '.join(links)}."])


def _known(content: Mapping[str, Any]) -> list[tuple[str, _Seen]]:
    """The families of architectures that a report is about, and what it says of all its operators there."""
    backend, cards = content["backend"], _cards(place(content))
    if simulated := _SIMULATED.fullmatch(backend):
        return [(_family(simulated[1]), _Seen(set(), {}, {simulated[1]}, set(), {}))]
    if not content["device"].startswith("cuda"):
        return []
    if backend in ELSEWHERE:
        return [(_family(ELSEWHERE[backend]), _Seen(set(), {}, set(), cards, {}))]
    archs = {run["environment"]["device_arch"] for run in content["runs"].values()} if backend in KERNELS else ()
    return [(_family(arch), _Seen(cards, {}, set(), set(), {})) for arch in archs]


def _family(arch: str) -> str:
    """The family of an architecture; its own name where it is of none."""
    return next((family for family, archs in FAMILIES.items() if arch in archs), arch)


def _cards(names: str) -> set[str]:
    return {found[1] if (found := _CARD.match(name)) else name for name in names.split(" and ")}


def _failing(backend: str, op: str, found: Mapping[str, Any], now: str | None) -> str:
    """How many clauses of a backend fail, or got no answer in time; whether all are of other sources or attacks."""
    fault = {c["clause"]: c["fault"] for c in found["clauses"] if c["status"] in {"violated", "fault"}}
    age = ", *older*" if {*fault} <= older(found, now) | changed(op, found) else ""
    late = sum(why == "timeout" for why in fault.values())
    counts = (("fails", len(fault) - late), ("had no answer in time for", late))
    said = [f"{verb} {n} clause{'s' * (n > 1)}" for verb, n in counts if n]
    return f"`{backend}` {' and '.join(said)}{age}"


def _cell(seen: _Seen) -> str:
    """The strongest that is known, in words; empty where nothing is."""
    if seen.cards:
        failing = ", ".join(text for _, text in sorted(seen.failing.items()))
        return f"measured on {', '.join(sorted(seen.cards))}" + (f"; {failing}" if failing else "")
    if seen.simulated:
        return "executed in a simulator"
    if seen.elsewhere:
        return f"compiled; its PTX run on {', '.join(sorted(seen.elsewhere))}"
    whole = [arch for arch, (done, of) in seen.builds.items() if done == of]
    if whole:
        return "compiled"
    return "compiled in part" if any(done for done, _ in seen.builds.values()) else ""


def _timed(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Operator, architecture and card of every number that a benchmark has of a backend with kernels."""
    for path in sorted(folder.rglob("results.json")):
        content = read_json(path, _TIMES, "Write it with rlkernel bench run --out FOLDER.")
        machine = content["environment"]
        for row in content["results"]:
            ran = {c["name"].partition(":")[0] for c in row["candidates"] if c["status"] == "measured"}
            if ran & {*KERNELS} and row["op"] in {s.name for s in OPERATORS.values()}:
                yield row["op"], machine["device_arch"], machine["device_name"]


def _compiled(table: Path) -> Iterator[tuple[str, str, int, int]]:
    """Operator, architecture, how many of its builds were compiled, and how many there are."""
    if not table.exists():
        return
    for section in re.split(r"^## ", read_text(table, "Write it with tools/compile_gate.py."), flags=re.MULTILINE)[1:]:
        rows = [[c.strip() for c in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
        for column, arch in enumerate(rows[0] if rows else ()):
            if column > 1:  # the first two name the kernel and the build
                done = [row[column] for row in rows[2:]]
                yield section.split("\n", 1)[0].strip(), arch, sum(map(bool, done)), len(done)
