"""What people write for a device, an architecture or a dtype: the name that is meant, or an error with the nearest one.

Names are those of rlkernel_core.hardware, and those that backends claim. Who is asked is the caller's to say: for a
command the backends in the order (`in_order`), for a proof the backend it is about. A backend that claims any device
takes any name; plain torch does not count, since it runs where torch does.
Imports torch only for devices that must be here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel import policy
from rlkernel.discover import FIRST_PARTY, guarded
from rlkernel.resolve import ANY
from rlkernel_core import hardware as names
from rlkernel_core.decision import AUTO, PLAIN_TORCH
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.hardware import DEVICE_WORDS, DEVICES, DTYPE_WORDS, DTYPES

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend, Impl

_DEVICE: Final = re.compile(r"([A-Za-z]\w*)((?::\d+)?)")


def in_order() -> list[Backend]:
    """The manifests of the backends that the orders in force name, `auto` written out."""
    rules = policy.current().policy
    orders = [own.order for own in (rules.default, *rules.ops.values())]
    named = dict.fromkeys(name for order in orders for name in order)
    wanted = dict.fromkeys(n for name in named for n in (FIRST_PARTY if name == AUTO else (name,)))
    installed = policy.installed()
    found = [installed[name].manifest for name in wanted if name in installed]
    return [manifest for manifest in found if manifest is not None]


def device(text: str, asked: Iterable[Backend], argument: str = "--device") -> str:
    """The device that a word names, as torch spells it: "cuda", "cuda:1".

    Args:
        text: what was written.
        asked: manifests whose claims count besides the names that torch has.
        argument: what the error calls the word.

    Raises:
        ArgumentError: it is a chip, an architecture or a vendor; the message has the words for it.
        UnknownNameError: nobody has such a device; the message has the nearest.
    """
    found = _DEVICE.fullmatch(text)
    kind, index = found.groups() if found else (text, "")
    claimed = {name for impl in _claiming(asked) for name in _words(impl.requires.device)}
    if kind in claimed or (ANY in claimed and found):
        return text
    if kind.lower() in DEVICES:
        return f"{kind.lower()}{index}"
    refuse_other(kind, argument)
    if _known_to_torch(kind):  # a package has given this name to PrivateUse1
        return text
    raise UnknownNameError("device", text, {*DEVICES, *claimed})


def refuse_other(text: str, argument: str) -> None:
    """Refuse what is a word for a chip, an architecture or a vendor where a device type is asked for.

    Raises:
        ArgumentError: with the words for it.
    """
    arch = names.chip(text) or _listed(names.architecture(text), {a for archs in DEVICES.values() for a in archs})
    if arch is not None:
        what = "a chip" if names.chip(text) else "an architecture"
        remedy = f"Say {_said(argument, device=str(_device_with(arch)), arch=arch)}."
        raise ArgumentError(argument, repr(text), f"this is {what}, not a device type of torch", remedy)
    if (known := DEVICE_WORDS.get(text.lower())) is not None:
        remedy = f"Say {_said(argument, device=known)}; the architecture says which it is: sm90, sm87, gfx942."
        raise ArgumentError(argument, repr(text), "torch calls these devices otherwise", remedy)


def architecture(text: str, kind: str, asked: Iterable[Backend], argument: str = "--arch") -> str:
    """The architecture that a word names, as facts and claims spell it: "sm90" of sm90, sm_90, SM90 and sm90a.

    Args:
        text: what was written.
        kind: type of the device that has it. Where torch knows no architectures of the type, any word is one.
        asked: manifests whose claims count besides the names that are known.
        argument: what the error calls the word.

    Raises:
        ArgumentError: it is a chip, or of another device type; the message has the word for it.
        UnknownNameError: there is no such one; the message has the nearest.
    """
    meant = names.architecture(text)
    claimed = {
        pattern
        for impl in _claiming(asked)
        if {kind, ANY} & set(_words(impl.requires.device))
        for pattern in impl.requires.arch
        if re.fullmatch(r"\w+", pattern)
    }
    known = {*DEVICES.get(kind, ()), *claimed}
    if not DEVICES.get(kind) or meant in claimed:
        return meant
    if (found := _listed(meant, known)) is not None:
        return found
    if (arch := names.chip(text)) is not None:
        raise ArgumentError(
            argument, repr(text), f"this is a chip, and {arch} its architecture", f"Say {_said(argument, arch=arch)}."
        )
    if (other := _device_with(meant)) is not None:
        remedy = f"Say {_said(argument, device=other)}, or leave the architecture out."
        raise ArgumentError(argument, repr(text), f"this is an architecture of {other}, the device is {kind}", remedy)
    raise UnknownNameError(f"architecture of {kind}", text, known)


def place(where: str | None, arch: str | None, asked: Collection[Backend]) -> tuple[str | None, str | None]:
    """What `--device` and `--arch` name; an architecture alone says on which device type it is.

    Raises:
        ArgumentError: a word is one for something else, or the two do not go together.
        UnknownNameError: nobody has such a device, or there is no such architecture.
    """
    found = device(where, asked) if where is not None else None
    if arch is None:
        return found, None
    found = found or _device_with(names.architecture(arch)) or names.GPU
    return found, architecture(arch, found.partition(":")[0], asked)


def present(text: str, asked: Iterable[Backend] = (), argument: str = "--device") -> str:
    """A device that must be in this machine, as `device` names it.

    One that torch does not know and a backend claims is taken as it is: that backend's own processes register it.

    Raises:
        ArgumentError: torch is not installed or sees no such device, or the word is one for something else.
        UnknownNameError: nobody has such a device; the message has the nearest.
    """
    name = device(text, asked, argument)
    torch, _ = guarded(lambda: import_module("torch"))
    if torch is None:
        problem = "torch, which knows the devices that are here, cannot be imported"
        raise ArgumentError(argument, repr(text), problem, "rlkernel doctor says why.")
    kind, _, index = name.partition(":")
    known, _ = guarded(lambda: torch.device(name))
    if known is None or int(index or 0) < _count(torch, kind):
        return name
    here = [f"{k} ({n})" if n > 1 else k for k in DEVICES if (n := _count(torch, k))]
    problem = f"torch sees no such device here, it sees {', '.join(here)}"
    remedy = "rlkernel doctor says why; rlkernel explain answers for hardware that is not here."
    raise ArgumentError(argument, repr(text), problem, remedy)


def _known_to_torch(kind: str) -> bool:
    """Whether torch, where it has been imported, takes a name that is not among ours."""
    torch = sys.modules.get("torch")
    return torch is not None and guarded(lambda: torch.device(kind))[1] is None


def _count(torch: Any, kind: str) -> int:
    """How many devices of a type torch can use in this process."""

    def count() -> int:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0

    return guarded(count)[0] or 0


def dtype(text: str, asked: Iterable[Backend], argument: str = "--dtype") -> str:
    """The dtype that a word names, as torch spells it.

    Raises:
        ArgumentError: it is another word for a dtype; the message has torch's.
        UnknownNameError: there is no such one; the message has the nearest.
    """
    claimed = {name for impl in _claiming(asked) for name in impl.requires.dtypes}
    meant = text.lower().removeprefix("torch.")
    if meant in {*DTYPES, *claimed}:
        return meant
    if meant in DTYPE_WORDS:
        word = DTYPE_WORDS[meant]
        raise ArgumentError(argument, repr(text), "torch calls this dtype otherwise", f"Say {argument} {word}.")
    raise UnknownNameError("dtype", text, {*DTYPES, *claimed})


def _claiming(asked: Iterable[Backend]) -> Iterator[Impl]:
    """The implementations whose claims say what there is: those of all but plain torch."""
    return (impl for manifest in asked if manifest.name != PLAIN_TORCH for impl in manifest.impls)


def _said(argument: str, **words: str) -> str:
    """Words as they are written where an argument was: on the command line, or in Python."""
    if argument.startswith("--"):
        return " ".join(f"--{name} {word}" for name, word in words.items())
    return ", ".join(f"{name}={word!r}" for name, word in words.items())


def _words(claimed: tuple[str, ...] | str) -> tuple[str, ...]:
    return (claimed,) if isinstance(claimed, str) else claimed


def _listed(text: str, known: Iterable[str]) -> str | None:
    """The name among those that are known, whatever its case."""
    return next((name for name in known if name.lower() == text.lower()), None)


def _device_with(arch: str) -> str | None:
    """The device type that has an architecture."""
    return next((kind for kind, archs in DEVICES.items() if _listed(arch, archs)), None)
