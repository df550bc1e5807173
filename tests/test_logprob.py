"""logprob by the plain-torch backend: real vocabularies, precision, ties, temperatures of any shape."""

import numpy as np
import pytest
import torch

from rlkernel_core.definitions import logprob as oracle
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import rows

INF = float("inf")


@pytest.mark.parametrize("V", [151669, 151936, 200064, 201088])
def test_every_column_counts_once_in_real_vocabularies(V):
    got = logprob(torch.zeros(1, V), torch.tensor([V - 1]), entropy=True)
    assert got.logprob.item() == pytest.approx(-np.log(V), abs=2e-6)
    assert got.entropy.item() == pytest.approx(np.log(V), abs=2e-6)


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("peak", [10.0, 17.0, 25.0, 40.0, 80.0])
def test_confident_rows_keep_relative_precision(peak, T):
    logits, ids = rows(16, 1000, peak=peak)
    got = logprob(logits, ids, temperature=T, entropy=True)
    want = oracle.logprob(logits.double().numpy(), ids, temperature=np.float32(T))
    assert bool((got.logprob <= 0).all())
    visible = want.logprob < -1e-30
    np.testing.assert_allclose(got.logprob[visible], want.logprob[visible], rtol=1e-4)
    visible = want.entropy > 1e-12  # below, the definition itself cancels in extended precision
    np.testing.assert_allclose(got.entropy[visible], want.entropy[visible], rtol=2e-4)


@pytest.mark.parametrize("shift", [-1000.0, 1000.0, -1e5, 1e5])
@pytest.mark.parametrize("T", [1.0, 0.7])
def test_a_shift_of_the_row_changes_nothing(shift, T):
    logits, ids = rows(8, 1000)
    logits = (logits * 8).round() / 8  # so that the shift itself is exact in fp32 up to 1e5
    plain, moved = (logprob(x, ids, temperature=T, entropy=True) for x in (logits, logits + shift))
    torch.testing.assert_close(moved.logprob, plain.logprob, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(moved.entropy, plain.entropy, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(moved.lse, plain.lse + shift / T, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_forbidden_ids_have_probability_zero(softcap):
    logits, ids = rows(6, 300, dtype=torch.float64)
    allowed = torch.zeros(6, 300, dtype=torch.bool)
    allowed[:, ::3] = True
    ids = ids // 3 * 3
    got = logprob(logits.masked_fill(~allowed, -INF), ids, softcap=softcap, entropy=True)
    want = logprob(logits[:, ::3], ids // 3, softcap=softcap, entropy=True)
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-13, rtol=0)
    forbidden = logprob(logits.masked_fill(~allowed, -INF), ids + 1, softcap=softcap)
    assert forbidden.logprob.tolist() == [-INF] * 6
    assert forbidden.invalid.tolist() == [False] * 6


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (3,), (4, 3)])
def test_a_tensor_of_temperatures_is_one_call_per_row(shape):
    logits, ids = (x.view(4, 3, *x.shape[1:]) for x in rows(12, 70))
    T = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    got = logprob(logits, ids, temperature=T, entropy=True)
    for i in range(4):
        for j in range(3):
            t = float(T.expand(4, 3)[i, j])
            one = logprob(logits[i, j], ids[i, j], temperature=t, entropy=True)
            assert torch.equal(got.logprob[i, j], one.logprob)
            assert torch.equal(got.entropy[i, j], one.entropy)


def test_best_ids_come_first_and_ties_go_to_the_lowest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, -0.0, 0.0, 0.0]])
    got = logprob(logits, torch.tensor([1, 4]), temperature=0.5, top_logprobs=4)
    assert got.top_ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    want = torch.log_softmax(logits / 0.5, -1).gather(1, got.top_ids)
    torch.testing.assert_close(got.top_logprobs, want)
    assert torch.equal(got.top_logprobs[0, 0], got.logprob[0])
    flat = torch.zeros(3, 5000)
    assert logprob(flat, torch.zeros(3, dtype=torch.int64), top_logprobs=20).top_ids[2].tolist() == list(range(20))


def test_the_best_id_of_a_confident_row_keeps_its_precision():
    logits, ids = rows(4, 1000, peak=40.0)
    got = logprob(logits, ids, top_logprobs=2)
    assert torch.equal(got.top_logprobs[:, 0], got.logprob)
    assert bool((got.top_logprobs[:, 0] < 0).all())
