"""A bound on the address space that a process maps from now on.

What it has mapped before is not counted: a build of torch with GPU code maps gigabytes, one for CPUs a fraction of one.
"""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

_ARENA_MAX: Final = -8  # of mallopt, in glibc's malloc.h
_ARENAS: Final = 4


def bound(more: int) -> None:
    """Let this process and its children map at most so many bytes more than it has mapped by now.

    Threads share four of glibc's arenas: each reserves 64 MiB, and there may be eight of them for every processor.
    """
    with suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
