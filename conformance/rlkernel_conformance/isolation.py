"""Attacks in processes of their own, with limits on time and memory; the run goes on after any of them dies."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from rlkernel_conformance import faults
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject

# Address space of a worker on the CPU; torch alone maps a few GiB. A GPU process maps far more than it uses: no limit.
MEMORY: Final = 16 << 30
STARTING_S: Final = 60.0  # importing torch on a loaded machine


def attack_apart(
    subject: Subject,
    attacks: list[Attack],
    profile: Profile,
    *,
    manifest: str | None = None,
    watch: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Carry out attacks in worker processes; a new one is started after each that dies.

    Args:
        subject: what is attacked.
        attacks: what to carry out, in order.
        profile: effort and time limit.
        manifest: "module:attribute" of a backend to register in the worker; None for an installed one.
        watch: told every outcome as it comes.
    """
    outcomes: list[Outcome] = []
    left = list(attacks)
    while left:
        clauses = [a.clause.id for a in left]
        for outcome in _one_worker(subject, clauses, profile, manifest):
            outcomes.append(outcome)
            watch(outcome)
            left = [a for a in left if a.clause.id != outcome.clause]
    return outcomes


def _one_worker(subject: Subject, clauses: list[str], profile: Profile, manifest: str | None) -> Iterator[Outcome]:
    """Outcomes of one worker, the last one a fault if it did not end as a worker does. At least one."""
    read, write = os.pipe()
    job: dict[str, Any] = {
        "secret": secrets.token_hex(16),
        "backend": subject.backend,
        "op": subject.op,
        "device": subject.device,
        "profile": asdict(profile),
        "clauses": clauses,
        "manifest": manifest,
        "memory": MEMORY if subject.device.partition(":")[0] == "cpu" else 0,
    }
    worker = subprocess.Popen(  # noqa: S603 our own interpreter and module
        [sys.executable, "-m", "rlkernel_conformance.worker", str(write)],
        pass_fds=(write,),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(write)
    channel = _Channel(read, job["secret"])
    current, begun, done = clauses[0], False, False
    try:
        if worker.stdin is not None:
            worker.stdin.write(json.dumps(job).encode())
            worker.stdin.close()
        limit = STARTING_S + profile.limit_s
        while not done:
            word = channel.next(limit)
            if isinstance(word, str):
                fault = _ended(worker) if word == "closed" else word
                # A worker that never began will not begin for the other clauses either.
                yield from (_died(subject, c, fault, limit) for c in ([current] if begun else clauses))
                return
            limit = profile.limit_s
            done = word["kind"] == "done"
            if word["kind"] == "begin":
                current, begun = word["clause"], True
            elif word["kind"] == "end":
                yield Outcome(**word["outcome"])
    finally:
        _end(worker)
        os.close(read)


class _Channel:
    """Words of one worker, in order; anything else ends the conversation."""

    def __init__(self, descriptor: int, secret: str) -> None:
        self.descriptor, self.secret = descriptor, secret
        self.number, self.buffer = 0, b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(descriptor, selectors.EVENT_READ)

    def next(self, limit: float) -> dict[str, Any] | str:
        """The next word, or "timeout", "closed" or "protocol_error"."""
        until = time.monotonic() + limit
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                return "timeout"
            data = os.read(self.descriptor, 1 << 16)
            if not data:
                return "closed"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            word: dict[str, Any] = json.loads(line)
            genuine = word["secret"] == self.secret and word["number"] == self.number
        except (ValueError, KeyError, TypeError):
            return "protocol_error"
        self.number += 1
        return word if genuine else "protocol_error"


def _died(subject: Subject, clause: str, fault: str, limit: float) -> Outcome:
    title = next(c.title for c in subject.spec.clauses if c.id == clause)
    text = f"no answer within {limit:g} s" if fault == "timeout" else faults.FAULTS[fault]
    return Outcome(subject.op, clause, title, "fault", fault, text)


def _ended(worker: subprocess.Popen[bytes]) -> str:
    """The fault of a worker that closed its channel."""
    try:
        return faults.of_exit(worker.wait(timeout=5))
    except subprocess.TimeoutExpired:
        return "protocol_error"


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and whatever it started."""
    try:
        os.killpg(worker.pid, 9)
    except ProcessLookupError:
        return
    finally:
        worker.wait()
