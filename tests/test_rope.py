"""rope beside what it stands for: transformers' rotate_half, complex numbers for neighbors, and rms_norm before it."""

from __future__ import annotations

import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import draw, ids

T, H, D, P = 5, 3, 16, 9
POSITIONS, TABLE = ids(T, below=P), draw(P, D, seed=3)
Q, K, WEIGHT = draw(T, H, D), draw(T, 1, D, seed=1), draw(D, seed=2)


def test_halves_have_the_bits_of_rotate_half_in_fp32() -> None:
    cos, sin = (torch.cat([x, x], -1)[POSITIONS][:, None] for x in TABLE.chunk(2, -1))

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)

    out = rlk.rope(Q, K, POSITIONS, TABLE)
    assert torch.equal(Q * cos + rotate_half(Q) * sin, out.q)
    assert torch.equal(K * cos + rotate_half(K) * sin, out.k)


def test_neighbors_are_complex_numbers() -> None:
    turn = torch.complex(*TABLE[POSITIONS].chunk(2, -1))[:, None]
    want = torch.view_as_real(torch.view_as_complex(Q.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    torch.testing.assert_close(rlk.rope(Q, K, POSITIONS, TABLE, interleaved=True).q, want)


def test_with_weights_fp32_has_the_bits_of_rms_norm_and_then_rope() -> None:
    out = rlk.rope(Q, K, POSITIONS, TABLE, q_weight=WEIGHT, k_weight=WEIGHT, eps=1e-6, offset=1.0)
    q, k = (rlk.rms_norm(x, WEIGHT, eps=1e-6, offset=1.0).y for x in (Q, K))
    assert torch.equal(rlk.rope(q, k, POSITIONS, TABLE).q, out.q)
    assert torch.equal(rlk.rope(q, k, POSITIONS, TABLE).k, out.k)
