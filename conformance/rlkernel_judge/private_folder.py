"""The folder of one judged process: empty, its own, removed even where its judge was killed. Standard library only."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

NOBODY: Final = 65534
_PREFIX: Final = "rlkernel-judge-"


@contextmanager
def private_folder(*, for_nobody: bool) -> Iterator[Path]:
    """An empty folder, removed afterwards; in namespaces a memory file system of the judged process covers it."""
    remove_leftovers()
    outer = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    lock = os.open(outer, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held while this judge lives
    outer = outer.rename(outer.with_name(outer.name[1:]))
    scratch = outer / "scratch"
    scratch.mkdir()
    if for_nobody:
        for path in (outer, scratch):
            os.chown(path, NOBODY, NOBODY)
    try:
        yield scratch
    finally:
        shutil.rmtree(outer, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> None:
    """Remove the folders of judges that are gone: those of this user, or of nobody, that no process has locked."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = left.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), NOBODY}:
                continue
            lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
