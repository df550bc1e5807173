"""linear_logprob@1, the reference: gradients of hidden, weight and bias, frozen operands, one rounding at the end."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_common import kept_ids
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import RLKernelError
from rlkernel_torch import linear_logprob as module
from rlkernel_torch.direct import linear_logprob, logprob
from tests.logprob_inputs import head, ragged

NAN = float("nan")
NAMES = ("logprob", "lse", "entropy", "log_kept_mass")


def upstream(N, *, seed=5):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(N, generator=g, dtype=torch.float64) for name in NAMES}


def gradients(x, g, *, wanted="hwb", **options):
    """Gradients of hidden, weight and bias; None for the frozen ones."""
    h, w, b = (t.detach().clone().requires_grad_(k in wanted) for t, k in zip(x[:3], "hwb", strict=True))
    out = linear_logprob(h, w, x.ids, bias=b, entropy=True, **options)
    results = {name: getattr(out, name) for name in NAMES if getattr(out, name) is not None}
    torch.autograd.backward(list(results.values()), [g[name].to(r.dtype) for name, r in results.items()])
    return h.grad, w.grad, b.grad


def relative(got, want):
    """Relative Frobenius error."""
    return float((got.double() - want.double()).norm() / want.double().norm())


class Matmuls(TorchDispatchMode):
    """Counts matmuls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_match_differences(softcap, supported, backward):
    x = head(4, 3, 6, dtype=torch.float64)
    T, mask = torch.tensor([0.5, 1.0, 1.7, 3.0]), torch.tensor([True, True, False, True])
    support = ragged([[1, 2], [], [3], [0, 4, 5]]) if supported else None

    def results(h, w, b):
        out = linear_logprob(
            h, w, x.ids, bias=b, temperature=T, softcap=softcap, logit_scale=1.3, mask=mask, entropy=True,
            support=support, backward=backward,
        )  # fmt: skip
        return tuple(r for r in (out.logprob, out.lse, out.entropy, out.log_kept_mass) if r is not None)

    assert torch.autograd.gradcheck(results, tuple(t.requires_grad_() for t in x[:3]))


@pytest.mark.parametrize("V", [1, 7, 1000, 2500])
def test_gradients_match_the_definition(V):
    x, g = head(70, 12, V), upstream(70)
    kept = [list(range(i % 5, V, 3)) for i in range(70)]
    got = gradients(x, g, temperature=0.75, softcap=30.0, logit_scale=0.5, support=ragged(kept))
    h, w, b = (t.double().numpy() for t in x[:3])
    dz = oracle.logprob((h @ w.T + b) * 0.5, x.ids, temperature=0.75, softcap=30.0, kept=kept, g=g).grad * 0.5
    for have, want in zip(got, (dz @ w, dz.T @ h, dz.sum(0)), strict=True):
        np.testing.assert_allclose(have, want, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_blocks_and_tiles_cost_one_rounding(dtype):
    """A 16-bit accumulator over the 16 blocks of rows would err by 4.8e-3 in dW, over 3 tiles by 2.5e-3 in dX."""
    x, g = head(1024, 32, 3000, dtype=dtype), upstream(1024)
    got = gradients(x, g)
    exact = gradients(x._replace(**{k: getattr(x, k).double() for k in ("hidden", "weight", "bias")}), g)
    unrounded = gradients(x._replace(**{k: getattr(x, k).float() for k in ("hidden", "weight", "bias")}), g)
    for have, want, wide in zip(got, exact, unrounded, strict=True):
        assert have.dtype == dtype
        assert relative(have, want) < 2.5e-3
        assert relative(wide, want) < 1e-6
        assert torch.equal(have, wide.to(dtype))


def test_modes_give_the_same_bits():
    x, g = head(150, 16, 1100), upstream(150)
    mask = torch.arange(150) % 3 != 0
    first = gradients(x, g, backward="recompute", mask=mask)
    for options in ({"backward": "save"}, {"backward": "auto"}, {"max_workspace_bytes": 10**9}):
        for a, b in zip(gradients(x, g, mask=mask, **options), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", ["h", "w", "b", "hb", "wb"])
def test_frozen_operands_get_nothing_and_change_nothing(wanted):
    x, g = head(70, 16, 90), upstream(70)
    every = dict(zip("hwb", gradients(x, g), strict=True))
    for name, got in zip("hwb", gradients(x, g, wanted=wanted), strict=True):
        assert (got is not None) == (name in wanted)
        assert got is None or torch.equal(got, every[name])


# 2 blocks of rows and 3 tiles make 6 matmuls of each kind: forward, logits again for each sweep, dX, dW.
@pytest.mark.parametrize(
    ("wanted", "backward", "count"),
    [
        ("", "recompute", 6),
        ("", "save", 6),
        ("h", "recompute", 18),
        ("w", "recompute", 18),
        ("b", "recompute", 12),
        ("hwb", "recompute", 30),
        ("hwb", "save", 18),
        ("h", "save", 12),
    ],
)
def test_only_the_matmuls_that_are_needed_are_done(wanted, backward, count):
    x, g = head(128, 8, 2500), upstream(128)
    with Matmuls() as matmuls:
        if wanted:
            gradients(x, g, wanted=wanted, backward=backward)
        else:
            linear_logprob(x.hidden, x.weight, x.ids, backward=backward)
    assert matmuls.count == count


def test_masked_rows_are_skipped():
    x = head(640, 8, 90)
    for active, blocks in ((640, 10), (128, 2), (1, 1), (0, 0)):
        mask = torch.zeros(640, dtype=torch.bool)
        mask[torch.randperm(640, generator=torch.Generator().manual_seed(0))[:active]] = True
        with Matmuls() as matmuls:
            linear_logprob(x.hidden, x.weight, x.ids, mask=mask)
        assert matmuls.count == blocks


@pytest.mark.parametrize("on_a_device", [False, True])
def test_masked_rows_add_nothing_whatever_they_hold(on_a_device, monkeypatch):
    if on_a_device:
        monkeypatch.setattr(module, "readable", lambda _: False)
        monkeypatch.setattr(kept_ids, "readable", lambda _: False)
    x, g, mask = head(70, 16, 90, dtype=torch.float64), upstream(70), torch.arange(70) % 5 != 0
    kept = [list(range(i, 90, 7)) for i in range(70)]
    only = [i for i in range(70) if mask[i]]
    want = gradients(
        x._replace(hidden=x.hidden[mask], ids=x.ids[mask]),
        {k: v[mask] for k, v in g.items()},
        support=ragged([kept[i] for i in only]),
    )
    x.hidden[~mask], x.ids[~mask] = NAN, 2**62
    for v in g.values():
        v[~mask] = NAN
    d_hidden, d_weight, d_bias = gradients(x, g, mask=mask, support=ragged(kept))
    assert d_hidden[~mask].abs().max().item() == 0.0
    torch.testing.assert_close(d_hidden[mask], want[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(d_weight, want[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(d_bias, want[2], atol=1e-12, rtol=0)


def test_an_invalid_id_has_gradient_zero_and_a_bad_row_stays_alone():
    x, g = head(4, 16, 90), upstream(4)
    clean = gradients(x, g)
    only_logprob = {k: v * (k == "logprob") for k, v in g.items()}
    d_hidden, _, _ = gradients(x._replace(ids=torch.tensor([-1, 90, *x.ids[2:].tolist()])), only_logprob)
    assert d_hidden[:2].abs().max().item() == 0.0
    x.hidden[1, 0] = NAN
    d_hidden, _, _ = gradients(x, g)
    assert bool(d_hidden[1].isnan().all())
    assert torch.equal(d_hidden[[0, 2, 3]], clean[0][[0, 2, 3]])


def test_the_gradient_of_a_row_has_the_same_bits_in_any_batch():
    x, g = head(150, 16, 1100), upstream(150)
    whole, _, _ = gradients(x, g)
    part, _, _ = gradients(
        x._replace(hidden=x.hidden[77:], ids=x.ids[77:]), {k: v[77:] for k, v in g.items()}, wanted="h"
    )
    assert torch.equal(part, whole[77:])


def test_gradients_are_those_of_logprob():
    x, g = head(20, 16, 90, dtype=torch.float64), upstream(20)
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    out = logprob(leaves[0] @ leaves[1].T + leaves[2], x.ids, temperature=0.7, entropy=True)
    torch.autograd.backward([out.logprob, out.lse, out.entropy], [g["logprob"], g["lse"], g["entropy"]])
    for got, leaf in zip(gradients(x, g, temperature=0.7), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, atol=1e-12, rtol=0)


def test_layouts_and_types_of_the_gradients_are_those_of_the_operands():
    x, g = head(12, 16, 90), upstream(12)
    want = gradients(x, g)
    h = x.hidden.view(3, 4, 16).bfloat16().requires_grad_()
    w = x.weight.T.contiguous().T.requires_grad_()
    out = linear_logprob(h, w, x.ids.view(3, 4), bias=x.bias, entropy=True)
    names = ("logprob", "lse", "entropy")
    torch.autograd.backward([getattr(out, n) for n in names], [g[n].float().view(3, 4) for n in names])
    assert (h.grad.shape, h.grad.dtype, w.grad.dtype) == ((3, 4, 16), torch.bfloat16, torch.float32)
    assert relative(h.grad.view(12, 16), want[0]) < 2e-2
    assert relative(w.grad, want[1]) < 2e-2


def test_no_rows_and_all_rows_masked_have_a_connected_zero():
    x = head(3, 4, 9)
    for hidden, ids, mask in ((x.hidden[:0], x.ids[:0], None), (x.hidden, x.ids, torch.zeros(3, dtype=torch.bool))):
        h, w = hidden.clone().requires_grad_(), x.weight.clone().requires_grad_()
        linear_logprob(h, w, ids, mask=mask).logprob.sum().backward()
        assert (h.grad.shape, h.grad.abs().sum().item(), w.grad.abs().sum().item()) == (hidden.shape, 0.0, 0.0)


def test_the_same_call_twice_gives_the_same_bits_and_arguments_stay():
    x, g = head(100, 16, 1500), upstream(100)
    before, state = [t.clone() for t in x], torch.get_rng_state()
    for a, b in zip(gradients(x, g), gradients(x, g), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(before, x, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_a_second_derivative_is_refused():
    x = head(2, 4, 9)
    out = linear_logprob(x.hidden.requires_grad_(), x.weight, x.ids)
    with pytest.raises(RLKernelError, match="linear_logprob has no second derivative"):
        torch.autograd.grad(out.logprob.sum(), x.hidden, create_graph=True)
