"""Make the calls of the table and write down their digests, in this process or in several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.bits.calls import TABLES
from rlkernel_bench.bits.digests import seen
from rlkernel_bench.bits.inputs import SMALL, WHOLE
from rlkernel_conformance.manifests import load
from rlkernel_core.errors import UnknownNameError

Pairs = Sequence[tuple[str, str]]  # operator, name of a call
LEAST, MOST = 4, 16  # calls of a process


@dataclass(frozen=True)
class Asked:
    """Which calls are made, where and by whom."""

    device: str = "cpu"
    order: tuple[str, ...] = ("torch",)  # backends, best first; no other may run
    manifests: tuple[str, ...] = ()  # module:attribute of backends to register
    operators: tuple[str, ...] = ()  # all where empty
    small: bool = False  # tiny sizes and few formats, for interpreters
    jobs: int = 1  # processes at once; 1 stays in this one
    seconds: float = 3600.0  # what comes later is left out

    def pairs(self) -> list[tuple[str, str]]:
        """Every call of the table by operator and name.

        Raises:
            UnknownNameError: no such operator in the table.
        """
        for op in self.operators:
            if op not in TABLES:
                raise UnknownNameError("operator", op, TABLES)
        size = SMALL if self.small else WHOLE
        return [(op, name) for op in self.operators or TABLES for name in TABLES[op](size)]


def record(asked: Asked, file: Path) -> dict[str, int]:
    """Make the calls and write the file; how many were asked for, made, refused or failed, and unstable."""
    pairs, until = asked.pairs(), time.monotonic() + asked.seconds
    found = apart(asked, pairs, file, until) if asked.jobs > 1 else run(asked, pairs, file, until)
    made = [entry for calls in found.values() for entry in calls.values()]
    counts = {name: sum(name in entry for entry in made) for name in ("error", "unstable")}
    return {"asked": len(pairs), "made": len(made), **counts}


def run(asked: Asked, pairs: Pairs, file: Path, until: float) -> dict[str, Any]:
    """Records of some calls in this process; written down as an operator ends, in small parts as each call ends."""
    size = SMALL if asked.small else WHOLE
    found: dict[str, Any] = {}
    if asked.device == "cpu":
        torch.set_num_threads(1)  # sums must not depend on how many cores are free
    with ExitStack() as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for manifest in asked.manifests:
            scope.enter_context(rlk.registered(load(manifest)))
        scope.enter_context(rlk.use(*asked.order, fallback="error"))
        for i, (op, name) in enumerate(pairs):
            if time.monotonic() > until:
                break
            start = time.perf_counter()
            entry = seen(op, TABLES[op](size)[name], asked.device)
            found.setdefault(op, {})[name] = entry | {"seconds": round(time.perf_counter() - start, 3)}
            if len(pairs) <= MOST or i + 1 == len(pairs) or pairs[i + 1][0] != op:
                write(file, asked, found)
    return found


def apart(asked: Asked, pairs: Pairs, file: Path, until: float) -> dict[str, Any]:
    """The same with parts of the table in processes of their own; what a process did not come to has crashed it."""
    size = max(LEAST, min(MOST, len(pairs) // (2 * asked.jobs)))
    parts: list[list[int]] = []
    for i, (op, _) in enumerate(pairs):
        if not parts or len(parts[-1]) == size or pairs[parts[-1][0]][0] != op:
            parts.append([])
        parts[-1].append(i)
    found: dict[str, Any] = {}

    def one(part: list[int], folder: Path) -> None:
        left = until - time.monotonic()
        if left <= 0:
            return
        out = folder / f"{part[0]}.json"
        alone = json.dumps({**asdict(asked), "jobs": 1, "seconds": left})
        command = [sys.executable, "-m", __name__, alone, str(part[0]), str(part[-1] + 1), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left + 60, check=False)  # noqa: S603
            ended = f"exit {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = "out of time"
        got = json.loads(out.read_text(encoding="utf-8"))["operators"] if out.exists() else {}
        for op, name in (pairs[i] for i in part):
            entry = got.get(op, {}).get(name)
            if entry is None and ended:
                entry = {"error": "ended", "error says": ended}
            if entry is not None:
                found.setdefault(op, {})[name] = entry
        write(file, asked, found)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(lambda part: one(part, Path(folder)), parts))
    return found


def write(file: Path, asked: Asked, found: Mapping[str, Any]) -> None:
    """The file so far; whole at any time."""
    device = torch.cuda.get_device_name(asked.device) if asked.device.startswith("cuda") else "cpu"
    about = {
        "device": asked.device,
        "device_name": device,
        "order": ",".join(asked.order),
        "small": asked.small,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "interpreted": os.environ.get("TRITON_INTERPRET", ""),
    }
    content = {"about": about, "operators": {op: dict(sorted(found[op].items())) for op in TABLES if op in found}}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}.{id(content)}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def main(asked: str, first: str, last: str, file: str) -> None:
    """A part of the table in this process, as `apart` starts it."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(asked).items()}
    part = Asked(**fields)
    run(part, part.pairs()[int(first) : int(last)], Path(file), time.monotonic() + part.seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
