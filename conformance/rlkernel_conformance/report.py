"""What a run found: every clause of every operator, what was claimed, and a verdict.

Two runs of one backend at one profile on one machine give the same report but for `created` and the seconds; `hash`
covers all the rest. Verdicts, the worst first:

    fails       a clause is refuted, held without a case, or a claim has no executed case; a waiver is needless
    unfinished  a device failed and clauses were not run: a failure of the run, not of the backend
    waived      what is refuted is waived
    partial     clauses have no attack yet, or a quick run drew no case of a claim
    holds       every clause that the claims call for held, those apart for which the device has no room: they are
                listed, and a claim that only they try is one without an executed case
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, Final

from rlkernel import policy
from rlkernel_conformance import tolerances
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_conformance.waivers import Waiver, needless
from rlkernel_core import __version__
from rlkernel_core.host.facts import facts

_ROOT: Final = Path("/")
SCHEMA: Final = 1
STATUSES: Final = ("held", "violated", "fault", "waived", "not_claimed", "not_attacked", "no_room", "not_run")
REFUTED: Final = ("violated", "fault")
VERDICTS: Final = ("fails", "unfinished", "waived", "partial", "holds")
# Variables that change what a kernel computes, or what computes it.
VARIABLES: Final = (
    "TRITON_INTERPRET",
    "TRITON_DEFAULT_FP_FUSION",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_VOLATILE: Final = ("created", "seconds", "hash")
_UNTOLD: Final = ("op", "seconds", "features")  # of an outcome


def report(
    outcomes: Mapping[Subject, list[Outcome]],
    profile: Profile,
    *,
    provider: str | None = None,
    waivers: Iterable[Waiver] = (),
) -> dict[str, Any]:
    """The report of a run: one subject per operator, all of one backend and device.

    Args:
        outcomes: of each operator.
        profile: effort of the run.
        provider: who made the backend, where that is not the distribution that its entry point names.
        waivers: of this backend.
    """
    first = next(iter(outcomes))
    waivers = tuple(waivers)
    excused = {w.clause: w for w in waivers}
    operators = {s.spec.id: _operator(s, found, profile, excused) for s, found in outcomes.items()}
    problems = needless(waivers, (o for found in outcomes.values() for o in found))
    counts = Counter(c["status"] for found in operators.values() for c in found["clauses"])
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": first.backend,
        "provider": provider or policy.installed()[first.backend].provider,
        "device": first.device,
        "profile": profile.name,
        "environment": environment(first.device),
        "tolerances": tolerances.version(),
        "operators": operators,
        "problems": problems,
        "summary": {status: counts[status] for status in STATUSES}
        | {"cases": sum(o.executed for found in outcomes.values() for o in found)},
    }
    content["verdict"] = worst([*(op["verdict"] for op in operators.values()), *["fails"] * bool(problems)])
    content["hash"] = content_hash(content)
    content["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    content["seconds"] = round(sum(o.seconds for found in outcomes.values() for o in found), 1)
    return content


def _operator(
    subject: Subject, outcomes: list[Outcome], profile: Profile, waivers: Mapping[str, Waiver]
) -> dict[str, Any]:
    clauses = sorted((_clause(o, waivers.get(o.clause)) for o in outcomes), key=lambda c: str(c["clause"]))
    statuses = {c["status"] for c in clauses}
    unproved = sorted(subject.claims - _proved(subject, outcomes))
    hollow = any(c["status"] == "held" and not c["executed"] for c in clauses)
    tried = bool(statuses & {"held", *REFUTED}) and "not_run" not in statuses
    verdicts = {
        "fails": bool(statuses & {*REFUTED}) or hollow or (profile.thorough and tried and bool(unproved)),
        "unfinished": "not_run" in statuses,
        "waived": "waived" in statuses,
        "partial": "not_attacked" in statuses or bool(unproved) or statuses <= {"no_room", "not_claimed"},
    }
    return {
        "implementations": sorted(i.target for i in subject.impls),
        "claims": sorted(subject.claims),
        "unproved_claims": unproved,
        "tolerances": tolerances.version((subject.op,)),
        "verdict": next((v for v, applies in verdicts.items() if applies), "holds"),
        "clauses": clauses,
    }


def _proved(subject: Subject, outcomes: list[Outcome]) -> set[str]:
    """Features with an executed case: a clause is about them, or its calls needed them."""
    about = {c.id: c.feature for c in subject.spec.clauses if c.feature is not None}
    executed = [o for o in outcomes if o.executed or o.failed]
    return {about[o.clause] for o in executed if o.clause in about} | {f for o in executed for f in o.features}


def _clause(outcome: Outcome, waiver: Waiver | None) -> dict[str, Any]:
    told = {k: v for k, v in asdict(outcome).items() if k not in _UNTOLD}
    told["measures"] = {k: v if isfinite(v) else str(v) for k, v in outcome.measures.items()}  # JSON has no infinity
    if waiver is None or not outcome.failed:
        return told
    about = {"issue": waiver.issue, "expires": waiver.expires.isoformat(), "reason": waiver.reason}
    return {**told, "status": "waived", "waiver": about}


def worst(verdicts: Iterable[str]) -> str:
    """The worst of them; "holds" where there is none."""
    return min(verdicts, key=VERDICTS.index, default="holds")


def environment(device: str, root: Path = _ROOT) -> dict[str, Any]:
    """What a result may depend on; `root`: of the file system."""
    import hypothesis
    import torch

    from rlkernel.probe import device_facts

    return {
        "rlkernel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hypothesis": hypothesis.__version__,
        "torch": torch.__version__,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        **{f"device_{k}": v for k, v in device_facts(device).items() if k not in {"torch", "device"}},
        **({"board": told} if (told := facts(root)) else {}),
    }


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash of a report without what differs between two runs that found the same."""
    rest = {k: v for k, v in content.items() if k not in _VOLATILE}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is different between two reports, a line a clause; empty where they agree."""

    def facts(content: Mapping[str, Any]) -> dict[str, str]:
        told = {
            f"{op} {c['clause']}": c["status"] for op, found in content["operators"].items() for c in found["clauses"]
        }
        return told | {f"{op} tolerances": found["tolerances"] for op, found in content["operators"].items()}

    before, after = facts(old), facts(new)
    return [
        f"{what}: {before.get(what, 'absent')} -> {after.get(what, 'absent')}"
        for what in sorted({*before, *after})
        if before.get(what) != after.get(what)
    ]
