"""Whether a new plugin may have a name: the backend's in `order`, the distribution's, the package's.

NAME -> backend `NAME`, distribution `rlkernel-NAME`, package `rlkernel_NAME`. Imports no torch and no backend.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.utils import canonicalize_name

from rlkernel import hardware, policy
from rlkernel.discover import FIRST_PARTY
from rlkernel_core.decision import AUTO
from rlkernel_core.errors import ArgumentError

# As `order` and an import name take it: PEP 508 would allow more, and both would then differ.
_NAME: Final = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]*")
_OURS: Final = frozenset({AUTO, "core", "conformance", "rlkernel", *FIRST_PARTY})
_LONGEST: Final = 40


def distribution_of(name: str) -> str:
    """`rlkernel-acme`."""
    return f"rlkernel-{name.replace('_', '-')}"


def package_of(name: str) -> str:
    """`rlkernel_acme`."""
    return f"rlkernel_{name.replace('-', '_')}"


def check_name(name: str) -> None:
    """Refuse a name that cannot be one, is ours, or is taken on this machine.

    Raises:
        ArgumentError: with what to choose instead.
    """
    if name.startswith(("rlkernel-", "rlkernel_")):
        short = re.split("[-_]", name, maxsplit=1)[1] or "acme"
        raise ArgumentError("NAME", repr(name), "is given without 'rlkernel-', which is added", f"Say {short!r}.")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        near = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_LONGEST].strip("-") or "acme"
        text = f"must be lower-case letters, digits and single dashes, a letter first, {_LONGEST} at most"
        raise ArgumentError("NAME", repr(name), text, f"Say {near!r}.")
    if name in _OURS:
        raise ArgumentError(
            "NAME", repr(name), "is a name of rlkernel's own", "Choose another, such as your company's."
        )
    taken = {canonicalize_name(known): known for known in policy.installed()}
    if canonicalize_name(name) in taken:
        raise ArgumentError("NAME", repr(name), "is the name of an installed backend", _taken(distribution_of(name)))
    dist, package = distribution_of(name), package_of(name)
    try:
        version(dist)
    except PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            return
        raise ArgumentError("NAME", repr(name), f"would hide the package {package}", _taken(dist)) from None
    raise ArgumentError("NAME", repr(name), f"{dist} is installed already", _taken(dist))


def _taken(dist: str) -> str:
    return f"Choose another name, or pip uninstall {dist}."


def check_device(device: str) -> None:
    """Refuse what is no device type as torch spells it.

    Raises:
        ArgumentError: with the spelling.
    """
    hardware.refuse_other(device, "--device")
    if not _DEVICE.fullmatch(device):
        kind = re.sub("[^a-z0-9_]", "", device.partition(":")[0].lower()) or "cuda"
        raise ArgumentError("--device", repr(device), "must be a device type, without an index", f"Say {kind!r}.")


def check_author(author: str) -> None:
    """Refuse what does not fit in one line of metadata.

    Raises:
        ArgumentError: with the form.
    """
    if not author.strip() or not author.isprintable():
        raise ArgumentError("--author", repr(author), "must be one line of text", "Say 'Name' or 'Name <mail@host>'.")
