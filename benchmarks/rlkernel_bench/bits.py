"""The bits of every workload's results, in a file, and what differs between two such files.

    rlkernel bench bits --device cuda --backend triton --size full --out before.json
    rlkernel bench bits before.json after.json

A change of the code that is not about arithmetic must leave every bit as it was. The calls are the workloads of the
suites: inputs are drawn from seeds, and nothing but the public API is used. The file holds, by workload and backend,
the SHA-256 of every output's and gradient's dtype, shape and bytes; of a call that is refused or fails, its class of
error. Each call is made twice: outputs that differ between the two are listed as unstable, and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel.discover import guarded
from rlkernel_bench import suites
from rlkernel_bench.candidates import Candidate
from rlkernel_bench.run import candidates
from rlkernel_bench.work import Inputs, Outputs, Problem, Work
from rlkernel_core.documents import read_json
from rlkernel_core.files import make_folder, write_json

Record = dict[str, Any]  # "bits": output -> digest, "unstable": outputs; or "error" and "error says"
_ENTRY: Final = {"bits?": {str: str}, "unstable?": [str], "error?": str, "error says?": str}
_FORM: Final = {"about": {"device_name": str}, "workloads": {str: {str: _ENTRY}}}
_SLOW: Final = ("process",)  # clocks of workloads that start processes and return no tensors


def record(works: Sequence[Work], device: str, use: Sequence[str], file: Path) -> dict[str, int]:
    """Make the calls and write the file; how many were made, refused or failed, and unstable."""
    if device == "cpu":
        torch.set_num_threads(1)  # sums must not depend on how many cores are free
    found: dict[str, dict[str, Record]] = {}
    for work in works:
        if work.clock not in _SLOW:
            found[f"{work.suite}: {work.op} {work.name}"] = dict(_of(work, device, use))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    content = {"about": {"device_name": name, "torch": torch.__version__}, "workloads": found}
    make_folder(file.parent)
    write_json(file, content)
    made = [entry for entries in found.values() for entry in entries.values()]
    return {"made": len(made), **{part: sum(part in entry for entry in made) for part in ("error", "unstable")}}


def _of(work: Work, device: str, use: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Each backend's way to carry out a workload, and its record."""
    problem = suites.problem(work, device)
    with problem.within():
        for candidate in candidates(problem, device, use, ()):
            if candidate.kind == "backend" and candidate.run is not None:
                yield candidate.name, _twice(problem, candidate)


def _twice(problem: Problem, candidate: Candidate) -> Record:
    def once() -> dict[str, str]:
        given: Inputs = problem.make(0)
        made: Outputs = candidate.run(given) if candidate.run is not None else {}
        return {name: digest(x() if callable(x) else x) for name, x in made.items()}

    both, error = guarded(lambda: (once(), once()))
    if both is None:
        return {"error": type(error).__name__, "error says": str(error)[:300]}
    first, again = both
    unstable = [name for name in first if again.get(name) != first[name]]
    return {"bits": first} | ({"unstable": unstable} if unstable else {})


def digest(value: Any) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes; of another value's text."""
    if not isinstance(value, Tensor):
        return sha256(repr(value).encode()).hexdigest()
    x = value.detach().cpu().contiguous().reshape(-1)
    data = x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return sha256(f"{value.dtype} {tuple(value.shape)}\n".encode() + data).hexdigest()


@dataclass(frozen=True)
class Comparison:
    """Two files beside each other."""

    devices: tuple[str, str]
    calls: tuple[int, int]
    unstable: int  # records with outputs that are not compared
    lines: tuple[str, ...]  # one for whatever differs


def compare(old: Path, new: Path) -> Comparison:
    """Everything that differs, calls that one of the files lacks included.

    Raises:
        FileError: one of them is no file of bits.
    """
    files = [read(old), read(new)]
    was, now = (
        {f"{work}, {name}": entry for work, entries in file["workloads"].items() for name, entry in entries.items()}
        for file in files
    )
    names = [str(file["about"]["device_name"]) for file in files]
    unstable = sum("unstable" in entry for entries in (was, now) for entry in entries.values())
    return Comparison((names[0], names[1]), (len(was), len(now)), unstable, tuple(_differences(was, now)))


def read(file: Path) -> dict[str, Any]:
    """A file that `rlkernel bench bits` wrote.

    Raises:
        FileError: it did not.
    """
    content: dict[str, Any] = read_json(file, _FORM, "Write it with rlkernel bench bits --out FILE.")
    return content


def _differences(was: Mapping[str, Record], now: Mapping[str, Record]) -> Iterator[str]:
    for call in dict.fromkeys((*was, *now)):
        if call not in was or call not in now:
            yield f"{call}: only in the {'first' if call in was else 'second'}"
            continue
        old, new = was[call], now[call]
        if old.get("error") != new.get("error"):
            said = "; ".join(str(entry["error says"]) for entry in (old, new) if "error says" in entry)
            yield f"{call}: error {old.get('error')} -> {new.get('error')} ({said})"
            continue
        unstable = {*old.get("unstable", ()), *new.get("unstable", ())}
        a, b = old.get("bits", {}), new.get("bits", {})
        for name in dict.fromkeys((*a, *b)):
            if name not in unstable and a.get(name) != b.get(name):
                yield f"{call}: {name} {'differs' if name in a and name in b else 'is gone' if name in a else 'is new'}"
