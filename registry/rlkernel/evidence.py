"""Evidence in selection: whether a conformance report shows that a backend holds an operator's clauses here.

Asked where a policy says `need = ["conformant"]` or `need = ["exact"]`, with `reports` as the folder of the reports. A
report counts if it is of the backend, the operator and this kind of device, if its verdict is "holds", and if its
fingerprints of sources and attacks and its library versions are those of now. Reading reports is the suite's work,
which is loaded when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rlkernel.discover import load_target
from rlkernel_core.decision import Call
from rlkernel_core.reasons import Reason

_ASKED: Final = "rlkernel_conformance.evidence:unproved"


def unproved(folder: str | None, packages: Mapping[str, str], backend: str, call: Call) -> Reason | None:
    """What reports say against a backend for a call; None where one shows that the backend's clauses hold.

    Args:
        folder: of the reports, one in each folder below it.
        packages: installed versions by name of distribution.
        backend: name.
        call: operator, device and architecture.
    """
    if folder is None:
        text = "the policy needs conformance reports and names no folder of them"
        return Reason("evidence", "none", text, 'reports = "conformance/reports", the folder of your reports')
    ask: Callable[..., Reason | None] | Reason = load_target(_ASKED)
    return ask if isinstance(ask, Reason) else ask(folder, packages, backend, call)
