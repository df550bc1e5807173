"""Recordings: which configurations a run launched, one JSON document a line, as bundles are compiled from them.

Nothing is said of sizes and alignments: what more a bundle is compiled for, the recorded launches of the table of
workloads promise (`rlkernel_triton.aot.compiling.closed`). Imports neither torch nor Triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot.builds import Build

Uses = Mapping[Build, Mapping[str, frozenset[str]]]  # build -> operator -> targets


def chosen(table: Uses, target: str, ops: Iterable[str] = ()) -> list[Build]:
    """Builds that these operators, or all, launch on a target."""
    asked = frozenset(ops)
    return [
        b for b, uses in table.items() if any(target in on and (not asked or op in asked) for op, on in uses.items())
    ]


def read(path: Path) -> dict[Build, dict[str, frozenset[str]]]:
    """What `rlkernel_triton.aot.recording` wrote.

    Raises:
        RLKernelError: it did not.
    """
    found: dict[Build, dict[str, frozenset[str]]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            document = json.loads(line)
            uses = found.setdefault(Build.of(document), {})
            uses[document["op"]] = uses.get(document["op"], frozenset()) | {document["target"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RLKernelError(f"{path} is no recording of configurations ({error!r}); record it again") from error
    return found
