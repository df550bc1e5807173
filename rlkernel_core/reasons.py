"""Why a candidate was not chosen, as data: stage, code, text, fix.

The list of codes is closed: `Reason` refuses a code that is not in `CODES`, each code is created in one place of
the source, has a line in docs/reasons.md and a test that provokes it. Machines match on `stage/code`; `text` is
for people and may be reworded; `fix` is a line to run or write.
Imports nothing outside the standard library and `visible`: a plugin may have written text and fix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlkernel_core.visible import visible

# Stages in the order in which they are checked, each with its codes and what the code means.
STAGES: Final[dict[str, dict[str, str]]] = {
    "policy": {
        "not-in-order": "the policy's order does not name this backend",
        "third-party": "`auto` considers first-party backends only; a third party runs when it is named",
        "outranked": "an earlier backend in the order takes the call",
        "locked": "rlkernel.lock pins another implementation or version for this operator",
    },
    "load": {
        "import-error": "importing the plugin's manifest raised",
        "import-crashed": "importing the plugin, or a function that it names, ended the process that tried it",
        "import-timeout": "importing the plugin, or a function that it names, did not finish in time",
        "malformed-entry-point": "the entry point has no name for an order, or does not lead to package.module:name",
        "not-a-manifest": "the entry point does not lead to a rlkernel_core.Backend",
        "invalid-manifest": "the manifest contradicts itself or the catalog of operators and features",
        "duplicate-name": "two installed distributions, or two entry points of one, claim this backend name",
        "reserved-name": "a distribution that is not ours claims the name of one of our backends",
        "not-installed": "the policy names it or `auto` would use it, and no installed distribution provides it",
        "target-missing": "the manifest names a function that cannot be imported",
        "target-signature": "the function does not take one argument, the operator's call record, and answer at once",
    },
    "api": {
        "too-new": "the plugin was built for a newer plugin API",
        "too-old": "the plugin was built for a plugin API that is no longer supported",
    },
    "operator": {
        "absent": "the backend does not implement this operator",
        "other-version": "the backend implements another version of this operator's meaning",
    },
    "device": {"not-claimed": "the implementation does not claim this device"},
    "environment": {
        "missing-package": "a package the implementation needs is not installed",
        "package-version": "a package the implementation needs has the wrong version",
    },
    "arch": {
        "unsupported": "the implementation does not claim this architecture",
        "excluded": "the implementation excludes this architecture by name",
    },
    "dtype": {"unsupported": "the implementation does not claim this dtype"},
    "features": {
        "missing": "the call or the policy needs a feature the implementation does not claim",
        "no-sums": "the policy needs exact bits, and the manifest names no order of the implementation's sums",
    },
    "grad": {"unsupported": "the call needs gradients and the implementation claims none"},
    "shape": {
        "too-large": "the call has more rows, or a larger vocabulary, than the implementation says that it takes",
        "layout": "the implementation reads no tensor with these strides",
        "unsupported": "the implementation's own check refused these sizes or arguments",
        "check-failed": "the implementation's check raised, or returned neither None nor a Reason of this stage",
    },
    "memory": {
        "insufficient": "the call needs more memory than the policy allows",
        "workspace-failed": "the function that tells what memory a call needs raised, or returned no number of bytes",
    },
    "probe": {
        "failed": "the backend's self-test ran here and gave an error",
        "crashed": "the backend's self-test killed its process",
        "timeout": "the backend's self-test did not finish in time",
    },
    "evidence": {
        "none": "the policy needs a conformance report, and none is of this backend, operator and kind of device",
        "not-held": "the conformance report says that clauses of the operator do not hold",
        "older": "the conformance report is of other sources or library versions than would run",
    },
}

CODES: Final[frozenset[str]] = frozenset(f"{stage}/{code}" for stage, codes in STAGES.items() for code in codes)


@dataclass(frozen=True, slots=True)
class Reason:
    """One refusal: at which stage, under which code, in which words, and what would change it."""

    stage: str  # a key of STAGES
    code: str  # one of the stage's
    text: str  # for people; may be reworded
    fix: str = ""  # a line to run or to write; empty where there is none

    def __post_init__(self) -> None:
        if f"{self.stage}/{self.code}" not in CODES:
            raise ValueError(f"reason code {self.stage}/{self.code} is not in rlkernel_core.reasons.STAGES")
        object.__setattr__(self, "text", visible(self.text))
        object.__setattr__(self, "fix", visible(self.fix))

    @property
    def slug(self) -> str:
        """`stage/code`, the stable, machine-readable name."""
        return f"{self.stage}/{self.code}"

    def __str__(self) -> str:
        return f"{self.slug}: {self.text}" + (f"\n  fix: {self.fix}" if self.fix else "")
