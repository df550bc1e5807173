"""`rlkernel backends`: who is installed, and what they implement."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlkernel import policy
from rlkernel.cli.options import Json
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.coverage import matches
from rlkernel.discover import ACCELERATORS, FIRST_PARTY, Candidate, PackageVersions
from rlkernel.doctor.hardware import Hardware, look
from rlkernel.doctor.system import install_line
from rlkernel.resolve import ANY, environment
from rlkernel_core.decision import AUTO

if TYPE_CHECKING:
    from rlkernel_core.manifest import Impl, Requires

EXAMPLES: Final = (
    ("rlkernel backends", "what is installed, and what one could install"),
    ("rlkernel backends --load", "third-party plugins too, although no order names them"),
)
EXITS: Final = {0: "listed; a backend that cannot be loaded is listed with its reason"}

_MISSING: Final = "environment/missing-package"
_ALWAYS: Final = ("cpu",)  # in every machine
_TIERS: Final = {0: "vendor", 1: "portable", 2: "plain torch"}
_READY, _NOT_LOADED, _NOT_INSTALLED = "ready", "not loaded", "not installed"
_NO_DEVICE, _LOADED = "no device", "loaded"


def command(
    *,
    load: Annotated[bool, typer.Option("--load", help="Load the manifests of third-party plugins as well.")] = False,
    json: Json = False,
) -> None:
    """Backends that are installed, whether they can run here, and our own that are not installed.

    `auto` considers our own alone: vendor, then portable, then plain torch;
    those of ours that say "if named" run only where the order names them.
    A third-party plugin is listed without importing it, unless the order
    names it or --load is given.
    """
    installed = policy.installed()
    rules = policy.base().policy
    named = {name for own in (rules.default, *rules.ops.values()) for name in own.order if name != AUTO}
    rows = []
    for name in sorted(installed, key=_rank):
        known = installed.listed(name)
        wanted = load or known.ours or name in named
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
    state, text, fix = _state(found, loaded=loaded)
    return {
        "name": found.name,
        "distribution": found.dist,
        "version": found.version,
        "kind": _kind(found),
        "installed": True,
        "loaded": loaded and found.manifest is not None,
        "state": state,
        "text": text,
        "fix": fix,
        "operators": sorted({i.op for i in impls}),
        "devices": sorted(_devices(impls)),
    }


def _kind(found: Candidate) -> str:
    if found.tier is not None:
        return _TIERS[found.tier]
    return "ours, if named" if found.ours else "third party"


def _state(found: Candidate, *, loaded: bool) -> tuple[str, str, str]:
    """Whether a backend can run here, what is in the way, and the line that changes it; torch is not imported."""
    if found.reason is not None:
        return found.reason.slug, found.reason.text, found.reason.fix
    if found.manifest is None:
        return _NOT_LOADED, "", "" if loaded else "rlkernel backends --load"
    impls = found.manifest.impls
    if importlib.util.find_spec("torch") is None:
        return _MISSING, "needs torch, which is not installed", install_line(machine())
    lacking = [environment(found.name, impl.requires.packages, PackageVersions()) for impl in impls]
    if impls and (reason := next(iter(lacking))) is not None and all(lacking):
        return reason.slug, reason.text, reason.fix
    claimed = _devices(impls)
    if not claimed or claimed & {ANY, *_ALWAYS}:
        return _READY, "", ""
    if not claimed & ACCELERATORS:  # only torch, with what registers it, knows whether one is here
        return _LOADED, "", f"rlkernel status --device {min(claimed)}"
    gpus = machine().gpus
    if not gpus:
        return _NO_DEVICE, "no GPU is in this machine", "" if machine().nvidia_problem is None else "rlkernel doctor"
    if not any(_is_for(impl.requires, gpu.arch) for impl in impls for gpu in gpus):
        wanted = ", ".join(dict.fromkeys(a for impl in impls for a in impl.requires.arch))
        return _NO_DEVICE, f"it claims {wanted}; here is {', '.join(dict.fromkeys(str(g.arch) for g in gpus))}", ""
    return _READY, "", ""


def _devices(impls: Iterable[Impl]) -> set[str]:
    """Device types that are claimed."""
    claimed = (impl.requires.device for impl in impls)
    return {device for named in claimed for device in ([named] if isinstance(named, str) else named)}


def _is_for(requires: Requires, arch: str | None) -> bool:
    """Whether claims cover an architecture; an unknown one is refused by none."""
    if arch is None:
        return True
    return (not requires.arch or matches(requires.arch, arch)) and not matches(requires.arch_excluded, arch)


@cache
def machine() -> Hardware:
    """The accelerators of this machine, looked for once."""
    return look()


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
    color = {_READY: "green", **dict.fromkeys((_LOADED, _NOT_LOADED, _NOT_INSTALLED, _NO_DEVICE), "dim")}.get(
        row["state"], "red"
    )
    state = f"[{color}]{row['state']}[/]"
    more = [row["text"], row["fix"]]
    state += "".join(f"\n{plain(text)}" for text in more if text)
    operators = ", ".join(op.partition("@")[0] if op.endswith("@1") else op for op in row["operators"])
    devices = ", ".join("any" if d == "*" else d for d in row["devices"])
    provider = " ".join(filter(None, (row["distribution"], row["version"])))
    return plain(row["name"]), plain(provider), row["kind"], state, operators, devices
