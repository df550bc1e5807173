"""The choice: `resolve(candidates, facts, call, policy)` is a pure function from claims and facts to a Decision.

Every candidate that is not chosen gets a Reason, checked in one fixed order (rlkernel_core.reasons.STAGES). The
function reads no clock, no environment and no device, which is what makes `explain` work for hardware that is not
there and lets property tests cover it without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from rlkernel.coverage import matches
from rlkernel.discover import ACCELERATORS, FIRST_PARTY, Candidate
from rlkernel_core.decision import AUTO, EXACT, PLAIN_TORCH, PROVED, Call, Decision, OpPolicy, Pin, Rejected
from rlkernel_core.reasons import Reason

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend, Impl

ANY: Final = "*"
# What says "this backend is not about this call", or "not wanted for it": passing over a named one is no fallback.
_NOT_CONCERNED: Final = frozenset({"operator/absent", "device/not-claimed", "policy/locked"})


@dataclass(frozen=True)
class Facts:
    """What is known about this machine, as values."""

    packages: Mapping[str, str] = field(default_factory=dict)  # distribution -> version
    broken_targets: Mapping[str, Reason] = field(default_factory=dict)  # target -> why it cannot be imported
    failed_probes: Mapping[str, Reason] = field(default_factory=dict)  # backend -> why its self-test failed here
    locked: Mapping[str, frozenset[Pin]] | None = None  # op id -> what it may run
    # What conformance reports say against a backend for a call; asked where the policy needs "conformant" or "exact".
    unproved: Callable[[str, Call], Reason | None] | None = None
    made_of: Callable[[Backend, Impl], str] | None = None  # what decides an implementation's bits; None: nobody asks


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
        A Decision. `backend` is None where nothing qualifies; `ambiguous` lists ties, which are an error;
        `fell_back_from` is set where the decision is a fallback: a backend that the order names was passed over, or
        `auto` leaves an accelerator to plain torch although the operator has kernels for it.
    """
    slots = _expand(policy.order, candidates, call)
    rejected: list[Rejected] = []
    qualified: list[tuple[_Slot, Impl]] = []
    passed_over: str | None = None  # the first that the order names, that is about the call and does not take it
    for slot in slots:
        candidate = candidates.get(slot.name)
        outranked = bool(qualified) and (slot.tier is None or slot.tier != qualified[0][0].tier)
        # Nobody outranked is asked about the arguments: only calls whose choice depends on a check pay for one.
        found, reasons = _consider(slot, candidate, facts, call, policy, None if outranked else check)
        rejected += reasons
        if found is None:
            if slot.named and not qualified and passed_over is None and _concerns(reasons[0].reason):
                passed_over = slot.name
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
    fell_back = passed_over
    if fell_back is None and slot.name == PLAIN_TORCH:
        fell_back = _with_kernels(candidates, call, policy)
    chosen = candidates[slot.name]
    return Decision(
        call, policy, slot.name, impl.target, chosen.provider, tuple(rejected), fell_back, tied, source,
        sums=impl.sums, made_of=_made_of(chosen, impl, facts),
    )  # fmt: skip


def _expand(order: Iterable[str], candidates: Mapping[str, Candidate], call: Call) -> list[_Slot]:
    """The order with `auto` replaced by our own backends in tiers; a backend keeps its first place.

    Those that have kernels for this call and are not installed stand there too, to be refused with the line that
    installs them.
    """
    slots: dict[str, _Slot] = {}
    named = {name for name in order if name != AUTO}
    for name in order:
        if name != AUTO:
            slots.setdefault(name, _Slot(name, named=True, tier=None))
            continue
        for ours in FIRST_PARTY:
            tier = _tier(candidates, ours)
            absent = ours not in candidates and FIRST_PARTY[ours].has_kernels(call.op, call.device, call.arch)
            if (tier is not None or absent) and ours not in named:
                slots.setdefault(ours, _Slot(ours, named=False, tier=tier))
    return list(slots.values())


def _tier(candidates: Mapping[str, Candidate], name: str) -> int | None:
    """The tier of an installed first-party backend, judged by who distributes it, not by what it calls itself."""
    return _listed(candidates, name).tier if name in candidates else None


def _listed(candidates: Mapping[str, Candidate], name: str) -> Candidate:
    """An installed backend, loaded only if it was before."""
    listed: Callable[[str], Candidate] = getattr(candidates, "listed", candidates.__getitem__)
    return listed(name)


def _with_kernels(candidates: Mapping[str, Candidate], call: Call, policy: OpPolicy) -> str | None:
    """The backend of ours in whose place plain torch runs on an accelerator; None where plain torch is the choice.

    It is the choice on the CPU, where the order puts it before `auto` or has no `auto`, and where no backend of ours
    has kernels of the operator for this hardware. Installed backends come first: why they refuse is known. Of the
    others the first in the order of `auto`; for an unknown architecture the portable one.
    """
    order = policy.order
    asked_for = AUTO not in order or (PLAIN_TORCH in order and order.index(PLAIN_TORCH) < order.index(AUTO))
    if asked_for or call.device not in ACCELERATORS:
        return None
    able = [name for name in FIRST_PARTY if _has_kernels(name, candidates, call)]
    if call.arch is None:
        able.sort(key=lambda name: -FIRST_PARTY[name].tier)
    return next((name for name in able if _tier(candidates, name) is not None), next(iter(able), None))


def _has_kernels(name: str, candidates: Mapping[str, Candidate], call: Call) -> bool:
    """Whether a backend of ours has kernels of the call's operator for its hardware, as it is known or claims."""
    if FIRST_PARTY[name].has_kernels(call.op, call.device, call.arch):
        return True
    if name == PLAIN_TORCH or _tier(candidates, name) is None:
        return False
    manifest, op = candidates[name].manifest, call.op.partition("@")[0]
    return any(
        impl.op.partition("@")[0] == op
        and claims(impl.requires.device, call.device)
        and _refused_arch(impl, call) is None
        for impl in (manifest.impls if manifest else ())
    )


def _outside(candidates: Mapping[str, Candidate], slots: Iterable[_Slot], policy: OpPolicy) -> list[Rejected]:
    """Installed backends that the order does not permit; they are not even imported."""
    inside = {slot.name for slot in slots}
    out = []
    for name in sorted(set(candidates) - inside):
        fix = f'order = ["{name}", ' + ", ".join(f'"{o}"' for o in policy.order) + "]"
        if AUTO in policy.order and not _listed(candidates, name).ours:
            text = f"{name} is a third party; it runs only where the order names it"
            out.append(Rejected(name, Reason("policy", "third-party", text, fix)))
        else:
            aside = f", and {AUTO!r} leaves it out" if AUTO in policy.order else ""
            text = f"the order {list(policy.order)} does not name it{aside}"
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
        fix = known.install_on(call.arch) if known else f"install the distribution that provides {slot.name!r}"
        reason = Reason("load", "not-installed", f"no installed distribution provides {slot.name!r}", fix)
        return None, [Rejected(slot.name, reason)]
    if candidate.reason is not None:
        return None, [Rejected(slot.name, candidate.reason)]
    impls = candidate.manifest.of(call.op) if candidate.manifest else ()
    if not impls:
        return None, [Rejected(slot.name, _absent(candidate, call))]
    rejected: list[Rejected] = []
    for impl in impls:
        why = _refusal(slot.name, candidate, impl, facts, call, policy) or _broken(candidate, impl)
        why = why or (check(impl) if check else None)
        why = why or _locked(candidate, impl, facts, call) or facts.failed_probes.get(slot.name)
        if why is None and not PROVED.isdisjoint(policy.need) and facts.unproved is not None:
            why = facts.unproved(slot.name, call)
        if why is None:
            return impl, rejected
        rejected.append(Rejected(slot.name, why, impl.target))
    # Where a backend has several implementations, the telling reason is that of one that is for this hardware.
    rejected.sort(key=lambda r: (not _concerns(r.reason), r.reason.stage == "arch"))
    return None, rejected


def _concerns(reason: Reason) -> bool:
    """Whether a backend that is refused for this reason is about the call, so that passing over it means something."""
    return reason.slug not in _NOT_CONCERNED


def _absent(candidate: Candidate, call: Call) -> Reason:
    name = call.op.partition("@")[0]
    others = sorted(
        {i.op for i in candidate.manifest.impls if i.op.startswith(name + "@")} if candidate.manifest else ()
    )
    if others:
        text = f"it implements {', '.join(others)}, the call is for {call.op}"
        return Reason("operator", "other-version", text, f"update {candidate.dist} or rlkernel, so that they agree")
    known = FIRST_PARTY.get(candidate.name) if candidate.tier is not None else None
    outdated = known is not None and known.has_kernels(call.op, call.device, call.arch)
    fix = f"pip install -U {candidate.dist}" if outdated else ""
    return Reason("operator", "absent", f"it does not implement {call.op}", fix)


# Operators whose sums over a split vocabulary may depend on the number of ranks: "exact" asks that they do not.
_SPLIT: Final = frozenset({"logprob@1", "linear_logprob@1"})


def _refusal(name: str, candidate: Candidate, impl: Impl, facts: Facts, call: Call, policy: OpPolicy) -> Reason | None:
    """The first claim that does not cover the call, in the fixed order of stages."""
    need = impl.requires
    if broken := facts.broken_targets.get(impl.target):
        return broken
    if not claims(need.device, call.device):
        return Reason("device", "not-claimed", f"it claims {_names(need.device)}, the call is on {call.device}")
    if reason := environment(name, need.packages, facts.packages):
        return reason
    if reason := _refused_arch(impl, call):
        return reason
    if call.dtype and need.dtypes and call.dtype not in need.dtypes:
        text = f"it claims {_names(need.dtypes)}, the call has {call.dtype}"
        return Reason("dtype", "unsupported", text, "cast the input, or name another backend first")
    ranks = {"rank_invariant"} if EXACT in policy.need and call.op in _SPLIT and "group" in call.features else set()
    if missing := (call.features | policy.need | ranks) - PROVED - impl.supports:
        text = f"it does not claim {_names(sorted(missing))}"
        return Reason(
            "features", "missing", text, f"drop what needs it, or name a backend that claims it before {name}"
        )
    if EXACT in policy.need and impl.sums is None:
        text = 'the policy needs "exact" and its manifest names no `sums`: it promises no bits to anyone else'
        return Reason("features", "no-sums", text, f"name a backend whose manifest does before {name}")
    if call.grad and "grad" not in impl.supports:
        text = f"an input requires gradients and {candidate.dist} claims none for {impl.op}"
        return Reason("grad", "unsupported", text, "call it under torch.no_grad(), or name another backend first")
    return None


def _broken(candidate: Candidate, impl: Impl) -> Reason | None:
    """Why a function that an implementation names cannot be used, found out before it was imported here."""
    named = (impl.target, impl.check, impl.workspace, impl.gradient)
    return next((candidate.broken[name] for name in named if name is not None and name in candidate.broken), None)


def _refused_arch(impl: Impl, call: Call) -> Reason | None:
    """Why an implementation is not for the call's architecture; an unknown one is refused by nobody."""
    need = impl.requires
    if call.arch and matches(need.arch_excluded, call.arch):
        return Reason("arch", "excluded", f"it excludes {call.arch}")
    if call.arch and need.arch and not matches(need.arch, call.arch):
        return Reason("arch", "unsupported", f"it claims {_names(need.arch)}, the device is {call.arch}")
    return None


def _locked(candidate: Candidate, impl: Impl, facts: Facts, call: Call) -> Reason | None:
    if facts.locked is None or call.op not in facts.locked:
        return None
    allowed = facts.locked[call.op]
    this = Pin(impl.target, candidate.provider, impl.sums or "", _made_of(candidate, impl, facts) or "")
    if any(pin.admits(this) for pin in allowed):
        return None
    text = f"rlkernel.lock pins {', '.join(map(str, sorted(allowed)))}; this is {this}"
    return Reason("policy", "locked", text, "install what is pinned, or write a new lock with `rlkernel lock --force`")


def _made_of(candidate: Candidate, impl: Impl, facts: Facts) -> str | None:
    if facts.made_of is None or candidate.manifest is None:
        return None
    return facts.made_of(candidate.manifest, impl) or None


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


def _names(names: tuple[str, ...] | list[str] | str) -> str:
    return names if isinstance(names, str) else ", ".join(names)
