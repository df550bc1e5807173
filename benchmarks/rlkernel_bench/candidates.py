"""Who is measured: the installed backends, through the front door, and the peers that are here."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlkernel
from rlkernel import policy
from rlkernel.discover import brief, guarded
from rlkernel_bench.peers import PEERS, Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Problem, Work
from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.spec import OPERATORS


@dataclass(frozen=True)
class Candidate:
    """Something that can carry out a workload, or the reason why it cannot."""

    name: str
    kind: str  # "backend", "peer" or "ruler"
    version: str = ""
    run: Call | None = None
    status: str = ""  # "absent" or "refused" where run is None
    message: str = ""
    ran: str = ""  # of a peer: where its adapter has been seen working; "" means nowhere


def named(names: Sequence[str]) -> tuple[str, ...]:
    """Backends as results call them, all that are installed where none is named.

    Plain torch is "reference" there: "torch" is the peer, the plain torch calls that do the same job.
    """
    return tuple("reference" if n == PLAIN_TORCH else n for n in names or policy.installed())


def backends(problem: Problem, names: Sequence[str], device: str) -> list[Candidate]:
    """One candidate for each backend that claims all operators of the workload on the device."""
    installed = policy.installed()
    found = []
    for name in named(names):
        candidate = installed[name]
        if candidate.reason is not None:
            found.append(Candidate(name, "backend", candidate.provider, None, "absent", str(candidate.reason)))
        elif all(claims(name, op, device) for op in problem.work.op.split(",")):
            for variant, call in problem.ours.items():
                said = f"{name}:{variant}" if variant else name
                found.append(Candidate(said, "backend", candidate.provider, prepared(name, problem, call)))
    return found


def claims(backend: str, op: str, device: str) -> bool:
    """Whether an installed backend has an implementation of an operator for a device."""
    manifest = policy.installed()[backend].manifest
    kind = device.partition(":")[0]
    impls = manifest.of(OPERATORS[op].id) if manifest else ()
    return any(i.requires.device == "*" or kind in i.requires.device for i in impls)


def in_scope(backend: str, call: Call) -> Call:
    """The call where this backend alone may run; entered once, so that no call pays for entering."""
    alone = scope_of(backend, fallback="error")
    return lambda inputs: alone.run(call, inputs)


def prepared(backend: str, problem: Problem, call: Call) -> Call:
    """The same on inputs that are arranged for it once.

    Whoever arranges them may be another: a backend that has a kernel need not have what packs weights for it.
    """
    alone = in_scope(backend, call)
    if problem.prepare is None:
        return alone
    prepare, helped = problem.prepare, scope_of(**dict.fromkeys(problem.work.op.split(","), backend))
    ready: dict[int, tuple[Inputs, Inputs]] = {}  # by identity; the first of the pair keeps it taken

    def run(inputs: Inputs) -> Outputs:
        if id(inputs) not in ready:
            ready[id(inputs)] = inputs, helped.run(prepare, inputs)
        return alone(ready[id(inputs)][1])

    return run


def scope_of(*order: str, **options: Any) -> contextvars.Context:
    """A context in which a policy is in force: what runs in it pays nothing for entering."""
    context = contextvars.copy_context()
    context.run(rlkernel.use(*order, **options).__enter__)
    return context


def peers(problem: Problem, names: Sequence[str] | None, device: str) -> list[Candidate]:
    """One candidate for each adapter that has something to say to the workload; None for all of them."""
    chosen = [p for p in PEERS.values() if names is None or p.name in names or p.name == problem.work.ruler]
    return [c for p in chosen for c in _of_peer(p, problem, device)]


def _of_peer(peer: Peer, problem: Problem, device: str) -> list[Candidate]:
    work = problem.work
    kind = "ruler" if peer.name == work.ruler else "peer"
    entry = peer.calls.get(_task(work))
    if entry is None:
        return []
    version = peer.version()
    known: dict[str, Any] = {"name": peer.name, "kind": kind, "version": version or "", "ran": peer.ran}
    lacking = peer.lacking(device)
    if lacking:
        return [Candidate(**known, status="absent", message=lacking)]
    call, error = guarded(lambda: entry(work))
    if error is not None or call is None:
        missing = isinstance(error, ImportError)
        said = brief(error) if error is not None else "no call"
        return [Candidate(**known, status="absent" if missing else "refused", message=said)]
    return [Candidate(**known, run=call if peer.whole else problem.complete(call))]


def _task(work: Work) -> str:
    """What adapters are listed by: the operator, or the suite's own word for a chain of operators."""
    return str(work.options.get("chain", work.op))
