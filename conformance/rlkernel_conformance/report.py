"""What was found of a backend on a device: every clause of every operator, what was claimed, and a verdict.

A report is made in one run or in several, each of some operators or clauses (`merged`). So each clause names its run,
which is under `runs` with its profile and environment, its date, and the fingerprint of the sources that were judged
(`rlkernel.sources`). A clause that was attacked has the fingerprint of its attack, too
(`rlkernel_conformance.attack_sources`). The profile of an operator, and of a report, is the weakest that one of its
clauses was attacked with.

Two runs of one backend at one profile on one machine give the same report but for dates and seconds; `hash` covers all
the rest. Verdicts, the worst first:

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

from packaging.requirements import Requirement

from rlkernel import policy
from rlkernel.discover import PackageVersions
from rlkernel_conformance import tolerances
from rlkernel_conformance.attack_sources import attack_sources
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.manifests import sources_of
from rlkernel_conformance.orders.shipped import shipped
from rlkernel_conformance.profiles import PROFILES, Profile
from rlkernel_conformance.subject import Subject
from rlkernel_conformance.waivers import Waiver, needless
from rlkernel_core import __version__
from rlkernel_core.decision import ALIASES
from rlkernel_core.errors import ConfigError
from rlkernel_core.host.facts import facts
from rlkernel_core.spec import OPERATORS

__all__ = ["compare", "report"]

_ROOT: Final = Path("/")
SCHEMA: Final = 2
NOT_ASKED: Final = "not asked for: the run was of other clauses"  # why a clause is `not_run` that nobody wanted
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
_VOLATILE: Final = ("created", "date", "seconds", "hash")
_FOUND: Final = ("held", *REFUTED, "waived")  # statuses of clauses that were attacked
_RESULTS: Final = ("held", "violated", "waived", "not_claimed")  # that need no further attack
_DIGITS: Final = 8
_PACKAGES: Final = ("triton", "numpy")


def report(
    outcomes: Mapping[Subject, list[Outcome]],
    profile: Profile,
    *,
    provider: str | None = None,
    manifest: str | None = None,
    waivers: Iterable[Waiver] = (),
    sources: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report of a run: one subject per operator, all of one backend and device.

    Args:
        outcomes: of each operator.
        profile: effort of the run.
        provider: who made the backend, where that is not the distribution that its entry point names.
        manifest: "module:attribute" of the backend's manifest, where it was named.
        waivers: of this backend.
        sources: fingerprints by operator, as they were before the run; None for those of now.
    """
    first = next(iter(outcomes))
    waivers = tuple(waivers)
    made = {
        "profile": asdict(profile),
        "provider": provider or policy.installed()[first.backend].provider,
        "environment": environment(first.device, packages=_packages(outcomes)),
    }
    name = content_hash(made)[:_DIGITS]
    stamp = {"run": name, "date": datetime.now(UTC).date().isoformat()}
    operators = {}
    for subject, found in outcomes.items():
        told = {**stamp, "sources": (sources or {}).get(subject.op) or present(subject)}
        about = {
            "implementations": sorted(i.target for i in subject.impls),
            "claims": sorted(subject.claims),
            "tolerances": tolerances.version((subject.op,)),
            "problems": needless(waivers, found),
            "orders": shipped((i.target for i in subject.impls), subject.op),
        }
        attacks, excused = attack_sources(subject.op), {w.clause: w for w in waivers}
        clauses = [_clause(o, excused.get(o.clause), attacks.get(o.clause)) | told for o in found]
        operators[subject.spec.id] = _operator(subject.op, about, clauses, {name: made})
    content = {"backend": first.backend, "manifest": manifest, "device": first.device, "operators": operators}
    return _whole({"schema": SCHEMA, **content, "runs": {name: made}})


def present(subject: Subject) -> str:
    """Fingerprint of the sources of an operator of a backend."""
    manifest = policy.installed()[subject.backend].manifest
    return sources_of(manifest, subject.spec.id, subject.device) if manifest else ""


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A report with what a new one found in the place of what was known; the rest stays as it was.

    Of an operator of the new report, a clause that was not run keeps its older result where that is of the same sources
    or where nobody asked for it; it is reported as not run where its turn did not come. A result of a later day stays:
    the new report may hold, besides what its run found, what was known before it.

    Raises:
        ConfigError: they are of different backends or kinds of devices.
    """
    same_subject(old, new["backend"], new["device"], architectures(new))
    runs = {**old["runs"], **new["runs"]}
    operators = dict(old["operators"])
    for op, found in new["operators"].items():
        known = {c["clause"]: c for c in operators.get(op, {}).get("clauses", ())}
        clauses = [_newer(known.get(c["clause"]), c) for c in found["clauses"]]
        operators[op] = _operator(op.partition("@")[0], found, clauses, runs)
    order = {spec.id: i for i, spec in enumerate(OPERATORS.values())}
    operators = dict(sorted(operators.items(), key=lambda item: order.get(item[0], len(order))))
    return _whole({**new, "operators": operators, "runs": runs})


def has_result(op: str, clause: Mapping[str, Any], content: Mapping[str, Any], sources: str, examples: int) -> bool:
    """Whether today's attack on a clause came to its end, on these sources, with so many cases or more.

    A fault is no result: a time-out, or a library that lacks something, may be the machine's.
    """
    enough = content["runs"][clause["run"]]["profile"]["examples"] >= examples
    ended = clause["status"] in _RESULTS and clause["sources"] == sources
    return bool(ended and enough and not attack_changed(op, clause))


def attack_changed(op: str, clause: Mapping[str, Any]) -> bool:
    """Whether the attack that a result is of differs from today's; not where the report does not say which it was."""
    was = clause.get("attack")
    return was is not None and was != attack_sources(op).get(clause["clause"])


def only(content: Mapping[str, Any], ops: Iterable[str]) -> dict[str, Any]:
    """The part of a report that is of some operators, by id, as a report."""
    return _whole({**content, "operators": {op: content["operators"][op] for op in ops}})


def same_subject(content: Mapping[str, Any], backend: str, device: str, archs: Iterable[str]) -> None:
    """See that a report is of a backend, a kind of device and its architecture.

    Raises:
        ConfigError: it is of others.
    """
    of = str(content["backend"])
    was = (ALIASES.get(of, of), content["device"].partition(":")[0], *architectures(content))
    now = (ALIASES.get(backend, backend), device.partition(":")[0], *archs)
    if was != now:
        raise ConfigError(
            f"the report is of {' '.join(was)}, not of {' '.join(now)}: each backend and device has a report of its own"
        )


def architectures(content: Mapping[str, Any]) -> list[str]:
    """Of the devices that a report was made on."""
    return sorted({str(run["environment"].get("device_arch")) for run in content["runs"].values()})


def _newer(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Mapping[str, Any]:
    if old is not None and old["date"] > new["date"]:
        return old
    if old is None or new["status"] != "not_run" or old["status"] not in {*_FOUND, "not_claimed"}:
        return new
    asked = new["message"] != NOT_ASKED
    return old if old["sources"] == new["sources"] or (not asked and old["status"] in _FOUND) else new


def _whole(content: dict[str, Any]) -> dict[str, Any]:
    """A report with what follows from its operators, and its hash."""
    operators = content["operators"].values()
    clauses = [c for found in operators for c in found["clauses"]]
    counts = Counter(c["status"] for c in clauses)
    problems = sorted({problem for found in operators for problem in found["problems"]})
    used = {c["run"] for c in clauses}
    content = {
        **content,
        "profile": weakest(clauses, content["runs"])["name"],
        "runs": {name: run for name, run in content["runs"].items() if name in used},
        "problems": problems,
        "summary": {status: counts[status] for status in STATUSES} | {"cases": sum(c["executed"] for c in clauses)},
        "verdict": worst([*(found["verdict"] for found in operators), *["fails"] * bool(problems)]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(sum(c["seconds"] for c in clauses), 1),
    }
    return {**content, "hash": content_hash(content)}


def _operator(
    op: str, about: Mapping[str, Any], clauses: Iterable[Mapping[str, Any]], runs: Mapping[str, Any]
) -> dict[str, Any]:
    clauses = sorted(clauses, key=lambda c: str(c["clause"]))
    statuses = {c["status"] for c in clauses}
    unproved = sorted({*about["claims"]} - _proved(op, clauses))
    hollow = any(c["status"] == "held" and not c["executed"] for c in clauses)
    tried = bool(statuses & {"held", *REFUTED}) and "not_run" not in statuses
    profile = weakest(clauses, runs)
    verdicts = {
        "fails": bool(statuses & {*REFUTED}) or hollow or (profile["thorough"] and tried and bool(unproved)),
        "unfinished": "not_run" in statuses,
        "waived": "waived" in statuses,
        "partial": "not_attacked" in statuses or bool(unproved) or statuses <= {"no_room", "not_claimed"},
    }
    return {
        **{k: about[k] for k in ("implementations", "claims", "tolerances", "problems")},
        **({"orders": about["orders"]} if about.get("orders") else {}),
        "unproved_claims": unproved,
        "profile": profile["name"],
        "verdict": next((v for v, applies in verdicts.items() if applies), "holds"),
        "clauses": clauses,
    }


def weakest(clauses: Iterable[Mapping[str, Any]], runs: Mapping[str, Any]) -> dict[str, Any]:
    """The profile of fewest cases among those that clauses were attacked with; of all runs where none was."""
    used = {c["run"] for c in clauses if c["status"] in _FOUND} or set(runs)
    found: dict[str, Any] = min((runs[run]["profile"] for run in sorted(used)), key=lambda p: int(p["examples"]))
    return found


def _proved(op: str, clauses: Iterable[Mapping[str, Any]]) -> set[str]:
    """Features with an executed case: a clause is about them, or its calls needed them."""
    about = {c.id: c.feature for c in OPERATORS[op].clauses if c.feature is not None}
    executed = [c for c in clauses if c["executed"] or c["fault"]]
    return {about[c["clause"]] for c in executed if c["clause"] in about} | {f for c in executed for f in c["features"]}


def _clause(outcome: Outcome, waiver: Waiver | None, attack: str | None) -> dict[str, Any]:
    told = {k: v for k, v in asdict(outcome).items() if k != "op"}
    told["measures"] = {k: v if isfinite(v) else str(v) for k, v in outcome.measures.items()}  # JSON has no infinity
    told |= {"features": sorted(outcome.features), "seconds": round(outcome.seconds, 1)}
    told |= {} if attack is None or outcome.status == "not_run" else {"attack": attack}
    if waiver is None or not outcome.failed:
        return told
    about = {"issue": waiver.issue, "expires": waiver.expires.isoformat(), "reason": waiver.reason}
    return {**told, "status": "waived", "waiver": about}


def upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """A report of schema 1 in the form of today: nobody says of which sources it is, so it is older than any.

    It does not say either which clause proved which claim: all do that were executed.
    """
    known = {"thorough": False, "limit_s": 0.0, "examples": 0}
    profile = {**known, **asdict(PROFILES[content["profile"]])} if content["profile"] in PROFILES else known
    made = {"provider": content["provider"], "environment": {"packages": {}, **content["environment"]}}
    name = content_hash(made)[:_DIGITS]
    stamp = {"run": name, "date": content["created"][:10], "sources": None, "seconds": 0.0}
    operators = {}
    for op, found in content["operators"].items():
        proved = sorted({*found["claims"]} - {*found["unproved_claims"]})
        clauses = [{**c, "features": proved if c["executed"] else [], **stamp} for c in found["clauses"]]
        operators[op] = {**found, "problems": [], "profile": content["profile"], "clauses": clauses}
    runs = {name: {"profile": {**profile, "name": content["profile"]}, **made}}
    rest = {k: v for k, v in content.items() if k not in {"provider", "environment", "tolerances"}}
    whole = {**rest, "schema": SCHEMA, "manifest": None, "operators": operators, "runs": runs}
    return {**whole, "hash": content_hash(whole)}


def _packages(subjects: Iterable[Subject]) -> tuple[str, ...]:
    """Libraries that implementations need."""
    needed = {Requirement(text).name for s in subjects for i in s.impls for text in i.requires.packages}
    return tuple(sorted({*_PACKAGES, *needed}))


def standing(verdict: str, clauses: Iterable[Mapping[str, Any]]) -> str:
    """A verdict with the clauses that it stands for: `holds 25`, `holds 33 of 34`, or `fails, 24 of 25 hold`.

    Counted are the clauses that the claims call for. One of 34 that has no room on the device is not held. Clauses
    that failed for want of an answer in time are counted once more: `fails, 24 of 25 hold, 1 late`.
    """
    called = [c for c in clauses if c["status"] != "not_claimed"]
    due = [c["status"] for c in called]
    held, late = due.count("held"), sum(c["status"] == "fault" and c["fault"] == "timeout" for c in called)
    if verdict == "holds":
        return f"holds {held}" if held == len(due) else f"holds {held} of {len(due)}"
    return f"{verdict}, {held} of {len(due)} hold" + (f", {late} late" if late else "")


def worst(verdicts: Iterable[str]) -> str:
    """The worst of them; "holds" where there is none."""
    return min(verdicts, key=VERDICTS.index, default="holds")


def environment(device: str, root: Path = _ROOT, packages: Iterable[str] = _PACKAGES) -> dict[str, Any]:
    """What a result may depend on; `root`: of the file system; `packages`: whose versions are told."""
    import hypothesis
    import torch

    from rlkernel.probe import device_facts

    versions = PackageVersions()
    return {
        "rlkernel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hypothesis": hypothesis.__version__,
        "torch": torch.__version__,
        "packages": {name: version for name in packages if (version := versions.get(name)) is not None},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        **{f"device_{k}": v for k, v in device_facts(device).items() if k not in {"torch", "device"}},
        **({"board": told} if (told := facts(root)) else {}),
    }


def content_hash(content: Mapping[str, Any]) -> str:
    """Hash of a report without what differs between two runs that found the same."""
    return sha256(json.dumps(_lasting(content), sort_keys=True).encode()).hexdigest()


def _lasting(told: Any) -> Any:
    if isinstance(told, Mapping):
        return {k: _lasting(v) for k, v in told.items() if k not in _VOLATILE}
    return [_lasting(item) for item in told] if isinstance(told, list | tuple) else told


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is different between two reports, `old` and `new`, a line a clause; empty where they agree."""

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
