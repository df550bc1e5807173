"""The cold path: check a call, bind it to an implementation, and plan what runs for calls of its shape.

Runs once a shape. Decisions are made once a kind of call under the process lock; an implementation's own `fits` is
asked once a shape, and decides with. Fallbacks warn or raise here, before anything is stored, so that a warning turned
into an error stays one at the next call. Observers are called last and outside the lock: they may call operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, final

from rlkernel import announce, audit, evidence, lock, policy, ranges, selftest, sources, spread, targets
from rlkernel.discover import IN_PROCESS, PackageVersions, brief, described, guarded, load_target
from rlkernel.limits import Question, answer, question
from rlkernel.plans import Choice, Plan, Table, key_or_none
from rlkernel.probe import arch_of, probe
from rlkernel.resolve import Facts, resolve
from rlkernel_core import checks
from rlkernel_core.decision import EXACT, Call, Decision
from rlkernel_core.errors import ArgumentTypeError, ResolutionError
from rlkernel_core.manifest import Impl
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import OpSpec

if TYPE_CHECKING:
    from rlkernel_core.gradients import Pair


@final
class Verdicts(dict[Question, Reason | None]):
    """What limits, checks and memory say of a call, by implementation; each is asked once, when its word is wanted."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def __missing__(self, asked: Question) -> Reason | None:
        said = self[asked] = _answer(asked, self.call)
        return said

    def of(self, impl: Impl) -> Reason | None:
        """What is to be said against an implementation; None where nothing is."""
        asked = question(impl)
        return self[asked] if asked is not None else None


@final
@dataclass(slots=True)
class Kind:
    """The choices for one kind of call, by what limits and checks of its candidates say about the sizes."""

    checks: tuple[Question, ...] = ()  # all that have been asked
    choices: dict[tuple[str | None, ...], Choice] = field(default_factory=dict)  # by their verdicts

    def choice(self, verdicts: Verdicts) -> Choice | None:
        """What was chosen for calls that the checks say the same of."""
        return self.choices.get(tuple([_slug(verdicts[check]) for check in self.checks]))

    def remember(self, choice: Choice, verdicts: Verdicts) -> Choice:
        """Store what was decided on these verdicts; checks that were asked at other times are asked now."""
        self.checks = tuple(dict.fromkeys([*self.checks, *verdicts]))
        return self.choices.setdefault(tuple([_slug(verdicts[check]) for check in self.checks]), choice)


def _slug(verdict: Reason | None) -> str | None:
    return verdict.slug if verdict is not None else None


def plan_for(spec: OpSpec[Any, Any], key: tuple[Any, ...] | None, call: Any) -> Plan:
    """What runs this call and all of its shape; stored under `key` unless that is None.

    Raises:
        ArgumentError: the operator's check refuses an argument.
        ResolutionError: nothing in the order takes the call; every reason is in the message.
        FallbackError: a later backend could, and the policy says fallback = "error".
    """
    scope, generation = policy.current(), policy.IN_FORCE.generation
    plan = planned(choose(spec, call), spec, call)
    if key is not None and not selftest.running():  # a self-test may yet fail
        with policy.PROCESS.lock:
            if generation == policy.IN_FORCE.generation:  # else what is installed has changed meanwhile
                return scope.tables[spec.name].keep(key, plan)
    return plan


def planned(choice: Choice, spec: OpSpec[Any, Any], call: Any) -> Plan:
    """The plan of a choice for calls of this shape, in a profiler range or under audit where the policy asks for it.

    Raises:
        ResolutionError: what should prepare it returned no function.
    """
    from rlkernel_core.gradients import gradient_wanted

    plan = choice.plan(call, grad=gradient_wanted(spec.name, call))
    if not callable(plan.run):
        raise ResolutionError(
            f"{choice.decision.target} prepares calls of {spec.id} and returned {described(plan.run)}, which is no "
            f'function; name another backend first, for example order = ["torch"], and report it to '
            f"{choice.decision.version}"
        )
    if choice.decision.policy.profile:
        plan.run = ranges.ranged(plan.run, choice.decision)
    if choice.decision.policy.audit:  # outermost: the reference is in nobody's range
        plan.run = audit.audited(plan.run, choice, spec, call)
    return plan


def choose(spec: OpSpec[Any, Any], call: Any) -> Choice:
    """The implementation that the policy in force chooses for a call."""
    scope, asked = policy.current(), call_of(spec, call)
    where = (asked, str(place(spec, call)[0]))
    kinds: dict[Any, Kind] = scope.kinds[spec.name]
    verdicts = Verdicts(call)
    if (kind := kinds.get(where)) is not None and (known := kind.choice(verdicts)) is not None:
        return known
    with policy.PROCESS.lock:
        choice = _decided(spec, asked, where[1], verdicts)
        if not selftest.running():
            choice = kinds.setdefault(where, Kind()).remember(choice, verdicts)
    announce.decided(choice.decision)
    return choice


class Bound:
    """Plans of one choice, whatever the policy becomes."""

    def __init__(self, spec: OpSpec[Any, Any], choice: Choice) -> None:
        self.spec, self.choice, self.table = spec, choice, Table()
        self.impls = _chosen(choice.decision)  # kept here: the backend may be gone when a new shape comes

    def lookup(self, call: Any) -> Plan:
        """The plan of a record."""
        key = key_or_none(self.spec.name, call)
        return self.table.get(key) or self.plan_for(key, call)

    def plan_for(self, key: tuple[Any, ...] | None, call: Any) -> Plan:
        """What runs this call and all of its shape.

        Raises:
            ArgumentError: the operator's check refuses an argument.
            ResolutionError: the implementation does not take calls of this kind or shape; the message says why.
        """
        decision = self.choice.decision
        asked, was = call_of(self.spec, call), decision.call
        claiming = [impl for impl in self.impls if _takes(impl, asked)]
        if (asked.device, asked.arch) != (was.device, was.arch) or not claiming:
            raise ResolutionError(
                f"{self.spec.name} was bound to {decision.target} for `{was}`; it does not take `{asked}`. Bind "
                "a call of that kind, or call the operator itself."
            )
        verdicts = Verdicts(call)
        refused = [said for impl in claiming if (said := verdicts.of(impl)) is not None]
        if len(refused) == len(claiming):
            raise ResolutionError(
                f"{self.spec.name} was bound to {decision.target}, which refuses this call: {refused[0]}"
            )
        plan = planned(self.choice, self.spec, call)
        return plan if key is None else self.table.keep(key, plan)


def _chosen(decision: Decision) -> tuple[Impl, ...]:
    """The claims that the chosen backend makes for the chosen function."""
    candidate = policy.installed().get(str(decision.backend))
    impls = candidate.manifest.of(decision.call.op) if candidate is not None and candidate.manifest else ()
    return tuple(impl for impl in impls if impl.target == decision.target)


def _takes(impl: Impl, asked: Call) -> bool:
    """Whether what an implementation claims covers a call on the device that it was chosen for."""
    dtypes = impl.requires.dtypes
    wanted = asked.features | ({"grad"} if asked.grad else frozenset())
    return wanted <= impl.supports and (not dtypes or asked.dtype in dtypes)


def chosen(decision: Decision) -> Impl | None:
    """The manifest's entry of the implementation that a decision names; None where it names none."""
    return next(iter(_chosen(decision)), None)


def bind(spec: OpSpec[Any, Any], call: Any) -> Bound:
    """The implementation that takes this very call; the decision shows in `status`, with the calls of what is bound."""
    choice = choose(spec, call)
    bound = Bound(spec, Choice(choice.function, choice.prepared, choice.decision, pair=choice.pair))
    policy.current().bound[spec.name].append(bound.choice)
    return bound


def call_of(spec: OpSpec[Any, Any], call: Any) -> Call:
    """What is known about a call before a backend is chosen; bad arguments are found here, before any is considered."""
    from rlkernel_core.gradients import gradient_wanted

    device, dtype = place(spec, call)
    spread.refuse(call)
    if spec.check is not None:
        spec.check(call)
    kind = str(device).partition(":")[0]
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    return Call(spec.id, kind, name, gradient_wanted(spec.name, call), spec.needs(call), arch_of(str(device)))


def place(spec: OpSpec[Any, Any], call: Any) -> tuple[Any, Any]:
    """Device and dtype that decide a call."""
    if spec.primary is not None:
        x = getattr(call, spec.primary)
        if not checks.is_tensor(x):
            raise ArgumentTypeError(
                spec.primary, checks.describe(x), "must be a torch.Tensor", f"Pass torch.as_tensor({spec.primary})."
            )
        return x.device, x.dtype
    found: Any = spec.where(call) if spec.where else None
    if checks.is_tensor(found):
        return found.device, found.dtype
    return found if found is not None else "cpu", None


def facts_for(device: str, *, locked: bool = True) -> Facts:
    """What is known about this machine and process; `locked=False` leaves the lock in force out of account."""
    process, rules = policy.PROCESS, policy.current().policy
    outcomes = list(process.probes.items())  # other threads may add to them
    failed = {backend: reason for (backend, *at), reason in outcomes if at == [device, rules.probe] and reason}
    path, packages = rules.lock if locked else None, PackageVersions()
    unproved = partial(evidence.unproved, rules.reports, packages)
    # Reading sources takes tens of milliseconds: only where a lock pins them, or is about to, or bits are promised.
    asked = path or not locked or any(EXACT in each.need for each in (rules.default, *rules.ops.values()))
    made_of = partial(sources.made_of, packages=packages) if asked else None
    return Facts(packages, process.broken_targets, failed, lock.read(path) if path else None, unproved, made_of)


def foreseen(
    spec: OpSpec[Any, Any],
    call: Call,
    device: str,
    check: Callable[[Impl], Reason | None] | None = None,
    *,
    locked: bool = True,
) -> Decision:
    """The decision about a call that is not made: nothing runs, and no backend that is installed is imported for it.

    That the chosen function exists and takes the record is known of a third party's since it was loaded (`trial`), and
    of ours from their tests; of a backend of this process it is looked up here.
    """
    installed = policy.installed()
    rules, source = policy.policy_for(policy.current(), spec)
    while True:
        facts = facts_for(device, locked=locked)
        decision = resolve(installed, facts, call, rules, source=source, check=check)
        if decision.backend is None or decision.target is None or installed[decision.backend].dist != IN_PROCESS:
            return decision
        found, pair = targets.function(spec, decision.target), pair_of(spec, decision)
        misfit = next((one for one in (found, pair) if isinstance(one, Reason)), None)
        if misfit is None:
            return decision
        policy.PROCESS.broken_targets[decision.target] = misfit


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
        run, pair = targets.function(spec, decision.target), pair_of(spec, decision)
        if isinstance(pair, Reason):
            run = pair
        if isinstance(run, Reason):
            process.broken_targets[decision.target] = run
            continue
        where = (decision.backend, device, how)
        if where not in process.probes and not selftest.running():  # which may call what it tests
            process.probes[where] = probe(installed[decision.backend], device, how)
        if process.probes.get(where) is None:
            return decision, run


def _decided(spec: OpSpec[Any, Any], asked: Call, device: str, verdicts: Verdicts) -> Choice:
    """The settled decision of a call, said aloud where it must be."""
    decision, run = settle(spec, asked, device, verdicts.of)
    announce.broken(policy.installed(), decision)
    if run is None:
        raise announce.refused(decision)
    if decision.fell_back_from is not None:
        announce.fallback(decision)
    pair: Any = pair_of(spec, decision)  # no Reason: it has just been loaded
    return Choice(run, any(impl.prepared for impl in _chosen(decision)), decision, pair=pair)


def _answer(asked: Question, call: Any) -> Reason | None:
    """What is to be said against a call, by limits, the implementation's own check, and memory."""
    return answer(asked, call, _checked, policy.current().policy.of(asked.op).max_workspace_bytes)


def _checked(target: str, call: Any) -> Reason | None:
    """The implementation's own word on a call; anything but None or a shape's Reason counts against it."""
    check = load_target(target)
    if isinstance(check, Reason):
        return check
    said, error = guarded(lambda: check(call))
    if error is None and (said is None or (type(said) is Reason and said.stage == "shape")):
        return said
    text = brief(error) if error is not None else f"it returned {described(said)}"
    return Reason("shape", "check-failed", f"{target}: {text}", "report it to the plugin's author")


def pair_of(spec: OpSpec[Any, Any], decision: Decision) -> type[Pair[Any, Any]] | Reason | None:
    """The pair of forward and backward that the chosen implementation names; None where it names none."""
    target = next((impl.gradient for impl in _chosen(decision) if impl.gradient is not None), None)
    return targets.pair(spec, target) if target is not None else None
