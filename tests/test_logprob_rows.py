"""logprob@1, the reference: masked, invalid and broken rows, layouts, batches, and arguments that are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.logprob import Support
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import ragged, rows, same

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_masked_rows_may_hold_anything(bad):
    logits, ids = rows(6, 50)
    mask = torch.tensor([True, False, True, False, True, True])
    clean = logprob(logits, ids, mask=mask, entropy=True, top_logprobs=2)
    logits[~mask], ids[~mask] = bad, 2**62
    ids[3] = -(2**63)
    T = torch.where(mask, 1.0, NAN)
    got = logprob(logits, ids, mask=mask, temperature=T, entropy=True, top_logprobs=2, validate=True)
    for name in ("logprob", "lse", "entropy", "top_logprobs", "top_ids", "invalid"):
        assert torch.equal(getattr(got, name), getattr(clean, name))
    assert got.logprob[~mask].tolist() == [0.0, 0.0]
    assert got.top_ids[~mask].unique().tolist() == [-1]


@pytest.mark.parametrize(
    ("row", "lse"), [([NAN, 1.0, 2.0], NAN), ([1.0, INF, 2.0], INF), ([-INF] * 3, -INF), ([INF, 1.0, 2.0], INF)]
)
def test_a_row_without_a_law_is_nan_and_spoils_no_other(row, lse):
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    ids, clean = torch.tensor([0, 0, 2]), logits.clone()
    logits[1] = torch.tensor(row)
    got = logprob(logits, ids, entropy=True, top_logprobs=1, support=ragged([[0, 1], [0], [2]]))
    want = logprob(clean, ids, entropy=True, top_logprobs=1, support=ragged([[0, 1], [0], [2]]))
    for name in ("logprob", "lse", "entropy", "top_logprobs", "log_kept_mass"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        if name != "lse":
            assert bool(a[1].isnan().all())
    assert same(got.lse[1], torch.tensor(lse))
    assert logprob(logits, ids).invalid.tolist() == [False] * 3


@pytest.mark.parametrize("t", [0.0, -1.0, NAN, INF])
def test_a_meaningless_temperature_spoils_its_row_alone(t):
    logits, ids = rows(3, 9)
    T = torch.tensor([0.7, t, 1.3])
    got = logprob(logits, ids, temperature=T, entropy=True)
    assert got.logprob.isnan().tolist() == [False, True, False]
    assert got.entropy.isnan().tolist() == [False, True, False]
    with pytest.raises(ArgumentError, match=r"temperature: must be > 0 and finite in every row; got .* in row \[1\]"):
        logprob(logits, ids, temperature=T, validate=True)


@pytest.mark.parametrize("bad", [-1, 9, -100, 2**40])
def test_an_id_out_of_range_is_nan_and_flagged(bad):
    logits, ids = rows(4, 9)
    clean = logprob(logits, ids, entropy=True)
    ids[2] = bad
    got = logprob(logits, ids, entropy=True)
    assert got.invalid.tolist() == [False, False, True, False]
    assert got.logprob.isnan().tolist() == [False, False, True, False]
    assert torch.equal(got.logprob[[0, 1, 3]], clean.logprob[[0, 1, 3]])
    # lse and entropy do not depend on the id.
    torch.testing.assert_close(got.lse, clean.lse)
    torch.testing.assert_close(got.entropy, clean.entropy)
    with pytest.raises(ArgumentError, match=rf"ids: must lie in \[0, 9\) .* got {bad} in row \[2\]"):
        logprob(logits, ids, validate=True)


def test_ids_of_any_integer_type_and_alignment():
    logits, ids = rows(9, 50)
    want = logprob(logits, ids).logprob
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(logprob(logits, ids.to(dtype)).logprob, want)
    odd = torch.cat((torch.zeros(1, dtype=torch.int64), ids))[1:]
    assert odd.data_ptr() % 16 == 8
    assert torch.equal(logprob(logits, odd).logprob, want)


def test_layouts_give_the_bits_of_contiguous_input():
    logits, ids = (x.view(3, 5, *x.shape[1:]) for x in rows(15, 77))
    want = logprob(logits, ids, entropy=True, top_logprobs=3)
    wide = torch.full((3, 6, 99), NAN)
    wide[:, :5, 11:88] = logits
    spread = torch.full((3, 5, 154), NAN)
    spread[..., ::2] = logits
    for view in (
        wide[:, :5, 11:88],
        spread[..., ::2],
        logits.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        logits.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        got = logprob(view, ids, entropy=True, top_logprobs=3)
        for name in ("logprob", "lse", "entropy", "top_logprobs", "top_ids"):
            assert torch.equal(getattr(got, name), getattr(want, name))


@given(seed=st.integers(0, 1000), V=st.sampled_from((3, 1000, 1025, 5000)), T=st.sampled_from((1.0, 0.7)))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_a_row_has_the_same_bits_in_any_batch(seed, V, T):
    logits, ids = rows(40, V, seed=seed)
    whole = logprob(logits, ids, temperature=T, entropy=True)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    mixed = logprob(logits[order], ids[order], temperature=T, entropy=True, mask=torch.ones(40, dtype=torch.bool))
    one = [logprob(logits[i], ids[i], temperature=T, entropy=True) for i in range(3)]
    for name in ("logprob", "lse", "entropy"):
        assert torch.equal(getattr(whole, name)[order], getattr(mixed, name))
        assert torch.equal(getattr(whole, name)[:3], torch.stack([getattr(x, name) for x in one]))


def test_no_rows_and_no_leading_dimension():
    got = logprob(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), entropy=True, top_logprobs=2)
    assert (got.logprob.shape, got.top_ids.shape, got.invalid.shape) == ((0,), (0, 2), (0,))
    assert logprob(torch.zeros(2, 0, 7), torch.zeros(2, 0, dtype=torch.int64)).lse.shape == (2, 0)
    scalar = logprob(torch.zeros(8), torch.tensor(3))
    assert (scalar.logprob.shape, scalar.logprob.item()) == ((), pytest.approx(-np.log(8)))


def test_more_rows_than_a_launch_grid_holds():
    got = logprob(torch.zeros(70_000, 3), torch.ones(70_000, dtype=torch.int64))
    assert got.logprob.unique().tolist() == [pytest.approx(-np.log(3))]


def test_rows_beyond_two_to_the_31_elements():
    store = torch.empty(2**31 + 100, dtype=torch.float16)  # pages that nobody touches cost nothing
    logits, ids = rows(2, 50, dtype=torch.float16)
    far = store.as_strided((2, 50), (2**31, 1))
    far.copy_(logits)
    assert torch.equal(logprob(far, ids).logprob, logprob(logits, ids).logprob)


def test_nothing_waits_for_values_and_nothing_depends_on_them():
    with FakeTensorMode():
        logits, ids = torch.empty(4, 3000, requires_grad=True), torch.empty(4, dtype=torch.int64)
        mask, T = torch.empty(4, dtype=torch.bool), torch.empty(4)
        support = Support(torch.empty(9, dtype=torch.int64), torch.empty(5, dtype=torch.int64))
        got = logprob(logits, ids, mask=mask, temperature=T, entropy=True, top_logprobs=3, support=support)
        (got.logprob + got.entropy + got.log_kept_mass).sum().backward()
        assert (got.logprob.shape, got.top_ids.shape, logits.grad.shape) == ((4,), (4, 3), (4, 3000))


def test_arguments_and_global_state_stay_as_they_are():
    logits, ids = rows(4, 30)
    mask, T, support = torch.tensor([True, True, False, True]), torch.ones(4) * 0.7, ragged([[1], [2, 3], [4], []])
    before = [x.clone() for x in (logits, ids, mask, T, support.ids, support.offsets)]
    state = torch.get_rng_state()
    logits.requires_grad_()
    out = logprob(logits, ids, mask=mask, temperature=T, softcap=5.0, entropy=True, top_logprobs=2, support=support)
    out.logprob.sum().backward()
    assert all(
        torch.equal(a, b) for a, b in zip(before, (logits, ids, mask, T, support.ids, support.offsets), strict=True)
    )
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"logits": torch.zeros(4, 5, dtype=torch.int64)}, "logits"),
        ({"logits": [[0.0]]}, "logits"),
        ({"logits": torch.zeros(4, 0)}, "logits"),
        ({"ids": torch.zeros(4)}, "ids"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "ids"),
        ({"ids": torch.zeros(4, 1, dtype=torch.int64)}, "ids"),
        ({"ids": torch.zeros(4, dtype=torch.int64, device="meta")}, "ids"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"temperature": torch.ones(4, dtype=torch.int64)}, "temperature"),
        ({"temperature": torch.ones(4, requires_grad=True)}, "temperature"),
        ({"softcap": 0.0}, "softcap"),
        ({"mask": torch.ones(4)}, "mask"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"top_logprobs": 1.5}, "top_logprobs"),
        ({"support": [[1]] * 4}, "support"),
        ({"support": Support(torch.zeros(3), torch.zeros(5, dtype=torch.int64))}, "support.ids"),
        ({"support": Support(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))}, "support.offsets"),
    ],
)
def test_bad_arguments_are_named(change, argument):
    call = {"logits": torch.zeros(4, 5), "ids": torch.zeros(4, dtype=torch.int64), **change}
    with pytest.raises(ArgumentError) as caught:
        logprob(call.pop("logits"), call.pop("ids"), **call)
    assert caught.value.argument == argument
    assert caught.value.remedy


def test_a_wrong_type_is_a_type_error_too():
    with pytest.raises(ArgumentTypeError, match=r"ids: must be an integer tensor; got float32\[4\] on cpu"):
        logprob(torch.zeros(4, 5), torch.zeros(4))
