"""A process that has imported what workers need and forks each of them: imports take seconds, a fork milliseconds.

python -m rlkernel_conformance.fork_server SOCKET. It loads no tested code, computes nothing and has one thread, so a
worker forked from it has nothing that one started anew has not. A request on its socket is three descriptors: the job,
which has the worker's variables, folder and path of imports too, the worker's channel, and the file of its case. It
ends when the socket closes, and all its workers with it. Where there is a second thread it ends at once, and workers
are started anew.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from rlkernel.discover import guarded
from rlkernel_conformance import process_reaper, worker

# Variables that no import looks at, and the path of imports: a worker has its own, whatever its server began with.
_OF_A_JOB: Final = ("COLUMNS", "HYPOTHESIS_STORAGE_DIRECTORY", "PYTEST_CURRENT_TEST", "PYTHONPATH", "XDG_CACHE_HOME")
_FORK_S: Final = 20.0  # a fork takes milliseconds; a server that does not answer is given up
_NUMBER: Final = 8  # bytes of one that a reaper tells


class Forked:
    """A worker that a server forked, with what is asked of a `subprocess.Popen`: its parent is the server."""

    def __init__(self, server: Server, told: socket.socket) -> None:
        self.server = server  # lives as long as its workers
        self._told = told
        self.returncode: int | None = None
        told.settimeout(_FORK_S)
        if not (number := told.recv(_NUMBER)):
            raise OSError("the fork server has ended")
        self.pid = int.from_bytes(number, sys.byteorder, signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """The status with which the worker ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                number = self._told.recv(_NUMBER)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("worker", timeout or 0.0) from None
            # A server that is gone says nothing more, and its workers went with it.
            self.returncode = int.from_bytes(number, sys.byteorder, signed=True) if number else -signal.SIGKILL
            self._told.close()
        return self.returncode

    def terminate(self) -> None:
        """Ask its reaper to end it and all that it has started."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


class Server:
    """A server of this process, for workers with these variables."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(  # noqa: S603 our own interpreter and module
            [sys.executable, "-P", "-m", "rlkernel_conformance.fork_server", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        theirs.close()
        self.loaded = False
        weakref.finalize(self, _end, self.process, self.requests)

    def ready(self, limit: float) -> bool:
        """Whether it forks workers, after waiting for its imports up to `limit` seconds."""
        if not self.loaded and select.select([self.requests], [], [], limit)[0]:
            self.loaded = bool(self.requests.recv(1))
        return self.loaded and self.process.poll() is None

    def fork(self, job: int, channel: int, case: int) -> Forked:
        """A worker with these descriptors.

        Raises:
            OSError: the server has ended or does not answer.
        """
        told, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self.requests, [b"1"], [job, channel, case, theirs.fileno()])
            return Forked(self, told)
        except OSError:
            told.close()
            raise


_lock: Final = threading.Lock()
_servers: Final[dict[tuple[int, frozenset[tuple[str, str]]], Server]] = {}  # the last one


def server(environ: dict[str, str], limit: float) -> Server | None:
    """The server of all workers with these variables; None where there is none within `limit` seconds."""
    if sys.platform != "linux":
        return None
    key = os.getpid(), frozenset((k, v) for k, v in environ.items() if k not in _OF_A_JOB)
    with _lock:
        found = _servers.get(key)
        if found is None:
            _servers.clear()
            found = _servers[key] = Server(environ)
        return found if found.ready(limit) else None


def _end(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    process.kill()
    process.wait()


def _fork_for_jobs(requests: socket.socket) -> tuple[int, int] | None:
    """Return in every worker-to-be, with its channel and its case; None in the server at its end."""
    ended, noted = socket.socketpair()
    ended.setblocking(False)
    noted.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(noted.fileno())
    living: dict[int, int] = {}  # process -> descriptor that gets its id and its exit status
    requests.send(b"1")
    while True:
        due, _, _ = select.select([requests, ended], [], [])
        if ended in due:
            ended.recv(1 << 12)
            _tell_ends(living)
        if requests not in due:
            continue
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
        if not descriptors:
            return None
        job, channel, case, told = descriptors
        if (child := os.fork()) == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(job, 0)
            for descriptor in (job, told, *living.values()):
                os.close(descriptor)
            for ours in (requests, ended, noted):
                ours.close()
            return channel, case
        living[child] = told
        _tell(told, child)
        for descriptor in (job, channel, case):
            os.close(descriptor)


def _tell_ends(living: dict[int, int]) -> None:
    for child in list(living):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            told = living.pop(child)
            _tell(told, os.waitstatus_to_exitcode(status))
            os.close(told)


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        os.write(told, number.to_bytes(_NUMBER, sys.byteorder, signed=True))


def _import_what_workers_need() -> None:
    import torch  # noqa: F401

    from rlkernel_conformance import clause_runner  # noqa: F401
    from rlkernel_conformance.clauses import MODULES, attacks_on

    for op in MODULES:
        attacks_on(op)


def _main(requests: socket.socket) -> None:
    gc.disable()
    guarded(_import_what_workers_need)  # a worker imports again what fails here, and reports it
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    gc.collect()
    gc.freeze()  # pages that a worker's collections do not touch stay shared
    if (found := _fork_for_jobs(requests)) is None:
        return
    process_reaper.fork_under_reaper()
    job: dict[str, Any] = json.load(sys.stdin)
    os.environ.clear()
    os.environ.update(job.pop("environ"))
    with contextlib.suppress(OSError):
        os.chdir(job.pop("folder"))
    sys.path[:] = job.pop("path")
    worker.main(*found, job)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
