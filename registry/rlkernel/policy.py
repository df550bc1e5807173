"""The policy in force: the one place of global state.

A context (thread, task, `with rlkernel.use(...)`) has a Scope: its policy and one table per operator from kind of call
to the callable that takes it. The cold path fills tables under a lock, the warm path reads them without one; a fork
starts with none.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import invalidate_caches
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from rlkernel import config, hooks
from rlkernel.discover import Candidate, Installed, known_names
from rlkernel.plans import Choice, Table
from rlkernel_core.decision import EXACT, PROVED, OpPolicy, Policy
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import BATCH_INVARIANT, OpSpec

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend

F = TypeVar("F", bound=Callable[..., Any])


class Scope:
    """A policy and what has been decided under it."""

    __slots__ = ("bound", "kinds", "layers", "policy", "rules", "tables")

    def __init__(self, policy: Policy, layers: tuple[tuple[str, config.Settings], ...]) -> None:
        self.policy, self.layers = policy, layers
        # By operator; those that plugins bring come later.
        self.tables = defaultdict(Table, {op: Table() for op in OPERATORS})  # plans, by the key of their calls
        self.kinds: dict[str, dict[Any, Any]] = defaultdict(dict)  # what was chosen, by kind of call
        self.bound: dict[str, list[Choice]] = defaultdict(list)  # choices that `bind` has frozen
        self.rules = {op: _rules(policy, op) for op in OPERATORS}  # what compiled graphs guard on

    def choices(self) -> list[Choice]:
        """Everything that was chosen under this policy."""
        kinds = [kind for found in list(self.kinds.values()) for kind in list(found.values())]
        chosen = [choice for kind in kinds for choice in list(kind.choices.values())]
        return [*chosen, *(choice for found in list(self.bound.values()) for choice in list(found))]

    def forget(self) -> None:
        """Forget what was decided and planned."""
        for table in list(self.tables.values()):
            table.forget()
        self.kinds.clear()
        self.bound.clear()


def _rules(policy: Policy, op: str) -> str:
    """All of a policy that can change the decision or the plans for an operator, as text."""
    own = policy.of(op)
    text = f"order={own.order} fallback={own.fallback} need={sorted(own.need)} {own.watched}"
    text += f" room={own.max_workspace_bytes}"
    return f"{text} probe={policy.probe} lock={policy.lock} reports={policy.reports}"


class _Process:
    """What all contexts of the process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed: Installed | None = None
        self.registered: dict[str, Backend] = {}  # by `registered`: they outlive a refresh
        self.configured: tuple[tuple[str, config.Settings], ...] = ()
        self.base: Scope | None = None
        # By policy and sources, so that entering the same use() again finds its tables warm.
        self.scopes: dict[tuple[Policy, frozenset[tuple[str, str]]], Scope] = {}
        self.broken_targets: dict[str, Reason] = {}  # target -> why it cannot be used
        self.probes: dict[
            tuple[str, str, str], Reason | None
        ] = {}  # (backend, device, how) -> outcome of its self-test
        self.warned: set[tuple[str, ...]] = set()
        self.operators: list[Any] = []  # the front door's functions, as `dispatch` makes them

    def forget(self) -> None:
        """Forget what was found out about this process's plugins and devices."""
        self.broken_targets.clear()
        self.probes.clear()
        self.warned.clear()
        self.renew()
        for scope in self.scopes.values():
            scope.forget()

    def renew(self) -> None:
        """What is installed has changed: no compiled graph that was traced before may be used again."""
        IN_FORCE.generation = str(int(IN_FORCE.generation) + 1)


SCOPE: Final[ContextVar[Scope | None]] = ContextVar("rlkernel_scope", default=None)
# What the use() blocks of this context go back to, the innermost last.
_OUTER: Final[ContextVar[tuple[Scope | None, ...]]] = ContextVar("rlkernel_outer_scopes", default=())
_GUARDED: Final[ContextVar[Any]] = ContextVar("rlkernel_guarded_scope")  # SCOPE, as `_InForce` shows it


class _InForce:
    """The policy as the guards of a compiled graph see it, at every call and without running Python code.

    Dynamo evaluates a property whose getter is a C function, here the ContextVar itself, so that a graph follows the
    context it is called in: other threads and tasks keep theirs.
    """

    # A getter is called with the object, and ContextVar.get takes it for the default: so this is the Scope in force,
    # and this very object where no use() is, whether none ever was (never set) or all have ended (set to it).
    scope = property(_GUARDED.get)

    def __init__(self) -> None:
        self.generation = "0"  # a string, since integers may become symbols in a graph
        self.rules: dict[str, str] = {}  # of the scope outside any use()


IN_FORCE: Final = _InForce()
PROCESS: Final = _Process()


def installed() -> Installed:
    """The backends of this process, scanned once."""
    with PROCESS.lock:
        if PROCESS.installed is None:
            PROCESS.installed = Installed()
            for manifest in PROCESS.registered.values():
                PROCESS.installed.add(manifest)
        return PROCESS.installed


def is_operator(name: str) -> bool:
    """Whether there is an operator of this name; a plugin whose name it begins with may bring it, and is loaded."""
    if name in OPERATORS:
        return True
    with PROCESS.lock:
        for backend in installed():
            if name.startswith(f"{backend.replace('-', '_')}_"):
                installed()[backend]
    return name in OPERATORS


def current() -> Scope:
    """The scope of this context."""
    return SCOPE.get() or base()


def base() -> Scope:
    """The scope outside any use(): configure(), environment, file, default."""
    if (found := PROCESS.base) is not None:  # every warm call comes here: it waits for no lock
        return found
    with PROCESS.lock:
        if PROCESS.base is None:
            layers = (*PROCESS.configured, *config.ambient(known_names(installed()), operator=is_operator))
            found = _scope(layers)
            IN_FORCE.rules = found.rules
            PROCESS.base = found
        return PROCESS.base


def scopes() -> list[Scope]:
    """Every scope with tables, the base first."""
    with PROCESS.lock:
        return list(dict.fromkeys([base(), *PROCESS.scopes.values()]))


def policy_for(scope: Scope, spec: OpSpec[Any, Any]) -> tuple[OpPolicy, str]:
    """The policy of one operator, its needs cut to what the operator can have, and where its order came from.

    Exact bits need batch invariance: a sum whose order depends on the batch has no name.
    """
    policy = scope.policy
    own = policy.of(spec.name)
    key = f"ops.{spec.name}.order" if spec.name in policy.ops else "order"
    need = own.need | ({BATCH_INVARIANT.name} if EXACT in own.need else frozenset())
    return replace(own, need=need & (spec.feature_names | PROVED)), policy.source.get(key, "default")


def _scope(layers: tuple[tuple[str, config.Settings], ...]) -> Scope:
    policy = config.merge(layers)
    key = (policy, frozenset(policy.source.items()))
    with PROCESS.lock:
        if key not in PROCESS.scopes:
            PROCESS.scopes[key] = Scope(policy, layers)
        return PROCESS.scopes[key]


def _layer(where: str, order: tuple[str, ...], options: dict[str, Any]) -> tuple[str, config.Settings]:
    """Arguments of use() and configure() as one layer: operator names are keywords like any other."""
    values: dict[str, Any] = {"order": order} if order else {}
    ops: dict[str, Any] = {}
    for key, value in options.items():
        if key not in config.Settings.model_fields and is_operator(key):
            ops[key] = value if isinstance(value, Mapping) else {"order": value}
        elif key in values:
            raise ConfigError(f"{where}: {key} is given twice; name the backends once")
        elif key in config.Settings.model_fields:
            values[key] = value
        else:
            raise ConfigError(
                f"{where}: {UnknownNameError('argument', key, {*OPERATORS, *config.Settings.model_fields})}"
            )
    if ops:
        values["ops"] = {**values.get("ops", {}), **ops}
    return where, config.validated(values, where, known_names(installed()), operator=is_operator)


def _enter(scope: Scope | None) -> None:
    SCOPE.set(scope)
    _GUARDED.set(IN_FORCE if scope is None else scope)


class use(ContextDecorator):  # noqa: N801 a context manager reads as a verb
    """Choose backends for this context only.

        with rlkernel.use("torch"): ...
        with rlkernel.use("acme", "auto", sample="cuda", fallback="error"): ...

    A thread starts without it, also one of autograd's: what runs an operator again in backward (activation
    checkpointing) wants `configure`. Nor does a use() in force follow a later `configure`. One object may be entered
    by many threads and tasks; as a decorator it takes functions that run their body when called.

    Args:
        *order: backends that may run, best first.
        **options: `fallback`, `need`, `profile`, `audit`, `max_workspace_bytes`, `probe`, `lock`, `reports`, or an
            operator's name with its order (a name, a list, or a dict with the same keys but the last three).

    Raises:
        ConfigError: an unknown backend, operator, key or feature; a decorated coroutine function or generator.
    """

    said_in: ClassVar[str] = "use()"  # what messages and sources call this layer

    def __init__(self, *order: str, **options: Any) -> None:
        self._layer = _layer(self.said_in, order, options)

    def __call__(self, function: F) -> F:
        """Decorate a function."""
        late = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(function) for kind in late):
            name = getattr(function, "__name__", function)
            text = f"{self.said_in}: the body of {name} runs after the call has returned"
            raise ConfigError(f"{text}; write `with rlkernel.use(...)` inside it")
        return super().__call__(function)

    def __enter__(self) -> Policy:
        scope = _scope((self._layer, *current().layers))
        _OUTER.set((*_OUTER.get(), SCOPE.get()))
        _enter(scope)
        return scope.policy

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        outer = _OUTER.get()
        if outer:  # else the event loop closes an async generator in a context that has nothing to undo
            _OUTER.set(outer[:-1])
            _enter(outer[-1])


def configure(*order: str, **options: Any) -> Policy:
    """Set the policy of the whole process; the arguments are those of `use`. Called again, it starts anew.

    With no argument it forgets what was configured and reads environment and file again.
    """
    layer = _layer("configure()", order, options)
    with PROCESS.lock:
        PROCESS.configured = (layer,) if order or options else ()
        PROCESS.base = None
        return base().policy


def refresh() -> None:
    """Forget what is installed and what was decided: after installing a plugin, and in a forked child."""
    with PROCESS.lock:
        PROCESS.forget()
        PROCESS.installed = None
        PROCESS.base = None
        hooks.refresh()
    invalidate_caches()  # of folders, by whole ticks of their clock: what came just now is found too


@contextmanager
def registered(manifest: Backend) -> Iterator[Candidate]:
    """Add a backend to this process for the time of the block; it counts as a third party, so name it in the order.

    What was decided is forgotten when it comes and when it goes.

    Raises:
        ConfigError: the manifest is malformed, or its name belongs to an installed backend.
    """
    with PROCESS.lock:
        if manifest.name in installed():
            raise ConfigError(f"a backend named {manifest.name!r} is installed; choose another name")
        candidate = installed().add(manifest)
        if candidate.reason is not None:
            installed().remove(manifest.name)
            raise ConfigError(str(candidate.reason))
        PROCESS.registered[manifest.name] = manifest
        PROCESS.forget()
    try:
        yield candidate
    finally:
        with PROCESS.lock:
            del PROCESS.registered[manifest.name]
            installed().remove(manifest.name)
            PROCESS.forget()


def _after_fork() -> None:
    # Another process: devices and plugins may differ, and the lock may have been held by a thread that is gone.
    PROCESS.lock = threading.RLock()
    PROCESS.forget()
    for operator in PROCESS.operators:
        operator.last = None


os.register_at_fork(after_in_child=_after_fork)
