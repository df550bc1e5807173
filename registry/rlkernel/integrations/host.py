"""A host framework as an integration sees it: versions and symbols that are looked at before anything is touched.

Imports no host and no torch.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from packaging.specifiers import SpecifierSet

from rlkernel_core.errors import HostError

T = TypeVar("T")
Make = Callable[[Any, Counter[str]], Any]  # from the original and the count of calls to keep, its replacement


@dataclass(frozen=True)
class Symbol:
    """A name of the host that an integration uses, with the parameters that it counts on."""

    module: str  # to import
    name: str  # dotted within the module
    takes: str | None = None  # parameters in order, "logits, labels"; None for what is no function

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def find(self) -> Any:
        """The object.

        Raises:
            AttributeError: the host has no such name.
            ImportError: nor such a module.
        """
        return reduce(getattr, self.name.split("."), import_module(self.module))

    def problem(self) -> str | None:
        """What is not as it was when the integration was written; None where all is."""
        try:
            found = self.find()
        except (AttributeError, ImportError) as error:
            return f"{self} is gone ({error})"
        if self.takes is None:
            return None
        now = ", ".join(inspect.signature(found).parameters)
        return None if now == self.takes else f"{self} takes ({now}), not ({self.takes})"


@dataclass(frozen=True)
class Host:
    """A framework, the versions that its integration was made for, and what the integration does there."""

    name: str  # as people write it
    distribution: str  # as pip writes it
    versions: str  # a window, as pip writes it
    tested: str  # the version whose code was read
    does: str  # in a few words, for tables
    symbols: tuple[Symbol, ...]  # what it uses of the host
    ran: bool = True  # in a version of the window; False: held against the host's source alone
    source: str = ""  # what pip installs it from; "" for its name and versions on the package index
    builds: tuple[str, ...] = ()  # other distributions of the same modules, as pip writes them

    @property
    def installed(self) -> str | None:
        """The version that is installed here, from whichever distribution; the host is not imported."""
        for name in (self.distribution, *self.builds):
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    @property
    def supported(self) -> bool:
        """Whether the installed version is one that the integration was made for."""
        return self.installed is not None and SpecifierSet(self.versions).contains(self.installed, prereleases=True)

    def require(self, *, force: bool = False) -> str:
        """The installed version, where this integration may be used with it.

        Args:
            force: take a version outside the window, too. Symbols are looked at in any case.

        Raises:
            HostError: not installed, a version outside the window, or a symbol that is not what it was.
        """
        found = self.installed
        pin = f"pip install {self.source or repr(f'{self.distribution}{self.versions}')}"
        if found is None:
            raise HostError(f"{self.name} is not installed; {pin}")
        if not self.supported and not force:
            raise HostError(
                f"{self.name} {found} is installed, and this integration was made for {self.versions}; {pin}, update "
                f"rlkernel, or pass force=True to try it: its symbols are looked at in any case"
            )
        ours = _ACTIVE[self.name].symbols if self.name in _ACTIVE else ()  # looked at before they were replaced
        left = [s for s in self.symbols if not any(f"{s}.".startswith(f"{replaced}.") for replaced in ours)]
        problems = [text for symbol in left if (text := symbol.problem()) is not None]
        if problems:
            raise HostError(
                f"{self.name} {found} is not what this integration was made for ({self.tested}): "
                f"{'; '.join(problems)}. Nothing was changed. {pin}, or update rlkernel"
            )
        return found


@dataclass
class Active:
    """An integration at work in this process."""

    host: str  # its name
    version: str  # of the host
    symbols: tuple[str, ...]  # what was replaced, or registered
    calls: Counter[str] = field(default_factory=Counter)  # operator -> calls that the host made through it
    depth: int = 1  # blocks that want it, one inside the other
    undo: Callable[[], None] = field(default=lambda: None, repr=False)  # puts back what was replaced

    def __str__(self) -> str:
        said = ", ".join(f"{op} x{n}" for op, n in sorted(self.calls.items()))
        return f"{self.host} {self.version}: {', '.join(self.symbols)}{f' ({said})' if said else ''}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"host": self.host, "version": self.version, "symbols": list(self.symbols), "calls": dict(self.calls)}


_LOCK: Final = threading.RLock()
_ACTIVE: Final[dict[str, Active]] = {}
KEPT: Final = ExitStack()  # blocks that a worker entered until its process ends; a block that nobody holds ends at once
_SEEN: Final[dict[str, Active]] = {}  # those of before too: a run that has ended still says what it went through


def active() -> list[Active]:
    """Every integration that is at work in this process now."""
    return list(_ACTIVE.values())


def seen() -> list[Active]:
    """Every integration that is or was at work in this process."""
    return list(_SEEN.values())


def registered(host: Host, found: str, *symbols: str) -> Active:
    """Note that something was registered with a host by its own means; it stays for the life of the process."""
    entry = _SEEN.setdefault(host.name, Active(host.name, found, symbols))
    return _ACTIVE.setdefault(host.name, entry)


@contextmanager
def replaced(
    host: Host,
    symbol: Symbol,
    make: Make,
    *,
    also: Sequence[tuple[Symbol, Make]] = (),
    idle: Callable[[], str] = lambda: "call it inside the block",
    force: bool = False,
) -> Iterator[Active]:
    """Replace a global of the host for the time of the block; blocks may be nested, and the last to end puts it back.

    Args:
        host: the framework.
        symbol: the global.
        make: from what stood there and the count of calls to keep, what stands there inside the block.
        also: globals that go with it, and what makes of each.
        idle: why the host may not have called it, and the remedy; asked where it did not.
        force: as in `Host.require`.

    Raises:
        HostError: as `Host.require`; or on leaving, where the host has not called ours inside the block, or somebody
            else has replaced ours meanwhile (theirs stays).
    """
    with _LOCK:
        entry = _ACTIVE.get(host.name)
        if entry is None:
            every = [(symbol, make), *also]
            entry = Active(host.name, host.require(force=force), tuple(str(s) for s, _ in every))
            if host.name in _SEEN:
                entry.calls = _SEEN[host.name].calls
            with ExitStack() as undone:
                for each, ours in every:
                    undone.callback(_replace(each, ours, entry.calls))
                entry.undo = undone.pop_all().close
            _ACTIVE[host.name] = _SEEN[host.name] = entry
        else:
            entry.depth += 1
        before = entry.calls.total()
    try:
        yield entry
    finally:
        with _LOCK:
            entry.depth -= 1
            if entry.depth == 0:
                del _ACTIVE[host.name]
                entry.undo()
    if entry.calls.total() == before:
        raise HostError(f"{host.name}: nothing went through {symbol} inside the block: {idle()}")


def counted(op: str, function: Callable[..., Any]) -> Make:
    """What `replaced` takes to put a function there whose calls count as those of an operator."""

    def make(_: Any, calls: Counter[str]) -> Any:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[op] += 1
            return function(*args, **kwargs)

        return called

    return make


def _replace(symbol: Symbol, make: Make, calls: Counter[str]) -> Callable[[], None]:
    module = import_module(symbol.module)
    original = getattr(module, symbol.name)
    ours = make(original, calls)
    setattr(module, symbol.name, ours)

    def undo() -> None:
        if getattr(module, symbol.name) is not ours:
            raise HostError(
                f"{symbol} was replaced by somebody else inside the block, and theirs is left in place: "
                "undo in reverse order"
            )
        setattr(module, symbol.name, original)

    return undo


def asked_of(op: str, feature: str, result: T | None) -> T:
    """An optional result of an operator, which an integration cannot do without.

    Raises:
        HostError: it is None: the implementation that ran does not claim it.
    """
    if result is None:
        raise HostError(
            f"the integration reads `{feature}` of {op}, and the implementation that ran does not claim {feature}; "
            f'need = ["{feature}"] lets only those run that do'
        )
    return result
