"""Calls that work in pieces take what the board has."""

import pytest

from rlkernel_core.errors import ArgumentError
from rlkernel_core.host.memory import memory
from rlkernel_jetson.bundled import piece
from rlkernel_triton.launchers import in_pieces_of, piece_of
from rlkernel_triton.linear_logprob import workspace as head_workspace
from rlkernel_triton.linear_logprob.workspace import Size, plan, workspace
from rlkernel_triton.logprob.top_ids import BLOCK_BYTES
from rlkernel_triton.quant import dequantized
from tests.boards import KIB_8GB, meminfo, plant

MIB = 1 << 20
HEAD = Size(N=4096, D=2048, V=151936, item=2, tiles=8 * 149, support=False, parts=8)
# What works in pieces: how many bytes it takes, and how many of them there may be at once.
SIZES = ((BLOCK_BYTES, 1), (dequantized.PIECE, 2), (dequantized.DENSE_EXPERTS, 1))


@pytest.fixture
def board(tmp_path):
    """The files of a board with so much memory available, MiB."""
    return lambda available: plant(tmp_path, {"proc/meminfo": meminfo(KIB_8GB, available << 10, 100 << 10)})


@pytest.mark.parametrize(
    ("available", "expected"),
    [(6200, 512), (3300, 256), (2000, 64), (1300, 16), (100, 16)],  # of a budget of 5003, 2103, 803, 103, 0 MiB
)
def test_a_piece_is_an_eighth_of_the_budget_as_a_power_of_two(board, available, expected) -> None:
    root = board(available)
    assert piece(root) == memory(root).piece == expected * MIB


def test_with_memory_to_spare_nothing_is_cut(board) -> None:
    with in_pieces_of(piece(board(6200))):
        assert [piece_of(*size) for size in SIZES] == [most for most, _ in SIZES]


def test_with_little_memory_every_piece_fits(board) -> None:
    with in_pieces_of(piece(board(2000))):
        assert [piece_of(*size) * size[1] for size in SIZES] == [64 * MIB] * len(SIZES)


@pytest.mark.parametrize(("available", "block"), [(6200, 16384), (2000, 2048), (1300, 256)])
def test_a_head_is_cut_into_the_largest_blocks_that_a_piece_holds(board, available, block) -> None:
    most = piece(board(available))
    with in_pieces_of(most):
        found = plan("auto", None, HEAD)
    assert workspace(found, HEAD) <= most
    assert found == plan("recompute", most, HEAD)
    assert found.block == block


def test_a_head_that_no_piece_holds_takes_the_least_blocks_and_a_named_limit_is_kept(board) -> None:
    large = HEAD._replace(N=1 << 20)
    with in_pieces_of(piece(board(100))):
        assert plan("auto", None, large)[:2] == head_workspace.BLOCKS[-1]
        with pytest.raises(ArgumentError, match="max_workspace_bytes"):
            plan("auto", 1000, large)


def test_a_system_that_does_not_tell_leaves_sizes_as_they_are(tmp_path) -> None:
    assert piece(tmp_path / "nowhere") is None
    with in_pieces_of(None):
        assert [piece_of(*size) for size in SIZES] == [most for most, _ in SIZES]
        assert plan("auto", None, HEAD) == head_workspace.Plan(*head_workspace.BLOCKS[0], save=False)
