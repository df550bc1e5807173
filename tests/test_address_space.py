"""A process of the suite may map so much more than it has mapped already."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from pathlib import Path

import pytest

from rlkernel_conformance import address_space


def _maps(held: int, bound: int, more: int) -> str:
    before = bytearray(held)
    address_space.bound(bound)
    try:
        bytearray(more)
    except MemoryError:
        return f"refused, {len(before)} held"
    return f"mapped, {len(before)} held"


@pytest.mark.parametrize(("more", "expected"), [(64 << 20, "mapped"), (512 << 20, "refused")])
def test_a_bound_counts_what_is_mapped_after_it_alone(more: int, expected: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_maps, (400 << 20, 256 << 20, more))
    assert found == f"{expected}, {400 << 20} held"


def _twice() -> bool:
    address_space.bound(256 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    address_space.bound(1 << 40)
    return resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_bound_never_widens_an_earlier_one() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_twice) is True


def _reserved_by_threads(count: int) -> int:
    """MiB that threads map which hold memory all at once."""
    address_space.bound(16 << 30)
    threading.stack_size(1 << 20)
    all_hold, pages = threading.Barrier(count + 1, timeout=30), Path("/proc/self/statm")

    def mapped() -> int:
        return int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize() >> 20

    def hold() -> None:
        held = [bytearray(1000) for _ in range(50)]
        all_hold.wait()
        all_hold.wait()
        del held

    before = mapped()
    threads = [threading.Thread(target=hold) for _ in range(count)]
    for thread in threads:
        thread.start()
    all_hold.wait()
    found = mapped() - before
    all_hold.wait()
    return found - count  # without their stacks


def test_threads_reserve_no_arena_each(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "64")  # as on a machine of eight processors
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_reserved_by_threads, (40,)) < 400
