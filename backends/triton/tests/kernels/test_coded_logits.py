"""Logits of 8 bits on Triton: every code of both types, and the bits of the same values in fp32.

The interpreter and GPUs decode bytes by the same arithmetic.
"""

import pytest
import torch

import rlkernel as rlk

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
N, V = 4, 300


def coded(kind, device):
    """Rows of which the first has all codes, NaN and infinities left out, and a scale for each."""
    x = (20 * torch.randn(N, V, generator=torch.Generator().manual_seed(0))).to(kind)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every.view(kind).float().isfinite()]
    x.view(torch.uint8)[0, : len(every)] = every
    return x.to(device), torch.tensor([1e-3, 0.25, 0.5, 1.0], device=device)


def bits(result):
    return {n: x.float().nan_to_num(7.0) for n, x in vars(result).items() if x is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{"entropy": True, "top_logprobs": 3}, {"softcap": 5.0, "temperature": 0.7}])
def test_results_have_the_bits_of_the_values_in_fp32(device, kind, more) -> None:
    x, scale = coded(kind, device)
    ids = torch.arange(N, device=device) * 70
    found = bits(rlk.logprob(x, ids, logits_scale=scale, **more))
    want = bits(rlk.logprob(x.float() * scale[:, None], ids, **more))
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", KINDS)
def test_several_ids_of_rows_that_lie_apart_have_them_too(device, kind) -> None:
    x, _ = coded(kind, device)
    ids = torch.arange(6, device=device).view(2, 1, 3) * 50
    apart = x.view(2, 2, V)[:, :1]
    found, want = rlk.logprob(apart, ids, logits_scale=0.1), rlk.logprob(apart.float() * 0.1, ids)
    assert torch.equal(found.logprob, want.logprob)


def test_a_scale_without_meaning_spoils_its_row_alone(device) -> None:
    x, scale = coded(KINDS[0], device)
    ids = torch.zeros(N, dtype=torch.int64, device=device)
    bad = scale.clone()
    bad[1:3] = torch.tensor([float("nan"), -1.0])
    found, want = (rlk.logprob(x, ids, logits_scale=s).logprob for s in (bad, scale))
    assert found.isnan().tolist() == [False, True, True, False]
    assert torch.equal(found[[0, 3]], want[[0, 3]])
