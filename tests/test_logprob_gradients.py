"""logprob@1, the reference: analytic gradients against differences and the definition."""

import numpy as np
import pytest
import torch

from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import RLKernelError
from rlkernel_torch.direct import logprob
from tests.logprob_inputs import ragged, rows

INF, NAN = float("inf"), float("nan")
NAMES = ("logprob", "lse", "entropy", "log_kept_mass")
KEPT = [[3, 1, 4], [], [0, 1, 2, 3, 4, 5, 6], [5, 5], [2]]


def upstream(N, *, seed=5):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(N, generator=g, dtype=torch.float64) for name in NAMES}


def gradient(logits, ids, g, **options):
    leaf = logits.detach().clone().requires_grad_()
    out = logprob(leaf, ids, entropy=True, **options)
    results = {name: getattr(out, name) for name in NAMES if getattr(out, name) is not None}
    torch.autograd.backward(list(results.values()), [g[name].to(x.dtype) for name, x in results.items()])
    return leaf.grad


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("T", [1.0, 0.5, torch.tensor([0.5, 1.0, 1.7, 3.0, 0.9])])
def test_gradients_match_differences(T, softcap, kept):
    logits, ids = rows(5, 7, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    support = None if kept is None else ragged(kept)

    def results(x):
        out = logprob(x, ids, temperature=T, softcap=softcap, mask=mask, entropy=True, support=support)
        return tuple(x for x in (out.logprob, out.lse, out.entropy, out.log_kept_mass) if x is not None)

    assert torch.autograd.gradcheck(results, (logits.requires_grad_(),))


@pytest.mark.parametrize("peak", [0.0, 20.0, 60.0])
@pytest.mark.parametrize("V", [1, 2, 7, 1000, 1500])
@pytest.mark.parametrize(("T", "softcap"), [(1.0, None), (0.5, 30.0), (1.75, None)])
def test_gradients_match_the_definition(V, T, softcap, peak):
    logits, ids = rows(4, V, peak=peak)
    g = upstream(4)
    kept = [list(range(i, V, 3)) for i in range(4)]
    got = gradient(logits, ids, g, temperature=T, softcap=softcap, support=ragged(kept))
    want = oracle.logprob(logits.double().numpy(), ids, temperature=T, softcap=softcap, kept=kept, g=g).grad
    scale = max(float(x.abs().max()) for x in g.values())
    np.testing.assert_allclose(got.numpy(), want, atol=2e-6 * scale * (peak + 5), rtol=2e-5)


def test_the_chosen_id_of_a_confident_row_keeps_its_gradient():
    logits, ids = rows(4, 100, peak=40.0)
    g = {"logprob": torch.ones(4, dtype=torch.float64)}
    leaf = logits.clone().requires_grad_()
    logprob(leaf, ids).logprob.sum().backward()
    want = oracle.logprob(logits.double().numpy(), ids, g=g).grad
    np.testing.assert_allclose(leaf.grad.numpy(), want, rtol=1e-4, atol=1e-36)
    assert bool((leaf.grad[torch.arange(4), ids] > 0).all())


def test_the_gradient_of_a_row_sums_to_zero():
    logits, ids = (x.requires_grad_() if x.is_floating_point() else x for x in rows(6, 3000))
    logprob(logits, ids, temperature=0.7).logprob.sum().backward()
    assert float(logits.grad.sum(-1).abs().max()) < 1e-5


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_gradients_are_rounded_once(dtype, eps):
    logits, ids = rows(8, 500, dtype=dtype)
    g = upstream(8)
    exact = gradient(logits.float(), ids, g)
    got = gradient(logits, ids, g)
    assert got.dtype == dtype
    assert torch.equal(got, exact.to(dtype))
    assert bool(((got.double() - exact.double()).abs() <= eps * exact.double().abs() + 1e-6).all())


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_forbidden_ids_get_no_gradient(softcap):
    logits, ids = rows(6, 300, dtype=torch.float64)
    allowed = torch.zeros(6, 300, dtype=torch.bool)
    allowed[:, ::3] = True
    g, ids = upstream(6), ids // 3 * 3
    got = gradient(logits.masked_fill(~allowed, -INF), ids, g, softcap=softcap)
    want = gradient(logits[:, ::3], ids // 3, g, softcap=softcap)
    assert got[~allowed].unique().tolist() == [0.0]
    torch.testing.assert_close(got[:, ::3], want, atol=1e-13, rtol=0)


def test_masked_and_invalid_rows_ignore_the_upstream_gradient():
    logits, ids = rows(4, 30)
    logits[1], ids[1], ids[2] = NAN, 10**12, -5
    mask = torch.tensor([True, False, True, True])
    clean, g = upstream(4), upstream(4)
    for name in NAMES:
        g[name][1] = NAN
    g["logprob"][2] = NAN
    got = gradient(logits, ids, g, mask=mask)
    assert got[1].abs().max().item() == 0.0
    only_lse_and_entropy = {**clean, "logprob": torch.zeros(4)}
    want = gradient(logits[[2]], ids[[3]], {k: v[[2]] for k, v in only_lse_and_entropy.items()})
    torch.testing.assert_close(got[[2]], want)
    assert torch.equal(got[[0, 3]], gradient(logits[[0, 3]], ids[[0, 3]], {k: v[[0, 3]] for k, v in clean.items()}))


def test_an_invalid_id_alone_has_gradient_zero():
    logits, ids = rows(2, 30)
    ids[0] = 30
    leaf = logits.clone().requires_grad_()
    logprob(leaf, ids).logprob.sum().backward()
    assert leaf.grad[0].abs().max().item() == 0.0
    assert leaf.grad[1].abs().max().item() > 0.0


def test_a_row_without_a_law_spoils_no_other_gradient():
    logits, ids = rows(4, 30)
    g, clean = upstream(4), logits.clone()
    for i, bad in enumerate((NAN, INF)):
        logits[i, 3] = bad
    got, want = gradient(logits, ids, g), gradient(clean, ids, g)
    assert bool(got[:2].isnan().all())
    assert torch.equal(got[2:], want[2:])


def test_results_have_the_same_bits_with_gradients_on_and_off():
    logits, ids = rows(9, 1200)
    with torch.no_grad():
        old = logprob(logits, ids, temperature=0.7, entropy=True)
    new = logprob(logits.requires_grad_(), ids, temperature=0.7, entropy=True)
    assert torch.equal(new.logprob.detach(), old.logprob)
    assert (new.logprob.detach() - old.logprob).exp().unique().tolist() == [1.0]
    assert torch.equal(new.entropy.detach(), old.entropy)
    assert torch.equal(logprob(logits, ids, temperature=0.7).logprob, new.logprob)


def test_going_back_twice_gives_the_same_bits_and_leaves_the_logits_alone():
    logits, ids = rows(5, 400)
    before = logits.clone()
    out = logprob(logits.requires_grad_(), ids, entropy=True)
    loss = (out.logprob - 0.1 * out.entropy).sum()
    [first] = torch.autograd.grad(loss, logits, retain_graph=True)
    [second] = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)
    assert torch.equal(logits.detach(), before)


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


def test_no_rows_and_all_rows_masked_have_a_connected_zero():
    empty = torch.zeros(0, 5, requires_grad=True)
    logprob(empty, torch.zeros(0, dtype=torch.int64)).logprob.sum().backward()
    assert empty.grad.shape == (0, 5)
    logits = torch.full((2, 5), NAN, requires_grad=True)
    out = logprob(logits, torch.tensor([9, -9]), mask=torch.zeros(2, dtype=torch.bool), entropy=True)
    (out.logprob + out.entropy).sum().backward()
    assert logits.grad.abs().sum().item() == 0.0


def test_the_best_are_for_reporting_and_second_derivatives_are_refused():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = logprob(logits, torch.tensor([0, 1]), top_logprobs=2)
    assert not out.top_logprobs.requires_grad
    assert out.logprob.requires_grad
    with pytest.raises(RLKernelError, match="no second derivative"):
        torch.autograd.grad(out.logprob.sum(), logits, create_graph=True)
