"""`rlkernel lock`: pin which implementation and version each operator may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from rlkernel import lock, policy, record
from rlkernel.cli.options import Arch, Device, Dtype, Force, Json, Order, dtype_named, ordered, place, to_write
from rlkernel.cli.output import print_json
from rlkernel.probe import arch_of, device_here
from rlkernel.survey import Situation, survey
from rlkernel.wording import fallbacks, remedy, why
from rlkernel_core.decision import Decision
from rlkernel_core.spec import OPERATORS

EXAMPLES: Final = (
    ("rlkernel lock", "pin what serves every operator on this machine"),
    ("rlkernel lock --from runs/grpo", "pin exactly what ran in a run that wrote decisions.json there"),
    ("rlkernel lock --check", "in CI, and before a rollout engine starts"),
)
EXITS: Final = {
    0: "written, or the lock holds",
    1: "--check found a difference, or there is nothing to pin; nothing is written",
}

_FILE: Final = "rlkernel.lock"


def command(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The lock file; default the configured one.")
    ] = None,
    device: Device = None,
    arch: Arch = None,
    dtype: Dtype = None,
    grad: Annotated[
        bool | None, typer.Option("--grad/--no-grad", help="Calls with or without gradients only; default both.")
    ] = None,
    order: Order = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Pin what ran in this run instead of deciding anew.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the file instead of writing it.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write rlkernel.lock: operator, implementation, version and order of sums, for every process of a run.

    Under a lock, whatever is not pinned is refused with a reason. Without
    --device it is decided for this machine, with implementations loaded and
    self-tests run; with --device for hardware that need not be here. What
    would be a fallback, such as plain torch on a GPU, is pinned all the same
    and named on standard error.
    """
    with ordered(order):
        path = output or Path(policy.current().policy.lock or _FILE)
        decisions = [r.decision for r in record.read(run)[1]] if run else _decided(device, arch, dtype, grad)
    if check:
        _compare(path, decisions, json=json)
        return
    if not lock.content(decisions)["operators"]:
        typer.echo("nothing in the order takes any operator here, so nothing is written; see rlkernel status", err=True)
        raise typer.Exit(1)
    to_write(path, "--output", force=force or lock.is_of(path, decisions))
    content = lock.write(path, decisions)
    for said in fallbacks(decisions):
        typer.secho(f"warning: {path} pins a fallback for {said}", fg="yellow", err=True)
    if json:
        print_json({"file": str(path), **content, "fallbacks": _fallbacks(decisions)})
        return
    for op, pins in content["operators"].items():
        for pin in pins:
            typer.echo(f"  {op:20} {pin['backend']:10} {pin['target']}  [{pin['provider']}]")
    missing = sorted({d.call.op for d in decisions} - set(content["operators"]))
    if missing:
        typer.echo(f"not pinned, because nothing in the order takes them: {', '.join(missing)}")
    typer.echo(f"{path} pins {len(content['operators'])} operator(s)")


def _decided(device: str | None, arch: str | None, dtype: str | None, grad: bool | None) -> list[Decision]:
    """Decisions for every operator, the lock in force left out of account."""
    here = device is None and arch is None
    named, known = place(device, arch)
    where = named or device_here()
    known, dtype = (arch_of(where) if here else known), dtype_named(dtype)
    decisions = []
    for wanted in (False, True) if grad is None else (grad,):
        ops = [op for op, spec in OPERATORS.items() if not wanted or "grad" in spec.feature_names]
        decisions += survey(Situation(where, known, dtype, wanted), ops=ops, locked=False, here=here)
    return decisions


def _fallbacks(decisions: list[Decision]) -> list[dict[str, str | bool | None]]:
    """Pins that are fallbacks, as data: which operator, what is pinned in place of what, why, and what changes it."""
    return [
        {
            "op": d.call.op,
            "device": d.call.device,
            "arch": d.call.arch,
            "grad": d.call.grad,
            "backend": d.backend,
            "fell_back_from": d.fell_back_from,
            "reason": why(d).reason.slug,
            "text": why(d).reason.text,
            "fix": remedy(d),
        }
        for d in decisions
        if d.backend is not None and d.fell_back_from is not None
    ]


def _compare(path: Path, decisions: list[Decision], *, json: bool) -> None:
    found = lock.differences(lock.read(str(path)), decisions)
    if json:
        changed = {op: {"pinned": sorted(old), "now": sorted(new)} for op, (old, new) in found.items()}
        print_json({"file": str(path), "holds": not found, "differences": changed})
    elif not found:
        typer.echo(f"{path} holds")
    else:
        for op, (old, new) in found.items():
            typer.echo(op)
            for mark, color, pins in (("-", "red", old - new), ("+", "green", new - old)):
                for pin in sorted(pins):
                    typer.secho(f"  {mark} {pin}", fg=color)
        typer.echo(f"{path} does not hold; `rlkernel lock --force` writes a new one")
    if found:
        raise typer.Exit(1)
