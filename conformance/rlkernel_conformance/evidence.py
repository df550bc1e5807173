"""Which reports are still of the present sources, and what renews those that are not.

rlkernel conformance evidence          a line for each operator of each report that must be renewed, with its command
rlkernel conformance evidence --json   every operator of every report
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rlkernel.resolve import claims
from rlkernel_conformance.documents import FILE, read
from rlkernel_conformance.leak_check import CLAUSE
from rlkernel_conformance.manifests import here, known, sources_of
from rlkernel_conformance.profiles import PROFILES, sanitizer_of
from rlkernel_conformance.report import architectures, attack_changed
from rlkernel_core.decision import ALIASES, Call
from rlkernel_core.errors import ConfigError
from rlkernel_core.manifest import Backend
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS

# state of an operator in a report -> what it says
STATES: Final = {
    "current": "every clause has a result from the present sources",
    "older": "some results are of other sources, or of nobody knows which",
    "changed": "attacks on some clauses are other ones today",
    "missing": "some clauses have no result",
    "absent": "the backend implements it, the report does not have it",
    "gone": "the backend implements it no more",
    "unknown": "the backend is not here to compare with",
}
RENEWABLE: Final = ("older", "changed", "missing", "absent")
_CHANGES_NOTHING: Final = ("numpy",)  # packages of a report that no kernel computes with
# Modules whose reports tools/simulated_reports.py makes, at an effort of its own.
_SIMULATED: Final = "rlkernel_rocm.simulated."
# backends/triton/tools/aot_compile_missing.py compiles the builds that a bundle lacks; older reports have another name.
_COMPILING: Final = "aot_compile_missing"
_RENAMED: Final = {"aot_growing": _COMPILING}


@dataclass(frozen=True)
class Evidence:
    """What a report says of an operator, beside what is there now."""

    report: str  # its folder
    backend: str
    op: str
    state: str  # a key of STATES
    clauses: int  # that a new run is about
    seconds: float  # that those took last time, one after another; 0 where nobody knows
    command: str  # that renews it; "" where nothing is to do


def evidence(folder: Path) -> Iterator[Evidence]:
    """Every operator of every report below a folder.

    Raises:
        ConfigError: no report there, or one that was changed.
    """
    for path in reports(folder):
        content = read(path)
        manifest = manifest_of(content)
        now = {} if manifest is None else sources(manifest, content["device"])
        for op in dict.fromkeys([*content["operators"], *now]):
            found = content["operators"].get(op)
            state, due = _state(op, found, now, at_hand=manifest is not None)
            took = sum(c["seconds"] for c in (found or {"clauses": ()})["clauses"] if c["clause"] in due)
            command = renewal(content, op, path.parent) if state in RENEWABLE else ""
            yield Evidence(path.parent.name, content["backend"], op, state, len(due), round(took, 1), command)


def unproved(folder: str, packages: Mapping[str, str], backend: str, call: Call) -> Reason | None:
    """What the reports below a folder say against a backend for a call; None where one shows that its clauses hold.

    Args:
        folder: of the reports.
        packages: installed versions by name of distribution.
        backend: name.
        call: operator, device and architecture; an unknown architecture is any.

    Raises:
        ConfigError: no report there, or one that was changed.
    """
    about = " ".join(filter(None, (backend, call.op, "on", call.device, call.arch)))
    found = [(path, _as_read(path.resolve(), path.stat().st_mtime_ns)) for path in reports(Path(folder))]
    judged = [(path, content) for path, content in found if sanitizer_of(content["profile"]) is None]
    mine = [(path, content) for path, content in judged if _is_of(content, backend, call)]
    if not mine:
        profile = next(name for name, p in reversed(PROFILES.items()) if p.sanitizer is None)
        fix = f"rlkernel conformance run {backend} --op {call.op.partition('@')[0]} --profile {profile}"
        fix += f" --device {call.device} --report {folder}/{backend}"
        return Reason("evidence", "none", f"no report in {folder} is of {about}", fix)
    said: list[Reason] = []
    manifest = here(backend)  # what would run; a report may be of another manifest by this name
    now = {} if manifest is None else {call.op: sources_of(manifest, call.op, call.device)}
    for path, content in mine:
        found, command = content["operators"][call.op], renewal(content, call.op, path.parent)
        state, due = _state(call.op, found, now, at_hand=manifest is not None)
        changed = _versions(content, found, packages) if state in {"current", "changed", "missing"} else "sources"
        if changed:
            said.append(Reason("evidence", "older", f"{path.parent} is of other {changed}", command))
        elif found["verdict"] != "holds":
            said.append(Reason("evidence", "not-held", f"{path.parent} says of {call.op}: {found['verdict']}", command))
        elif due:
            of = " of today's attacks" if state == "changed" else ""
            text = f"{path.parent} has no result{of} for {', '.join(sorted(due))}"
            said.append(Reason("evidence", "not-held", text, command))
        else:
            return None
    return said[0]


@lru_cache(maxsize=128)
def _as_read(path: Path, changed: int) -> dict[str, Any]:
    """A report, read once a process for as long as its file stays as it is; nobody changes what was read."""
    return read(path)


def _is_of(content: Mapping[str, Any], backend: str, call: Call) -> bool:
    """Whether a report is of a backend, an operator and a kind of device."""
    name = ALIASES.get(content["backend"], content["backend"])
    here = content["device"].partition(":")[0] == call.device and call.arch in {None, *architectures(content)}
    return name == backend and call.op in content["operators"] and here


def _versions(content: Mapping[str, Any], found: Mapping[str, Any], packages: Mapping[str, str]) -> str:
    """Libraries whose versions are not those that an operator of a report was attacked with; "" where all are."""
    made = [content["runs"][run]["environment"] for run in {c["run"] for c in found["clauses"] if c["executed"]}]
    with_what = [(name, v) for env in made for name, v in (("torch", env["torch"]), *env["packages"].items())]
    differ = {
        f"{name} {was} (here {packages.get(name)})"
        for name, was in with_what
        if _public(was) != _public(packages.get(name)) and name not in _CHANGES_NOTHING
    }
    return ", ".join(sorted(differ))


def _public(version: str | None) -> str:
    """A version without its local part, which a distribution's metadata may leave out: 2.11.0+cu130 is 2.11.0."""
    return (version or "").partition("+")[0]


def reports(folder: Path) -> list[Path]:
    """The files of the reports below a folder.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(folder.glob(f"*/{FILE}"))
    if not found:
        raise ConfigError(
            f"no report in {folder}/*/{FILE}; rlkernel conformance run BACKEND --report {folder}/NAME makes one"
        )
    return found


def manifest_of(content: Mapping[str, Any]) -> Backend | None:
    """The manifest of a report's backend as it is now; None where it is not here.

    A report does not choose what is imported: its manifest must stand in one of our packages, or in one that an
    installed backend names.
    """
    where = _named(content)
    if where is not None and where.partition(".")[0].partition(":")[0] not in _packages():
        return None
    return here(content["backend"], where)


def _packages() -> set[str]:
    """The packages that manifests stand in, and ours that hold some which no distribution names."""
    named = {where.partition(":")[0].partition(".")[0] for where in known().values()}
    return named | {"rlkernel_conformance", *(module.partition(".")[0] for module in (_SIMULATED, _COMPILING))}


def sources(manifest: Backend, device: str) -> dict[str, str]:
    """Fingerprint of each operator that a backend implements on a kind of device."""
    kind = device.partition(":")[0]
    ops = dict.fromkeys(i.op for i in manifest.impls if claims(i.requires.device, kind))
    return {op: sources_of(manifest, op, device) for op in ops}


def sources_now(content: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of a report's operators as they are here; of none where it has none, or its backend is not here."""
    told = {c["sources"] for operator in content["operators"].values() for c in operator["clauses"]} - {None}
    manifest = manifest_of(content) if told else None
    return {} if manifest is None else sources(manifest, content["device"])


def older(found: Mapping[str, Any], now: str | None) -> set[str]:
    """Clauses of an operator in a report whose results are of other sources; None: those of now are not known."""
    results = {c["clause"]: c["sources"] for c in found["clauses"] if c["executed"] or c["fault"]}
    return {clause for clause, was in results.items() if was is None or (now is not None and was != now)}


def changed(op: str, found: Mapping[str, Any]) -> set[str]:
    """Clauses of an operator in a report whose results are of other attacks than today's."""
    return {c["clause"] for c in found["clauses"] if attack_changed(op.partition("@")[0], c)}


def _state(op: str, found: Mapping[str, Any] | None, now: Mapping[str, str], *, at_hand: bool) -> tuple[str, set[str]]:
    name = op.partition("@")[0]
    if name not in OPERATORS or (op not in now and at_hand):
        return "gone", set()
    spec = {c.id for c in OPERATORS[name].clauses} | {CLAUSE.id}
    if found is None:
        return "absent", spec
    before, attacks = older(found, now.get(op)), changed(op, found)
    lacking = spec - {c["clause"] for c in found["clauses"] if c["status"] not in {"not_run", "fault"}}
    if not before and not at_hand:
        return "unknown", set()
    state = "older" if before else "changed" if attacks else "missing" if lacking else "current"
    return state, before | attacks | lacking


def renewal(content: Mapping[str, Any], op: str, folder: Path) -> str:
    """The command that gives a report what it lacks of an operator; tools of a clone, where they made the report."""
    name = ALIASES.get(content["backend"], content["backend"])
    profile = content["operators"].get(op, content)["profile"]
    manifest = _named(content)
    module = (manifest or "").partition(":")[0]
    if profile not in PROFILES and module.startswith(_SIMULATED):
        arch = module.removeprefix(_SIMULATED)
        return f"python tools/simulated_reports.py {arch} {op.partition('@')[0]} --to {folder.parent}"
    variables = [run["environment"]["variables"] for run in content["runs"].values()]
    before = ["TRITON_INTERPRET=1"] * any(v.get("TRITON_INTERPRET") == "1" for v in variables)
    if module == _COMPILING:
        before += [
            "PYTHONPATH=backends/triton/tools AOT_MISSING=missing.jsonl",
            *["AOT_CODE=ptx"] * (name == "orin-ptx"),
        ]
    words = [
        *before,
        f"rlkernel conformance run {name} --op {op.partition('@')[0]} --missing",
        f"--profile {profile if profile in PROFILES else next(iter(PROFILES))}",
        f"--device {content['device'].partition(':')[0]}",
        *([f"--manifest {manifest}"] if manifest not in (None, known().get(name)) else []),
        f"--report {folder}",
    ]
    return " ".join(words)


def _named(content: Mapping[str, Any]) -> str | None:
    """Where a manifest stands that no distribution names: as the report says, else beside the implementations."""
    if content["manifest"]:
        module, _, attribute = content["manifest"].partition(":")
    elif ALIASES.get(content["backend"], content["backend"]) in known():
        return None
    else:
        module, attribute = _first_target(content).partition(":")[0], "backend"
    return f"{_RENAMED.get(module, module)}:{attribute}" if module else None


def _first_target(content: Mapping[str, Any]) -> str:
    """An implementation that a report is of, "module:function"; empty where it names none."""
    return next((target for found in content["operators"].values() for target in found["implementations"]), "")
