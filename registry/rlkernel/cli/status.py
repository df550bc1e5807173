"""`rlkernel status`: what serves each operator here, or served it in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel import integrations, policy, record
from rlkernel.cli.options import Json, Order, ordered, present
from rlkernel.cli.output import plain, print_json, print_table, say
from rlkernel.probe import arch_of, device_here
from rlkernel.provenance import plans
from rlkernel.survey import Situation, served, survey
from rlkernel.wording import fallbacks, implementation, remark
from rlkernel_core.decision import Decision
from rlkernel_core.spec import OPERATORS
from rlkernel_core.visible import visible

EXAMPLES: Final = (
    ("rlkernel status", "what calls would get on this machine"),
    ("rlkernel status runs/grpo", "what they got in a run that wrote decisions.json there"),
)
EXITS: Final = {0: "somebody serves every operator", 1: "nobody serves some operator here"}


def command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Folder of a run, or its decisions.json; left out, this machine."),
    ] = None,
    *,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="A device that is here, cuda:1; default cuda if torch sees one, else cpu.",
        ),
    ] = None,
    order: Order = None,
    json: Json = False,
) -> None:
    """What serves each operator on this machine, or what did in a run.

    Here, implementations are loaded and self-tests that have not run on this
    device yet are run, as the first call would do. For a run, every kind of
    call is listed with its count; two runs with one hash ran the same kernels.
    """
    if run is not None:
        _print_run(run, json=json)
        return
    with ordered(order):
        where = device_here() if device is None else present(device)
        situations = [Situation(where, arch_of(where), grad=grad) for grad in (False, True)]
        plain_calls, training = (survey(s, here=True) for s in situations)
        lock = policy.current().policy.lock
    training = [d for d in training if "grad" in OPERATORS[d.call.op.partition("@")[0]].feature_names]
    if json:
        found = {"decisions": [d.as_dict() for d in (*plain_calls, *training)], "hosts": _hosts()}
        held = [p.as_dict() for p in plans()]
        print_json({"device": where, "arch": situations[0].arch, "lock": lock, **found, "plans": held})
    else:
        _print_here(where, situations[0].arch, lock, plain_calls, {d.call.op: d for d in training})
    if not all(served(d) for d in (*plain_calls, *training)):
        raise typer.Exit(1)


def _print_here(
    where: str, arch: str | None, lock: str | None, decisions: list[Decision], training: dict[str, Decision]
) -> None:
    rows = []
    for d in decisions:
        backward = training.get(d.call.op)
        gradients = "" if backward is None else _served_by(backward)
        said = remark(d) or (remark(backward) if backward is not None else "")
        rows.append(
            (d.call.op, _served_by(d), gradients, plain(implementation(d)), plain(d.version or ""), plain(said))
        )
    columns = ("operator", "served by", "with gradients", "implementation", "from", "")
    print_table(columns, rows, title=f"{where} {arch or ''}".strip())
    for said in fallbacks([*decisions, *training.values()]):
        typer.echo(f"fallback  {said}")
    for name, host in _hosts().items():
        typer.echo(
            f"host  {name} {host['installed']}: {'supported' if host['supported'] else 'needs ' + host['needs']}"
        )
    typer.echo(f"lock  {lock or 'none'}")
    for held in plans():  # of what self-tests and plugins called here
        typer.echo(f"plans {held}")


def _hosts() -> dict[str, dict[str, Any]]:
    """The host frameworks that are installed here, and whether rlkernel plugs into these versions."""
    return {
        host.name: {"installed": host.installed, "supported": host.supported, "needs": host.versions}
        for host in integrations.hosts()
        if host.installed is not None
    }


def _served_by(decision: Decision) -> str:
    return decision.backend or "[red]nobody[/]"


def _print_run(run: Path, *, json: bool) -> None:
    digest, ran = record.read(run)
    hosts, planned = record.through(run), record.planned(run)
    if json:
        found = {"decisions": [r.as_dict() for r in ran], "hosts": [h.as_dict() for h in hosts]}
        print_json({"hash": digest, **found, "plans": [p.as_dict() for p in planned]})
        return
    rows = []
    for r in ran:
        d = r.decision
        call = str(d.call).partition(" ")[2]
        rows.append(
            (
                r.op,
                plain(call),
                str(r.calls),
                r.backend,
                plain(implementation(d)),
                plain(str(d.version)),
                d.hash,
                plain(remark(d)),
            )
        )
    columns = ("operator", "call", "calls", "served by", "implementation", "from", "decision", "")
    print_table(columns, rows, title=visible(str(run)))
    for said in fallbacks(r.decision for r in ran):
        say(f"fallback  {said}")
    for r in ran:
        if r.audit is not None:
            say(f"audit {r.decision.call}: {r.backend}, {r.audit}")
    for through in hosts:
        say(f"through {through}")
    for held in planned:
        say(f"plans {held}")
    say(f"decisions {digest}")
