"""logprob by the plain-torch backend: what its clauses do not say yet, and sizes that they do not reach."""

import numpy as np
import pytest
import torch

from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import Support
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import ragged, rows

INF, NAN = float("inf"), float("nan")
KEPT = [[3, 1, 4], [], [0, 1, 2, 3, 4, 5, 6], [5, 5], [2]]
NAMES = ("logprob", "lse", "entropy", "log_kept_mass")
UPSTREAM = dict(zip(NAMES, torch.randn(4, 8, generator=torch.Generator().manual_seed(5)), strict=True))


def gradient(logits, ids, g=UPSTREAM, **options):
    """The gradient of every result that there is, each times its own upstream gradient."""
    leaf = logits.detach().clone().requires_grad_()
    out = logprob(leaf, ids, entropy=True, **options)
    found = {name: getattr(out, name) for name in NAMES if getattr(out, name) is not None}
    torch.autograd.backward(list(found.values()), [g[name][: len(ids)].to(x.dtype) for name, x in found.items()])
    return leaf.grad


@pytest.mark.parametrize("V", [151669, 151936, 200064, 201088])
def test_every_column_counts_once_in_real_vocabularies(V):
    got = logprob(torch.zeros(1, V), torch.tensor([V - 1]), entropy=True)
    assert got.logprob.item() == pytest.approx(-np.log(V), abs=2e-6)
    assert got.entropy.item() == pytest.approx(np.log(V), abs=2e-6)


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("peak", [10.0, 25.0, 80.0])
def test_confident_rows_keep_the_relative_precision_of_their_entropy_and_gradient(peak, T):
    logits, ids = rows(16, 1000, peak=peak)
    g = {"logprob": torch.ones(16, dtype=torch.float64)}
    want = oracle.logprob(logits.double().numpy(), ids, temperature=np.float32(T), g=g)
    leaf = logits.clone().requires_grad_()
    got = logprob(leaf, ids, temperature=T, entropy=True)
    visible = want.entropy > 1e-12  # below, the definition itself cancels in extended precision
    np.testing.assert_allclose(got.entropy.detach()[visible], want.entropy[visible], rtol=2e-4)
    got.logprob.sum().backward()
    chosen = np.arange(16), ids.numpy()
    np.testing.assert_allclose(leaf.grad.numpy()[chosen], want.grad[chosen], rtol=1e-4, atol=1e-36)


def test_forbidden_ids_have_probability_zero_under_a_cap():
    logits, ids = rows(6, 300, dtype=torch.float64)
    allowed = torch.zeros(6, 300, dtype=torch.bool)
    allowed[:, ::3] = True
    ids = ids // 3 * 3
    holes = logits.masked_fill(~allowed, -INF)
    got, want = (logprob(x, i, softcap=30.0, entropy=True) for x, i in ((holes, ids), (logits[:, ::3], ids // 3)))
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-13, rtol=0)
    forbidden = logprob(holes, ids + 1, softcap=30.0)
    assert (forbidden.logprob.tolist(), forbidden.invalid.any().item()) == ([-INF] * 6, False)
    dlogits = gradient(holes, ids, softcap=30.0)
    assert dlogits[~allowed].unique().tolist() == [0.0]
    torch.testing.assert_close(dlogits[:, ::3], gradient(logits[:, ::3], ids // 3, softcap=30.0), atol=1e-13, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (3,), (4, 3)])
def test_a_tensor_of_temperatures_is_one_call_per_row(shape):
    logits, ids = (x.view(4, 3, *x.shape[1:]) for x in rows(12, 70))
    T = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    got = logprob(logits, ids, temperature=T, entropy=True)
    for at in np.ndindex(4, 3):
        one = logprob(logits[at], ids[at], temperature=float(T.expand(4, 3)[at]), entropy=True)
        assert torch.equal(got.logprob[at], one.logprob)
        assert torch.equal(got.entropy[at], one.entropy)


def test_the_best_of_many_tiles_are_the_lowest_ids_and_keep_their_precision():
    flat = torch.zeros(3, 5000)
    assert logprob(flat, torch.zeros(3, dtype=torch.int64), top_logprobs=20).top_ids[2].tolist() == list(range(20))
    logits, ids = rows(4, 1000, peak=40.0)
    got = logprob(logits, ids, top_logprobs=2)
    assert torch.equal(got.top_logprobs[:, 0], got.logprob)
    assert bool((got.top_logprobs[:, 0] < 0).all())


@pytest.mark.parametrize("bad", [NAN, INF])
def test_masked_rows_may_hold_anything_in_every_argument(bad):
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
def test_a_row_without_a_law_is_nan_in_every_result_and_spoils_no_other(row, lse):
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    ids, clean = torch.tensor([0, 0, 2]), logits.clone()
    logits[1] = torch.tensor(row)
    options = {"entropy": True, "top_logprobs": 1, "support": ragged([[0, 1], [0], [2]])}
    got, want = logprob(logits, ids, **options), logprob(clean, ids, **options)
    for name in (*NAMES, "top_logprobs"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert name == "lse" or bool(a[1].isnan().all())
    torch.testing.assert_close(got.lse[1], torch.tensor(lse), equal_nan=True)
    dlogits, others = gradient(logits, ids), gradient(clean, ids)
    assert lse == -INF or bool(dlogits[1].isnan().all())
    assert torch.equal(dlogits[[0, 2]], others[[0, 2]])


@pytest.mark.parametrize("t", [0.0, -1.0, NAN, INF])
def test_a_meaningless_temperature_spoils_its_row_alone(t):
    logits, ids = rows(3, 9)
    got = logprob(logits, ids, temperature=torch.tensor([0.7, t, 1.3]), entropy=True)
    assert got.logprob.isnan().tolist() == got.entropy.isnan().tolist() == [False, True, False]


def test_a_refusal_of_values_names_the_row():
    logits, ids = rows(3, 9)
    with pytest.raises(ArgumentError, match=r"temperature: must be > 0 and finite in every row; got .* in row \[1\]"):
        logprob(logits, ids, temperature=torch.tensor([0.7, 0.0, 1.3]), validate=True)
    with pytest.raises(ArgumentError, match=r"ids: must lie in \[0, 9\) .* got 9 in row \[2\]"):
        logprob(logits, torch.tensor([0, 1, 9]), validate=True)


def test_an_invalid_id_has_gradient_zero_and_ignores_the_upstream_one():
    logits, ids = rows(3, 30)
    ids[0] = 30
    leaf = logits.clone().requires_grad_()
    logprob(leaf, ids).logprob.backward(torch.tensor([NAN, 1.0, 1.0]))
    assert leaf.grad[0].abs().max().item() == 0.0
    alone = logits[1:].clone().requires_grad_()
    logprob(alone, ids[1:]).logprob.sum().backward()
    assert torch.equal(leaf.grad[1:], alone.grad)


def test_ids_of_any_integer_type_and_alignment():
    logits, ids = rows(9, 50)
    want = logprob(logits, ids).logprob
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(logprob(logits, ids.to(dtype)).logprob, want)
    odd = torch.cat((torch.zeros(1, dtype=torch.int64), ids))[1:]
    assert odd.data_ptr() % 16 == 8
    assert torch.equal(logprob(logits, odd).logprob, want)


def test_a_call_without_a_leading_dimension_and_one_of_more_rows_than_a_launch_grid_holds():
    scalar = logprob(torch.zeros(8), torch.tensor(3))
    assert (scalar.logprob.shape, scalar.logprob.item()) == ((), pytest.approx(-np.log(8)))
    got = logprob(torch.zeros(70_000, 3), torch.ones(70_000, dtype=torch.int64))
    assert got.logprob.unique().tolist() == [pytest.approx(-np.log(3))]


def test_rows_beyond_two_to_the_31_elements():
    store = torch.empty(2**31 + 100, dtype=torch.float16)  # pages that nobody touches cost nothing
    logits, ids = rows(2, 50, dtype=torch.float16)
    far = store.as_strided((2, 50), (2**31, 1))
    far.copy_(logits)
    assert torch.equal(logprob(far, ids).logprob, logprob(logits, ids).logprob)


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("T", [0.5, torch.tensor([0.5, 1.0, 1.7, 3.0, 0.9])])
def test_gradients_match_differences(T, softcap, kept):
    logits, ids = rows(5, 7, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    support = None if kept is None else ragged(kept)

    def results(x):
        out = logprob(x, ids, temperature=T, softcap=softcap, mask=mask, entropy=True, support=support)
        return tuple(x for x in (out.logprob, out.lse, out.entropy, out.log_kept_mass) if x is not None)

    assert torch.autograd.gradcheck(results, (logits.requires_grad_(),))


@pytest.mark.parametrize("peak", [0.0, 60.0])
@pytest.mark.parametrize("V", [2, 1500])
@pytest.mark.parametrize(("T", "softcap"), [(1.0, None), (0.5, 30.0)])
def test_gradients_over_a_support_match_the_definition(V, T, softcap, peak):
    logits, ids = rows(4, V, peak=peak)
    kept = [list(range(i, V, 3)) for i in range(4)]
    g = {name: x[:4].double() for name, x in UPSTREAM.items()}
    got = gradient(logits, ids, temperature=T, softcap=softcap, support=ragged(kept))
    want = oracle.logprob(logits.double().numpy(), ids, temperature=T, softcap=softcap, kept=kept, g=g).grad
    scale = max(float(x.abs().max()) for x in g.values())
    np.testing.assert_allclose(got.numpy(), want, atol=2e-6 * scale * (peak + 5), rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_rounded_once(dtype):
    logits, ids = rows(8, 500, dtype=dtype)
    got = gradient(logits, ids)
    assert got.dtype == dtype
    assert torch.equal(got, gradient(logits.float(), ids).to(dtype))


def test_a_strided_view_takes_the_gradient_of_its_own_place():
    logits, ids = rows(15, 40)
    wide = torch.zeros(3, 6, 60).requires_grad_()
    with torch.no_grad():
        wide[:, :5, 10:50] = logits.view(3, 5, 40)
    logprob(wide[:, :5, 10:50], ids.view(3, 5)).logprob.sum().backward()
    leaf = logits.requires_grad_()
    logprob(leaf, ids).logprob.sum().backward()
    assert torch.equal(wide.grad[:, :5, 10:50].reshape(15, 40), leaf.grad)
    assert wide.grad[:, 5].abs().sum().item() == 0.0


def test_almost_everything_kept_keeps_the_precision_of_the_mass():
    logits, ids = rows(1, 1000, peak=30.0)
    kept = [i for i in range(1000) if i != (int(ids[0]) + 1) % 1000]
    got = logprob(logits, ids, support=ragged([kept]))
    want = oracle.logprob(logits.double().numpy(), ids, kept=[kept])
    assert got.log_kept_mass.item() < 0.0
    assert got.log_kept_mass.item() == pytest.approx(want.log_kept_mass[0], rel=1e-4)


def test_nothing_kept_leaves_the_chosen_id_and_everything_kept_is_the_tempered_law():
    logits, ids = rows(2, 20)
    none, every = (logprob(logits, ids, support=ragged([kept] * 2)) for kept in ([], range(20)))
    tempered = logprob(logits, ids).logprob
    assert (none.logprob.tolist(), every.log_kept_mass.tolist()) == ([0.0] * 2, [0.0] * 2)
    torch.testing.assert_close(none.log_kept_mass, tempered)
    assert torch.equal(every.logprob, tempered)


def test_capacity_beyond_the_last_offset_is_ignored():
    logits, ids = rows(5, 9)
    plain = ragged(KEPT)
    junk = Support(torch.cat((plain.ids, torch.tensor([-7, 2**40, 3]))).int(), plain.offsets)
    found, want = logprob(logits, ids, support=junk, validate=True), logprob(logits, ids, support=plain)
    assert torch.equal(found.logprob, want.logprob)


def test_a_kept_id_out_of_range_is_flagged_unless_its_row_is_masked():
    logits, ids = rows(5, 9)
    lists = [[3, 1], [9], [2], [-1, 4], [8]]
    mask = torch.tensor([True, True, True, False, True])
    got = logprob(logits, ids, mask=mask, support=ragged(lists))
    assert got.invalid.tolist() == [False, True, False, False, False]
    assert got.logprob.isnan().tolist() == got.log_kept_mass.isnan().tolist() == got.invalid.tolist()
    clean = logprob(logits, ids, mask=mask, support=ragged([[3, 1], [], [2], [4], [8]]))
    assert torch.equal(got.logprob[[0, 2, 3, 4]], clean.logprob[[0, 2, 3, 4]])
