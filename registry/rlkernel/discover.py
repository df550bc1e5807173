"""Which backends are installed: entry points listed without importing them, manifests loaded one by one.

A plugin that raises, exits, crashes, never returns, lies about its name or was built for another API becomes a Reason;
its neighbors are not disturbed. A third party's is imported in a process of its own first (`trial`). This module is the
only one that catches foreign exceptions, in `guarded`. Imports no torch and no backend.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, distributions, entry_points, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from packaging.utils import canonicalize_name

from rlkernel import installation, trial
from rlkernel.coverage import Coverage
from rlkernel.manifest_rules import broken_rules, contradiction, specs_of, validated
from rlkernel_core.decision import ALIASES, AUTO, PLAIN_TORCH
from rlkernel_core.errors import ApiMismatchError, ConfigError, PluginWarning, UnknownNameError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import brought
from rlkernel_core.visible import visible

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend

GROUP: Final = "rlkernel.backends"
IN_PROCESS: Final = "in-process"

# Integrated GPUs of Jetson modules: Xavier, Orin, Thor (sm101 up to CUDA 12, sm110 from CUDA 13 on).
JETSON_ARCHS: Final = ("sm72", "sm87", "sm101", "sm110")


class Ours(NamedTuple):
    """A backend of our own, known whether it is installed or not."""

    dist: str
    tier: int  # position within `auto`, lowest first
    released: str  # the line that installs a released version
    devices: tuple[str, ...]  # torch device types it is made for
    kernels: Coverage = Coverage()  # the operators it has kernels for, and the architectures

    @property
    def install(self) -> str:
        """The line that installs it where the user stands: from the clone that rlkernel came from, or a release."""
        name = self.dist.removeprefix("rlkernel-")
        if name == self.dist:  # rlkernel itself
            return self.released
        folders = (name,) if name == "triton" else ("triton", name)  # whose kernels all others run
        return installation.backends(folders, self.released)

    def install_on(self, arch: str | None) -> str:
        """The same for an architecture; a vendor's own torch and Triton stay: the extra `triton` asks for PyPI's."""
        vendors = arch is not None and (arch.startswith("gfx") or arch in JETSON_ARCHS)
        portable = self.dist == "rlkernel-triton"
        return f"pip install {self.dist}" if portable and vendors and not installation.clone() else self.install

    def made_for(self, device: str, arch: str | None) -> bool:
        """Whether one would install it for this hardware; an unknown architecture counts as any."""
        return device in self.devices and self.kernels.serves(arch)

    def has_kernels(self, op: str, device: str, arch: str | None) -> bool:
        """Whether it has kernels of an operator, by name or by id, for this hardware."""
        return device in self.devices and self.kernels.has(op, arch)


_HOPPER: Final = frozenset({"linear_divergence", "linear_logprob", "linear_policy_loss", "qmatmul", "sample"})
_PORTABLE: Final = frozenset(
    {
        "advantage", "affine_suffix_scan", "attention", "capture", "dequantize", "divergence", "fake_quantize", "glu",
        "grouped_linear", "linear", "linear_divergence", "linear_logprob", "linear_policy_loss", "lm_head_sample",
        "logprob",
        "policy_loss", "prepack", "qmatmul", "quantize", "rms_norm", "rope", "sample", "verify", "whiten",
    }
)  # fmt: skip
_CDNA: Final = ("gfx90a", "gfx942", "gfx950")
_RDNA: Final = ("gfx11*", "gfx12*")
_UNTRIED: Final = ("gfx125*",)
_NO_GRAPHS: Final = {"capture": _RDNA}

# `auto` considers these alone, lowest tier first.
FIRST_PARTY: Final[Mapping[str, Ours]] = {
    "cuda": Ours("rlkernel-cuda", 0, "pip install 'rlkernel[cuda]'", ("cuda",), Coverage(_HOPPER, ("sm90",))),
    "rocm": Ours(
        "rlkernel-rocm",
        0,
        "pip install 'rlkernel[rocm]'",
        ("cuda",),  # torch calls HIP "cuda"
        Coverage(_PORTABLE, (*_CDNA, *_RDNA), _UNTRIED, _NO_GRAPHS),
    ),
    "jetson": Ours(
        "rlkernel-jetson",
        0,
        "pip install 'rlkernel[jetson]'",
        ("cuda",),
        Coverage(_PORTABLE, ("sm87", "sm101", "sm110")),
    ),
    "triton": Ours(
        "rlkernel-triton",
        1,
        "pip install 'rlkernel[triton]'",
        ("cuda",),
        Coverage(_PORTABLE, ("sm80+", *_CDNA, *_RDNA), _UNTRIED, _NO_GRAPHS),
    ),
    PLAIN_TORCH: Ours("rlkernel", 2, "pip install rlkernel", ()),
}

# Device types that any of them is made for: there, plain torch is the slow way for what has kernels.
ACCELERATORS: Final = frozenset(device for ours in FIRST_PARTY.values() for device in ours.devices)

T = TypeVar("T")
_LONGEST: Final = 500  # characters of a message that are worth reading
# As manifests have names, and Python has modules and attributes; extras in brackets are allowed and mean nothing here.
_ENTRY_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")
_ENTRY_VALUE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\s*:\s*[^\W\d]\w*(\.[^\W\d]\w*)*\s*(\[.*\])?\s*")


@dataclass(frozen=True)
class Candidate:
    """An installed backend: where it comes from, and its manifest or the reason why there is none."""

    name: str
    dist: str
    version: str
    manifest: Backend | None = None
    reason: Reason | None = None
    broken: Mapping[str, Reason] = field(default_factory=dict, compare=False)  # functions it names -> why they are none

    @property
    def tier(self) -> int | None:
        """Position within `auto`; None for third parties."""
        known = FIRST_PARTY.get(self.name)
        return known.tier if known and known.dist == canonicalize_name(self.dist) else None

    @property
    def ours(self) -> bool:
        """Whether a distribution of this project provides it; some of ours `auto` leaves out, such as `flashinfer`."""
        return canonicalize_name(self.dist) in {known.dist for known in FIRST_PARTY.values()}

    @property
    def provider(self) -> str:
        """Distribution and version: `rlkernel-cuda 0.1.0`."""
        return f"{self.dist} {self.version}"


class Installed(Mapping[str, Candidate]):
    """Backend name -> candidate. Listing imports nothing; looking a name up loads that manifest once."""

    def __init__(self) -> None:
        self._entries: dict[str, list[EntryPoint]] = {}
        self._loaded: dict[str, Candidate] = {}
        brought.remove()  # by plugins that were installed before
        found, unread = entries(GROUP)
        for problem in unread:
            warnings.warn(problem, PluginWarning, stacklevel=2)
        for entry in found:
            rivals = self._entries.setdefault(visible(entry.name), [])
            if all((_dist(r), r.value) != (_dist(entry), entry.value) for r in rivals):  # some are listed twice
                rivals.append(entry)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._entries, *self._loaded]))

    def __len__(self) -> int:
        return len({*self._entries, *self._loaded})

    def __contains__(self, name: object) -> bool:
        name = ALIASES.get(str(name), name)
        return name in self._loaded or name in self._entries

    def __getitem__(self, name: str) -> Candidate:
        name = ALIASES.get(name, name)
        if name not in self._loaded:
            if name not in self._entries:
                install = FIRST_PARTY[name].install if name in FIRST_PARTY else ""
                raise UnknownNameError("backend", name, known_names(self), install)
            self._loaded[name] = _load(self._entries[name])
        return self._loaded[name]

    def listed(self, name: str) -> Candidate:
        """Name, distribution and version without importing the plugin."""
        return self._loaded.get(name) or _unloaded(_first(self._entries[name]))

    def add(self, manifest: Backend) -> Candidate:
        """Register a backend of this process; it counts as a third party."""
        self._loaded[manifest.name] = added = _judged(Candidate(manifest.name, IN_PROCESS, "0"), manifest)
        return added

    def remove(self, name: str) -> None:
        """Undo `add`."""
        self._loaded.pop(name, None)
        brought.remove(name)


def entries(group: str) -> tuple[list[EntryPoint], list[str]]:
    """Entry points of a group, and the distributions whose own cannot be read: they hide no other."""
    found, error = guarded(lambda: list(entry_points(group=group)))
    if error is None and found is not None:
        return found, []
    one_by_one: list[EntryPoint] = []
    unread: list[str] = []
    for dist in distributions():
        mine, error = guarded(lambda d=dist: [e for e in d.entry_points if e.group == group])  # type: ignore[misc]
        one_by_one += mine or ()
        if error is not None:
            name, _ = guarded(lambda d=dist: visible(d.name))  # type: ignore[misc]
            unread.append(f"the entry points of {name} cannot be read: {brief(error)}; reinstall or uninstall it")
    return one_by_one, unread


def known_names(installed: Mapping[str, Candidate]) -> frozenset[str]:
    """Names a policy may mention: installed ones and our own, installed or not."""
    return frozenset({*installed, *FIRST_PARTY, *ALIASES})


def guarded(run: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run foreign code; return its result, or what it raised, whatever that is; the user's interrupt goes through."""
    try:
        return run(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 foreign code may raise anything; the caller makes it a Reason
        return None, error


def load_target(target: str) -> Callable[..., Any] | Reason:
    """Import `package.module:function`; a target that cannot be imported is a Reason."""

    def find() -> Callable[..., Any]:
        module, _, name = target.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    found, error = guarded(find)
    if error is None and callable(found):
        return found
    why = f"cannot be imported: {brief(error)}" if error is not None else "is no function"
    return Reason("load", "target-missing", f"{target} {why}", "reinstall or update the plugin")


def brief(error: BaseException | None) -> str:
    """`ValueError: first line of the message`, as it may be printed."""
    text, _ = guarded(lambda: str.__str__(str(error)))
    lines = (text or "").strip().splitlines()
    return visible(f"{_kind(error)}: {lines[0]}" if lines else _kind(error), _LONGEST)


def described(thing: object) -> str:
    """The `repr` of a foreign object, as it may be printed; its type where it has none."""
    text, _ = guarded(lambda: str.__str__(repr(thing)))
    return visible(text if text is not None else f"a {_kind(thing)}", _LONGEST)


def _kind(thing: object) -> str:
    """The name of a type, whatever its metaclass would answer."""
    name: str = type.__dict__["__name__"].__get__(type(thing))
    return name


def _dist(entry: EntryPoint) -> tuple[str, str]:
    known, _ = guarded(lambda: (entry.dist.name, entry.dist.version) if entry.dist else None)
    name, number = known or (None, None)
    return visible(name or "unknown"), visible(number or "0")


def _first(entries: list[EntryPoint]) -> EntryPoint:
    """Our own distribution where it is among the rivals, else the first."""
    return next((e for e in entries if _unloaded(e).ours), entries[0])


def _unloaded(entry: EntryPoint) -> Candidate:
    return Candidate(visible(entry.name), *_dist(entry))


def _load(entries: list[EntryPoint]) -> Candidate:
    """The one of them that counts, with its manifest; a third party's is tried in a process of its own first."""
    entry = _first(entries)
    found = _unloaded(entry)
    if (reason := _misnamed(found, entries)) is not None:
        return replace(found, reason=reason)
    if found.ours:  # their tests tell more than half a second in another process
        return imported(found, entry)
    reason, broken = tried(entry, GROUP)
    return replace(found, reason=reason) if reason is not None else replace(imported(found, entry), broken=broken)


def tried(entry: EntryPoint, group: str) -> trial.Tried:
    """What importing an entry point, and what its manifest names, does to a process that is not this one."""
    if trial.inside():  # this is that process
        return trial.Tried(None, {})
    record, _ = guarded(lambda: entry.dist.read_text("RECORD") if entry.dist else "")
    return trial.tried(trial.Plugin(group, visible(entry.name), entry.value, *_dist(entry)), record or "")


def _misnamed(found: Candidate, entries: list[EntryPoint]) -> Reason | None:
    """Why entry points cannot be told apart, or lead nowhere; known without an import."""
    if found.ours:
        return None
    if found.name in FIRST_PARTY:
        text = f"{found.dist} provides {found.name!r}, the name of a backend of {FIRST_PARTY[found.name].dist}"
        return Reason("load", "reserved-name", text, f"pip uninstall {found.dist}")
    if len(entries) > 1:
        dists = sorted({_dist(e)[0] for e in entries})
        who = f"{' and '.join(dists)} both provide" if len(dists) > 1 else f"{dists[0]} has {len(entries)} entry points"
        return Reason("load", "duplicate-name", f"{who} {found.name!r}", "uninstall one of them")
    named = _ENTRY_NAME.fullmatch(entries[0].name) and found.name != AUTO
    if named and _ENTRY_VALUE.fullmatch(entries[0].value):
        return None
    what = f"leads to {entries[0].value!r}, which" if named else "has a name that"
    example = "acme_rl:backend" if named else "acme"
    text = f"the entry point {found.name!r} {what} should look like {example!r}"
    return Reason("load", "malformed-entry-point", text, f"report it to the author of {found.dist}")


def imported(found: Candidate, entry: EntryPoint) -> Candidate:
    """An entry point with its manifest, imported in this process, or with the reason why there is none."""
    manifest, error = guarded(entry.load)
    return _judged(found, manifest) if error is None else replace(found, reason=raised(found, entry.value, error))


def raised(found: Candidate, where: str, error: BaseException) -> Reason:
    """The reason that an exception is, raised while a manifest was imported or validated."""
    from pydantic import ValidationError

    if isinstance(error, ApiMismatchError):
        newer = error.theirs > error.ours
        fix = "pip install -U rlkernel" if newer else f"pip install -U {found.dist}"
        return Reason("api", "too-new" if newer else "too-old", str(error), fix)
    if isinstance(error, ValidationError):
        rules, odd = guarded(lambda: broken_rules(error))
        return _invalid(found, rules or brief(odd))
    text = f"{where} raised {brief(error)}"
    return Reason("load", "import-error", text, f"pip install -U {found.dist}, or uninstall it")


def _judged(found: Candidate, manifest: object) -> Candidate:
    """Hold a loaded manifest against its entry point and the catalog of operators."""
    from rlkernel_core.manifest import Backend

    if type(manifest) is not Backend:  # a subclass could answer otherwise than its fields say
        text = f"the entry point gives a {_kind(manifest)}, not a rlkernel_core.Backend"
        reason = Reason("load", "not-a-manifest", text, f"report it to the author of {found.dist}")
        return replace(found, reason=reason)
    plain, error = guarded(lambda: validated(manifest))
    if plain is None:
        return replace(found, reason=raised(found, "the manifest", error or ValueError()))
    specs, error = guarded(lambda: specs_of(plain))
    if specs is None:
        return replace(found, reason=_invalid(found, str(error) if isinstance(error, ConfigError) else brief(error)))
    problem, error = guarded(lambda: contradiction(found.name, plain, specs))
    problem = problem if error is None else brief(error)
    if problem is not None:
        return replace(found, reason=_invalid(found, problem))
    for spec, operator in zip(specs.values(), plain.operators, strict=True):
        brought.bring(found.name, spec, operator.attacks)
    return replace(found, manifest=plain)


def _invalid(found: Candidate, problem: str) -> Reason:
    return Reason(
        "load", "invalid-manifest", f"manifest of {found.name!r}: {problem}", f"report it to the author of {found.dist}"
    )


class PackageVersions(Mapping[str, str]):
    """Distribution name -> installed version, read when asked."""

    def __getitem__(self, name: str) -> str:
        known, error = guarded(lambda: version(name))
        if not isinstance(known, str):  # not installed, or its metadata cannot be read
            raise KeyError(name) from error
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
