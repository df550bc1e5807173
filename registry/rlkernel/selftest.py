"""One self-test of a backend, in this process: run it, and say in one line how it went.

`probe` starts a process for it, which writes its verdict as JSON to a file of its own: whatever a plugin prints cannot
be taken for it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

from rlkernel.discover import brief, guarded, load_target
from rlkernel_core.reasons import Reason

CODE: Final = "from rlkernel.selftest import main; main()"  # what the process runs, with file, target and device
_LONGEST: Final = 500  # characters of an error that are worth reading


class _Running:
    """Self-tests under way in this process."""

    count = 0


def running() -> bool:
    """Whether a self-test is under way: one that calls an operator starts no other."""
    return _Running.count > 0


def verdict(target: str, device: str) -> dict[str, Any]:
    """Run a self-test: `ok`, or else `code` and `error`."""
    run = load_target(target)
    if isinstance(run, Reason):
        return {"ok": False, "code": "failed", "error": run.text[:_LONGEST]}
    _Running.count += 1
    try:
        _, error = guarded(lambda: run(device))
    finally:
        _Running.count -= 1
    return {"ok": True} if error is None else {"ok": False, "code": "failed", "error": brief(error)[:_LONGEST]}


def main() -> None:
    """The process of a self-test; it ends at once, whatever threads the self-test has left."""
    file, target, device = sys.argv[1:]
    os.write(int(file), json.dumps(verdict(target, device)).encode())
    os._exit(0)
