"""Does it really run here? A backend's self-test, run once per device, driver and plugin version, and remembered.

"Imports" is not "works": a wheel without code for this card fails at its first launch, and a fault can poison the
process that meets it. So the self-test runs in a process of its own, with a time limit, and its outcome is cached on
disk: a success for good, a failure for a while, since a device may have been busy.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

from rlkernel import child, outcomes, selftest
from rlkernel.discover import Candidate, PackageVersions, guarded
from rlkernel_core.reasons import STAGES, Reason

TIMEOUT_S: Final = 120.0  # a first JIT compilation is allowed to be slow
# Versions of the loaded kernel drivers; one that comes with the kernel has the kernel's.
_DRIVERS: Final = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")


def device_facts(device: str) -> dict[str, Any]:
    """What identifies a device for a cache: its name, architecture, driver and torch build. Imports torch."""
    import torch

    kind, _, index = device.partition(":")
    facts: dict[str, Any] = {"device": kind, "arch": arch_of(device), "torch": torch.__version__}
    if kind == "cuda" and torch.cuda.is_available():
        facts["name"] = torch.cuda.get_device_name(int(index or 0))
        versions = [_text(path) for path in _DRIVERS]
        facts["driver"] = [torch.version.hip or torch.version.cuda, *versions, platform.release()]
    else:
        facts["name"] = platform.processor() or platform.machine()
    return facts


def arch_of(device: str) -> str | None:
    """`sm90`, `gfx942`, `x86_64`; None for a device type that names none."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return platform.machine()
    import torch

    if kind != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip:
        properties = torch.cuda.get_device_properties(int(index or 0))
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(int(index or 0))
    return f"sm{major}{minor}"


def device_here() -> str:
    """Type of the device that calls will mostly be on: an accelerator if torch sees one, else the CPU."""
    torch, _ = guarded(lambda: import_module("torch"))
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def probe(
    candidate: Candidate, device: str, how: str, *, cache: Path | None = None, afresh: bool = False
) -> Reason | None:
    """Run a backend's self-test on a device, or recall its outcome; None means that it works.

    Args:
        candidate: a loaded backend; without a self-test it passes.
        device: torch device string, e.g. "cuda:0".
        how: "subprocess", "inprocess" (where a second process cannot have the device) or "off".
        cache: folder of remembered outcomes; None for the user's cache folder.
        afresh: run it although an outcome is remembered.
    """
    test = candidate.manifest.self_test if candidate.manifest else None
    if test is None or how == "off":
        return None
    if how == "inprocess":
        return _reason(candidate, selftest.verdict(test, device))
    facts = _facts(candidate, device, test)
    path = outcomes.file_of("probe", facts, cache)
    known = None if afresh else _recall(path)
    if known is None:
        known = _run_child(test, device)
        outcomes.remember(path, {**facts, **known})
    return _reason(candidate, known)


def remembered(candidate: Candidate, device: str, *, cache: Path | None = None) -> Mapping[str, Any] | None:
    """The outcome of an earlier self-test of a backend on a device: `ok`, else `code` and `error`; None if none ran."""
    test = candidate.manifest.self_test if candidate.manifest else None
    return _recall(outcomes.file_of("probe", _facts(candidate, device, test), cache)) if test else None


def forget(cache: Path | None = None) -> int:
    """Delete remembered outcomes; returns how many there were."""
    return outcomes.forget("probe", cache)


def _facts(candidate: Candidate, device: str, test: str) -> dict[str, Any]:
    """Everything that an outcome depends on."""
    impls = candidate.manifest.impls if candidate.manifest else ()
    needed = sorted({Requirement(text).name for impl in impls for text in impl.requires.packages})
    versions = PackageVersions()
    packages = {name: versions.get(name) for name in needed}
    own = {"backend": candidate.provider, "test": test, "packages": packages, "python": platform.python_version()}
    return {**device_facts(device), **own}


def _reason(candidate: Candidate, outcome: Mapping[str, Any]) -> Reason | None:
    if outcome["ok"]:
        return None
    fix = f"rlkernel doctor --probe runs it again; see the install page of {candidate.dist}, or report it to its author"
    return Reason("probe", outcome["code"], f"self-test of {candidate.provider}: {outcome['error']}", fix)


def _run_child(test: str, device: str) -> dict[str, Any]:
    """One self-test in its own process; the verdict is what it wrote, or how the process ended."""
    ended = child.run(selftest.CODE, (test, device), TIMEOUT_S)
    if ended.timed_out:
        return {"ok": False, "code": "timeout", "error": f"no answer within {TIMEOUT_S:g} s"}
    outcome, _ = guarded(lambda: json.loads(ended.said))  # a self-test may write there too
    if isinstance(outcome, dict) and (outcome.get("ok") is True or outcome.get("code") == "failed"):
        return {"error": "", **outcome}
    return {"ok": False, "code": "crashed", "error": ended.how}


def _recall(path: Path) -> dict[str, Any] | None:
    known, age = outcomes.recall(path)
    if known is None:
        return None
    code, error = known.get("code"), known.get("error")
    listed = isinstance(code, str) and code in STAGES["probe"] and isinstance(error, str)
    failure = listed and age < outcomes.FAILURE_BELIEVED_S
    return known if known.get("ok") is True or failure else None


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
