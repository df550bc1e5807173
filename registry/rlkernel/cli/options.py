"""Options that several commands share, and what they mean for the policy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from rlkernel import policy
from rlkernel.survey import named
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS

Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys instead of text.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Device type as torch spells it: cpu, cuda (ROCm too). It need not be here."),
]
Arch = Annotated[
    str | None, typer.Option(metavar="ARCH", help="Architecture: sm90, sm87, gfx942. Left out, none is refused for it.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Type of the main tensor: bfloat16, float32. Left out, any.")
]
Need = Annotated[
    list[str] | None,
    typer.Option(metavar="FEATURE", help="A feature the call needs, such as entropy; may be given several times."),
]
Order = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Backends that may run, best first, with commas; instead of the configured order."
    ),
]


class _Order(policy.use):
    """use() as said on the command line."""

    said_in = "--order"


def ordered(order: str | None) -> AbstractContextManager[Any]:
    """The policy with the order of `--order`, or as it is."""
    return _Order(*(name.strip() for name in order.split(",") if name.strip())) if order else nullcontext()


def features(need: list[str] | None, op: str | None) -> frozenset[str]:
    """Features asked for by `--need`, known to the operator or, without one, to any."""
    specs = [named(op)] if op else list(OPERATORS.values())
    known = frozenset[str]().union(*(spec.feature_names for spec in specs))
    for name in need or ():
        if name not in known:
            raise UnknownNameError(f"feature of {op}" if op else "feature", name, known)
    return frozenset(need or ())
