"""linear_logprob by the plain-torch backend: which matmuls gradients cost, the modes bit by bit, types and layouts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_common import kept_ids
from rlkernel_torch import linear_logprob as module
from rlkernel_torch.direct import linear_logprob
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


def test_masked_rows_add_nothing_where_the_mask_cannot_be_read(monkeypatch):
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
