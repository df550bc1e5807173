"""`rlkernel explain`: who would take a call, and why every other would not."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Final

import typer

from rlkernel import policy
from rlkernel.cli.options import Arch, Device, Dtype, Json, Need, Order, dtype_named, features, ordered, place
from rlkernel.cli.output import colored, plain, print_json, print_table
from rlkernel.discover import FIRST_PARTY
from rlkernel.survey import Situation, foresee, served, survey
from rlkernel.wording import explanation, fallbacks, implementation, remark
from rlkernel_core.decision import AUTO, Decision
from rlkernel_core.spec import OPERATORS

EXAMPLES: Final = (
    ("rlkernel explain logprob --device cuda --arch sm90 --dtype bfloat16 --grad", "a training call on an H100"),
    ("rlkernel explain", "one line for each operator, on the CPU"),
)
EXITS: Final = {0: "a backend takes the call (every call, without OP)", 1: "none may: the reasons are printed"}


def command(
    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="Operator, such as logprob; left out, all of them.")
    ] = None,
    *,
    device: Device = None,
    arch: Arch = None,
    dtype: Dtype = None,
    grad: Annotated[bool, typer.Option("--grad", help="The call needs gradients.")] = False,
    need: Need = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Rows (tokens) of the call, for limits. Left out, any.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(metavar="V", min=1, help="Ids of its vocabulary, for limits. Left out, any.")
    ] = None,
    order: Order = None,
    everyone: Annotated[
        bool, typer.Option("--all", help="Judge the installed backends outside the order too, as if named last.")
    ] = False,
    json: Json = False,
) -> None:
    """Which backend would take a call, and why every other would not.

    Nothing is run, no device is started and torch is not imported, so the
    hardware need not be here. Backends stand in the order in which they are
    considered; each refusal has a stable code and the line that changes it
    (docs/reasons.md lists all of them).
    """
    wanted = features(need, op)
    with ordered(order), _judging_all([op] if op else OPERATORS, everyone=everyone):
        where, known = place(device, arch)
        situation = Situation(where or "cpu", known, dtype_named(dtype), grad, wanted, rows, vocab)
        decisions = survey(situation) if op is None else [foresee(op, situation)]
    if json:
        print_json([d.as_dict() for d in decisions] if op is None else decisions[0].as_dict())
    elif op is None:
        _print_all(decisions)
    else:
        typer.echo(colored(explanation(decisions[0])))
    if not all(served(d) for d in decisions):
        raise typer.Exit(1)


class _All(policy.use):
    """use() as said by `--all`."""

    said_in = "--all"


def _judging_all(ops: Iterable[str], *, everyone: bool) -> AbstractContextManager[object]:
    """The orders in force, each followed by whatever else is installed."""
    if not everyone:
        return nullcontext()
    orders = {}
    for op in ops:
        order = policy.policy_for(policy.current(), OPERATORS[op])[0].order
        inside = {*order, *(FIRST_PARTY if AUTO in order else ())}
        orders[op] = [*order, *(name for name in policy.installed() if name not in inside)]
    return _All(**orders)


def _print_all(decisions: list[Decision]) -> None:
    call = decisions[0].call
    words = [call.device, call.arch or "any architecture", call.dtype or "any dtype"]
    words += ["with gradients"] if call.grad else []
    columns = ("operator", "served by", "implementation", "from", "")
    rows = [
        (d.call.op, d.backend or "nobody", plain(implementation(d)), plain(d.version or ""), plain(remark(d)))
        for d in decisions
    ]
    print_table(columns, rows, title=", ".join(words))
    for said in fallbacks(decisions):
        typer.echo(f"fallback  {said}")
    typer.echo("rlkernel explain OPERATOR ... prints every reason.")
