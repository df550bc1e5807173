"""Options that several commands share, and what they mean: names are checked here, before anything runs or is written.

Device, architecture and dtype are asked of the backends in the order, so within `ordered`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rlkernel import hardware, policy
from rlkernel.survey import named
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec import OPERATORS

Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys instead of text.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Device type as torch spells it: cpu, cuda (ROCm too). It need not be here."),
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", metavar="ARCH", help="Architecture: sm90, sm87, gfx942. Left out, none is refused for it."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Type of the main tensor: bfloat16, float32. Left out, any."),
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
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


class _Order(policy.use):
    """use() as said on the command line."""

    said_in = "--order"


def ordered(order: str | None) -> AbstractContextManager[Any]:
    """The policy with the order of `--order`, or as it is."""
    return nullcontext() if order is None else _Order(*backends_named(order))


def backends_named(order: str | None, argument: str = "--order") -> tuple[str, ...]:
    """The names in an order that was given with commas; none where none was given."""
    names = tuple(name.strip() for name in (order or "").split(",") if name.strip())
    if order is not None and not names:
        raise ArgumentError(argument, repr(order), "names no backend", f"Say {argument} auto, or leave it out.")
    return names


def place(device: str | None, arch: str | None) -> tuple[str | None, str | None]:
    """What `--device` and `--arch` name, under the policy in force; see `hardware.place`."""
    return hardware.place(device, arch, hardware.in_order()) if (device, arch) != (None, None) else (None, None)


def present(device: str) -> str:
    """What `--device` names where the device must be here, under the policy in force; see `hardware.present`."""
    return hardware.present(device, hardware.in_order())


def dtype_named(dtype: str | None) -> str | None:
    """What `--dtype` names, under the policy in force; see `hardware.dtype`."""
    return hardware.dtype(dtype, hardware.in_order()) if dtype is not None else None


def features(need: list[str] | None, op: str | None) -> frozenset[str]:
    """Features asked for by `--need`, known to the operator or, without one, to any."""
    specs = [named(op)] if op else list(OPERATORS.values())
    known = frozenset[str]().union(*(spec.feature_names for spec in specs))
    for name in need or ():
        if name not in known:
            raise UnknownNameError(f"feature of {op}" if op else "feature", name, known)
    return frozenset(need or ())


def to_write(path: Path, argument: str, *, force: bool) -> Path:
    """A file that a command may write: its folder is there, and it is not, or `--force` gives it up.

    Raises:
        ArgumentError: the file is there and not given up, it is a folder, or it would lie in none.
    """
    if path.is_dir():
        raise ArgumentError(argument, path, "is a folder", "Name a file.")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(argument, path, "its folder does not exist", f"Make it: mkdir -p {path.parent}.")
    if path.exists() and not force:
        raise ArgumentError(argument, path, "exists and is not overwritten", "Name another, or add --force.")
    return path
