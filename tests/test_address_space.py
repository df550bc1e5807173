"""A process of the suite may map so much more than it has mapped already."""

from __future__ import annotations

import multiprocessing
import resource

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
