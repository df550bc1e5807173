"""Operators shared out over devices: each place takes the next one; a device that fails is taken out.

What a device that failed has not run goes to the devices that are left; where none is, it stays `not_run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Lock

from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.subject import Subject

# Carries out attacks on a subject; outcomes of what its device could not run have the status `not_run`.
AttackInProcesses = Callable[[Subject, list[Attack]], list[Outcome]]


@dataclass(frozen=True)
class Work:
    """One operator and the attacks on it that are left."""

    subject: Subject
    attacks: tuple[Attack, ...]
    not_run: tuple[Outcome, ...] = ()  # what the last device said of them, if one failed


def attack_on_devices(
    work: Iterable[Work], devices: Sequence[str], jobs: int, attack: AttackInProcesses
) -> dict[str, list[Outcome]]:
    """Outcomes by operator.

    Args:
        work: what is to be done; outcomes name the device of its subjects, whichever did it.
        devices: where it is done; one that stands there twice is two places.
        jobs: operators at a time in each place.
        attack: how; called in threads.
    """
    waiting = deque(work)
    outcomes: dict[str, list[Outcome]] = {w.subject.op: [] for w in waiting}
    failed: set[str] = set()
    lock = Lock()

    def take(device: str) -> Work | None:
        with lock:
            return waiting.popleft() if waiting and device not in failed else None

    def serve(device: str) -> None:
        while (due := take(device)) is not None:
            found = attack(replace(due.subject, device=device), list(due.attacks))
            with lock:
                settle(due, device, found)

    def settle(due: Work, device: str, found: list[Outcome]) -> None:
        done = [o for o in found if o.status != "not_run"]
        outcomes[due.subject.op] += [_named(o, device, due.subject.device) for o in done]
        if left := {o.clause: o for o in found if o.status == "not_run"}:
            failed.add(device)
            attacks = tuple(a for a in due.attacks if a.clause.id in left)
            waiting.append(Work(due.subject, attacks, tuple(left.values())))

    while waiting and (healthy := [d for d in devices if d not in failed]):
        with ThreadPoolExecutor(max_workers=jobs * len(healthy)) as pool:
            serving = [pool.submit(serve, d) for d in healthy for _ in range(jobs)]
            try:
                wait(serving, return_when=FIRST_EXCEPTION)
            except KeyboardInterrupt:
                waiting.clear()  # what is under way ends, nothing else begins
                raise
        for served in serving:
            served.result()
    for due in waiting:
        outcomes[due.subject.op] += due.not_run or [_untried(due.subject.op, a) for a in due.attacks]
    return outcomes


def _named(outcome: Outcome, place: str, device: str) -> Outcome:
    """The outcome as if it had come from the device that the report names: the same wherever it was found."""
    return replace(outcome, reproduce=outcome.reproduce.replace(f"device={place!r}", f"device={device!r}"))


def _untried(op: str, attack: Attack) -> Outcome:
    return Outcome(op, attack.clause.id, attack.clause.title, "not_run", message="no device was left")
