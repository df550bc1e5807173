"""affine_suffix_scan: the primitive, its gradient, its layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.errors import ArgumentError
from rlkernel_torch.direct import affine_suffix_scan

SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)


def loop(a, b, mask, init, *, exclusive):
    """The recurrence, in float64."""
    y, out = float(init), np.zeros(len(b))
    for t in range(len(b) - 1, -1, -1):
        before = y
        if mask[t]:
            y = a[t] * y + b[t]
            out[t] = before if exclusive else y
    return out, y


def draw(B, T, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, B, T, generator=g, dtype=torch.float64).to(dtype).unbind()
    return 0.9 * a, b, torch.rand(B, T, generator=g) < 0.7, torch.randn(B, generator=g, dtype=torch.float64).to(dtype)


@SETTINGS
@given(st.integers(0, 70), st.integers(0, 1000), st.booleans(), st.booleans())
def test_it_is_the_recurrence_over_valid_positions(T, seed, exclusive, number):
    a, b, mask, init = draw(3, T, seed)
    a = torch.full_like(b, 0.8) if number else a
    poison = torch.where(mask, b, torch.nan)
    out = affine_suffix_scan(
        poison, 0.8 if number else torch.where(mask, a, torch.nan), mask=mask, init=init, exclusive=exclusive
    )
    for i in range(3):
        y, carry = loop(a[i].numpy(), b[i].numpy(), mask[i].numpy(), init[i], exclusive=exclusive)
        np.testing.assert_allclose(out.y[i].numpy(), y, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(out.carry[i].numpy(), carry, rtol=1e-12, atol=1e-12)


def test_fp32_stays_within_a_few_roundings_at_131072():
    a = float(torch.tensor(0.999))  # as stored: rounding a moves y by up to 2^-25 / (1 - a)
    b = torch.randn(1, 131072, generator=torch.Generator().manual_seed(0))
    want, _ = loop(np.full(131072, a), b[0].double().numpy(), np.ones(131072), 0.0, exclusive=False)
    np.testing.assert_allclose(affine_suffix_scan(b, a).y[0].numpy(), want, rtol=0, atol=1e-5 * abs(want).max())
    # a bf16 state would give -85.0 for a sum of -87.5; only the loads may be bf16
    low = b[:, :4096].bfloat16()
    assert torch.equal(affine_suffix_scan(low.float(), 1.0).y, affine_suffix_scan(low, 1.0).y)


@SETTINGS
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 100), st.booleans())
def test_layouts_agree_bitwise_and_sequences_are_apart(lengths, seed, exclusive):
    lens = torch.tensor(lengths)
    a, b, _, init = draw(len(lengths), 21, seed, torch.float32)
    keep = torch.arange(21) < lens[:, None]
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    kw = {"init": init, "exclusive": exclusive}
    padded = affine_suffix_scan(b, a, lengths=lens, **kw)
    packed = affine_suffix_scan(b[keep], a[keep], cu_seqlens=cu, **kw)
    assert torch.equal(padded.y[keep], packed.y)
    assert torch.equal(padded.carry, packed.carry)
    nan = b[keep].clone()
    nan[: lengths[0]] = torch.nan
    after = affine_suffix_scan(nan, a[keep], cu_seqlens=cu, **kw)
    assert torch.equal(packed.y[lengths[0] :], after.y[lengths[0] :])


def test_a_scan_may_be_split_and_carries_through_masks():
    a, b, mask, init = draw(2, 40, 3)
    whole = affine_suffix_scan(b, a, mask=mask, init=init, masked_out="carry")
    for cut in (1, 20, 39):
        right = affine_suffix_scan(b[:, cut:], a[:, cut:], mask=mask[:, cut:], init=init)
        left = affine_suffix_scan(b[:, :cut], a[:, :cut], mask=mask[:, :cut], init=right.carry, masked_out="carry")
        torch.testing.assert_close(left.y, whole.y[:, :cut], rtol=1e-12, atol=1e-12)
    none = affine_suffix_scan(b, a, mask=torch.zeros_like(mask), init=init, masked_out="carry")
    assert torch.equal(init[:, None].expand(2, 40), none.y)


def test_gradient_of_every_argument():
    a, b, mask, init = draw(2, 9, 4)
    a, b, init = (x.requires_grad_() for x in (a, b, init))
    for kw in ({}, {"exclusive": True}, {"masked_out": "carry"}):
        assert torch.autograd.gradcheck(
            lambda b, a, i: tuple(vars(affine_suffix_scan(b, a, mask=mask, init=i, **kw)).values()),  # noqa: B023
            (b, a, init),
        )
    cu = torch.tensor([1, 4, 4, 8])
    assert torch.autograd.gradcheck(
        lambda b, a: affine_suffix_scan(b, a, cu_seqlens=cu).y,
        (b[0].detach().requires_grad_(), a[0].detach().requires_grad_()),
    )


def test_gradients_under_a_mask_are_zero_though_it_hides_nan():
    a, b, mask, _ = draw(2, 9, 5)
    a, b = (torch.where(mask, x, torch.nan).requires_grad_() for x in (a, b))
    affine_suffix_scan(b, a, mask=mask).y.sum().backward()
    for x in (a, b):
        assert torch.isfinite(x.grad).all()
        assert (x.grad[~mask] == 0).all()


def test_nothing_to_scan():
    for shape in ((0, 4), (3, 0)):
        out = affine_suffix_scan(torch.zeros(shape), 0.9, init=torch.ones(shape[0]))
        assert out.y.shape == shape
        assert torch.equal(torch.ones(shape[0]) * (1.0 if not shape[1] else 0.0), out.carry)


@pytest.mark.parametrize(
    ("argument", "b", "a", "kw"),
    [
        ("b", torch.zeros(4), 0.9, {}),
        ("b", torch.zeros(2, 4, dtype=torch.int64), 0.9, {}),
        ("a", torch.zeros(2, 4), torch.zeros(4), {}),
        ("a", torch.zeros(2, 4), float("nan"), {}),
        ("mask", torch.zeros(2, 4), 0.9, {"mask": torch.ones(2, 4)}),
        ("init", torch.zeros(2, 4), 0.9, {"init": torch.zeros(4)}),
        ("masked_out", torch.zeros(2, 4), 0.9, {"masked_out": "hold"}),
        ("cu_seqlens", torch.zeros(4), 0.9, {"cu_seqlens": torch.zeros(0, dtype=torch.int64)}),
    ],
)
def test_a_bad_argument_is_named(argument, b, a, kw):
    with pytest.raises(ArgumentError) as error:
        affine_suffix_scan(b, a, **kw)
    assert argument == error.value.argument
