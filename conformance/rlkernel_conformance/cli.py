"""`rlkernel conformance`: hold a backend to its claims, prove the suite, read and compare what was found."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.installation import extras
from rlkernel.survey import named
from rlkernel_conformance.actions import ACTIONS, Effort, Orders
from rlkernel_core.errors import ConfigError, UnknownNameError

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
        "rlkernel conformance mutants --drawn 20 --seed 1 --op whiten",
        "small changes of plain torch's source, drawn by seed: what share does the suite find?",
    ),
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
        typer.Option(help="run, --drawn: a clause such as SA-08; may be given several times. All, unless given."),
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
        int | None, typer.Option(min=1, help="Processes at a time on each device; half the cores unless given.")
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
    drawn: Annotated[
        int | None,
        typer.Option(min=1, help="mutants: so many changes of plain torch's source in place of the planted bugs."),
    ] = None,
    seed: Annotated[int, typer.Option(help="mutants: which changes --drawn draws.")] = 0,
    within: Annotated[
        float | None, typer.Option(min=1, help="run: seconds for all of it; clauses left then are reported as not run.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="run: only what --report lacks, or has of older sources or attacks.")
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
    for name in () if manifest is not None else op or ():  # a manifest may bring operators, once it is loaded
        named(name)
    ops, devices, limits = tuple(op or ()), tuple(device.split(",")), math.inf if within is None else within
    effort = Effort(
        ops=ops,
        clauses=tuple(clause or ()),
        profile=hard,
        devices=devices,
        jobs=many,
        manifest=manifest,
        waivers=waivers,
        report=report,
        hostile=hostile,
        drawn=drawn,
        seed=seed,
        within=limits,
        missing=missing,
        json=json,
        orders=Orders(tuple(arch.split(",")), tuple(size.split(",")) if size else (), level, dtype, gradient),
    )
    if not ACTIONS[action](*given, effort=effort):
        raise typer.Exit(1)
