"""One planted bug, as the tables of the mutants list it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[Any], Any]  # of a record
How = Callable[[Run, Any], Any]  # of plain torch's implementation and a record
Check = Callable[[Any], object]  # of a record; raises ArgumentError


@dataclass(frozen=True)
class Bug:
    """One planted bug."""

    clause: str  # that must refute it
    wrong: str  # what is wrong, and where it was seen
    how: How
    check: Callable[[Check], Check] | None = None  # the operator's check to the one in its place
    claims: frozenset[str] = frozenset()  # features it claims though plain torch does not
    fits: str | None = None  # "module:function", its own word on the calls that it takes
