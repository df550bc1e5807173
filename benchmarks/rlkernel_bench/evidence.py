"""Which results are of the present sources of the backends that were measured, and what renews those that are not.

rlkernel bench evidence [FOLDER]          a line for each suite of each file that must be renewed, with its command
rlkernel bench evidence [FOLDER] --json   every backend and operator of every suite
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlkernel_bench.results import FILE, best, read
from rlkernel_conformance.manifests import here, sources_of
from rlkernel_core.decision import ALIASES
from rlkernel_core.errors import ConfigError
from rlkernel_core.manifest import Backend
from rlkernel_core.paths import missing
from rlkernel_core.spec import OPERATORS

RESULTS: Final = Path("benchmarks/results")


@dataclass
class Present:
    """Fingerprints of the operators of backends as they are now, each computed once."""

    device: str
    manifests: dict[str, Backend | None] = field(default_factory=dict)
    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, candidate: str, ops: Iterable[str]) -> dict[str, str]:
        """Of the operators that a candidate of a workload carries out: "triton" or "triton:eager"; else nothing."""
        name = ALIASES.get(backend := candidate.partition(":")[0], backend)
        if name not in self.manifests:
            self.manifests[name] = here(name)
        manifest = self.manifests[name]
        ids = {op: OPERATORS[op].id for op in ops if op in OPERATORS}
        if manifest is None or not all(manifest.of(op_id) for op_id in ids.values()):
            return {}
        for op_id in ids.values():
            if (name, op_id) not in self.found:
                self.found[name, op_id] = sources_of(manifest, op_id, self.device)
        return {op: self.found[name, op_id] for op, op_id in ids.items()}

    def older(self, result: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
        """Operators of a candidate's number that are of other sources than those of now, or of nobody knows which."""
        if candidate["kind"] != "backend" or best(candidate) is None:
            return []
        now = self.of(candidate["name"], result["op"].split(","))
        was = candidate.get("sources", {})
        return [op for op, fingerprint in now.items() if was.get(op) != fingerprint]


@dataclass(frozen=True)
class Evidence:
    """What a file of results says of an operator of a backend in a suite, beside what is there now."""

    results: str  # its folder
    suite: str
    backend: str
    op: str
    state: str  # "current" or "older"
    command: str  # that renews the suite; "" where nothing is to do


def evidence(folder: Path) -> Iterator[Evidence]:
    """Every operator of every backend that was measured in a suite of a file below a folder.

    Raises:
        ConfigError: there is no such file, or one was changed.
    """
    if not folder.exists():
        raise ConfigError(missing(folder))
    files = sorted(folder.rglob(FILE))
    if not files:
        raise ConfigError(f"{folder} holds no {FILE}; rlkernel bench run --out {folder} writes one")
    for file in files:
        content = read(file)
        present, states = Present(content["device"]), dict[tuple[str, str, str], str]()
        for result in content["results"]:
            for candidate in result["candidates"]:
                backend, older = candidate["name"].partition(":")[0], present.older(result, candidate)
                measured = candidate["kind"] == "backend" and best(candidate) is not None
                for op in present.of(candidate["name"], result["op"].split(",")) if measured else ():
                    key = (result["suite"], ALIASES.get(backend, backend), op)
                    states[key] = "older" if op in older or states.get(key) == "older" else "current"
        for (suite, backend, op), state in states.items():
            command = renewal(content, file.parent) if state == "older" else ""
            yield Evidence(str(file.parent), suite, backend, op, state, command)


def renewal(content: Mapping[str, Any], folder: Path) -> str:
    """The command that makes a file of results anew."""
    suites = dict.fromkeys(result["suite"] for result in content["results"])
    named = " ".join(f"--suite {suite}" for suite in suites)
    kind = content["device"].partition(":")[0]
    return f"rlkernel bench run {named} --size {content['size']} --device {kind} --out {folder}"
