"""`rlkernel conformance`: hold a backend to its claims, prove the suite, read and compare what was found."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlkernel import policy
from rlkernel.cli.options import Json
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.hardware import present
from rlkernel.installation import extras
from rlkernel.survey import named
from rlkernel_core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlkernel_conformance.mutation_run import MutantResult
    from rlkernel_conformance.profiles import Profile
    from rlkernel_conformance.run import Progress

EXAMPLES: Final = (
    ("rlkernel conformance run torch --op logprob", "every clause of one operator, twenty cases each"),
    ("rlkernel conformance run acme --profile standard --report reports/acme", "a backend, with its report written"),
    (
        "rlkernel conformance run acme --op sample --missing --report reports/acme",
        "what a report lacks of an operator",
    ),
    ("rlkernel conformance run acme --manifest acme.kernels:backend", "a backend that is not installed yet"),
    (
        "rlkernel conformance run acme --device cuda --profile memcheck",
        "out-of-bounds accesses of its kernels, by clause",
    ),
    ("rlkernel conformance run acme --device cuda:0,cuda:1 --waivers waivers.toml", "two devices; known failures"),
    ("rlkernel conformance mutants --op logprob", "backends with one planted bug each: does the suite find them all?"),
    (
        "rlkernel conformance mutants --hostile",
        "backends that crash, hang, leak and lie: is each reported as what it is?",
    ),
    ("rlkernel conformance tolerances --op qmatmul", "how close is close, and where each number comes from"),
    ("rlkernel conformance report from-gpu.json --report reports/acme", "renew a report with one of another machine"),
    ("rlkernel conformance compare reports/old reports/new", "what changed between two reports"),
    ("rlkernel conformance parity reference triton --op logprob", "how far two backends are apart on the same calls"),
    ("rlkernel conformance orders triton --op logprob --arch sm90", "in which order sums are taken, without a GPU"),
    ("rlkernel conformance table README.md", "write what conformance/reports holds into a file's tables"),
    ("rlkernel conformance evidence", "which reports are of other sources than are here, and what renews them"),
)
EXITS: Final = {
    0: "every attacked clause holds or is waived; every mutant is killed; the reports agree; all orders are derived",
    1: "a clause is refuted, could not be attacked or was not run; a mutant survives; reports differ; an order is not",
}
# action -> how few and how many words may follow
_ACTIONS: Final = {
    "run": (1, 1),
    "mutants": (0, 0),
    "report": (1, 1),
    "compare": (2, 2),
    "tolerances": (0, 0),
    "table": (0, 1),
    "evidence": (0, 0),
    "parity": (2, 2),
    "orders": (1, 1),
}
_NEEDED: Final = ("hypothesis", "numpy", "torch")
_REPORTS: Final = Path("conformance/reports")


@dataclass(frozen=True)
class _Effort:
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
    within: float
    missing: bool
    json: bool
    orders: _Orders


@dataclass(frozen=True)
class _Orders:
    """What certificates are asked for."""

    archs: tuple[str, ...]
    sizes: tuple[str, ...]
    level: str
    dtype: str
    gradient: bool


def command(
    action: Annotated[
        str,
        typer.Argument(
            help="run BACKEND, mutants, report PATH, compare OLD NEW, parity A B, tolerances, table [FILE], evidence, "
            "orders BACKEND.",
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(help="A backend's name, reports (files or folders), or a file.")
    ] = None,
    *,
    op: Annotated[
        list[str] | None, typer.Option(help="Operator; may be given several times. All, unless given.")
    ] = None,
    clause: Annotated[
        list[str] | None,
        typer.Option(help="run: a clause such as SA-08; may be given several times. All, unless given."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="quick, standard or deep: how many cases a clause; memcheck, racecheck, initcheck or synccheck: two, "
            "under that tool of compute-sanitizer."
        ),
    ] = "quick",
    device: Annotated[str, typer.Option(help="torch devices with commas, such as cpu or cuda:0,cuda:1.")] = "cpu",
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds for one clause, instead of the profile's: for interpreters.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Operators at a time on each device; half the cores unless given.")
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="MODULE:ATTRIBUTE", help="Where the manifest stands, if the backend is not installed."),
    ] = None,
    waivers: Annotated[Path | None, typer.Option(help="TOML with the clauses that may fail for a while.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for report.json, report.md, junit.xml, badge.json; renews a report there."),
    ] = None,
    hostile: Annotated[bool, typer.Option("--hostile", help="mutants: the hostile backends only.")] = False,
    within: Annotated[
        float | None, typer.Option(min=1, help="run: seconds for all of it; clauses left then are reported as not run.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="run: only what the report in --report lacks, or has of other sources.")
    ] = False,
    arch: Annotated[str, typer.Option(help="orders: architectures with commas, such as sm90,gfx942.")] = "sm90",
    size: Annotated[
        str | None, typer.Option(help="orders: sizes with commas, such as 8x50257; the operator's own, unless given.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="orders: bits, or order, which is comparable across architectures.")
    ] = "bits",
    dtype: Annotated[str, typer.Option(help="orders: of the operator's tensors.")] = "bfloat16",
    gradient: Annotated[bool, typer.Option("--gradient", help="orders: the gradients are outputs too.")] = False,
    json: Json = False,
) -> None:
    """Hold a backend against the clauses of its operators.

    Every clause is attacked with drawn inputs that the backend's manifest
    claims to take, in a process of its own with limits on time and memory.
    A refuted clause comes with a counterexample and a script that shows it
    alone. What is not claimed is not attacked, and the report says so.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"the suite needs {', '.join(lacking)}: {extras('cpu', 'conformance')}")
    if action not in _ACTIONS:
        raise UnknownNameError("action", action, _ACTIONS)
    given = words or []
    least, most = _ACTIONS[action]
    if not least <= len(given) <= most:
        wanted = f"{least}" if least == most else f"{least} or {most}"
        raise ConfigError(f"{action} takes {wanted} more word(s), got {given}; see rlkernel conformance --help")
    many = jobs or max(1, (os.cpu_count() or 2) // 2)
    from rlkernel_conformance.profiles import profile as known

    hard = known(profile) if limit is None else replace(known(profile), limit_s=limit)
    for name in op or ():
        named(name)
    ops, devices, limits = tuple(op or ()), tuple(device.split(",")), math.inf if within is None else within
    effort = _Effort(
        ops, tuple(clause or ()), hard, devices, many, manifest, waivers, report, hostile, limits, missing, json,
        _Orders(tuple(arch.split(",")), tuple(size.split(",")) if size else (), level, dtype, gradient),
    )  # fmt: skip
    acts: dict[str, Callable[..., bool]] = {
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
    if not acts[action](*given, effort=effort):
        raise typer.Exit(1)


def _run(backend: str, *, effort: _Effort) -> bool:
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


def _report(path: str, *, effort: _Effort) -> bool:
    from rlkernel_conformance.documents import put, read
    from rlkernel_conformance.show import passes, show

    content = read(Path(path))
    if effort.report is not None:
        content = put(content, effort.report)
    show(content, json=effort.json)
    return passes(content)


def _mutants(*, effort: _Effort) -> bool:
    from rlkernel_conformance.hostile import attack_hostile, hostile_backends
    from rlkernel_conformance.mutation_run import mutation_run
    from rlkernel_core.spec import OPERATORS

    rows: list[dict[str, object]] = []

    def tell(op: str, name: str, wrong: str, expected: str, found: tuple[str, ...], *, killed: bool) -> None:
        rows.append(
            {"op": op, "mutant": name, "wrong": wrong, "expected": expected, "found": list(found), "killed": killed}
        )
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


def _compare(old: str, new: str, *, effort: _Effort) -> bool:
    from rlkernel_conformance.documents import read
    from rlkernel_conformance.report import compare

    lines = compare(read(Path(old)), read(Path(new)))
    if effort.json:
        print_json({"differences": lines})
    else:
        typer.echo("\n".join(plain(line) for line in lines) if lines else "the reports agree")
    return not lines


def _tolerances(*, effort: _Effort) -> bool:
    from rlkernel_conformance.show import show_tolerances

    show_tolerances(effort.ops, json=effort.json)
    return True


def _table(path: str | None = None, *, effort: _Effort) -> bool:
    from rlkernel_conformance.table import rows, table, write

    if effort.json:
        print_json(rows(_REPORTS))
    elif path is None:
        typer.echo(table(_REPORTS))
    else:
        write(Path(path), _REPORTS)
    return True


def _parity(a: str, b: str, *, effort: _Effort) -> bool:
    from rlkernel_conformance.parity import markdown, parity

    found = parity(a, b, ops=effort.ops, device=_here(effort.devices, (a, b))[0])
    if effort.json:
        print_json(found)
    else:
        typer.echo(markdown(found))
    return True


def _evidence(*, effort: _Effort) -> bool:
    from rlkernel_conformance.evidence import RENEWABLE, evidence

    found = [e for e in evidence(_REPORTS) if not effort.ops or e.op.partition("@")[0] in effort.ops]
    if effort.json:
        print_json([vars(e) for e in found])
        return True
    due = [e for e in found if e.state in RENEWABLE]
    cells = [(e.report, e.op, e.state, str(e.clauses), f"{e.seconds:.0f}" if e.seconds else "") for e in due]
    print_table(("report", "operator", "", "clauses", "seconds"), cells, title=f"{len(due)} of {len(found)} to renew")
    typer.echo("".join(f"{e.command}\n" for e in due), nl=False)
    return True


def _orders(backend: str, *, effort: _Effort) -> bool:
    from rlkernel_conformance.orders.calls import PROBES, probe
    from rlkernel_conformance.orders.certificates import certificate
    from rlkernel_conformance.orders.show import show_orders

    asked, found = effort.orders, []
    for op in effort.ops or PROBES:
        for arch in asked.archs:
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
