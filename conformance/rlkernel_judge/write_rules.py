"""Landlock: judged code writes in its private folder and to its devices alone, and reaches no process but its own.

The kernel has it from 5.13 on, for every user, in containers too, also where plain users may not make name spaces. It
forbids making, changing and removing files elsewhere, reading and writing the memory of processes outside, and from
Linux 6.12 on signals to them. CUDA names its threads in /proc as it starts, and fails where it may not: where a GPU is
used, a process may write there about its own threads, and truncate before. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
_GIVE_VERSION, _PATH_BENEATH = 1, 1
# linux/landlock.h: rights by the version of the interface that brought them
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES: Final = {
    1: _WRITE_FILE | sum(1 << bit for bit in range(4, 13)),  # remove and make directories, files, sockets, links
    2: 1 << 13,  # move between directories
    3: _TRUNCATE,
}
_SCOPES: Final = {6: 0b11}  # abstract Unix sockets; signals


def restrict(folder: Path, devices: Iterable[str], *, gpu: bool) -> bool:
    """Forbid this process and its children everything else from now on; False where the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _GIVE_VERSION)
    if version < 1:
        return False
    changes = sum(bits for since, bits in _CHANGES.items() if since <= version)
    scopes = sum(bits for since, bits in _SCOPES.items() if since <= version)
    attributes = struct.pack("QQQ", changes, 0, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        threads = {"/proc/self/task": changes & (_WRITE_FILE | _TRUNCATE)} if gpu else {}
        for path, allowed in {str(folder): changes, **dict.fromkeys(devices, _WRITE_FILE), **threads}.items():
            with suppress(FileNotFoundError):
                at = os.open(path, os.O_PATH | os.O_CLOEXEC)
                libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, at), 0)
                if not path.startswith("/proc"):  # the kernel forgets a rule there once nobody has the folder open
                    os.close(at)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
