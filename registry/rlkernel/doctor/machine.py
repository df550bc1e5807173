"""The facts a diagnosis is made from, as one value: gathered here, or written down by a test."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlkernel import config, lock, policy, trial
from rlkernel.discover import Candidate, guarded, known_names
from rlkernel.doctor.hardware import Hardware, look
from rlkernel.doctor.torchbuild import TorchBuild, ask
from rlkernel.outcomes import cache_folder
from rlkernel.probe import probe, remembered
from rlkernel_core.decision import Pin, Policy
from rlkernel_core.errors import RLKernelError
from rlkernel_core.reasons import Reason

# Outcome of a self-test that has not run.
UNTESTED: Final = "untested"


@dataclass(frozen=True)
class Machine:
    """What is known about a machine and its installation."""

    python: tuple[int, int, int] = sys.version_info[:3]
    system: str = ""
    hardware: Hardware = field(default_factory=Hardware)
    torch: TorchBuild | None = None  # None: not installed
    packages: Mapping[str, str] = field(default_factory=dict)  # canonical distribution name -> version
    torch_triton: str | None = None  # the Triton that torch asks for: "triton==3.5.0"
    environ: Mapping[str, str] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()  # every installed backend, its manifest loaded
    policy: Policy | None = None  # None: the configuration is malformed
    config_problems: tuple[str, ...] = ()
    config_file: str | None = None
    locked: Mapping[str, frozenset[Pin]] | None = None  # operator id -> what it may run
    cache: str = ""
    cache_problem: str | None = None
    # (backend, device) -> None where its self-test passed, a Reason where it failed, UNTESTED where it has not run
    self_tests: Mapping[tuple[str, str], Reason | str | None] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a distribution is installed."""
        return name in self.packages


def examine(*, run_self_tests: bool = False) -> Machine:
    """Gather the facts of this machine.

    Args:
        run_self_tests: try every plugin and run every backend's self-test afresh; otherwise outcomes are recalled.
    """
    packages = _packages()
    torch = ask() if "torch" in packages else None
    if run_self_tests and trial.forget():
        policy.refresh()  # and every plugin is imported in a process of its own again
    installed = policy.installed()
    candidates = tuple(installed[name] for name in sorted(installed))
    problems, file = _configuration(known_names(installed))
    rules = None if problems else policy.base().policy
    locked: Mapping[str, frozenset[Pin]] | None = None
    if rules is not None and rules.lock is not None:
        locked, wrong = _tried(lambda: lock.read(str(rules.lock)))
        problems = [*problems, *wrong]
    cache = cache_folder()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        hardware=look(),
        torch=torch,
        packages=packages,
        torch_triton=_wanted_triton() if torch else None,
        environ=dict(os.environ),
        candidates=candidates,
        policy=rules,
        config_problems=tuple(problems),
        config_file=file,
        locked=locked,
        cache=str(cache),
        cache_problem=_unwritable(cache),
        self_tests=_self_tests(candidates, torch, rules, afresh=run_self_tests),
    )


def _packages() -> dict[str, str]:
    """Canonical name -> version of what is installed; a distribution whose metadata cannot be read is left out."""
    known = [guarded(lambda d=d: (str(canonicalize_name(d.name)), str(d.version)))[0] for d in distributions()]  # type: ignore[misc]
    return dict(one for one in known if one is not None)


def _tried(read: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a reader gives, or its error as a text."""
    try:
        return read(), []
    except RLKernelError as error:
        return None, [str(error)]


def _configuration(backends: Iterable[str]) -> tuple[list[str], str | None]:
    """Everything that is wrong with environment and file, not only the first thing; and the file."""
    names = tuple(backends)
    _, problems = _tried(lambda: config.read_environment(os.environ, names))
    path, wrong = _tried(lambda: config.find_file(os.environ, Path.cwd()))
    problems += wrong
    if path is not None:
        problems += _tried(lambda: config.read_file(path, names))[1]
    return problems, str(path) if path is not None else None


def _wanted_triton() -> str | None:
    """The requirement by which torch pins its Triton, whatever the distribution is called in that build."""
    for text in requires("torch") or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if "triton" in requirement.name and (requirement.marker is None or requirement.marker.evaluate()):
            return f"{requirement.name}{requirement.specifier}"
    return None


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be remembered in the cache folder; None where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error)


def _self_tests(
    candidates: Iterable[Candidate], torch: TorchBuild | None, rules: Policy | None, *, afresh: bool
) -> dict[tuple[str, str], Reason | str | None]:
    """Outcomes of the self-tests of all backends on the devices they claim."""
    if torch is None or torch.error:
        return {}
    devices = ["cpu", *(f"cuda:{i}" for i in range(len(torch.devices)))]
    how = rules.probe if rules is not None else "subprocess"
    found: dict[tuple[str, str], Reason | str | None] = {}
    for candidate in candidates:
        if candidate.manifest is None or candidate.manifest.self_test is None:
            continue
        claimed = {d for i in candidate.manifest.impls for d in _listed(i.requires.device)}
        for device in devices:
            if not claimed & {"*", device.partition(":")[0]}:
                continue
            if afresh:
                found[candidate.name, device] = probe(candidate, device, how, afresh=True)
            elif remembered(candidate, device) is None:
                found[candidate.name, device] = UNTESTED
            else:
                found[candidate.name, device] = probe(candidate, device, how)
    return found


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
