"""`rlkernel aot`: kernels compiled ahead of time into a bundle, and what a bundle holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel import installation
from rlkernel.cli.options import Force, Json
from rlkernel.cli.output import print_json, print_table
from rlkernel.discover import FIRST_PARTY, load_target
from rlkernel.hardware import architecture
from rlkernel.probe import forget
from rlkernel.survey import named
from rlkernel_core.errors import ArgumentError, RLKernelError, UnknownNameError
from rlkernel_core.hardware import GPU
from rlkernel_core.reasons import Reason

EXAMPLES: Final = (
    ("rlkernel aot build --target sm_90 --out runs/sm_90.zip", "every kernel that bundles have, for one architecture"),
    (
        "rlkernel aot build --target sm_87 --target sm_110 --op logprob --op sample --out runs/jetson.zip",
        "two operators, for Jetson Orin and Thor",
    ),
    ("rlkernel aot list runs/jetson.zip --json", "what is in it; every piece is held against its hash"),
)
EXITS: Final = {0: "built or listed", 1: "built without what --keep-going left out"}

_ACTIONS: Final = ("build", "list")
# Who compiles: the registry knows backends by name alone.
_TARGETS: Final = {"build": "rlkernel_triton.aot.command:build", "list": "rlkernel_triton.aot.command:listed"}


def command(
    action: Annotated[str, typer.Argument(metavar="{build|list}", help="What to do.")],
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="list: the bundle.")] = None,
    *,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="ARCH", help="build: sm_87, sm_90, gfx942 and so on; may be given several times."),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="build: an operator; all that bundles have by default.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="build: the file; by default where the backend aot looks.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="build: processes; one a core by default.")] = 0,
    ptx: Annotated[
        int | None, typer.Option(metavar="VERSION", help="build: ISA version of the PTX for older drivers, 80 for 8.0.")
    ] = None,
    configurations: Annotated[
        str | None, typer.Option(metavar="FILE", help="build: a recording in place of what workloads launch.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="build: leave out what does not compile, and say so.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compile the portable kernels ahead of time, for GPUs that need not be here.

    A bundle holds machine code and, for architectures that allow it, PTX that
    later drivers compile. The backends `aot` and `jetson` run operators from
    bundles, without Triton, a compiler or headers, and without compiling at
    the first call.
    """
    if action not in _ACTIONS:
        raise UnknownNameError("action", action, _ACTIONS)
    if action == "list":
        if file is None:
            raise ArgumentError("FILE", "nothing", "list reads a bundle", "Name one: rlkernel aot list FILE.")
        _show(_loaded(action)(file), json=json)
        return
    if not target:
        raise ArgumentError(
            "--target", "nothing", "a bundle is for an architecture", "Add --target sm_87, for example."
        )
    if file is not None:
        raise ArgumentError("FILE", file, "build writes where --out says", f"Write --out {file}.")
    if out is not None and Path(out).exists() and not force:
        raise ArgumentError("--out", out, "exists and is not overwritten", "Name another, or add --force.")
    archs = _named(target, op or ())
    found = _loaded(action)(
        archs, op or (), out=out, jobs=jobs, ptx=ptx, configurations=configurations, keep_going=keep_going
    )
    forget()  # without this bundle the self-test of a backend may have failed
    _show(found, json=json)
    if found["failed"]:
        for text in found["failed"]:
            typer.echo(text, err=True)
        raise typer.Exit(1)


def _named(targets: Iterable[str], ops: Iterable[str]) -> list[str]:
    """The architectures that targets name; operators must exist, too."""
    for op in ops:
        named(op)
    return [architecture(target, GPU, (), "--target") for target in targets]


def _loaded(action: str) -> Callable[..., Any]:
    found = load_target(_TARGETS[action])
    if isinstance(found, Reason):
        vendors = "" if installation.clone() else f" (on Jetson or ROCm: {FIRST_PARTY['triton'].install_on('gfx942')})"
        raise RLKernelError(
            f"bundles are made and read by rlkernel-triton, which {found.text.partition(' ')[2]}: "
            f"{FIRST_PARTY['triton'].install}{vendors}"
        )
    return found


def _show(found: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(found)
        return
    columns = ("target", "kernel", "builds", "registers", "spilled", "shared")
    title = f"{found['path']}: {found['builds']} builds, {found['bytes'] / 2**20:.1f} MiB"
    print_table(columns, [[str(row[c]) for c in columns] for row in found["kernels"]], title=title)
    compiler = ", ".join(f"{name} {version}" for name, version in found["compiler"].items())
    typer.echo(f"by {compiler}; registers, bytes spilled and bytes of shared memory are the most of any build")
