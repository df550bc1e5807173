"""What the operating system lets us take away from judged code, found out by trying, never by assuming.

Levels, strongest first:
    namespaces  user, mount, network, process, IPC and host name spaces of its own: no network, everything read-only
                but a private memory file system, no other process visible to signals, no capabilities
    bubblewrap  the same through `bwrap`, where plain users may not make namespaces but it may
    limits      resource limits alone: the code can read, write and reach what its user can

At every level: limits on CPU time, address space, file size, processes and open files, no core dumps, an environment
that holds nothing of ours; where the judge runs as root, the code runs as nobody. What is in force is measured inside
the judged process before the candidate is loaded (`facts`) and reported with the verdict.

Reading stays possible: files that the user may read can be read. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

from rlkernel_core.errors import ConfigError

LEVELS: Final = ("namespaces", "bubblewrap", "limits")
NOBODY: Final = 65534
_OWN_NET: Final = Path("/proc/self/ns/net")
_PROBE_S: Final = 20.0
_POLL_S: Final = 0.02
_KILLING_S: Final = 10.0
# Variables that judged code may see: where things are, how many threads, which devices. No token, no key, no home.
_PASSED_ON: Final = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "ROCM_PATH",
    "HIP_VISIBLE_DEVICES", "PYTHONPATH", "CC", "CXX", "TRITON_INTERPRET", "TORCH_CUDA_ARCH_LIST",
)  # fmt: skip

# Variables that name folders to write to: all the private one.
_FOLDERS: Final = (
    "HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "JUDGE_SCRATCH",
)  # fmt: skip

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAP_VERSION_3: Final = 0x20080522


@dataclass(frozen=True)
class Limits:
    """What one judged process may use."""

    cpu_s: int = 600
    memory: int = 16 << 30  # address space in bytes; 0: none, for GPU processes map far more than they use
    file_bytes: int = 256 << 20  # of one file, and of the private file system
    processes: int = 256  # threads too, on top of those its user has already


@dataclass(frozen=True)
class Sandbox:
    """How judged processes are started on this machine."""

    level: str
    as_nobody: bool

    def command(self, module: str, scratch: Path, *arguments: str) -> list[str]:
        """Arguments that start a module in the sandbox; it calls `enter` first."""
        python = [sys.executable, "-m", module, self.level, str(scratch), *arguments]
        if self.level != "bubblewrap":
            return python
        return [
            "bwrap", "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL",
            "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev",
            "--proc", "/proc", "--tmpfs", str(scratch), "--chdir", str(scratch), "--", *python,
        ]  # fmt: skip

    def start(
        self, module: str, scratch: Path, *arguments: str, keep: tuple[int, ...] = (), **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a module in the sandbox, in a session of its own, with its output thrown away."""
        return subprocess.Popen(  # noqa: S603 our own interpreter and module
            self.command(module, scratch, *arguments),
            pass_fds=keep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=environment(scratch, **more),
            start_new_session=True,
            user=NOBODY if self.as_nobody else None,
            group=NOBODY if self.as_nobody else None,
            extra_groups=[] if self.as_nobody else None,
        )


def environment(scratch: Path, **more: str) -> dict[str, str]:
    """The whole environment of a judged process."""
    kept = {k: os.environ[k] for k in _PASSED_ON if k in os.environ}
    path = os.pathsep.join(p for p in (*sys.path, kept.get("PYTHONPATH", "")) if p)  # the folder we started in, too
    homes = {name: str(scratch) for name in _FOLDERS}
    homes["JUDGE_NET"] = str(_OWN_NET.readlink())
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "USER": "nobody", **homes, **more}


@contextmanager
def private_folder(box: Sandbox) -> Iterator[Path]:
    """An empty folder for one judged process, removed afterwards; in namespaces its memory file system covers it."""
    outer = Path(tempfile.mkdtemp(prefix="rlkernel-judge-"))
    scratch = outer / "scratch"
    scratch.mkdir()
    if box.as_nobody:
        for path in (outer, scratch):
            os.chown(path, NOBODY, NOBODY)
    try:
        yield scratch
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def kill(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """End a judged process and whatever it started, also what left its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        process.wait()
    until = time.monotonic() + _KILLING_S
    while (left := processes_of(scratch)) and time.monotonic() < until:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def processes_of(scratch: Path) -> list[int]:
    """Processes that run with this private folder, by their environment."""
    marker, found = f"JUDGE_SCRATCH={scratch}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@cache
def choose(wanted: str = "auto") -> Sandbox:
    """The strongest sandbox that works on this machine, or the wanted one.

    Raises:
        ConfigError: no such level, or it does not work here.
    """
    if wanted not in {"auto", *LEVELS}:
        raise ConfigError(f"sandbox {wanted!r}: choose auto, {', '.join(LEVELS)}")
    for as_nobody in (True, False) if os.geteuid() == 0 else (False,):
        for level in LEVELS if wanted == "auto" else (wanted,):
            found = Sandbox(level, as_nobody)
            if _works(found):
                return found
    raise ConfigError(f"sandbox {wanted!r} does not work on this machine; --sandbox auto takes the strongest that does")


def weaker(found: Sandbox) -> Sandbox | None:
    """The next level that works, for a device that cannot be used in this one."""
    rest = (Sandbox(level, found.as_nobody) for level in LEVELS[LEVELS.index(found.level) + 1 :])
    return next((c for c in rest if _works(c)), None)


def _works(candidate: Sandbox) -> bool:
    """Start a process in the sandbox and ask it what it can do."""
    if candidate.level == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    with private_folder(candidate) as scratch:
        ours, theirs = socket.socketpair()
        with ours:
            try:
                process = candidate.start(__name__, scratch, str(theirs.fileno()), keep=(theirs.fileno(),))
            except OSError:  # nobody may not read our interpreter
                return False
            finally:
                theirs.close()
            ours.settimeout(_PROBE_S)
            try:
                found: Mapping[str, bool] = json.loads(ours.recv(4096) or b"{}")
            except (OSError, ValueError):
                found = {}
            finally:
                kill(process, scratch)
    if candidate.level == "limits":
        return bool(found)
    return bool(found) and not (found["network"] or found["writes_outside"] or found["capabilities"])


def facts(scratch: Path) -> dict[str, bool]:
    """What this process can still do, each tried."""
    return {
        "network": _can_route("192.0.2.1") or str(_OWN_NET.readlink()) == os.environ.get("JUDGE_NET"),
        "writes_outside": _can_write(scratch.parent),
        "writes_inside": _can_write(scratch),
        "capabilities": int(_status("CapEff"), 16) != 0,
        "root": os.geteuid() == 0,
        "own_processes": os.getpid() <= 2,  # first of its process space, or second, behind bubblewrap's own
        "processes_limited": not _is_root_outside(),
    }


def _is_root_outside() -> bool:
    """Whether the kernel sees this user as root, for whom a limit on processes does not count."""
    inside, outside, _ = (int(n) for n in Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3])
    return os.geteuid() - inside + outside == 0


def _can_route(address: str) -> bool:
    """Whether a packet could leave for an address; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))
    except OSError:
        return False
    return True


def _can_write(folder: Path) -> bool:
    try:
        (folder / ".probe").write_bytes(b"x")
        (folder / ".probe").unlink()
    except OSError:
        return False
    return True


def _status(key: str) -> str:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{key}:"))


def enter(level: str, scratch: Path, limits: Limits) -> None:
    """Give up what the level takes away; in namespaces the caller goes on as another process, in a space of its own.

    Raises:
        OSError: the kernel refuses.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no judge, no judged process
    if level == "namespaces":
        _enter_namespaces(scratch, limits)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, 4096),
        (resource.RLIMIT_NPROC, limits.processes + _tasks()),
        *(((resource.RLIMIT_AS, limits.memory),) if limits.memory else ()),
    ):
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
    _drop_capabilities()


def _tasks() -> int:
    """Threads that this user has already: the kernel's limit counts them too."""
    me, total = os.getuid(), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == me:
                total += len(list((entry / "task").iterdir()))
        except OSError:
            continue
    return total


def _enter_namespaces(scratch: Path, limits: Limits) -> None:
    """Into spaces of our own: the file system read-only but for memory at `scratch`, no network, process number 1."""
    libc = _libc()
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_PID | _NEW_IPC | _NEW_UTS))
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1", encoding="ascii")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    read_only = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)  # struct mount_attr: set, clear, propagation, userns
    _check(libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.sizeof(read_only)))
    size = f"size={limits.file_bytes},mode=0700".encode()
    _check(libc.mount(b"tmpfs", str(scratch).encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, size))
    if first := os.fork():
        _limit_processes(first, limits.processes)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Refused in some containers: then the old list of processes stays to be read, and none of them can be reached.
    libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV, None)
    os.chdir(scratch)
    if second := os.fork():  # the first process of a space is deaf to its own signals: it only waits
        os.closerange(3, 4096)
        os._exit(_exit_code(_reaped(second)))


def _reaped(child: int) -> int:
    """Status of a child, with all orphans reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _exit_code(status: int) -> int:
    """A status as shells report it: 128 and the number of the signal."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _limit_processes(child: int, most: int) -> NoReturn:
    """Outside the new space: count its processes, for the kernel's limit does not bind root, and end as it ends."""
    os.closerange(3, 4096)
    before, (done, status) = _process_count(), (0, 0)
    while not done:
        if _process_count() > before + most:  # the list is that of the new space once it is mounted, and shorter
            os.kill(child, signal.SIGKILL)  # the first process of a space takes all others with it
        time.sleep(_POLL_S)
        done, status = os.waitpid(child, os.WNOHANG)
    os._exit(_exit_code(status))


def _process_count() -> int:
    return sum(entry.name.isdigit() for entry in Path("/proc").iterdir())


def _drop_capabilities() -> None:
    libc = _libc()
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # beyond the last one it fails, and there is none to drop
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{errno.errorcode.get(number, number)}: {os.strerror(number)}")


def _main(level: str, scratch: str, descriptor: str) -> None:
    """The probe: enter, and report what is left."""
    enter(level, Path(scratch), Limits())
    with socket.socket(fileno=int(descriptor)) as to:
        to.sendall(json.dumps(facts(Path(scratch))).encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
