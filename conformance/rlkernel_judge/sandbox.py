"""What the operating system lets us take away from judged code, found out by trying, never by assuming.

Levels, strongest first:
    namespaces  user, mount, network, process, IPC and host name spaces of its own: no network, everything read-only
                but a private memory file system, no device but GPUs, no other process to be seen, no capabilities
    bubblewrap  the same through `bwrap`, where plain users may not make namespaces but it may
    limits      what holds at every level, alone: the code can read what its user can

At every level: no sockets and no other call of `syscall_filter`, no writes outside the private folder (`write_rules`),
limits on CPU time, memory, file size, processes and open files, no core dumps, an environment that holds nothing of
ours, and a supervisor that leaves nothing running (`supervisor`); where the judge runs as root, the code runs as nobody
if nobody can run our interpreter. What is in force is measured inside the judged process before the candidate is loaded
(`facts`) and reported with the verdict.

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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import ConfigError
from rlkernel_judge import supervisor, syscall_filter, write_rules
from rlkernel_judge.private_folder import NOBODY, private_folder

LEVELS: Final = ("namespaces", "bubblewrap", "limits")
_OWN_NET: Final = Path("/proc/self/ns/net")
_PROBE_S: Final = 20.0
_KILLING_S: Final = 15.0  # beyond what a supervisor takes
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

# Devices that judged code may open, in /dev: those that hold no data, and GPUs. Not `zero`, which maps as memory that
# no process has to itself.
_DEVICES: Final = (
    "null", "full", "random", "urandom", "nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "kfd", "dri/*",
    "nvhost*", "nvmap", "nvgpu/*/*", "nvsciipc", "dxg",
)  # fmt: skip

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAP_VERSION_3: Final = 0x20080522


@dataclass(frozen=True)
class Limits:
    """What one judged process and all that it starts may use."""

    cpu_s: int = 600
    memory: int = 16 << 30  # bytes in memory, of all its processes together
    address_space: int = 16 << 30  # of one process; GPU processes map far more than they use
    file_bytes: int = 256 << 20  # of one file, and of the private file system
    gpu: bool = False  # what its driver cannot do without stays open; no bound on the address space
    processes: int = 256 + 4 * (os.cpu_count() or 1)  # threads too


@dataclass(frozen=True)
class Sandbox:
    """How judged processes are started on this machine."""

    level: str
    as_nobody: bool

    def command(self, module: str, scratch: Path, *arguments: str, limits: Limits) -> list[str]:
        """Arguments that start a module in the sandbox; it calls `enter` first."""
        python = [sys.executable, "-m", module, self.level, str(scratch), *arguments]
        if self.level != "bubblewrap":
            return python
        devices = [word for path in devices_here() for word in ("--dev-bind", path, path)]
        return [
            shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", str(NOBODY),
            "--gid", str(NOBODY), "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--ro-bind", "/", "/",
            "--dev", "/dev", *devices, "--ro-bind", "/dev/null", "/dev/zero", "--remount-ro", "/dev",
            "--proc", "/proc", *([] if limits.gpu else ["--remount-ro", "/proc"]), "--size", str(limits.file_bytes),
            "--tmpfs", str(scratch), "--chdir", str(scratch), "--", *python,
        ]  # fmt: skip

    def start(
        self, module: str, scratch: Path, *arguments: str, limits: Limits, keep: tuple[int, ...] = (), **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a module in the sandbox under a supervisor, in a session of its own, with its output thrown away.

        The process that is returned is the supervisor: its standard output says why it ended what it started.
        """
        bounds = map(str, (os.getpid(), limits.memory, limits.processes, limits.file_bytes))
        owner = str(NOBODY) if self.as_nobody else ""
        return subprocess.Popen(  # noqa: S603 our own interpreter and modules
            [
                sys.executable, "-I", "-S", supervisor.__file__, *bounds, owner, str(scratch.parent),
                *self.command(module, scratch, *arguments, limits=limits),
            ],
            pass_fds=keep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=environment(scratch, **more),
            start_new_session=True,
        )  # fmt: skip


def devices_here() -> list[str]:
    """Devices of this machine that judged code may open."""
    return sorted(str(path) for pattern in _DEVICES for path in Path("/dev").glob(pattern) if path.is_char_device())


def environment(scratch: Path, **more: str) -> dict[str, str]:
    """The whole environment of a judged process."""
    kept = {k: os.environ[k] for k in _PASSED_ON if k in os.environ}
    path = os.pathsep.join(p for p in (*sys.path, kept.get("PYTHONPATH", "")) if p)  # the folder we started in, too
    homes = {name: str(scratch) for name in _FOLDERS}
    homes["JUDGE_NET"] = str(_OWN_NET.readlink())
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "USER": "nobody", **homes, **more}


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a judged process and whatever it started; again does nothing."""
    with process:  # closes its output
        process.terminate()  # the supervisor ends what is below it
        try:
            process.wait(_KILLING_S)
        except subprocess.TimeoutExpired:
            process.kill()


def cause(process: subprocess.Popen[bytes]) -> str:
    """Why the supervisor of an ended process stopped it: memory, tasks, disk, stopped; "" where it ended by itself."""
    return process.stdout.read().decode() if process.stdout else ""


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent is gone, however that went; at once where that is no longer `parent`."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@cache
def choose(wanted: str = "auto") -> Sandbox:
    """The strongest sandbox that works on this machine, or the wanted one.

    Raises:
        ConfigError: no such level, or it does not work here.
    """
    if wanted not in {"auto", *LEVELS}:
        raise ConfigError(f"sandbox {wanted!r}: choose auto, {', '.join(LEVELS)}")
    for as_nobody in (True, False) if os.geteuid() == 0 and _nobody_can_run_us() else (False,):
        for level in LEVELS if wanted == "auto" else (wanted,):
            found = Sandbox(level, as_nobody)
            if _works(found):
                return found
    raise ConfigError(f"sandbox {wanted!r} does not work on this machine; --sandbox auto takes the strongest that does")


def _nobody_can_run_us() -> bool:
    try:
        return subprocess.run([sys.executable, "-c", ""], user=NOBODY, check=False).returncode == 0
    except OSError:
        return False


def weaker(found: Sandbox) -> Sandbox | None:
    """The next level that works, for a device that cannot be used in this one."""
    rest = (Sandbox(level, found.as_nobody) for level in LEVELS[LEVELS.index(found.level) + 1 :])
    return next((c for c in rest if _works(c)), None)


def _works(candidate: Sandbox) -> bool:
    """Start a process in the sandbox and ask it what it can do."""
    if candidate.level == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    with private_folder(for_nobody=candidate.as_nobody) as scratch:
        ours, theirs = socket.socketpair()
        with ours:
            try:
                process = candidate.start(
                    __name__, scratch, str(theirs.fileno()), limits=Limits(), keep=(theirs.fileno(),)
                )
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
                kill(process)
    if candidate.level == "limits":
        return bool(found)
    return bool(found) and not any(found[x] for x in ("network", "writes_outside", "writes_proc", "capabilities"))


def facts(scratch: Path) -> dict[str, bool]:
    """What this process can still do, each tried."""
    return {
        "network": _can_reach_the_network(),
        "writes_outside": _can_write(scratch.parent),
        "writes_inside": _can_write(scratch),
        "writes_proc": any(map(_can_open_for_writing, ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"))),
        "capabilities": int(_status("CapEff"), 16) != 0,
        "root": os.geteuid() == 0,
        "root_outside": _is_root_outside(),
        "own_processes": os.getpid() <= 3,  # first of its process space, or behind bubblewrap's own
        "calls_filtered": _status("Seccomp") == "2",
        "memory_cgroup": supervisor.CGROUP_VARIABLE in os.environ,  # else the supervisor adds up
    }


def _is_root_outside() -> bool:
    """Whether the kernel sees this user as root: what root owns it may open, for reading."""
    inside, outside, _ = (int(n) for n in Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3])
    return os.geteuid() - inside + outside == 0


def _can_reach_the_network() -> bool:
    """Whether a packet could leave, or a server of this machine be reached; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            if str(_OWN_NET.readlink()) == os.environ.get("JUDGE_NET"):
                return True
            s.connect(("192.0.2.1", 9))
    except OSError:
        return False
    return True


def _can_open_for_writing(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY))
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
    end_with_parent()
    devices = devices_here()
    if level == "namespaces":
        _enter_namespaces(scratch, limits, devices)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, 4096),
        (resource.RLIMIT_NPROC, limits.processes + _tasks()),
        *(() if limits.gpu else ((resource.RLIMIT_AS, limits.address_space),)),
    ):
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
    _drop_capabilities()
    write_rules.restrict(scratch, devices, gpu=limits.gpu)
    syscall_filter.install(gpu=limits.gpu)


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


def _enter_namespaces(scratch: Path, limits: Limits, devices: list[str]) -> None:
    """Into spaces of our own: the file system read-only but for memory at `scratch`, no network, process number 2."""
    libc = _libc()
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_PID | _NEW_IPC | _NEW_UTS))
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1", encoding="ascii")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _set_mount(libc, "/", add=_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, recursive=True)
    for device in devices:  # each a mount of its own, on which devices may be opened
        _check(libc.mount(device.encode(), device.encode(), None, _MS_BIND, None))
        _set_mount(libc, device, clear=_ATTR_NODEV)
    size = f"size={limits.file_bytes},mode=0700".encode()
    _check(libc.mount(b"tmpfs", str(scratch).encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, size))
    _wait_for_child()
    # Refused in some containers: then the old list of processes stays to be read, and none of them can be reached.
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    mounted = libc.mount(b"proc", b"/proc", b"proc", flags if limits.gpu else flags | _MS_RDONLY, None) == 0
    if mounted and limits.gpu:  # read-only but for what processes write about themselves
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() and not path.is_symlink():
                _check(libc.mount(str(path).encode(), str(path).encode(), None, _MS_BIND, None))
                _set_mount(libc, str(path), add=_ATTR_RDONLY)
    os.chdir(scratch)
    _wait_for_child()  # the first process of a space is deaf to its own signals: it only waits


def _set_mount(libc: Any, path: str, *, add: int = 0, clear: int = 0, recursive: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(add, clear, 0, 0)  # struct mount_attr: set, clear, propagation, userns
    flags = _AT_RECURSIVE if recursive else 0
    _check(libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, ctypes.sizeof(attributes)))


def _wait_for_child() -> None:
    """Go on as a child; the parent waits for it and ends as it ends."""
    if child := os.fork():
        os.closerange(3, 4096)
        os._exit(_exit_code(_reaped(child)))
    end_with_parent()


def _reaped(child: int) -> int:
    """Status of a child, with all orphans reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _exit_code(status: int) -> int:
    """A status as shells report it: 128 and the number of the signal."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


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
