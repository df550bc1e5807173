"""What each action of `rlkernel conformance` does with its words and options; it returns whether all went well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from rlkernel import policy
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.hardware import architecture, present
from rlkernel_core.errors import ConfigError

if TYPE_CHECKING:
    from rlkernel_conformance.mutation_run import MutantResult
    from rlkernel_conformance.profiles import Profile
    from rlkernel_conformance.run import Progress

__all__ = ["ACTIONS", "Effort", "Orders"]

REPORTS: Final = Path("conformance/reports")


@dataclass(frozen=True)
class Effort:
    """The options, of which every action takes those that concern it."""

    ops: tuple[str, ...]
    clauses: tuple[str, ...]
    profile: Profile
    devices: tuple[str, ...]
    jobs: int
    manifest: str | None
    waivers: Path | None
    report: Path | None
    hostile: bool
    drawn: int | None
    seed: int
    within: float
    missing: bool
    json: bool
    orders: Orders


@dataclass(frozen=True)
class Orders:
    """What certificates are asked for."""

    archs: tuple[str, ...]
    sizes: tuple[str, ...]
    level: str
    dtype: str
    gradient: bool


def _run(backend: str, *, effort: Effort) -> bool:
    from rlkernel.probe import arch_of
    from rlkernel_conformance import sanitizer
    from rlkernel_conformance.documents import found, put
    from rlkernel_conformance.profiles import sanitizer_of
    from rlkernel_conformance.report import only, same_subject
    from rlkernel_conformance.run import run
    from rlkernel_conformance.show import passes, show

    if effort.manifest is not None:
        sys.path.insert(0, "")  # as `python -m` has it
    if effort.profile.sanitizer is not None:
        sanitizer.executable()  # before a device is looked for, which may be missing too
    if effort.missing and effort.report is None:
        raise ConfigError("--missing needs --report FOLDER, which has what is not missing")
    devices = _here(effort.devices, (backend,), effort.manifest)
    earlier = None if effort.report is None else found(effort.report)
    if earlier is not None and sanitizer_of(earlier["profile"]) != effort.profile.sanitizer:
        raise ConfigError(
            f"{effort.report} has a report of profile {earlier['profile']}, and {effort.profile.name} is evidence of "
            "another kind: give it a folder of its own"
        )
    if earlier is not None:
        same_subject(earlier, backend, devices[0], [str(arch_of(devices[0]))])
    content = run(
        backend,
        effort.profile,
        ops=effort.ops,
        clauses=effort.clauses,
        devices=devices,
        jobs=effort.jobs,
        manifest=effort.manifest,
        waivers=effort.waivers,
        watch=(lambda _: None) if effort.json else _tell,
        within=effort.within,
        earlier=earlier if effort.missing else None,
    )
    if effort.report is not None:
        content = only(put(content, effort.report), content["operators"])
    show(content, json=effort.json)
    return passes(content)


def _here(devices: tuple[str, ...], backends: tuple[str, ...], manifest: str | None = None) -> tuple[str, ...]:
    """Devices by their names, all in this machine; the backends that are attacked may claim names of their own."""
    from rlkernel_conformance.manifests import load

    if manifest is not None:
        asked = [load(manifest)]
    else:
        found = [policy.installed()[name] for name in backends]
        asked = [candidate.manifest for candidate in found if candidate.manifest is not None]
    return tuple(present(device, asked) for device in devices)


def _tell(progress: Progress) -> None:
    """One line on standard error: how far the run is, and how the clause fared."""
    outcome = progress.outcome
    good = outcome.status == "held"
    mark = typer.style(f"{'held' if good else outcome.fault or outcome.status:8}", fg="green" if good else "red")
    at = f"{progress.done:4}/{progress.due} {progress.seconds:6.0f} s"
    text = f"{outcome.op:20} {outcome.clause}  {outcome.title}"
    typer.echo(f"{at}  {mark} {text}  ({outcome.executed} cases, {outcome.seconds:.1f} s)", err=True)


def _report(path: str, *, effort: Effort) -> bool:
    from rlkernel_conformance.documents import put, read
    from rlkernel_conformance.report import only
    from rlkernel_conformance.show import passes, show

    content = read(Path(path))
    if effort.ops:
        content = only(content, [op for op in content["operators"] if op.partition("@")[0] in effort.ops])
    if effort.report is not None:
        content = put(content, effort.report)
    show(content, json=effort.json)
    return passes(content)


def _mutants(*, effort: Effort) -> bool:
    if effort.drawn is not None:
        return _source_mutants(effort.drawn, effort)
    from rlkernel_conformance.hostile import attack_hostile, hostile_backends
    from rlkernel_conformance.mutation_run import mutation_run
    from rlkernel_core.spec import OPERATORS

    rows: list[dict[str, object]] = []

    def tell(op: str, name: str, wrong: str, expected: str, found: tuple[str, ...], *, killed: bool) -> None:
        about = {"op": op, "mutant": name, "wrong": wrong, "expected": expected}
        rows.append({**about, "found": list(found), "killed": killed})
        if not effort.json:
            mark = typer.style("killed  ", fg="green") if killed else typer.style("SURVIVED", fg="red")
            said = ", ".join(dict.fromkeys(found)) or "nothing"
            typer.echo(f"{mark}  {op:20} {name:36} {said}{'' if killed else f', expected {expected}'}", err=True)

    def told(result: MutantResult) -> None:
        mutant = result.mutant
        tell(mutant.op, mutant.name, mutant.bug.wrong, mutant.clause, result.failed, killed=result.killed)

    for op in () if effort.hostile else effort.ops or OPERATORS:
        mutation_run(op, effort.profile, watch=told)
    for backend in () if effort.ops else hostile_backends():
        verdict = attack_hostile(backend)
        tell("hostile", backend.name, backend.does, backend.fault, verdict.faults, killed=verdict.as_expected)
    killed = sum(bool(row["killed"]) for row in rows)
    if effort.json:
        print_json({"killed": killed, "of": len(rows), "mutants": rows})
    else:
        typer.echo(f"{killed} of {len(rows)} mutants killed")
    return killed == len(rows)


def _source_mutants(number: int, effort: Effort) -> bool:
    from rlkernel_conformance.source_mutants.run import SourceMutant, run
    from rlkernel_conformance.source_mutants.show import show

    begun = 0

    def told(mutant: SourceMutant) -> None:
        nonlocal begun
        begun += 1
        mark = typer.style(f"{mutant.status:10}", fg="red" if mutant.status == "survived" else "green")
        text = f"{mutant.op:20} {mutant.kind:10} {mutant.file}:{mutant.line}  {mutant.clause}"
        typer.echo(f"{begun:4}/{number}  {mark} {text}", err=True)

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    found = run(
        effort.ops,
        number,
        effort.seed,
        effort.profile,
        clauses=effort.clauses,
        jobs=effort.jobs,
        watch=told,
        tell=tell,
    )
    show(found, json=effort.json)
    return not any(mutant.status == "survived" for mutant in found.mutants)


def _compare(old: str, new: str, *, effort: Effort) -> bool:
    from rlkernel_conformance.documents import read
    from rlkernel_conformance.report import compare

    lines = compare(read(Path(old)), read(Path(new)))
    if effort.json:
        print_json({"differences": lines})
    else:
        typer.echo("\n".join(plain(line) for line in lines) if lines else "the reports agree")
    return not lines


def _tolerances(*, effort: Effort) -> bool:
    from rlkernel_conformance.show import show_tolerances

    show_tolerances(effort.ops, json=effort.json)
    return True


def _table(path: str | None = None, *, effort: Effort) -> bool:
    from rlkernel_conformance.table import rows, table, write

    if effort.json:
        print_json(rows(REPORTS))
    elif path is None:
        typer.echo(table(REPORTS))
    else:
        write(Path(path), REPORTS)
    return True


def _parity(a: str, b: str, *, effort: Effort) -> bool:
    from rlkernel_conformance.parity import markdown, parity

    found = parity(a, b, ops=effort.ops, device=_here(effort.devices, (a, b))[0])
    if effort.json:
        print_json(found)
    else:
        typer.echo(markdown(found))
    return True


def _evidence(*, effort: Effort) -> bool:
    from rlkernel_conformance.evidence import RENEWABLE, evidence

    found = [e for e in evidence(REPORTS) if not effort.ops or e.op.partition("@")[0] in effort.ops]
    if effort.json:
        print_json([vars(e) for e in found])
        return True
    due = [e for e in found if e.state in RENEWABLE]
    cells = [(e.report, e.op, e.state, str(e.clauses), f"{e.seconds:.0f}" if e.seconds else "") for e in due]
    print_table(("report", "operator", "", "clauses", "seconds"), cells, title=f"{len(due)} of {len(found)} to renew")
    typer.echo("".join(f"{e.command}\n" for e in due), nl=False)
    if unknown := [e for e in found if e.state == "unknown"]:
        named = ", ".join(dict.fromkeys(e.report for e in unknown))
        typer.echo(f"{len(unknown)} more cannot be compared: install their backends, or set PYTHONPATH: {named}")
    return True


def _orders(backend: str, *, effort: Effort) -> bool:
    from rlkernel_conformance.orders.calls import PROBES, probe
    from rlkernel_conformance.orders.certificates import certificate
    from rlkernel_conformance.orders.show import show_orders

    asked, found = effort.orders, []
    archs = [architecture(arch, "cuda", ()) for arch in asked.archs]
    for op in effort.ops or PROBES:
        for arch in archs:
            for size in asked.sizes or probe(op).sizes:
                found.append(
                    certificate(
                        op,
                        size,
                        backend=backend,
                        arch=arch,
                        level=asked.level,
                        dtype=asked.dtype,
                        gradient=asked.gradient,
                    )
                )
                if not effort.json:
                    typer.echo(f"{op} {arch} {size}: {found[-1].hash or found[-1].why}", err=True)
    show_orders(found, json=effort.json)
    return all(c.hash for c in found)


ACTIONS: Final[Mapping[str, Callable[..., bool]]] = {
    "run": _run,
    "mutants": _mutants,
    "report": _report,
    "compare": _compare,
    "tolerances": _tolerances,
    "table": _table,
    "parity": _parity,
    "evidence": _evidence,
    "orders": _orders,
}
