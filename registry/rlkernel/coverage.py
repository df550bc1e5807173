"""Which operators a backend has kernels for, and on which architectures: known before the backend is installed.

The data for our own backends stands in `discover.FIRST_PARTY`; tests hold it against their manifests.
Imports nothing outside the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

_AT_LEAST: Final = re.compile(r"^(?P<family>[a-z]+)(?P<number>\d+)\+$")


@dataclass(frozen=True)
class Coverage:
    """Operators with kernels, by architecture. Patterns are those of a manifest's `requires.arch`."""

    operators: frozenset[str] = frozenset()  # by name: "logprob"
    archs: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # architectures among those of `archs` that have no kernels
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # operator -> architectures it is missing on

    def serves(self, arch: str | None) -> bool:
        """Whether any operator has kernels for an architecture; an unknown one counts as any."""
        return arch is None or (matches(self.archs, arch) and not matches(self.excluded, arch))

    def has(self, op: str, arch: str | None) -> bool:
        """Whether an operator, by name or by id, has kernels for an architecture; an unknown one counts as any."""
        name = op.partition("@")[0]
        missing = arch is not None and matches(self.without.get(name, ()), arch)
        return name in self.operators and self.serves(arch) and not missing


def matches(patterns: Iterable[str], arch: str) -> bool:
    """Whether any pattern names an architecture.

    Args:
        patterns: `sm90` exactly, `sm80+` from there on within the family, `gfx9*` as a glob.
        arch: "sm90", "gfx942".
    """
    return any(_matches(pattern, arch) for pattern in patterns)


def _matches(pattern: str, arch: str) -> bool:
    if at_least := _AT_LEAST.match(pattern):
        have = re.match(rf"^{at_least['family']}(\d+)", arch)
        return have is not None and int(have[1]) >= int(at_least["number"])
    return fnmatchcase(arch, pattern)
