"""The choice: `resolve(candidates, facts, call, policy)` is a pure function from claims and facts to a Decision.

Every candidate that is not chosen gets a Reason, checked in one fixed order (rlkernel_core.reasons.STAGES). The
function reads no clock, no environment and no device, which is what makes `explain` work for hardware that is not
there and lets property tests cover it without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from rlkernel.discover import FIRST_PARTY, Candidate
from rlkernel_core.decision import AUTO, Call, Decision, OpPolicy, Rejected
from rlkernel_core.reasons import Reason

if TYPE_CHECKING:
    from rlkernel_core.manifest import Impl

ANY: Final = "*"
# Stages that say "this backend is not about this call", or "not wanted for it": passing over it is no fallback.
_NOT_CONCERNED: Final = frozenset({"operator", "device", "policy"})
_ARCH_AT_LEAST: Final = re.compile(r"^(?P<family>[a-z]+)(?P<number>\d+)\+$")


@dataclass(frozen=True)
class Facts:
    """What is known about this machine, as values."""

    packages: Mapping[str, str] = field(default_factory=dict)  # distribution -> version
    broken_targets: Mapping[str, Reason] = field(default_factory=dict)  # target -> why it cannot be imported
    failed_probes: Mapping[str, Reason] = field(default_factory=dict)  # backend -> why its self-test failed here
    locked: Mapping[str, frozenset[tuple[str, str]]] | None = None  # op id -> allowed (target, provider)


@dataclass(frozen=True)
class _Slot:
    """A place in the expanded order: the backend, and whether the user named it."""

    name: str
    named: bool
    tier: int | None


def resolve(
    candidates: Mapping[str, Candidate],
    facts: Facts,
    call: Call,
    policy: OpPolicy,
    *,
    source: str = "default",
    check: Callable[[Impl], Reason | None] | None = None,
) -> Decision:
    """Choose the implementation that takes `call`.

    Args:
        candidates: every installed backend by name; those outside the order are not looked into.
        facts: what is known about the machine.
        call: operator, device, architecture, dtype, gradient, needed features.
        policy: order, fallback and needed features for this operator.
        source: where the order came from, recorded in the decision.
        check: runs an implementation's own check against the actual arguments; None where there are none.

    Returns:
        A Decision. `backend` is None where nothing qualifies; `ambiguous` lists ties, which are an error.
    """
    slots = _expand(policy.order, candidates, call)
    rejected: list[Rejected] = []
    qualified: list[tuple[_Slot, Impl]] = []
    first_concerned: str | None = None
    for slot in slots:
        candidate = candidates.get(slot.name)
        outranked = bool(qualified) and (slot.tier is None or slot.tier != qualified[0][0].tier)
        # Nobody outranked is asked about the arguments: only calls whose choice depends on a check pay for one.
        found, reasons = _consider(slot, candidate, facts, call, policy, None if outranked else check)
        # A backend of our own that did not even load may be about any device; discovery warns about it.
        concerned = slot.named or (candidate is not None and candidate.manifest is not None)
        refused = found is None and bool(reasons) and not _concerns(slot, reasons[0].reason, call)
        if first_concerned is None and concerned and not refused:
            first_concerned = slot.name
        rejected += reasons
        if found is None:
            continue
        if outranked:
            winner = qualified[0][0].name
            text = f"{winner} comes first in the order and takes the call"
            rejected.append(Rejected(slot.name, Reason("policy", "outranked", text), found.target))
        else:
            qualified.append((slot, found))
    rejected += _outside(candidates, slots, policy)
    if not qualified:
        return Decision(call, policy, None, None, None, tuple(rejected), source=source)
    slot, impl = qualified[0]
    tied = tuple(s.name for s, _ in qualified) if len(qualified) > 1 else ()
    fell_back = first_concerned if first_concerned not in {None, slot.name} else None
    provider = candidates[slot.name].provider
    return Decision(call, policy, slot.name, impl.target, provider, tuple(rejected), fell_back, tied, source)


def _expand(order: Iterable[str], candidates: Mapping[str, Candidate], call: Call) -> list[_Slot]:
    """The order with `auto` replaced by our own backends in tiers; a backend keeps its first place.

    Those that are made for this hardware and not installed stand there too, to be refused with the line that installs
    them; they never count as a fallback.
    """
    slots: dict[str, _Slot] = {}
    named = {name for name in order if name != AUTO}
    for name in order:
        if name != AUTO:
            slots.setdefault(name, _Slot(name, named=True, tier=None))
            continue
        for ours in FIRST_PARTY:
            tier = _tier(candidates, ours)
            absent = ours not in candidates and FIRST_PARTY[ours].made_for(call.device, call.arch)
            if (tier is not None or absent) and ours not in named:
                slots.setdefault(ours, _Slot(ours, named=False, tier=tier))
    return list(slots.values())


def _tier(candidates: Mapping[str, Candidate], name: str) -> int | None:
    """The tier of an installed first-party backend, judged by who distributes it, not by what it calls itself."""
    if name not in candidates:
        return None
    listed = getattr(candidates, "listed", candidates.__getitem__)
    tier: int | None = listed(name).tier
    return tier


def _outside(candidates: Mapping[str, Candidate], slots: Iterable[_Slot], policy: OpPolicy) -> list[Rejected]:
    """Installed backends that the order does not permit; they are not even imported."""
    inside = {slot.name for slot in slots}
    out = []
    for name in sorted(set(candidates) - inside):
        fix = f'order = ["{name}", ' + ", ".join(f'"{o}"' for o in policy.order) + "]"
        if AUTO in policy.order and _tier(candidates, name) is None:
            text = f"{name} is a third party; it runs only where the order names it"
            out.append(Rejected(name, Reason("policy", "third-party", text, fix)))
        else:
            text = f"the order {list(policy.order)} does not name it"
            out.append(Rejected(name, Reason("policy", "not-in-order", text, fix)))
    return out


def _consider(
    slot: _Slot,
    candidate: Candidate | None,
    facts: Facts,
    call: Call,
    policy: OpPolicy,
    check: Callable[[Impl], Reason | None] | None,
) -> tuple[Impl | None, list[Rejected]]:
    """The first implementation of a backend that takes the call, and the reasons of those before it."""
    if candidate is None:
        known = FIRST_PARTY.get(slot.name)
        fix = known.install if known else f"install the distribution that provides {slot.name!r}"
        reason = Reason("load", "not-installed", f"no installed distribution provides {slot.name!r}", fix)
        return None, [Rejected(slot.name, reason)]
    if candidate.reason is not None:
        return None, [Rejected(slot.name, candidate.reason)]
    impls = candidate.manifest.of(call.op) if candidate.manifest else ()
    if not impls:
        return None, [Rejected(slot.name, _absent(candidate, call))]
    rejected: list[Rejected] = []
    for impl in impls:
        why = _refusal(slot.name, candidate, impl, facts, call, policy) or (check(impl) if check else None)
        why = why or _locked(candidate, impl, facts, call) or facts.failed_probes.get(slot.name)
        if why is None:
            return impl, rejected
        rejected.append(Rejected(slot.name, why, impl.target))
    # The reason nearest to success is the telling one where a backend has several implementations.
    rejected.sort(key=lambda r: not _concerns(slot, r.reason, call))
    return None, rejected


def _concerns(slot: _Slot, reason: Reason, call: Call) -> bool:
    """Whether a backend that is refused for this reason is about this call, so that passing over it is a fallback.

    Of our own backends, which `auto` brings, those that are made for other hardware are not.
    """
    if reason.slug == "arch/unsupported" and not slot.named:
        return FIRST_PARTY[slot.name].made_for(call.device, call.arch)
    return reason.stage not in _NOT_CONCERNED


def _absent(candidate: Candidate, call: Call) -> Reason:
    name = call.op.partition("@")[0]
    others = sorted(
        {i.op for i in candidate.manifest.impls if i.op.startswith(name + "@")} if candidate.manifest else ()
    )
    if others:
        text = f"it implements {', '.join(others)}, the call is for {call.op}"
        return Reason("operator", "other-version", text, f"update {candidate.dist} or rlkernel, so that they agree")
    return Reason("operator", "absent", f"it does not implement {call.op}")


def _refusal(name: str, candidate: Candidate, impl: Impl, facts: Facts, call: Call, policy: OpPolicy) -> Reason | None:
    """The first claim that does not cover the call, in the fixed order of stages."""
    need = impl.requires
    if broken := facts.broken_targets.get(impl.target):
        return broken
    if not claims(need.device, call.device):
        return Reason("device", "not-claimed", f"it claims {_names(need.device)}, the call is on {call.device}")
    if reason := environment(name, need.packages, facts.packages):
        return reason
    if call.arch and any(_arch_matches(pattern, call.arch) for pattern in need.arch_excluded):
        return Reason("arch", "excluded", f"it excludes {call.arch}")
    if call.arch and need.arch and not any(_arch_matches(pattern, call.arch) for pattern in need.arch):
        return Reason("arch", "unsupported", f"it claims {_names(need.arch)}, the device is {call.arch}")
    if call.dtype and need.dtypes and call.dtype not in need.dtypes:
        text = f"it claims {_names(need.dtypes)}, the call has {call.dtype}"
        return Reason("dtype", "unsupported", text, "cast the input, or name another backend first")
    if missing := (call.features | policy.need) - impl.supports:
        text = f"it does not claim {_names(sorted(missing))}"
        return Reason(
            "features", "missing", text, f"drop what needs it, or name a backend that claims it before {name}"
        )
    if call.grad and "grad" not in impl.supports:
        text = f"an input requires gradients and {candidate.dist} claims none for {impl.op}"
        return Reason("grad", "unsupported", text, "call it under torch.no_grad(), or name another backend first")
    return None


def _locked(candidate: Candidate, impl: Impl, facts: Facts, call: Call) -> Reason | None:
    if facts.locked is None or call.op not in facts.locked:
        return None
    allowed = facts.locked[call.op]
    if (impl.target, candidate.provider) in allowed:
        return None
    pinned = ", ".join(f"{target} [{provider}]" for target, provider in sorted(allowed))
    text = f"rlkernel.lock pins {pinned}; this is {impl.target} [{candidate.provider}]"
    return Reason("policy", "locked", text, "install what is pinned, or write a new lock with `rlkernel lock`")


def environment(name: str, needed: Iterable[str], packages: Mapping[str, str]) -> Reason | None:
    """The first package that an implementation of a backend needs and that is not there in a version that will do."""
    fix = FIRST_PARTY[name].install if name in FIRST_PARTY else ""
    for text in needed:
        requirement = Requirement(text)
        have = packages.get(requirement.name)
        if have is None:
            missing = f"needs {requirement}, which is not installed"
            return Reason("environment", "missing-package", missing, fix or f"pip install '{requirement}'")
        if not _admits(requirement, have):
            wrong = f"needs {requirement}, and {have} is installed"
            return Reason("environment", "package-version", wrong, f"pip install '{requirement}'")
    return None


def _admits(requirement: Requirement, version: str) -> bool:
    """Whether an installed version will do; one that is no version does only where any does."""
    try:
        return not requirement.specifier or requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def claims(claimed: tuple[str, ...] | str, device: str) -> bool:
    """Whether claimed device types cover a device type."""
    names = (claimed,) if isinstance(claimed, str) else claimed
    return ANY in names or device in names


def _arch_matches(pattern: str, arch: str) -> bool:
    """`sm90` exactly, `sm80+` from there on within the family, `gfx9*` as a glob."""
    if at_least := _ARCH_AT_LEAST.match(pattern):
        have = re.match(rf"^{at_least['family']}(\d+)", arch)
        return have is not None and int(have[1]) >= int(at_least["number"])
    return fnmatchcase(arch, pattern)


def _names(names: tuple[str, ...] | list[str] | str) -> str:
    return names if isinstance(names, str) else ", ".join(names)
