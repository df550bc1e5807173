"""lm_head_sample on Triton: where the head is cut changes no bit; what it draws: test_clauses.py."""

import pytest
import torch

from rlkernel_core.spec import OPERATORS
from rlkernel_triton.lm_head_sample import head
from rlkernel_triton.lm_head_sample import launch as head_sampling
from rlkernel_triton.lm_head_sample.launch import ROOM, TILE, slabs

lm_head_sample = OPERATORS["lm_head_sample"].taking_arguments(head_sampling.lm_head_sample)

N, V, D = 6, 2500, 16


def operands(seed: int):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=g), torch.randn(V, D, generator=g), g


def law(seed: int):
    return {
        "seed": torch.arange(N) + seed,
        "step": seed,
        "temperature": torch.where(torch.arange(N) % 4 == 3, 0.0, 0.8),
    }


def bits(result) -> list[torch.Tensor]:
    found = [x for x in vars(result).values() if x is not None]
    return [x.view(torch.int32) if x.dtype == torch.float32 else x for x in found]


def test_no_cut_changes_a_bit(device, monkeypatch) -> None:
    hidden, weight, _ = operands(4)
    hidden[0] = 0.0  # a flat row
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in law(4).items()}
    want = lm_head_sample(hidden.to(device), weight.to(device), **given)
    monkeypatch.setattr(head, "at_a_time", lambda *_: 3)
    got = lm_head_sample(hidden.to(device), weight.to(device), **given)
    assert all(torch.equal(a, b) for a, b in zip(bits(want), bits(got), strict=True))


def test_a_piece_that_wants_care_gives_the_bits_of_one_that_does_not(device) -> None:
    hidden, weight, _ = operands(5)
    far, never = (torch.zeros(V).index_fill(0, torch.tensor([7, 1100, V - 1]), x) for x in (-1e30, -torch.inf))
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in (law(5) | {"temperature": 0.8}).items()}
    plain, careful = (
        lm_head_sample(hidden.to(device), weight.to(device), bias=b.to(device), **given) for b in (far, never)
    )
    assert torch.equal(careful.kept_count, plain.kept_count - 3)
    for name in ("token", "logprob"):
        assert torch.equal(getattr(plain, name), getattr(careful, name))


@pytest.mark.parametrize("rows", [1, 64, 4096, 1 << 20])
def test_slabs_are_whole_tiles_that_cover_the_vocabulary(rows) -> None:
    for size in (1, 1024, 128256):
        cut = list(slabs(rows, size))
        assert [first for first, _ in cut] == [sum(width for _, width in cut[:i]) for i in range(len(cut))]
        assert sum(width for _, width in cut) == size
        assert all(width % TILE == 0 for _, width in cut[:-1])
        assert all(width <= TILE or (rows * width <= ROOM and width < size / 4) for _, width in cut)
