"""Calls that work in pieces take what the board has."""

from types import SimpleNamespace

import pytest

from rlkernel_core.errors import ArgumentError
from rlkernel_core.host.memory import memory
from rlkernel_jetson.pieces import SIZES, cut
from rlkernel_triton import head_workspace
from rlkernel_triton.aot.hosts import Host
from rlkernel_triton.aot.standin import triton
from rlkernel_triton.head_workspace import Size, workspace
from tests.boards import KIB_8GB, meminfo, plant

MIB = 1 << 20
HEAD = Size(N=4096, D=2048, V=151936, item=2, BN=128, support=False, ranks=1)


@pytest.fixture(scope="module")
def modules():
    """The modules of a host of their own, as files define them."""
    host = Host("pieces", triton(SimpleNamespace(target=lambda: "sm_87", device_type=lambda: "cpu")))
    names = [*(name for name, _, _ in SIZES), "rlkernel_triton.head_workspace"]
    return {name: dict(vars(host.module(name))) for name in names}


@pytest.fixture
def board(tmp_path, modules):
    """A host on a board with so much memory available, MiB."""

    def made(available):
        root = plant(tmp_path, {"proc/meminfo": meminfo(KIB_8GB, available << 10, 100 << 10)})
        fresh = {name: SimpleNamespace(**names) for name, names in modules.items()}
        return SimpleNamespace(module=fresh.__getitem__), root

    return made


@pytest.mark.parametrize(
    ("available", "piece"),
    [(6200, 512), (3300, 256), (2000, 64), (1300, 16), (100, 16)],  # of a budget of 5003, 2103, 803, 103, 0 MiB
)
def test_a_piece_is_an_eighth_of_the_budget_as_a_power_of_two(board, available, piece) -> None:
    host, root = board(available)
    assert cut(host, root) == memory(root).piece == piece * MIB


def test_with_memory_to_spare_nothing_is_cut(board, modules) -> None:
    host, root = board(6200)
    cut(host, root)
    now = {(name, size): getattr(host.module(name), size) for name, size, _ in SIZES}
    assert now == {(name, size): modules[name][size] for name, size, _ in SIZES}


def test_with_little_memory_every_piece_fits(board) -> None:
    host, root = board(2000)
    cut(host, root)
    assert [getattr(host.module(name), size) * parts for name, size, parts in SIZES] == [64 * MIB] * len(SIZES)


@pytest.mark.parametrize("available", [6200, 2000, 1300])
def test_a_head_is_cut_into_the_largest_blocks_that_a_piece_holds(board, available) -> None:
    host, root = board(available)
    piece = cut(host, root)
    plan = host.module("rlkernel_triton.head_workspace").plan
    found = plan("auto", None, HEAD)
    assert workspace(found, HEAD) <= piece
    assert found == head_workspace.plan("recompute", piece, HEAD)
    assert found.block == {6200: 16384, 2000: 2048, 1300: 256}[available]


def test_a_head_that_no_piece_holds_takes_the_least_blocks_and_a_named_limit_is_kept(board) -> None:
    host, root = board(100)
    cut(host, root)
    plan, large = host.module("rlkernel_triton.head_workspace").plan, HEAD._replace(N=1 << 20)
    assert plan("auto", None, large)[:2] == head_workspace.BLOCKS[-1]
    with pytest.raises(ArgumentError, match="max_workspace_bytes"):
        plan("auto", 1000, large)


def test_a_system_that_does_not_tell_leaves_sizes_as_they_are(board, tmp_path, modules) -> None:
    host, _ = board(100)
    assert cut(host, tmp_path / "nowhere") is None
    assert all(getattr(host.module(name), size) == modules[name][size] for name, size, _ in SIZES)
