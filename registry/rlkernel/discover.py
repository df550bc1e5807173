"""Which backends are installed: entry points listed without importing them, manifests loaded one by one.

A plugin that raises, exits, lies about its name or was built for another API becomes a Reason; its neighbors are
not disturbed. This module is the only one that catches foreign exceptions, in `guarded`.
Imports no torch and no backend.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, entry_points, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlkernel import installation
from rlkernel.coverage import Coverage
from rlkernel_core.decision import ALIASES, PLAIN_TORCH
from rlkernel_core.errors import ApiMismatchError, PluginWarning, UnknownNameError, did_you_mean
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    from pydantic import ValidationError

    from rlkernel_core.manifest import Backend, Impl
    from rlkernel_core.spec.form import OpSpec

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


_HOPPER: Final = frozenset({"linear_logprob", "linear_policy_loss", "qmatmul", "sample"})
_PORTABLE: Final = frozenset(
    {
        "advantage", "affine_suffix_scan", "capture", "dequantize", "linear_logprob", "linear_policy_loss",
        "lm_head_sample", "logprob", "policy_loss", "prepack", "qmatmul", "quantize", "sample", "verify", "whiten",
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


@dataclass(frozen=True)
class Candidate:
    """An installed backend: where it comes from, and its manifest or the reason why there is none."""

    name: str
    dist: str
    version: str
    manifest: Backend | None = None
    reason: Reason | None = None

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
        found, unread = entries(GROUP)
        for problem in unread:
            warnings.warn(problem, PluginWarning, stacklevel=2)
        for entry in found:
            rivals = self._entries.setdefault(entry.name, [])
            if all(_dist(r) != _dist(entry) for r in rivals):  # an editable install may be listed twice
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
            name, _ = guarded(lambda d=dist: str(d.name))  # type: ignore[misc]
            unread.append(f"the entry points of {name} cannot be read: {brief(error)}; reinstall or uninstall it")
    return one_by_one, unread


def known_names(installed: Mapping[str, Candidate]) -> frozenset[str]:
    """Names a policy may mention: installed ones and our own, installed or not."""
    return frozenset({*installed, *FIRST_PARTY, *ALIASES})


def guarded(run: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run foreign code; return its result, or what it raised. SystemExit is a failure like any other."""
    try:
        return run(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 foreign code may raise anything; the caller makes it a Reason
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
    """`ValueError: first line of the message`."""
    text, _ = guarded(lambda: str(error))
    lines = (text or "").strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _dist(entry: EntryPoint) -> tuple[str, str]:
    known, _ = guarded(lambda: (entry.dist.name, entry.dist.version) if entry.dist else None)
    name, number = known or (None, None)
    return name or "unknown", number or "0"


def _first(entries: list[EntryPoint]) -> EntryPoint:
    """Our own distribution where it is among the rivals, else the first."""
    return next((e for e in entries if _unloaded(e).ours), entries[0])


def _unloaded(entry: EntryPoint) -> Candidate:
    return Candidate(entry.name, *_dist(entry))


def _load(entries: list[EntryPoint]) -> Candidate:
    from pydantic import ValidationError

    entry = _first(entries)
    found = _unloaded(entry)
    if len(entries) > 1 and not found.ours:
        dists = " and ".join(sorted(_dist(e)[0] for e in entries))
        reason = Reason("load", "duplicate-name", f"{dists} both provide {entry.name!r}", "uninstall one of them")
        return replace(found, reason=reason)
    manifest, error = guarded(entry.load)
    if error is None:
        return _judged(found, manifest)
    if isinstance(error, ApiMismatchError):
        newer = error.theirs > error.ours
        fix = "pip install -U rlkernel" if newer else f"pip install -U {found.dist}"
        return replace(found, reason=Reason("api", "too-new" if newer else "too-old", str(error), fix))
    if isinstance(error, ValidationError):
        return replace(found, reason=_invalid(found, broken_rules(error)))
    reason = Reason(
        "load", "import-error", f"{entry.value} raised {brief(error)}", f"pip install -U {found.dist}, or uninstall it"
    )
    return replace(found, reason=reason)


def _judged(found: Candidate, manifest: object) -> Candidate:
    """Hold a loaded manifest against its entry point and the catalog of operators."""
    from rlkernel_core.manifest import Backend

    if type(manifest) is not Backend:  # a subclass could answer otherwise than its fields say
        text = f"the entry point gives a {type(manifest).__name__}, not a rlkernel_core.Backend"
        reason = Reason("load", "not-a-manifest", text, f"report it to the author of {found.dist}")
        return replace(found, reason=reason)
    problem = _contradiction(found.name, manifest)
    return replace(found, manifest=manifest) if problem is None else replace(found, reason=_invalid(found, problem))


def _contradiction(name: str, manifest: Backend) -> str | None:
    """What a manifest claims that cannot be meant."""
    from pydantic import ValidationError

    try:
        type(manifest).model_validate(manifest.model_dump(warnings=False))  # `model_construct` does not
    except ValidationError as error:
        return broken_rules(error)
    if manifest.name != name:
        return f"name: it calls itself {manifest.name!r}, and is known as {name!r}; write name={name!r}"
    if name in ALIASES:
        return f"{name!r} is another name of the backend {ALIASES[name]!r}"
    for impl in manifest.impls:
        op, _, number = impl.op.partition("@")
        if op not in OPERATORS:
            return str(UnknownNameError("operator", op, OPERATORS))
        if int(number) == OPERATORS[op].version and (odd := impl.supports - OPERATORS[op].feature_names):
            return str(UnknownNameError(f"feature of {impl.op}", min(odd), OPERATORS[op].feature_names))
        if int(number) == OPERATORS[op].version and (lacking := _unreachable(impl, OPERATORS[op])):
            return f"{impl.op}.supports: {impl.target} claims no {lacking}"
        for text in impl.requires.packages:
            if problem := _no_requirement(text):
                return f"{impl.op}.requires.packages: {text!r}: {problem}; write a name and versions, 'torch>=2.9'"
    return None


def _unreachable(impl: Impl, spec: OpSpec[Any, Any]) -> str | None:
    """A family of features of which every call needs one and an implementation claims none."""
    for name in spec.one_of:
        if impl.supports.isdisjoint(family := spec.family(name)):
            return f"{name}:..., and every call needs one; add one of {', '.join(family)}"
    return None


def _no_requirement(text: str) -> str | None:
    """Why a text is no requirement that can be held against installed versions."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return brief(error)
    if requirement.marker or requirement.url:
        return f"a {'marker' if requirement.marker else 'URL'} cannot be held against what is installed"
    return None


def _invalid(found: Candidate, problem: str) -> Reason:
    return Reason(
        "load", "invalid-manifest", f"manifest of {found.name!r}: {problem}", f"report it to the author of {found.dist}"
    )


def broken_rules(error: ValidationError) -> str:
    """Which fields of a manifest break which rule, and what to write: `Impl.op: 'logprob' should look like …; …`."""
    found = [{**e, "loc": _fields_of(e["loc"])} for e in error.errors()]
    judged = {e["loc"] for e in found if e["type"] != "tuple_type"}  # what may be a word or several is tried as both
    rules = [_broken_rule(error.title, e) for e in found if e["type"] != "tuple_type" or e["loc"] not in judged]
    return "; ".join(dict.fromkeys(rules))


def _fields_of(place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Where a field stands, without pydantic's names of the forms that it may have."""
    return tuple(str(part) for part in place if re.fullmatch(r"\w+", str(part)))


def _broken_rule(model: str, found: Any) -> str:
    from rlkernel_core import manifest

    *_, last = path = list(found["loc"]) or [model]
    where = ".".join([model, *path] if found["loc"] else path)
    if found["type"] == "extra_forbidden":
        known = {name for m in _MODELS for name in getattr(manifest, m).model_fields}
        if model in _MODELS and len(path) == 1:
            known = set(getattr(manifest, model).model_fields)
        return f"{where}: there is no such field{did_you_mean(last, known)}; the fields are {', '.join(sorted(known))}"
    if found["type"] == "missing":
        fields = {n: f for m in _MODELS for n, f in getattr(manifest, m).model_fields.items()}
        about = fields[last].description if last in fields else None
        return f"{where}: is missing; write {last}=...{f', {about}' if about else ''}"
    return f"{where}: {str(found['msg']).removeprefix('Value error, ')}"


_MODELS: Final = ("Backend", "Impl", "Requires", "Limits")


class PackageVersions(Mapping[str, str]):
    """Distribution name -> installed version, read when asked."""

    def __getitem__(self, name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
