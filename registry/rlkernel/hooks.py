"""Observers: plugins that are told what was decided. None can change a choice or touch a tensor.

Distributions register under the entry-point group `rlkernel.hooks`; a program uses `register`. Hooks run on the cold
path, and where an audited call differs. An observer that raises is reported as a PluginWarning and changes nothing
else; one that is installed is imported in a process of its own first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rlkernel.discover import brief, described, entries, guarded, tried
from rlkernel_core.decision import Decision
from rlkernel_core.errors import PluginWarning
from rlkernel_core.visible import visible

if TYPE_CHECKING:
    import pluggy

    from rlkernel.audit import Report

GROUP: Final = "rlkernel.hooks"


class Hookspecs:
    """What observers may implement; each may take fewer arguments than it is offered."""

    def rlkernel_decided(self, decision: Decision) -> None:
        """A kind of call was decided (once per kind, not per call)."""

    def rlkernel_fell_back(self, decision: Decision) -> None:
        """The decision is a fallback: heard before `rlkernel_decided`, as often as it, though warnings are rarer."""

    def rlkernel_plugin_failed(self, name: str, dist: str, error: str) -> None:
        """An installed plugin could not be loaded, or one of ours cannot run here.

        Heard before the decision is taken, so wait for no other call.
        """

    def rlkernel_audit(self, decision: Decision, report: Report) -> None:
        """A call under `audit` differed from the reference, or could not be compared: every one that did."""


class _Observers:
    manager: pluggy.PluginManager | None = None
    installed: tuple[str, ...] | None = None  # those that came with a distribution; None before they are looked for


def _manager() -> pluggy.PluginManager:
    if _Observers.manager is None:
        import pluggy

        manager = pluggy.PluginManager("rlkernel")
        spec = pluggy.HookspecMarker("rlkernel")
        for name in vars(Hookspecs):
            if name.startswith("rlkernel_"):
                spec(getattr(Hookspecs, name))
        manager.add_hookspecs(Hookspecs)
        _Observers.manager = manager
    return _Observers.manager


def _look() -> None:
    """Register the installed observers, one by one: pluggy's own loader stops at the first that raises."""
    _Observers.installed, problems = (), []  # set before, since one of them may call an operator
    for entry in entries(GROUP)[0]:  # discovery tells of distributions that cannot be read
        name = visible(entry.name)
        if (reason := tried(entry, GROUP).reason) is not None:
            problems.append(f"hook plugin {name!r}: {reason.text}")
            continue
        plugin, error = guarded(entry.load)
        if error is None:
            _, error = guarded(lambda n=name, p=plugin: _add(p, n))  # type: ignore[misc]
        if error is None:
            _Observers.installed += (name,)
        else:
            problems.append(f"hook plugin {name!r}: {brief(error)}")
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=2)


def _add(plugin: object, name: str | None = None) -> None:
    import pluggy

    manager = _manager()
    if manager.is_registered(plugin):
        raise ValueError(f"{described(plugin)} is registered already")

    try:
        manager.register(plugin, name=name)
        manager.check_pending()
        _refuse_wrappers(manager, plugin)
    except pluggy.PluginValidationError as error:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        raise pluggy.PluginValidationError(plugin, " ".join(str(error).split())) from error  # why is on its second line


def _refuse_wrappers(manager: pluggy.PluginManager, plugin: object) -> None:
    """An observer is told, and has nothing to wrap."""
    import pluggy

    for caller in manager.get_hookcallers(plugin) or ():
        if any(i.plugin is plugin and (i.wrapper or i.hookwrapper) for i in caller.get_hookimpls()):
            raise pluggy.PluginValidationError(plugin, f"{caller.name}: an observer cannot be a wrapper")


def register(plugin: object) -> None:
    """Add an observer: an object or module with functions marked by `pluggy.HookimplMarker("rlkernel")`.

    Raises:
        pluggy.PluginValidationError: a hook has a name or an argument that `Hookspecs` does not offer, or is a wrapper.
        ValueError: it is registered already.
    """
    _add(plugin)


def unregister(plugin: object) -> None:
    """Remove an observer.

    Raises:
        ValueError: it is not registered.
    """
    if not _manager().is_registered(plugin):
        raise ValueError(f"{described(plugin)} is not registered")
    _manager().unregister(plugin)


def refresh() -> None:
    """Look for installed observers again; those of `register` stay."""
    for name in _Observers.installed or ():
        if _manager().has_plugin(name):
            _manager().unregister(name=name)
    _Observers.installed = None


def emit(hook: str, facts: Mapping[str, Any]) -> None:
    """Tell every observer; one that raises is warned about and disturbs nobody else."""
    if _Observers.installed is None:
        _look()
    for implementation in getattr(_manager().hook, hook).get_hookimpls():
        offered = {key: facts[key] for key in implementation.argnames}
        _, error = guarded(lambda i=implementation, o=offered: i.function(**o))  # type: ignore[misc]
        if error is not None:
            text = f"hook {hook} of {visible(implementation.plugin_name)}: {brief(error)}"
            warnings.warn(text, PluginWarning, stacklevel=2)
