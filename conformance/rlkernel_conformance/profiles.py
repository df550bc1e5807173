"""How hard to try: examples and seconds per clause, and whether a tool of compute-sanitizer looks on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlkernel_conformance.sanitizer import TOOLS
from rlkernel_core.errors import UnknownNameError


@dataclass(frozen=True)
class Profile:
    """Effort of a run.

    Draws are derandomized: a subject that gives the same results is shown the same cases. Where a clause climbs towards
    the largest error, what is drawn next depends on the errors of the subject.
    """

    name: str
    examples: int  # drawn cases per clause
    limit_s: float  # for one clause, after which its process is ended
    thorough: bool = True  # enough cases that a claim which no case needed is a failure
    sanitizer: str | None = None  # tool of compute-sanitizer that looks at every process; None: none does


_ALL: Final = (
    Profile("quick", 20, 60, thorough=False),
    Profile("standard", 150, 300),
    Profile("deep", 2000, 3600),
    # A kernel takes 10 to 100 times as long under a tool: few cases, each of which runs all kernels of its call.
    *(Profile(tool, 2, 1800, thorough=False, sanitizer=tool) for tool in TOOLS),
)
PROFILES: Final = {p.name: p for p in _ALL}


def profile(name: str) -> Profile:
    """A profile by name."""
    if name not in PROFILES:
        raise UnknownNameError("profile", name, PROFILES)
    return PROFILES[name]


def sanitizer_of(name: str) -> str | None:
    """The tool that looked on where a report says this profile; None for a profile without one, or one not here."""
    known = PROFILES.get(name)
    return known.sanitizer if known is not None else None
