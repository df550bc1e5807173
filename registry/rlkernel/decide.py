"""The cold path: bind a call to an implementation once per kind of call, load it, probe it, record it.

Runs under the process lock. Fallbacks warn or raise here, before anything is stored, so that a warning turned into
an error stays one at the next call. Observers are told last and outside the lock: they may call operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from rlkernel import announce, lock, policy, selftest
from rlkernel.discover import PackageVersions, brief, guarded, load_target
from rlkernel.probe import arch_of, probe
from rlkernel.resolve import Facts, resolve
from rlkernel_core import checks
from rlkernel_core.decision import Call, Decision
from rlkernel_core.errors import ArgumentTypeError, did_you_mean
from rlkernel_core.manifest import Impl
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import OpSpec

Args = Mapping[str, Any]
Verdicts = dict[str, Reason | None]  # check -> what it said


@final
@dataclass(slots=True)
class Hit:
    """A decided kind of call: what runs, why, and how often it did."""

    run: Callable[..., Any]
    decision: Decision
    calls: int = 0


@final
@dataclass(slots=True)
class ByShape:
    """Chooses again for every call, where a candidate's own check looks at sizes: by what the checks say."""

    spec: OpSpec[Any, Any]
    checks: tuple[str, ...] = ()  # all that have been asked
    hits: dict[tuple[str | None, ...], Hit] = field(default_factory=dict)  # by their verdicts
    last: Hit | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation for these arguments."""
        self.last = hit = self.choose(args, kwargs)
        hit.calls += 1
        return hit.run(*args, **kwargs)

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hit:
        """The decision for these arguments, defaults included."""
        given = dict(zip(self.spec.parameters, args, strict=False), **kwargs)
        hit = self.hits.get(tuple([_slug(_checked(check, given)) for check in self.checks]))
        if hit is None:
            with policy.PROCESS.lock:
                decision, run, verdicts = _decided(self.spec, given)
                hit = self.remember(Hit(run, decision), verdicts, given)
            announce.decided(decision)
        return hit

    def remember(self, hit: Hit, verdicts: Verdicts, given: Args) -> Hit:
        """Store what was decided on these verdicts; checks that were asked at other times are asked now."""
        self.checks = tuple(dict.fromkeys([*self.checks, *verdicts]))
        known = [verdicts[check] if check in verdicts else _checked(check, given) for check in self.checks]
        return self.hits.setdefault(tuple([_slug(verdict) for verdict in known]), hit)


def _slug(verdict: Reason | None) -> str | None:
    return verdict.slug if verdict is not None else None


def decide(spec: OpSpec[Any, Any], key: tuple[Any, ...] | None, args: dict[str, Any]) -> Hit:
    """Which implementation takes calls of this kind; stored under `key` unless that is None.

    Raises:
        ArgumentTypeError: the argument that decides device and dtype is no tensor.
        ResolutionError: nothing in the order takes the call; every reason is in the message.
        FallbackError: a later backend could, and the policy says fallback = "error".
    """
    with policy.PROCESS.lock:
        decision, run, verdicts = _decided(spec, args)
        hit = Hit(run, decision)
        if verdicts:
            by_shape = ByShape(spec)
            by_shape.last = by_shape.remember(hit, verdicts, args)
            hit = Hit(by_shape, decision)
        if key is not None and not selftest.running():  # it may yet fail
            policy.current().tables[spec.name][key] = hit
    announce.decided(decision)
    return hit


def bind(spec: OpSpec[Any, Any], args: dict[str, Any]) -> Callable[..., Any]:
    """The implementation that takes this very call; the decision shows in `status`, the calls do not."""
    hit = decide(spec, None, args)
    if isinstance(hit.run, ByShape) and hit.run.last is not None:
        hit = hit.run.last
    policy.current().tables[spec.name].setdefault(("bound", hit.decision), Hit(hit.run, hit.decision))
    return hit.run


def arguments(spec: OpSpec[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, defaults included.

    Raises:
        ArgumentTypeError: a keyword that the operator does not have; the message suggests the nearest.
        TypeError: too many arguments, or too few.
    """
    unknown = [name for name in kwargs if name not in spec.parameters]
    if unknown:
        unknown_argument(spec, unknown[0], kwargs[unknown[0]])
    bound = inspect.signature(spec.signature).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def unknown_argument(spec: OpSpec[Any, Any], name: str, value: object) -> NoReturn:
    """Refuse a keyword that the operator does not have."""
    hint = did_you_mean(name, spec.parameters).removeprefix("; ")
    raise ArgumentTypeError(name, checks.describe(value), f"{spec.name} has no such argument", hint)


def call_of(spec: OpSpec[Any, Any], args: Args) -> Call:
    """What the arguments say about the call; bad ones are found here, before any backend is considered."""
    import torch

    device, dtype = place(spec, args)
    if spec.check is not None:
        spec.check(**args)
    grad = torch.is_grad_enabled() and any(getattr(args[n], "requires_grad", False) for n in spec.differentiable)
    kind = str(device).partition(":")[0]
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    return Call(spec.id, kind, name, grad, spec.needs(args), arch_of(str(device)))


def place(spec: OpSpec[Any, Any], args: Args) -> tuple[Any, Any]:
    """Device and dtype that decide a call."""
    if spec.primary is not None:
        x = args[spec.primary]
        if not checks.is_tensor(x):
            raise ArgumentTypeError(
                spec.primary, checks.describe(x), "must be a torch.Tensor", f"Pass torch.as_tensor({spec.primary})."
            )
        return x.device, x.dtype
    found: Any = spec.where(args) if spec.where else None
    if checks.is_tensor(found):
        return found.device, found.dtype
    return found if found is not None else "cpu", None


def facts_for(device: str, *, locked: bool = True) -> Facts:
    """What is known about this machine and process; `locked=False` leaves the lock in force out of account."""
    process, rules = policy.PROCESS, policy.current().policy
    outcomes = list(process.probes.items())  # other threads may add to them
    failed = {backend: reason for (backend, *at), reason in outcomes if at == [device, rules.probe] and reason}
    path = rules.lock if locked else None
    return Facts(PackageVersions(), process.broken_targets, failed, lock.read(path) if path else None)


def settle(
    spec: OpSpec[Any, Any],
    call: Call,
    device: str,
    check: Callable[[Impl], Reason | None] | None = None,
    *,
    locked: bool = True,
) -> tuple[Decision, Callable[..., Any] | None]:
    """Resolve until the chosen implementation has been loaded and its backend's self-test has passed on `device`.

    Returns:
        The decision, and the implementation; None in its place where nothing qualifies, or two do.
    """
    installed, process, how = policy.installed(), policy.PROCESS, policy.current().policy.probe
    rules, source = policy.policy_for(policy.current(), spec)
    while True:
        facts = facts_for(device, locked=locked)
        decision = resolve(installed, facts, call, rules, source=source, check=check)
        if decision.backend is None or decision.target is None or decision.ambiguous:
            return decision, None
        run = _loaded(spec, decision.target)
        if isinstance(run, Reason):
            process.broken_targets[decision.target] = run
            continue
        where = (decision.backend, device, how)
        if where not in process.probes and not selftest.running():  # which may call what it tests
            process.probes[where] = probe(installed[decision.backend], device, how)
        if process.probes.get(where) is None:
            return decision, run


def _decided(spec: OpSpec[Any, Any], args: Args) -> tuple[Decision, Callable[..., Any], Verdicts]:
    """The settled decision of a call, said aloud where it must be, and what checks said about its arguments."""
    check, verdicts = check_for(args)
    decision, run = settle(spec, call_of(spec, args), str(place(spec, args)[0]), check)
    announce.broken(policy.installed(), decision)
    if run is None:
        raise announce.refused(decision)
    if decision.fell_back_from is not None:
        announce.fallback(decision)
    return decision, run, verdicts


def check_for(args: Args) -> tuple[Callable[[Impl], Reason | None], Verdicts]:
    """A function that asks implementations about these arguments, and what it has been told."""
    said: Verdicts = {}

    def check(impl: Impl) -> Reason | None:
        if impl.check is None:
            return None
        if impl.check not in said:
            said[impl.check] = _checked(impl.check, args)
        return said[impl.check]

    return check, said


def _checked(target: str, args: Args) -> Reason | None:
    """The implementation's own word on these arguments; anything but None or a shape's Reason counts against it."""
    check = load_target(target)
    if isinstance(check, Reason):
        return check
    said, error = guarded(lambda: check(**args))
    if error is None and (said is None or (isinstance(said, Reason) and said.stage == "shape")):
        return said
    text = brief(error) if error is not None else f"it returned {said!r}"
    return Reason("shape", "check-failed", f"{target}: {text}", "report it to the plugin's author")


def _loaded(spec: OpSpec[Any, Any], target: str) -> Callable[..., Any] | Reason:
    """Import the function and hold its parameters against the operator's, defaults included: `bind` hands it out."""
    run = load_target(target)
    if isinstance(run, Reason):
        return run
    have, error = guarded(lambda: inspect.signature(run))
    if error is None and have is not None and _parameters(have) == _parameters(inspect.signature(spec.signature)):
        return run
    plain = [p.replace(annotation=p.empty) for p in spec.parameters.values()]
    text = f"{target}{have if have is not None else ''} does not take {spec.id}{inspect.Signature(plain)}"
    return Reason("load", "target-signature", text, "report it to the plugin's author")


def _parameters(signature: inspect.Signature) -> list[tuple[Any, ...]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]
