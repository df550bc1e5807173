"""linear_logprob@1, the reference: values against the definition, equality with logprob, batches, layouts, modes."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_common import kept_ids
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.linear_logprob import SPEC
from rlkernel_core.spec.logprob import Support
from rlkernel_torch import linear_logprob as module
from rlkernel_torch.direct import linear_logprob, logprob
from rlkernel_torch.head import product
from tests.logprob_inputs import head, ragged, rows

INF, NAN = float("inf"), float("nan")
NAMES = ("logprob", "lse", "entropy", "log_kept_mass")


def tolerance(output, dtype):
    [found] = [t for t in SPEC.tolerances if (t.output, f"torch.{t.dtype}") == (output, str(dtype))]
    return {"atol": found.atol, "rtol": found.rtol}


def assert_same_bits(a, b, names=NAMES):
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 2, 7, 1000, 50257])
@pytest.mark.parametrize(("T", "softcap", "scale"), [(1.0, None, 1.0), (0.5, 30.0, 0.5), (1.75, None, 2.0)])
def test_values_match_the_definition(V, dtype, T, softcap, scale):
    x = head(5, 16, V, dtype=dtype)
    got = linear_logprob(
        x.hidden, x.weight, x.ids, bias=x.bias, temperature=T, softcap=softcap, logit_scale=scale, entropy=True
    )
    logits = (x.hidden.double() @ x.weight.double().T + x.bias.double()) * scale
    want = oracle.logprob(logits.numpy(), x.ids, temperature=T, softcap=softcap)
    bound = tolerance("logprob", dtype)
    if dtype != torch.float64:
        bound["atol"] = 2e-5  # D is 16: far inside the contract, and far below any rounding of the logits
    for name in ("logprob", "lse", "entropy"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), **bound)


def test_logits_of_half_precision_operands_are_not_rounded():
    x = head(64, 256, 2000, dtype=torch.bfloat16, seed=3)
    exact = torch.log_softmax(x.hidden.double() @ x.weight.double().T, -1).gather(1, x.ids[:, None])[:, 0]
    rounded = torch.log_softmax((x.hidden @ x.weight.T).double(), -1).gather(1, x.ids[:, None])[:, 0]
    got = linear_logprob(x.hidden, x.weight, x.ids).logprob
    assert float((got - exact).abs().max()) < 1e-5
    assert float((rounded - exact).abs().max()) > 1e-3


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


@pytest.mark.parametrize("V", [50, 1500])
def test_a_row_has_the_same_bits_in_any_batch(V):
    x = head(200, 48, V)
    mask = torch.arange(200) % 4 != 2
    whole = linear_logprob(x.hidden, x.weight, x.ids, bias=x.bias, entropy=True)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    mixed = linear_logprob(x.hidden[order], x.weight, x.ids[order], bias=x.bias, entropy=True)
    masked = linear_logprob(x.hidden, x.weight, x.ids, bias=x.bias, entropy=True, mask=mask)
    for name in ("logprob", "lse", "entropy"):
        every = getattr(whole, name)
        assert torch.equal(getattr(mixed, name), every[order])
        assert torch.equal(getattr(masked, name)[mask], every[mask])
        for cut in (slice(0, 1), slice(63, 65), slice(100, 171)):
            part = linear_logprob(x.hidden[cut], x.weight, x.ids[cut], bias=x.bias, entropy=True)
            assert torch.equal(getattr(part, name), every[cut])


def test_layouts_give_the_bits_of_contiguous_input():
    x = head(12, 20, 300)
    want = linear_logprob(x.hidden, x.weight, x.ids)
    shaped = linear_logprob(x.hidden.view(3, 4, 20), x.weight, x.ids.view(3, 4).int())
    assert torch.equal(shaped.logprob.flatten(), want.logprob)
    wide = torch.full((3, 6, 41), NAN)
    wide[:, :4, ::2][..., :20] = x.hidden.view(3, 4, 20)
    tied = torch.full((20, 301), NAN)
    tied[:, 1:] = x.weight.T
    got = linear_logprob(wide[:, :4, ::2][..., :20], tied[:, 1:].T, x.ids.view(3, 4))
    assert torch.equal(got.logprob.flatten(), want.logprob)
    one = linear_logprob(x.hidden[5], x.weight, x.ids[5], temperature=torch.tensor(1.0))
    assert torch.equal(one.logprob, want.logprob[5])


def test_the_head_may_be_more_precise_than_the_hidden_states():
    x = head(6, 16, 90)
    got = linear_logprob(x.hidden.bfloat16(), x.weight, x.ids)
    assert torch.equal(got.logprob, linear_logprob(x.hidden.bfloat16().float(), x.weight, x.ids).logprob)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_bias_of_minus_infinity_pads_the_vocabulary(softcap):
    x = head(6, 16, 90, dtype=torch.float64)
    padded = torch.cat((x.weight, torch.full((38, 16), 7.0, dtype=torch.float64)))
    bias = torch.cat((x.bias, torch.full((38,), -INF, dtype=torch.float64)))
    want = linear_logprob(x.hidden, x.weight, x.ids, bias=x.bias, softcap=softcap, entropy=True)
    got = linear_logprob(x.hidden, padded, x.ids, bias=bias, softcap=softcap, entropy=True)
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-13, rtol=0)


@pytest.mark.parametrize("on_a_device", [False, True])
def test_masked_rows_may_hold_anything(on_a_device, monkeypatch):
    if on_a_device:  # as where reading the mask would mean waiting: all rows are computed and selected
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


def test_a_bad_row_spoils_no_other():
    x = head(5, 16, 90)
    clean = linear_logprob(x.hidden, x.weight, x.ids, entropy=True)
    x.hidden[1, 3], x.hidden[2, 0], x.ids[3] = NAN, INF, 90
    got = linear_logprob(x.hidden, x.weight, x.ids, entropy=True)
    assert got.logprob.isnan().tolist() == [False, True, True, True, False]
    assert got.invalid.tolist() == [False, False, False, True, False]
    for name in ("logprob", "lse", "entropy"):
        assert torch.equal(getattr(got, name)[[0, 4]], getattr(clean, name)[[0, 4]])
    torch.testing.assert_close(got.entropy[3], clean.entropy[3])


def test_no_rows_and_all_rows_masked():
    x = head(3, 4, 9)
    none = linear_logprob(x.hidden[:0], x.weight, x.ids[:0], entropy=True, support=ragged([]))
    assert (none.logprob.shape, none.entropy.shape, none.log_kept_mass.shape) == ((0,),) * 3
    mask = torch.zeros(3, dtype=torch.bool)
    assert linear_logprob(x.hidden, x.weight, x.ids, mask=mask).logprob.tolist() == [0.0] * 3


def test_on_policy_ratios_are_exactly_one():
    x = head(100, 32, 1500)
    with torch.no_grad():
        old = linear_logprob(x.hidden, x.weight, x.ids, temperature=0.7)
    for backward in ("auto", "recompute", "save"):
        new = linear_logprob(
            x.hidden.requires_grad_(), x.weight, x.ids, temperature=0.7, entropy=True, backward=backward
        )
        assert torch.equal(new.logprob.detach(), old.logprob)


def test_nothing_waits_for_values_and_nothing_depends_on_them():
    with FakeTensorMode():
        hidden, weight = torch.empty(4, 8, requires_grad=True), torch.empty(3000, 8, requires_grad=True)
        ids, mask, T = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.bool), torch.empty(4)
        support = Support(torch.empty(9, dtype=torch.int64), torch.empty(5, dtype=torch.int64))
        got = linear_logprob(hidden, weight, ids, mask=mask, temperature=T, entropy=True, support=support)
        (got.logprob + got.entropy + got.log_kept_mass).sum().backward()
        assert (got.logprob.shape, hidden.grad.shape, weight.grad.shape) == ((4,), (4, 8), (3000, 8))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"hidden": torch.zeros(4, 3, dtype=torch.int64)}, "hidden"),
        ({"hidden": torch.zeros(4, 0)}, "hidden"),
        ({"weight": torch.zeros(5, 4)}, "weight"),
        ({"weight": torch.zeros(5)}, "weight"),
        ({"weight": torch.zeros(0, 3)}, "weight"),
        ({"weight": torch.zeros(5, 3, device="meta")}, "weight"),
        ({"ids": torch.zeros(4)}, "ids"),
        ({"ids": torch.zeros(5, dtype=torch.int64)}, "ids"),
        ({"bias": torch.zeros(4)}, "bias"),
        ({"bias": torch.zeros(5, dtype=torch.int64)}, "bias"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": torch.ones(4, requires_grad=True)}, "temperature"),
        ({"softcap": -1.0}, "softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"mask": torch.ones(4)}, "mask"),
        ({"support": 3}, "support"),
        ({"backward": "saved"}, "backward"),
        ({"max_workspace_bytes": 0}, "max_workspace_bytes"),
        ({"max_workspace_bytes": 10}, "max_workspace_bytes"),
        ({"max_workspace_bytes": 1e9}, "max_workspace_bytes"),
        ({"group": "world"}, "group"),
    ],
)
def test_bad_arguments_are_named(change, argument):
    call = {
        "hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3), "ids": torch.zeros(4, dtype=torch.int64), **change
    }  # fmt: skip
    with pytest.raises(ArgumentError) as caught:
        linear_logprob(call.pop("hidden"), call.pop("weight"), call.pop("ids"), **call)
    assert caught.value.argument == argument
    assert caught.value.remedy


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


@pytest.mark.parametrize("columns", [2, 3, 7, 15, 16, 17])
@pytest.mark.parametrize("inner", [1, 5, 33, 257])
def test_a_row_of_a_product_has_the_same_bits_in_every_place(columns, inner) -> None:
    """MKL sums every fourth row in another order where there are few columns."""
    g = torch.Generator().manual_seed(columns * 1000 + inner)
    b = torch.randn(inner, columns, generator=g)
    y = product(torch.randn(inner, generator=g).expand(64, inner).contiguous(), b)
    assert torch.equal(y, y[:1].expand_as(y))
