"""Attacks in processes of their own, with limits on time and memory; the run goes on after any of them dies."""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Final

from rlkernel.outcomes import cache_folder
from rlkernel_conformance import faults, fork_server, sanitizer
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject

# Address space of a worker on the CPU; torch alone maps a few GiB. A GPU process maps far more than it uses: no limit.
MEMORY: Final = 16 << 30
STARTING_S: Final = 180.0  # importing torch, with sixty others that do the same
MAX_TIMEOUTS: Final = 3  # clauses in a row without an answer, after which the operator's others are not attacked
_ENDING_S: Final = 3.0  # for a reaper to end what its worker has started
_Worker = subprocess.Popen[bytes] | fork_server.Forked


def attack_in_processes(
    subject: Subject,
    attacks: list[Attack],
    profile: Profile,
    *,
    manifest: str | None = None,
    watch: Callable[[Outcome], None] = lambda _: None,
    until: float = math.inf,
) -> list[Outcome]:
    """Carry out attacks in worker processes; a new one is started after each that dies.

    Every worker looks at its device before it loads the backend. Where that fails, what is left is `not_run`.

    Args:
        subject: what is attacked.
        attacks: what to carry out, in order.
        profile: effort and time limit.
        manifest: "module:attribute" of a backend to register in the worker; None for an installed one.
        watch: told every outcome as it comes.
        until: time of `time.monotonic` at which the run is over; what has not ended by then is `not_run`.
    """
    outcomes: list[Outcome] = []
    left = list(attacks)
    while left:
        if _too_many_timeouts(outcomes):
            found = _not_attacked(left, profile)
        elif time.monotonic() >= until:
            found = _out_of_time(left)
        elif profile.sanitizer is not None:
            found = iter((_sanitized(subject, left[0], profile, manifest, until),))
        else:
            found = _one_worker(subject, left, profile, manifest, until)
        for outcome in found:
            outcomes.append(outcome)
            watch(outcome)
            left = [a for a in left if a.clause.id != outcome.clause]
    return outcomes


def _too_many_timeouts(outcomes: list[Outcome]) -> bool:
    last = outcomes[-MAX_TIMEOUTS:]
    return len(last) == MAX_TIMEOUTS and all(o.fault == "timeout" for o in last)


def _not_attacked(left: list[Attack], profile: Profile) -> Iterator[Outcome]:
    text = f"not attacked: the {MAX_TIMEOUTS} clauses before it gave no answer within {profile.limit_s:g} s each"
    return (_failed(a, "timeout", text) for a in left)


def _out_of_time(left: list[Attack]) -> Iterator[Outcome]:
    text = "the run's time was over: give it more with --within, or more processes with --jobs"
    return (not_run(a, text) for a in left)


def _sanitized(subject: Subject, attack: Attack, profile: Profile, manifest: str | None, until: float) -> Outcome:
    """The outcome of one clause in a process of its own, at which a tool of compute-sanitizer looks.

    What the tool finds is a fault. Where it could not look, nothing was judged: the clause is `not_run`.
    """
    tool = str(profile.sanitizer)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        (outcome,) = _one_worker(subject, [attack], profile, manifest, until, file)
        log = file.read_text(errors="replace") if file.exists() else ""
    if found := sanitizer.findings(log):
        text = f"{tool}: {sanitizer.message(found, log)}"
        return replace(outcome, status="fault", fault=sanitizer.TOOLS[tool], message=text)
    if outcome.status == "held" and sanitizer.summary(log) is None:
        return not_run(attack, f"{tool} did not look at it to the end: {sanitizer.complaint(log)}")
    return outcome


def _one_worker(
    subject: Subject,
    attacks: list[Attack],
    profile: Profile,
    manifest: str | None,
    until: float,
    log: Path | None = None,
) -> Iterator[Outcome]:
    """Outcomes of one worker, the last one a fault if it did not end as a worker does. At least one.

    `log` is where the profile's sanitizer writes, which is waited for.
    """
    left = list(attacks)
    job: dict[str, Any] = {
        "secret": secrets.token_hex(16),
        "backend": subject.backend,
        "op": subject.op,
        "device": subject.device,
        "check": subject.check,
        "profile": asdict(profile),
        "clauses": {a.clause.id: (a.scale, a.part) for a in attacks},
        "variables": sanitizer.variables(subject.op, attacks[0].clause) if log is not None else {},
        "manifest": manifest,
        "memory": MEMORY if subject.device.partition(":")[0] == "cpu" else 0,
    }
    with tempfile.TemporaryFile() as case:
        worker, channel = _start(job, case, log, until)
        healthy, begun, limit = False, False, STARTING_S if log is None else profile.limit_s
        try:
            while True:
                message = channel.next(max(0.0, min(limit, until - time.monotonic())))
                if isinstance(message, str) and time.monotonic() >= until:
                    yield from _out_of_time(left)
                    return
                if isinstance(message, str):  # no more will come
                    text = _why_it_ended(worker, message, limit)
                    if not healthy:
                        yield from (not_run(a, f"no health check of {subject.device}: {text}") for a in attacks)
                    else:  # one that never began will not begin for the other clauses either
                        fault = _fault(worker, message)
                        yield from (_failed(a, fault, text, case) for a in (left[:1] if begun else left))
                    return
                if message["kind"] == "healthy":
                    healthy = True
                elif message["kind"] == "device_error":
                    yield from (not_run(a, message["message"]) for a in attacks)
                    return
                elif message["kind"] == "no_backend":
                    yield from (_failed(a, message["fault"], message["message"]) for a in attacks)
                    return
                elif message["kind"] == "begin":
                    begun, limit = True, profile.limit_s
                elif message["kind"] == "end" and left:
                    found = message["outcome"]
                    yield Outcome(**{**found, "clause": left.pop(0).clause.id, "features": tuple(found["features"])})
                else:
                    if len(left) == len(attacks):  # a worker reports at least one
                        yield from (_failed(a, "protocol_error", "the worker was done before it began") for a in left)
                    if log is not None:
                        with suppress(subprocess.TimeoutExpired):
                            worker.wait(max(0.0, min(profile.limit_s, until - time.monotonic())))
                    return
        finally:
            _end(worker)
            channel.close()


def _start(job: dict[str, Any], case: IO[bytes], log: Path | None, until: float) -> tuple[_Worker, _Channel]:
    """A worker with its job, under the profile's sanitizer if it is to write to `log`, and the channel it speaks on."""
    tool = job["profile"]["sanitizer"]
    under = sanitizer.command(tool, log) if log is not None else []
    read, write = os.pipe()
    path = [p or os.curdir for p in sys.path]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RLKERNEL_")}
    environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(cache_folder() / "hypothesis")}
    environ |= {"PYTHONPATH": os.pathsep.join(path), **job["variables"]}
    worker: _Worker | None = None
    if not under and job["device"].partition(":")[0] == "cpu":
        limit = max(0.0, min(STARTING_S, until - time.monotonic()))
        with suppress(OSError):  # it has ended: the worker is started anew
            worker = _forked({**job, "environ": environ, "folder": str(Path.cwd()), "path": path}, write, case, limit)
    if worker is None:
        command = [*under, sys.executable, "-P", "-m", "rlkernel_conformance.worker", str(write), str(case.fileno())]
        worker = _begun(command, json.dumps(job).encode(), (write, case.fileno()), environ)
    os.close(write)
    return worker, _Channel(read, job["secret"])


def _forked(job: dict[str, Any], write: int, case: IO[bytes], limit: float) -> _Worker | None:
    """A worker by a fork; None where no server is ready within `limit` seconds."""
    server = fork_server.server(job["environ"], limit)
    if server is None:
        return None
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        return server.fork(file.fileno(), write, case.fileno())


def _begun(command: list[str], job: bytes, keep: tuple[int, ...], environ: dict[str, str]) -> _Worker:
    """A worker by a command."""
    worker = subprocess.Popen(  # noqa: S603 our own interpreter and module
        command,
        pass_fds=keep,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
    )
    if worker.stdin is not None:
        with suppress(BrokenPipeError):  # no message will come
            worker.stdin.write(job)
            worker.stdin.close()
    return worker


class _Channel:
    """Messages of one worker, in order; anything else ends the run of that worker."""

    def __init__(self, descriptor: int, secret: str) -> None:
        self.descriptor, self.secret = descriptor, secret
        self.number, self.buffer = 0, b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(descriptor, selectors.EVENT_READ)

    def next(self, limit: float) -> dict[str, Any] | str:
        """The next message, or "timeout", "closed" or "protocol_error"."""
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
            message: dict[str, Any] = json.loads(line)
            genuine = message["secret"] == self.secret and message["number"] == self.number
        except (ValueError, KeyError, TypeError):
            return "protocol_error"
        self.number += 1
        return message if genuine else "protocol_error"

    def close(self) -> None:
        """Close the channel."""
        self.selector.close()
        os.close(self.descriptor)


def _failed(attack: Attack, fault: str, text: str, case: IO[bytes] | None = None) -> Outcome:
    """A clause whose attack could not be carried out, with the case that was the last one, if any."""
    script = ""
    if case is not None:
        case.seek(0)
        script = case.read().decode(errors="replace")
    return Outcome(attack.op, attack.clause.id, attack.clause.title, "fault", fault, text, script)


def not_run(attack: Attack, text: str) -> Outcome:
    """The outcome of an attack that was not carried out, and why."""
    return Outcome(attack.op, attack.clause.id, attack.clause.title, "not_run", message=text)


def _fault(worker: _Worker, message: str) -> str:
    """The fault of a worker that sends no more messages: `message` is what the channel found."""
    if message != "closed":
        return message
    return "protocol_error" if worker.returncode is None else faults.of_exit(worker.returncode)


def _why_it_ended(worker: _Worker, message: str, limit: float) -> str:
    """Why no more messages come from a worker, for people."""
    if message == "timeout":
        return f"no answer within {limit:g} s"
    if message == "closed":
        with suppress(subprocess.TimeoutExpired):
            status = worker.wait(timeout=_ENDING_S)
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            return f"the process ended {how} before it had answered"
        return "the process closed its channel"
    return "messages came on the channel that no worker sends"


def _end(worker: _Worker) -> None:
    """End a worker and whatever it started: by its reaper, and the whole session if that does not answer."""
    with suppress(ProcessLookupError):
        worker.terminate()
    with suppress(subprocess.TimeoutExpired):
        worker.wait(_ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
