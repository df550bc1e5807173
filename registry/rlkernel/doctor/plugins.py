"""Backends and their self-tests, the configuration, the lock and the cache folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rlkernel.discover import FIRST_PARTY
from rlkernel.doctor.finding import Finding, note, ok, problem, warning
from rlkernel.doctor.machine import UNTESTED, Machine
from rlkernel.sources import made_of
from rlkernel_core.decision import AUTO, Pin, Policy
from rlkernel_core.reasons import Reason


def backends(machine: Machine) -> Iterator[Finding]:
    """Every installed backend could be loaded."""
    for found in machine.candidates:
        if found.manifest is not None:
            operators = {impl.op for impl in found.manifest.impls}
            yield ok("backend/loaded", f"backend {found.name} ({found.provider}): {len(operators)} operator(s)")
        elif found.reason is not None:
            named = found.tier is not None or (machine.policy is not None and found.name in _named(machine.policy))
            text = f"backend {found.name} ({found.provider}): {found.reason.slug}: {found.reason.text}"
            if named:
                yield problem("backend/broken", text, "it is passed over wherever the order names it", found.reason.fix)
            else:
                yield note("backend/broken", text, "nothing: the order does not name it", found.reason.fix)


def configuration(machine: Machine) -> Iterator[Finding]:
    """The configuration is valid, and names what is installed."""
    for text in machine.config_problems:
        yield problem(
            "config/malformed", text, "every operator call raises ConfigError", "correct it as the message says"
        )
    if machine.policy is None:
        return
    order = ", ".join(machine.policy.default.order)
    where = machine.config_file or "no rlkernel.toml"
    yield ok("config/order", f"order = {order} (from {machine.policy.source.get('order', 'default')}); {where}")
    have = {c.name for c in machine.candidates}
    for name in sorted(_named(machine.policy) - have):
        known = FIRST_PARTY.get(name)
        fix = known.install if known else "take it out of the order"
        yield warning("config/not-installed", f"the order names {name}, which is not installed", "others serve", fix)


def pinned(machine: Machine) -> Iterator[Finding]:
    """What the lock pins is installed."""
    if machine.locked is None or machine.policy is None:
        return
    have = {
        Pin(i.target, c.provider, i.sums or "", made_of(c.manifest, i, machine.packages))
        for c in machine.candidates
        if c.manifest
        for i in c.manifest.impls
    }
    missing = {op: pins for op, pins in machine.locked.items() if not any(pin.admits(h) for pin in pins for h in have)}
    for op, pins in missing.items():
        text = f"{machine.policy.lock} pins {', '.join(map(str, sorted(pins)))}, which is not installed"
        yield problem(
            "lock/missing", text, f"{op} raises LockError", "install what is pinned, or run rlkernel lock --force"
        )
    if not missing:
        yield ok("lock/holds", f"{machine.policy.lock} pins {len(machine.locked)} operator(s); all are installed")


def cache(machine: Machine) -> Iterator[Finding]:
    """Outcomes of self-tests can be remembered."""
    if machine.cache_problem is None:
        yield ok("cache/writable", f"cache folder {machine.cache}")
    else:
        text = f"the cache folder {machine.cache} cannot be written: {machine.cache_problem}"
        cost = "every process repeats the self-tests"
        yield warning("cache/read-only", text, cost, "export XDG_CACHE_HOME=/a/folder/you/may/write")


def self_tests(machine: Machine) -> Iterator[Finding]:
    """Every backend has run a kernel on every device it claims, and the result was right."""
    for (name, device), outcome in machine.self_tests.items():
        if isinstance(outcome, Reason):
            text = f"{outcome.slug} on {device}: {outcome.text}"
            yield problem(
                "probe/failed", text, f"{name} is passed over on {device}", "rlkernel doctor --probe, once mended"
            )
        elif outcome == UNTESTED:
            text = f"the self-test of {name} has not run on {device} yet"
            yield note("probe/untested", text, "its first call runs it", "rlkernel doctor --probe")
        else:
            yield ok("probe/passed", f"the self-test of {name} passed on {device}")


def _named(policy: Policy) -> set[str]:
    """Backends that any order names."""
    return {name for rules in (policy.default, *policy.ops.values()) for name in rules.order if name != AUTO}


CHECKS: Final[tuple[Callable[[Machine], Iterator[Finding]], ...]] = (backends, configuration, pinned, cache, self_tests)
