"""`rlkernel config`: every value of the policy with its source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel import policy
from rlkernel.cli.options import Json
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel.config import ENVIRONMENT, find_file
from rlkernel_core.decision import OpPolicy

EXAMPLES: Final = (
    ("rlkernel config", "what is in force here, and which file or variable says so"),
    ("rlkernel config --example > rlkernel.toml", "a file to start from, with comments"),
)
EXITS: Final = {0: "the configuration is valid"}

EXAMPLE: Final = """\
# rlkernel.toml: which backends may run. Found here or in a parent folder, or where RLKERNEL_CONFIG points to.
# use() > configure() > RLKERNEL_ORDER, RLKERNEL_FALLBACK > this file > default. `rlkernel config` shows the outcome.

[rlkernel]
# Backends that may run, best first. Nothing else ever runs. "auto" stands for rlkernel's own, best for the device
# first; a third party runs only where it is named: ["acme", "auto"].
order = ["auto"]

# When a backend that the order names is passed over, or a GPU is left to plain torch although kernels exist for it:
# "warn" says so once per operator, "error" refuses the call.
fallback = "warn"

# Features that every implementation must claim, e.g. ["batch_invariant"]; operators that cannot have one ignore it.
# "conformant": a conformance report in `reports` must hold for its present sources, on this kind of device.
# "exact": that, and its manifest names the order of its sums (equal names promise equal bits), whatever the batch.
need = []

# Folder of conformance reports, one in each folder below it.
# reports = "conformance/reports"

# Profiler ranges around each call: rlkernel.<operator> <backend> <decision>, in torch's profiler and in NVTX or ROCTX.
profile = false

# Compare every so many-th call of a shape with the reference, which runs beside it, and tell differences; 0 is off.
audit = 0

# Most bytes that a call may need on its device beyond its results; left out, any number.
# max_workspace_bytes = 4294967296

# A backend's self-test before its first use: in a process of its own ("subprocess"), in this one where a second
# process cannot have the device ("inprocess"), or not at all ("off").
probe = "subprocess"

# What may run, to the version: written by `rlkernel lock`. A rlkernel.lock in the working folder counts by itself.
# lock = "rlkernel.lock"

# The same keys for one operator: order, fallback, need, profile, audit, max_workspace_bytes.
[rlkernel.ops.logprob]
fallback = "error"
"""


def command(
    *,
    example: Annotated[bool, typer.Option("--example", help="Print a commented rlkernel.toml instead.")] = False,
    json: Json = False,
) -> None:
    """Every value of the policy in force, and where it comes from.

    use() > configure() > environment > rlkernel.toml > default: a value is
    taken from the highest layer that sets it. An unknown key, name or
    RLKERNEL_ variable is an error, never ignored.
    """
    if example:
        typer.echo(EXAMPLE, nl=False)
        return
    rules = policy.base().policy
    values = {key: {"value": value, "source": rules.source.get(key, "default")} for key, value in _values()}
    file = find_file(os.environ, Path.cwd())
    environment = {n: {"value": os.environ.get(n), "meaning": text} for n, text in ENVIRONMENT.items()}
    if json:
        print_json({"file": str(file) if file else None, "values": values, "environment": environment})
        return
    typer.echo(f"file  {file or 'no rlkernel.toml here or in a parent folder'}")
    print_table(("value", "", "from"), ((k, plain(_said(v["value"])), str(v["source"])) for k, v in values.items()))
    print_table(
        ("variable", "", "meaning"),
        ((n, plain(e["value"] or "not set"), plain(str(e["meaning"]))) for n, e in environment.items()),
    )
    typer.echo("rlkernel config --example prints a commented file to start from.")


def _values() -> Iterator[tuple[str, Any]]:
    """Key as in rlkernel.toml -> its value; operators last."""
    rules = policy.base().policy
    yield from _rules(rules.default, "")
    yield "probe", rules.probe
    yield "lock", rules.lock
    yield "reports", rules.reports
    for op, own in rules.ops.items():
        yield from _rules(own, f"ops.{op}.")


def _rules(rules: OpPolicy, prefix: str) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}order", list(rules.order)
    yield f"{prefix}fallback", rules.fallback
    yield f"{prefix}need", sorted(rules.need)
    yield f"{prefix}profile", rules.profile
    yield f"{prefix}audit", rules.audit
    yield f"{prefix}max_workspace_bytes", rules.max_workspace_bytes


def _said(value: list[str] | str | int | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return "[" + ", ".join(value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
