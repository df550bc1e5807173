"""logprob@1, the reference: the processed law, renormalised over the kept ids of each row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import Support
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import ragged, rows

KEPT = [[3, 1, 4], [], [0, 1, 2, 3, 4, 5, 6, 7, 8], [5, 5, 5], [8]]


@given(seed=st.integers(0, 1000), T=st.floats(0.3, 3.0))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_the_processed_law_matches_the_definition(seed, T):
    logits, ids = rows(5, 9, seed=seed, dtype=torch.float64)
    got = logprob(logits, ids, temperature=T, support=ragged(KEPT), entropy=True)
    want = oracle.logprob(logits.numpy(), ids, temperature=T, kept=KEPT)
    for name in ("logprob", "log_kept_mass", "lse", "entropy"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-12)


@pytest.mark.parametrize("peak", [0.0, 20.0])
def test_three_laws_meet(peak):
    logits, ids = rows(5, 3000, peak=peak)
    lists = [sorted({*range(i, 3000, 7), int(ids[i])}) for i in range(5)]
    tempered = logprob(logits, ids, temperature=0.7)
    processed = logprob(logits, ids, temperature=0.7, support=ragged(lists), top_logprobs=1)
    total = processed.logprob + processed.log_kept_mass
    torch.testing.assert_close(total, tempered.logprob, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(processed.lse, tempered.lse)
    assert torch.equal(processed.top_logprobs, logprob(logits, ids, temperature=0.7, top_logprobs=1).top_logprobs)
    assert tempered.log_kept_mass is None


def test_kept_probabilities_sum_to_one():
    logits, _ = rows(1, 50, dtype=torch.float64)
    kept = [3, 7, 11, 40]
    got = logprob(logits.expand(4, 50), torch.tensor(kept), support=ragged([kept] * 4))
    assert got.logprob.exp().sum().item() == pytest.approx(1.0, abs=1e-13)
    direct = torch.log_softmax(logits[0], -1)[kept].logsumexp(0)
    assert got.log_kept_mass[0].item() == pytest.approx(direct.item(), abs=1e-13)


def test_almost_everything_kept_keeps_the_precision_of_the_mass():
    logits, ids = rows(1, 1000, peak=30.0)
    kept = [i for i in range(1000) if i != (int(ids[0]) + 1) % 1000]
    got = logprob(logits, ids, support=ragged([kept]))
    want = oracle.logprob(logits.double().numpy(), ids, kept=[kept])
    assert got.log_kept_mass.item() < 0.0
    assert got.log_kept_mass.item() == pytest.approx(want.log_kept_mass[0], rel=1e-4)


def test_nothing_kept_leaves_the_chosen_id():
    logits, ids = rows(2, 20)
    got = logprob(logits, ids, support=ragged([[], []]))
    assert got.logprob.tolist() == [0.0, 0.0]
    torch.testing.assert_close(got.log_kept_mass, logprob(logits, ids).logprob)


def test_everything_kept_is_the_tempered_law():
    logits, ids = rows(3, 20)
    got = logprob(logits, ids, support=ragged([range(20)] * 3))
    assert torch.equal(got.logprob, logprob(logits, ids).logprob)
    assert got.log_kept_mass.tolist() == [0.0] * 3


def test_capacity_beyond_the_last_offset_is_ignored():
    logits, ids = rows(5, 9)
    plain = ragged(KEPT)
    junk = Support(torch.cat((plain.ids, torch.tensor([-7, 2**40, 3]))).int(), plain.offsets)
    assert torch.equal(
        logprob(logits, ids, support=junk, validate=True).logprob, logprob(logits, ids, support=plain).logprob
    )


def test_a_kept_id_out_of_range_is_flagged_unless_its_row_is_masked():
    logits, ids = rows(5, 9)
    lists = [[3, 1], [9], [2], [-1, 4], [8]]
    mask = torch.tensor([True, True, True, False, True])
    got = logprob(logits, ids, mask=mask, support=ragged(lists))
    assert got.invalid.tolist() == [False, True, False, False, False]
    assert got.logprob.isnan().tolist() == got.log_kept_mass.isnan().tolist() == got.invalid.tolist()
    clean = logprob(logits, ids, mask=mask, support=ragged([[3, 1], [], [2], [4], [8]]))
    assert torch.equal(got.logprob[[0, 2, 3, 4]], clean.logprob[[0, 2, 3, 4]])
    with pytest.raises(ArgumentError, match=r"support.ids: .* in row \[1\]"):
        logprob(logits, ids, mask=mask, support=ragged(lists), validate=True)


@pytest.mark.parametrize("offsets", [[1, 1, 2], [0, 2, 1], [0, 1, 9]])
def test_malformed_offsets_are_refused_on_validation(offsets):
    logits, ids = rows(2, 9)
    support = Support(torch.zeros(3, dtype=torch.int64), torch.tensor(offsets))
    with pytest.raises(ArgumentError, match="support.offsets: must start at 0, never decrease"):
        logprob(logits, ids, support=support, validate=True)


def test_layouts_and_batches_do_not_change_the_bits():
    logits, ids = rows(6, 2000)
    lists = [list(range(i, 2000, 5 + i)) for i in range(6)]
    whole = logprob(logits, ids, support=ragged(lists))
    shaped = logprob(logits.view(2, 3, 2000), ids.view(2, 3), support=ragged(lists))
    assert torch.equal(shaped.logprob.flatten(), whole.logprob)
    last = logprob(logits[4:], ids[4:], support=ragged(lists[4:]))
    assert torch.equal(last.logprob, whole.logprob[4:])
    assert torch.equal(last.log_kept_mass, whole.log_kept_mass[4:])
