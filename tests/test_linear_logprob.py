"""linear_logprob by the plain-torch backend: the bits of logprob, masks that cannot be read, autocast, refusals."""

import pytest
import torch

from rlkernel_common import kept_ids
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_torch import linear_logprob as module
from rlkernel_torch.direct import linear_logprob, logprob
from rlkernel_torch.head import add_product, product
from tests.logprob_inputs import head, ragged, rows

NAN = float("nan")
NAMES = ("logprob", "lse", "entropy", "log_kept_mass")


def assert_same_bits(a, b, names=NAMES):
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y), name


@pytest.mark.parametrize("T", [1.0, torch.linspace(0.5, 1.7, 70)])
@pytest.mark.parametrize("peak", [0.0, 30.0])
def test_it_is_logprob_of_the_same_logits_bit_for_bit(peak, T):
    logits, ids = rows(70, 1100, peak=peak)
    bias = logits[0].clone()
    kept = ragged([range(i, 1100, 50) for i in range(70)])
    options = {"temperature": T, "softcap": 20.0, "support": kept, "entropy": True}
    mask = torch.arange(70) % 3 != 1
    for change in ({}, {"softcap": None}, {"support": None}, {"mask": mask}):
        # An identity for a head makes hidden the logits, exactly.
        got = linear_logprob(logits, torch.eye(1100), ids, bias=bias, **{**options, **change})
        assert_same_bits(got, logprob(logits + bias, ids, **{**options, **change}))


def test_masked_rows_may_hold_anything_where_the_mask_cannot_be_read(monkeypatch):
    # As on a device, where reading the mask would mean waiting: all rows are computed and selected.
    monkeypatch.setattr(module, "readable", lambda _: False)
    monkeypatch.setattr(kept_ids, "readable", lambda _: False)
    x, mask = head(70, 16, 90), torch.arange(70) % 5 != 0
    lists = [list(range(i, 90, 7)) for i in range(70)]
    clean = linear_logprob(x.hidden, x.weight, x.ids, mask=mask, support=ragged(lists), entropy=True)
    hidden, ids = x.hidden.clone(), x.ids.clone()
    hidden[~mask], ids[~mask] = NAN, -(2**60)
    T = torch.where(mask, 1.0, -1.0)
    lists = [kept if m else [10**9] for kept, m in zip(lists, mask.tolist(), strict=True)]
    got = linear_logprob(hidden, x.weight, ids, mask=mask, temperature=T, support=ragged(lists), entropy=True)
    assert_same_bits(got, clean)
    assert got.logprob[~mask].unique().tolist() == [0.0]
    assert got.invalid.any().item() is False
    unmasked = linear_logprob(x.hidden, x.weight, x.ids, support=ragged([range(i, 90, 7) for i in range(70)]))
    assert torch.equal(got.logprob[mask], unmasked.logprob[mask])


@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_autocast_changes_no_bit(backward):
    operands = head(5, 16, 33)
    results = []
    for enabled in (False, True):
        hidden = operands.hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = linear_logprob(hidden, operands.weight, operands.ids, backward=backward)
        (grad,) = torch.autograd.grad(out.logprob.sum(), hidden)
        results.append((out.logprob, grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_backward_under_autocast_changes_no_bit_of_the_gradients_of_lora():
    x, g = head(5, 16, 33), torch.Generator().manual_seed(0)
    leaves = [t.requires_grad_() for t in (torch.randn(3, 16, generator=g), torch.randn(33, 3, generator=g))]
    found = []
    for enabled in (False, True):
        out = linear_logprob(x.hidden, x.weight, x.ids, lora=LoRA(*leaves, 0.5)).logprob.sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out, leaves))
    assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [2, 3, 7, 15, 16, 17, 101])
@pytest.mark.parametrize("inner", [1, 5, 33, 257])
def test_a_row_of_a_product_has_the_same_bits_in_every_place(dtype, columns, inner) -> None:
    """MKL sums some rows in another order where there are few columns, and float64 rows that are not aligned."""
    g = torch.Generator().manual_seed(columns * 1000 + inner)
    row = torch.randn(inner, generator=g, dtype=dtype).expand(64, inner).contiguous()
    for b in (torch.randn(inner, columns, generator=g, dtype=dtype), torch.randn(columns, inner, dtype=dtype).T):
        y, added = product(row, b), torch.zeros(64, columns, dtype=dtype)
        add_product(added, row, b)
        assert torch.equal(y, y[:1].expand_as(y))
        assert torch.equal(added, added[:1].expand_as(added))
