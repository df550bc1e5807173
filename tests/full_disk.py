"""A disk that is full after so many bytes of a file: the kernel refuses the rest of every write of this process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No file of this process grows beyond `after` bytes; Python ignores SIGXFSZ, so a write fails with EFBIG."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
