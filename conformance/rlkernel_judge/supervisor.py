"""Starts one judged process, watches what it and its children use, and ends all of them.

python supervisor.py JUDGE MEMORY TASKS DISK OWNER FOLDER COMMAND...     started by `sandbox.Sandbox.start` alone

It stays outside every name space and is the subreaper of what it starts: a process that forks twice, begins a session
of its own or clears its environment is still a descendant of this one. All of them end when the judged process ends,
when the judge ends it (SIGTERM), when the judge is gone, however it went, and when together they take more memory,
tasks or disk than they may. Where cgroups of version 2 can be written the kernel counts memory; elsewhere this process
adds it up.

On standard output it leaves a word that says why it ended them; its exit status is that of the judged process.
Standard library only; run by its path, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUP_VARIABLE: Final = "JUDGE_CGROUP"
_POLL_S: Final = 0.05
_KILLING_S: Final = 10.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# What the kernel may hold for one open pipe or socket that no process has in its own memory: a socket buffer in each
# direction (net.core.rmem_default) and a little.
_PER_DESCRIPTOR: Final = 256 << 10
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKING: Final = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Bounds:
    """What a judged process and all its descendants may use together."""

    memory: int  # bytes
    tasks: int  # processes and threads
    disk: int  # bytes, in the private folder; a memory file system there has its own bound


def main(judge: int, bounds: Bounds, owner: int | None, folder: Path, command: list[str]) -> int:
    """Run a command to its end, or to that of its judge; its exit status as shells report it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    with cgroup(bounds) as group:
        child = os.fork()
        if child == 0:
            _become(command, owner, group, libc)
        os.closerange(3, 4096)
        why, status = "", None
        while status is None and not why:
            woken = signal.sigtimedwait(_WAKING, _POLL_S)
            status = _reaped(child)
            if status is not None:
                break
            if os.getppid() != judge:
                why = "gone"
            elif woken is not None and woken.si_signo != signal.SIGCHLD:
                why = "stopped"
            else:
                why = excess(bounds, folder, counted=group is not None)
        killed = _end_all(child, group)
        status = killed if status is None else status
        if not why and group is not None and _events(group / "memory.events").get("oom_kill", 0):
            why = "memory"
    if os.getppid() != judge:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.write(1, why.encode())
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _become(command: list[str], owner: int | None, group: Path | None, libc: ctypes.CDLL) -> None:
    """Turn a fork into the command: in its cgroup, as its user, first in line when memory runs out."""
    try:
        if group is not None:
            (group / "cgroup.procs").write_text("0", encoding="ascii")
            os.environ[CGROUP_VARIABLE] = str(group)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        if owner is not None:
            os.setgroups([])
            os.setresgid(owner, owner, owner)
            os.setresuid(owner, owner, owner)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.execv(command[0], command)  # noqa: S606 our own interpreter, or bwrap
    finally:
        os._exit(127)


def excess(bounds: Bounds, folder: Path, *, counted: bool) -> str:
    """Which bound the descendants of this process break: tasks, disk, memory, or "" for none.

    Memory is not looked at where the kernel has `counted` it.
    """
    tree = descendants(os.getpid())
    if sum(tasks for _, tasks in tree) > bounds.tasks:
        return "tasks"
    if _on_disk(str(folder)) > bounds.disk:
        return "disk"
    if counted:
        return ""
    pids = [pid for pid, _ in tree]
    held = _held_by_kernel(pids)
    # Resident sizes count shared pages once for each process: an upper bound that is cheap to read.
    if held + sum(map(_resident, pids)) > bounds.memory and held + sum(map(_share, pids)) > bounds.memory:
        return "memory"
    return ""


def descendants(root: int) -> list[tuple[int, int]]:
    """Processes below one, each with its number of threads; what starts or ends meanwhile may be missing."""
    listed = Path(f"/proc/{root}/task/{root}/children").exists()
    parents = {} if listed else children_by_parent()
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        try:
            threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            threads = []
        if pid != root and threads:
            found.append((pid, len(threads)))
        waiting += _listed_children(pid, threads) if listed else parents.get(pid, [])
    return found


def _listed_children(pid: int, threads: list[str]) -> list[int]:
    found: list[int] = []
    for thread in threads:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def children_by_parent() -> dict[int, list[int]]:
    """The same from every process's own words, for kernels that list no children."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    return 0


def _share(pid: int) -> int:
    """Bytes of a process's memory, a page that n processes map counted as 1/n; all of it where that cannot be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return _resident(pid)


def _held_by_kernel(pids: list[int]) -> int:
    """The most that the kernel may hold for open pipes and sockets, and what it holds for memory files."""
    total, memory_files = 0, {}
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                total += _PER_DESCRIPTOR
                with suppress(OSError):
                    if str(entry.readlink()).startswith("/memfd:"):
                        found = entry.stat()
                        memory_files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return total + sum(memory_files.values())


def _on_disk(folder: str) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                below = entry.is_dir(follow_symlinks=False)
                total += _on_disk(entry.path) if below else entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _reaped(child: int) -> int | None:
    """Collect what has ended; the status of the child, if it has."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                found = ended[1]
    return found


def _end_all(child: int, group: Path | None) -> int:
    """Kill every descendant until none is left; the status of the child."""
    status, until = signal.SIGKILL.value, time.monotonic() + _KILLING_S
    while time.monotonic() < until:
        if group is not None:
            with suppress(OSError):
                (group / "cgroup.kill").write_text("1", encoding="ascii")
        for pid, _ in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            ended, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # orphans come to this process: without children it has no descendants
            break
        if ended == child:
            status = found
        if not ended:
            time.sleep(0.002)
    return status


@contextmanager
def cgroup(bounds: Bounds, root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[Path | None]:
    """A cgroup with these bounds, removed afterwards; None where none can be made.

    It is made below the nearest group above this process that hands the memory controller to its children: a group
    that holds processes itself may not.
    """
    found = None
    with suppress(OSError, StopIteration):
        line = next(x for x in own.read_text(encoding="ascii").splitlines() if x.startswith("0::"))
        at = root / line[3:].strip("/")
        for folder in (at, *at.parents):
            if folder.is_relative_to(root) and (made := _made(folder, bounds)):
                found = made
                break
    try:
        yield found
    finally:
        if found is not None:
            with suppress(OSError):
                found.rmdir()


def _made(folder: Path, bounds: Bounds) -> Path | None:
    group = folder / f"rlkernel-judge-{os.getpid()}"
    try:
        if "memory" not in (folder / "cgroup.subtree_control").read_text(encoding="ascii").split():
            return None
        group.mkdir()
    except OSError:
        return None
    try:
        (group / "memory.max").write_text(str(bounds.memory), encoding="ascii")
        (group / "memory.oom.group").write_text("1", encoding="ascii")
        with suppress(OSError):  # no swap in this kernel
            (group / "memory.swap.max").write_text("0", encoding="ascii")
    except OSError:
        group.rmdir()
        return None
    return group


def _events(file: Path) -> dict[str, int]:
    with suppress(OSError):
        pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
        return {name: int(count) for name, count in pairs}
    return {}


if __name__ == "__main__":
    parent, memory, tasks, disk, user, at, *rest = sys.argv[1:]
    bounds = Bounds(int(memory), int(tasks), int(disk))
    sys.exit(main(int(parent), bounds, int(user) if user else None, Path(at), rest))
