"""Backends that crash their process, hang, fill its memory, or start others."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.hostile import hostile
from rlkernel_conformance.leak_check import CLAUSE
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_torch.logprob import logprob as right

_KEPT: Final[list[Any]] = []
_FOREVER_S: Final = 600  # longer than anybody waits


@hostile("segfault", clauses=("LP-05", "LP-06"))
def reads_nowhere(call: LogprobCall) -> Any:
    """Reads address 0."""
    ctypes.string_at(0)


@hostile("abort")
def aborts(call: LogprobCall) -> Any:
    """Calls abort, as a failed assertion in C++ does."""
    os.abort()


@hostile("timeout", limit_s=4.0)
def hangs(call: LogprobCall) -> Any:
    """Never returns."""
    while True:
        time.sleep(0.1)


@hostile("out_of_memory")
def fills_memory(call: LogprobCall) -> Any:
    """Asks for more and more memory."""
    while True:  # address space: the pages are never touched
        _KEPT.append(np.empty(1 << 31, np.uint8))


@hostile("protocol_error")
def leaves(call: LogprobCall) -> Any:
    """Ends the process with status 0, as a run that succeeds does."""
    os._exit(0)


@hostile("protocol_error")
def raises_system_exit(call: LogprobCall) -> Any:
    """Raises SystemExit with status 0."""
    sys.exit(0)


@hostile("protocol_error")
def raises_keyboard_interrupt(call: LogprobCall) -> Any:
    """Raises KeyboardInterrupt, which no `except Exception` catches."""
    raise KeyboardInterrupt


@hostile("segfault")
def hides_behind_a_child(call: LogprobCall) -> Any:
    """Leaves a child in a session of its own, which holds every descriptor open, and crashes."""
    _daemon()
    ctypes.string_at(0)


@hostile("leak", clauses=(CLAUSE.id,))
def leaves_a_child(call: LogprobCall) -> Any:
    """Every call forks a child that survives it, in a session of its own."""
    _daemon()
    return right(call)


@hostile("leak", clauses=(CLAUSE.id,))
def leaves_a_thread(call: LogprobCall) -> Any:
    """Every call starts a thread that does not end."""
    threading.Thread(target=time.sleep, args=(_FOREVER_S,), daemon=True).start()
    return right(call)


@hostile("leak", clauses=(CLAUSE.id,))
def leaves_a_file_open(call: LogprobCall) -> Any:
    """Every call opens a file and forgets it."""
    os.open(os.devnull, os.O_RDONLY)
    return right(call)


@hostile("leak", clauses=(CLAUSE.id,))
def keeps_every_result(call: LogprobCall) -> Any:
    """Every call leaves 64 KiB of memory behind."""
    _KEPT.append(torch.zeros(1 << 14))
    return right(call)


def _daemon() -> None:
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(_FOREVER_S)
        os._exit(0)
    os.wait()
