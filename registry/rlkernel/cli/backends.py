"""`rlkernel backends`: who is installed, and what they implement."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from rlkernel import policy
from rlkernel.cli.options import Json
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.discover import FIRST_PARTY, Candidate
from rlkernel_core.decision import AUTO

EXAMPLES: Final = (
    ("rlkernel backends", "what is installed, and what one could install"),
    ("rlkernel backends --load", "third-party plugins too, although no order names them"),
)
EXITS: Final = {0: "listed; a backend that cannot be loaded is listed with its reason"}

_TIERS: Final = {0: "vendor", 1: "portable", 2: "plain torch"}
_READY, _NOT_LOADED, _NOT_INSTALLED = "ready", "not loaded", "not installed"


def command(
    *,
    load: Annotated[bool, typer.Option("--load", help="Load the manifests of third-party plugins as well.")] = False,
    json: Json = False,
) -> None:
    """Backends that are installed, their operators and devices, and our own that are not.

    `auto` considers our own alone: vendor, then portable, then plain torch.
    A third-party plugin is listed without importing it, unless the order
    names it or --load is given.
    """
    installed = policy.installed()
    rules = policy.base().policy
    named = {name for own in (rules.default, *rules.ops.values()) for name in own.order if name != AUTO}
    rows = []
    for name in sorted(installed, key=_rank):
        known = installed.listed(name)
        wanted = load or known.tier is not None or name in named
        rows.append(_row(installed[name] if wanted else known, loaded=wanted))
    rows += [_absent(name) for name in FIRST_PARTY if name not in installed]
    if json:
        print_json(rows)
        return
    columns = ("backend", "distribution", "kind", "state", "operators", "devices")
    print_table(columns, (_cells(row) for row in rows))


def _rank(name: str) -> tuple[int, str]:
    """Our own in the order of their tiers, then the others by name."""
    return (list(FIRST_PARTY).index(name) if name in FIRST_PARTY else len(FIRST_PARTY), name)


def _row(found: Candidate, *, loaded: bool) -> dict[str, Any]:
    impls = found.manifest.impls if found.manifest else ()
    devices = {
        d for i in impls for d in ([i.requires.device] if isinstance(i.requires.device, str) else i.requires.device)
    }
    state = _READY if found.manifest else found.reason.slug if found.reason else _NOT_LOADED
    return {
        "name": found.name,
        "distribution": found.dist,
        "version": found.version,
        "kind": _TIERS[found.tier] if found.tier is not None else "third party",
        "installed": True,
        "loaded": loaded and found.manifest is not None,
        "state": state,
        "text": found.reason.text if found.reason else "",
        "fix": found.reason.fix if found.reason else "" if loaded else "rlkernel backends --load",
        "operators": sorted({i.op for i in impls}),
        "devices": sorted(devices),
    }


def _absent(name: str) -> dict[str, Any]:
    ours = FIRST_PARTY[name]
    return {
        "name": name,
        "distribution": ours.dist,
        "version": None,
        "kind": _TIERS[ours.tier],
        "installed": False,
        "loaded": False,
        "state": _NOT_INSTALLED,
        "text": "",
        "fix": ours.install,
        "operators": [],
        "devices": list(ours.devices),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    color = {_READY: "green", _NOT_LOADED: "dim", _NOT_INSTALLED: "dim"}.get(row["state"], "red")
    state = f"[{color}]{row['state']}[/]"
    more = [row["text"], row["fix"]]
    state += "".join(f"\n{plain(text)}" for text in more if text)
    operators = ", ".join(op.partition("@")[0] if op.endswith("@1") else op for op in row["operators"])
    devices = ", ".join("any" if d == "*" else d for d in row["devices"])
    provider = " ".join(filter(None, (row["distribution"], row["version"])))
    return row["name"], provider, row["kind"], state, operators, devices
