"""logprob@1, the reference: values against the definition, the laws, and rows that go wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.spec.logprob import SPEC
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import rows

INF = float("inf")
SIZES = (1, 2, 7, 1000, 50257)


def tolerance(output, dtype):
    [found] = [t for t in SPEC.tolerances if (t.output, f"torch.{t.dtype}") == (output, str(dtype))]
    return {"atol": found.atol, "rtol": found.rtol}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize(("T", "softcap"), [(1.0, None), (0.5, 30.0), (1.7, None)])
def test_values_match_the_definition(V, dtype, T, softcap):
    logits, ids = rows(5, V, dtype=dtype)
    got = logprob(logits, ids, temperature=T, softcap=softcap, entropy=True)
    want = oracle.logprob(logits.double().numpy(), ids, temperature=T, softcap=softcap)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (got.logprob, got.lse, got.entropy)} == {kind}
    for name in ("logprob", "lse", "entropy"):
        bound = tolerance(name, kind)
        if kind == torch.float32:  # T is an fp32 number, as every scalar of a kernel is
            bound["rtol"] += 1e-6
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), **bound)


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


@given(seed=st.integers(0, 1000), V=st.integers(1, 40), T=st.floats(0.2, 5.0))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_probabilities_sum_to_one_and_entropy_is_theirs(seed, V, T):
    logits, _ = rows(1, V, seed=seed, dtype=torch.float64)
    got = logprob(logits.expand(V, V), torch.arange(V), temperature=T, entropy=True)
    p = got.logprob.exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert got.entropy[0].item() == pytest.approx(-(p * got.logprob).sum().item(), abs=1e-12)
    assert -1e-12 <= got.entropy[0].item() <= np.log(V) + 1e-12


def test_permuting_the_vocabulary_permutes_ids_alone():
    logits, ids = rows(8, 500, dtype=torch.float64)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    place = torch.empty_like(order)
    place[order] = torch.arange(500)
    a, b = logprob(logits, ids, entropy=True), logprob(logits[:, order], place[ids], entropy=True)
    torch.testing.assert_close(b.logprob, a.logprob, atol=1e-13, rtol=0)
    torch.testing.assert_close(b.entropy, a.entropy, atol=1e-13, rtol=0)


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


def test_a_single_allowed_id_is_certain():
    got = logprob(torch.tensor([[-INF, 4.0, -INF]]), torch.tensor([1]), entropy=True)
    assert (got.logprob.item(), got.lse.item(), got.entropy.item()) == (0.0, 4.0, 0.0)


def test_temperature_enters_log_probability_and_entropy_once():
    logits, ids = rows(8, 100, dtype=torch.float64)
    a, b = logprob(logits, ids, temperature=0.7, entropy=True), logprob(logits / 0.7, ids, entropy=True)
    torch.testing.assert_close(a.logprob, b.logprob, atol=1e-12, rtol=0)
    torch.testing.assert_close(a.entropy, b.entropy, atol=1e-12, rtol=0)
    assert not torch.allclose(a.entropy, logprob(logits, ids, entropy=True).entropy)


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
