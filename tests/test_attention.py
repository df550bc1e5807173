"""attention beside what it stands for: torch's scaled_dot_product_attention, in its masks and its groups of heads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import rlkernel as rlk
from rlkernel_conformance.example_calls import D, draw

T, HQ, HK = 6, 4, 2
Q, K, V = draw(T, HQ, D), draw(T, HK, D, seed=1), draw(T, HK, D, seed=2)
CU = torch.tensor([0, T], dtype=torch.int32)


def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True).transpose(0, 1)


def test_a_prompt_is_torchs_causal_attention() -> None:
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    torch.testing.assert_close(rlk.attention(Q, K, V, cu_q=CU).out, stock(Q, K, V, seen))


def test_a_part_behind_a_cache_is_the_end_of_the_prompt() -> None:
    part = torch.tensor([0, 2], dtype=torch.int32)
    whole = rlk.attention(Q, K, V, cu_q=CU)
    assert torch.equal(rlk.attention(Q[4:], K, V, cu_q=part, cu_k=CU).out, whole.out[4:])


def test_a_window_is_a_band() -> None:
    seen = torch.ones(T, T, dtype=torch.bool).tril().triu(-2)
    torch.testing.assert_close(rlk.attention(Q, K, V, cu_q=CU, window=3).out, stock(Q, K, V, seen))


def test_gradients_are_those_of_torch() -> None:
    def graded(attend: object) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        return list(torch.autograd.grad(attend(*leaves).square().sum(), leaves))  # type: ignore[operator]

    seen = torch.ones(T, T, dtype=torch.bool).tril()
    ours = graded(lambda q, k, v: rlk.attention(q, k, v, cu_q=CU).out)
    for found, expected in zip(ours, graded(lambda q, k, v: stock(q, k, v, seen)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_in_pages_that_want_a_gradient_are_refused(name: str) -> None:
    given = {"k": K[None], "v": V[None]}
    given[name] = given[name].clone().requires_grad_()
    used = torch.tensor([T], dtype=torch.int32)
    with pytest.raises(rlk.ArgumentError, match=f"^{name}: has no gradient in pages"):
        rlk.attention(Q, **given, cu_q=CU, page_table=torch.zeros(1, 1, dtype=torch.int32), seqused_k=used)
