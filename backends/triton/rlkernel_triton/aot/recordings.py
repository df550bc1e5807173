"""Files of configurations that a run launched or lacked, one JSON document a line, as bundles are compiled from them.

Nothing is said of sizes and alignments: which of these a bundle is compiled for besides, the table of workloads says
(`rlkernel_triton.aot.compiling.with_specializations`). Imports neither torch nor Triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rlkernel_core.documents import read_lines
from rlkernel_triton.aot.configurations import CONFIGURATION, Configuration

MISSING: Final = "AOT_MISSING"  # names a file, into which backends over bundles write what they lack
_LINE: Final = {"op": str, "target": str, **CONFIGURATION}
_REMEDY: Final = "Record the configurations again, with AOT_MISSING=FILE."
Uses = Mapping[Configuration, Mapping[str, frozenset[str]]]  # build -> operator -> targets


def append(file: Path, op: str, configuration: Configuration, target: str) -> None:
    """Add the configuration of a launch, for the operator that launches it."""
    line = json.dumps({"op": op, "target": target, **configuration.document()}) + "\n"
    with file.open("ab", buffering=0) as out:  # in one piece: other processes write there too
        out.write(line.encode())


def chosen(table: Uses, target: str, ops: Iterable[str] = ()) -> list[Configuration]:
    """Builds that these operators, or all, launch on a target."""
    asked = frozenset(ops)
    return [
        b for b, uses in table.items() if any(target in on and (not asked or op in asked) for op, on in uses.items())
    ]


def read(path: Path) -> dict[Configuration, dict[str, frozenset[str]]]:
    """What `rlkernel_triton.aot.recording` wrote.

    Raises:
        FileError: it did not.
    """
    found: dict[Configuration, dict[str, frozenset[str]]] = {}
    for document in read_lines(path, _LINE, _REMEDY):
        uses = found.setdefault(Configuration.of(document), {})
        uses[document["op"]] = uses.get(document["op"], frozenset()) | {document["target"]}
    return found
