"""What launches, for which GPU, and with how much memory at a time, where host code asks neither a device nor a caller.

    with planning_for("sm_90"), using(Recorder()):
        ...  # what is recorded is what an H100 would launch

A scope holds all three. Host code that decides by warps, multiprocessors or architecture asks `planned_target` before
it asks the device; a plan keeps the scope that it was made in, and so does a node of autograd until its backward pass,
whatever thread that runs in.

Imports no operator, no torch and no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from rlkernel_core.errors import UnknownNameError
from rlkernel_triton.launchers.targets import TARGETS, Target

if TYPE_CHECKING:
    from rlkernel_triton.launchers.binding import Launcher

T = TypeVar("T")


class Scope(NamedTuple):
    """What holds for host code that runs within it; None: what the device says."""

    launcher: Launcher | None = None
    target: Target | None = None
    piece: int | None = None  # most bytes that work in pieces takes at a time
    op: str = ""  # the operator whose kernels are bound, where somebody asks


_SCOPE: Final[ContextVar[Scope]] = ContextVar("scope", default=Scope())  # noqa: B039 a tuple of nothing
current: Final = _SCOPE.get


@contextmanager
def within(scope: Scope) -> Iterator[None]:
    """Run in a scope that `current` has told."""
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


@contextmanager
def planning_for(name: str) -> Iterator[None]:
    """Within this scope host code plans for one of `rlkernel_triton.launchers.targets.TARGETS`, whatever the device.

    Raises:
        UnknownNameError: there is no such target.
    """
    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    with within(current()._replace(target=TARGETS[name])):
        yield


@contextmanager
def using(launcher: Launcher) -> Iterator[None]:
    """Within this scope host code binds its kernels with one launcher, whatever the device: a `Recorder`, say.

    It plans for the launcher's target, if that has one.
    """
    scope = current()
    with within(scope._replace(launcher=launcher, target=launcher.target or scope.target)):
        yield


@contextmanager
def in_pieces_of(piece: int | None) -> Iterator[None]:
    """Within this scope work that is done in pieces takes so many bytes at a time at most; None: what it would take."""
    with within(current()._replace(piece=piece)):
        yield


def planned_target() -> Target | None:
    """The target of the innermost scope; None: what the device is."""
    return current().target


def piece_of(most: int, parts: int = 1) -> int:
    """Bytes that a piece of work takes, of which there may be several at once: the scope's, or most if that is less."""
    piece = current().piece
    return most if piece is None else min(most, piece // parts)


class Plan:
    """The launches of calls of one shape, by the place where host code makes them; the first call binds them.

    They are bound in the scope in which the plan was made, wherever that call runs.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self._scope = launcher, current()
        self._bound: dict[str, Any] = {}

    def get(self, place: str, bind: Callable[[Launcher], T]) -> T:
        """What `bind` made of the launcher at the first call at this place."""
        found: T | None = self._bound.get(place)
        if found is None:
            with within(self._scope):
                found = self._bound[place] = bind(self.launcher)
        return found
