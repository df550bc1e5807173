"""The table of configurations: what a bundle is compiled from, as a file that people can read and compare.

    {"rlkernel_triton.top_ids:values": {"base": {"logits": "*fp32", "n": "i32", "WIDTH": [8], ...},
                                        "rows": [{}, {"logits": "*bf16", "for": {"logprob": ["sm_87", "sm_90"]}}, ...]}}

A row is what differs from its kernel's base. A string is the type of a parameter passed at run time, a list of one the
value of a constant; "how" is [warps, stages, whether a multiply and an add are fused, options of the target's
compiler], "for" says which operators launch it on which targets. Nothing is said of sizes and alignments: what more a
bundle is compiled for, kernels declare (`rlkernel_triton.aot.compiling.closed`).
Imports neither torch nor Triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot.builds import Build

TABLE: Final = Path(__file__).with_name("configurations.json")
Uses = Mapping[Build, Mapping[str, frozenset[str]]]  # build -> operator -> targets


def recorded(lines: Iterable[str]) -> dict[Build, dict[str, frozenset[str]]]:
    """What `rlkernel_triton.aot.recording` wrote."""
    found: dict[Build, dict[str, frozenset[str]]] = {}
    for line in lines:
        document = json.loads(line)
        uses = found.setdefault(Build.of(document), {})
        uses[document["op"]] = uses.get(document["op"], frozenset()) | {document["target"]}
    return found


def merged(*tables: Uses) -> dict[Build, dict[str, frozenset[str]]]:
    """Several tables as one."""
    found: dict[Build, dict[str, frozenset[str]]] = {}
    for table in tables:
        for build, uses in table.items():
            own = found.setdefault(build, {})
            for op, targets in uses.items():
                own[op] = own.get(op, frozenset()) | targets
    return found


def chosen(table: Uses, target: str, ops: Iterable[str] = ()) -> list[Build]:
    """Builds that these operators, or all, launch on a target."""
    asked = frozenset(ops)
    return [
        b for b, uses in table.items() if any(target in on and (not asked or op in asked) for op, on in uses.items())
    ]


def read(path: Path = TABLE) -> dict[Build, dict[str, frozenset[str]]]:
    """A table from its file, or from a recording.

    Raises:
        RLKernelError: it is neither.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if text.startswith('{"op"'):
            return recorded(text.splitlines())
        kernels = json.loads(text)
        return {
            build: uses
            for kernel, part in kernels.items()
            for row in part["rows"]
            for build, uses in [_of(kernel, {**part["base"], **row})]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RLKernelError(f"{path} is no table of configurations ({error!r}); record one again") from error


def write(table: Uses, path: Path = TABLE) -> None:
    """Write a table, sorted."""
    kernels: dict[str, list[dict[str, Any]]] = {}
    for build, uses in table.items():
        kernels.setdefault(build.kernel, []).append(_row(build, uses))
    lines = []
    for kernel, rows in sorted(kernels.items()):
        base = _common(rows)
        differing = sorted(json.dumps({k: row[k] for k in base if base[k] != row[k]}) for row in rows)
        inner = ",\n   ".join(differing)
        lines.append(f'{json.dumps(kernel)}: {{"base": {json.dumps(base)},\n  "rows": [\n   {inner}]}}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _row(build: Build, uses: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    return {
        **dict(build.types),
        **{n: [v] for n, v in build.constants},
        "how": [build.num_warps, build.num_stages, build.enable_fp_fusion, dict(build.options)],
        "for": {op: sorted(targets) for op, targets in sorted(uses.items())},
    }


def _common(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Parameter by parameter what most rows say."""
    base = {}
    for name in sorted(rows[0], key=lambda n: (n in {"how", "for"}, n)):
        said = [json.dumps(row[name]) for row in rows]
        base[name] = json.loads(max(sorted(set(said)), key=said.count))
    return base


def _of(kernel: str, row: Mapping[str, Any]) -> tuple[Build, dict[str, frozenset[str]]]:
    own = {n: v for n, v in row.items() if n not in {"how", "for"}}
    *how, options = row["how"]
    build = Build(
        kernel,
        tuple((n, v) for n, v in own.items() if isinstance(v, str)),
        tuple((n, v[0]) for n, v in own.items() if isinstance(v, list)),
        (),
        *how,
        tuple(options.items()),
    )
    return build, {op: frozenset(targets) for op, targets in row["for"].items()}
