"""divergence beyond one tile, one program of columns and one block of a list, against plain torch."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec.divergence import KINDS, DivergenceCall
from rlkernel_torch.divergence import divergence as plain_divergence
from rlkernel_triton.divergence import kernels
from rlkernel_triton.divergence.launch import divergence

V = kernels.TILE + 53


def results(kind, device, *, rows=3, K=0):
    """The result and the gradient of a call that is drawn anew."""
    g = torch.Generator().manual_seed(7)
    x, teacher = (2 * torch.randn(rows, V, generator=g) for _ in range(2))
    up, more = torch.randn(rows, generator=g).to(device), {}
    if K:
        teacher, ids = teacher.log_softmax(-1).topk(K)
        more["teacher_ids"] = ids.to(device)
    x = x.to(device).requires_grad_()
    out = rlk.divergence(x, teacher.to(device), kind=kind, temperature=0.7, **more)
    return out.detach(), torch.autograd.grad(out, x, up)[0]


@pytest.mark.parametrize("K", [0, kernels.ENTRIES + 6])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_plain_torch(kind, K, device) -> None:
    found = results(kind, device, K=K)
    with rlk.use("torch"):
        want = results(kind, device, K=K)
    torch.testing.assert_close(found, want, atol=2e-6, rtol=1e-5)


def test_a_gradient_has_the_same_bits_where_a_program_takes_more_columns(device, monkeypatch) -> None:
    g = torch.Generator().manual_seed(7)
    x, teacher = (torch.randn(3, V, generator=g).to(device) for _ in range(2))
    found = []
    for repeats in (1, 8):
        monkeypatch.setattr(kernels, "REPEATS", ((0, repeats),))
        leaf = x.clone().requires_grad_()
        out = divergence(DivergenceCall(leaf, teacher, kind="jsd"))
        found.append(torch.autograd.grad(out.sum(), leaf)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_excludes_all_but_the_list_has_the_gradient_of_plain_torch(kind, device) -> None:
    g = torch.Generator().manual_seed(7)
    x, ids = torch.full((2, 40), -torch.inf), torch.tensor([[4, 30, 2], [11, 5, 39]])
    x.scatter_(1, ids, torch.randn(2, 3, generator=g))
    log_t, found = torch.randn(2, 3, generator=g).log_softmax(-1).to(device), []
    for implementation in (divergence, plain_divergence):
        leaf = x.to(device).requires_grad_()
        out = implementation(DivergenceCall(leaf, log_t, teacher_ids=ids.to(device), kind=kind))
        found.append((out.detach(), torch.autograd.grad(out.sum(), leaf)[0]))
    torch.testing.assert_close(*found, equal_nan=True)
    if kind != "forward_kl":  # which is infinite: the teacher's tail has a mass
        assert found[0][0].isfinite().all()
        assert not found[0][1].cpu()[x == -torch.inf].any()


def rows_over_many_tiles():
    """Student and teacher [5, 30 tiles]: a late peak over flat logits, rising and falling ones, near ones, -inf."""
    g = torch.Generator().manual_seed(7)
    x, y = (5 * torch.randn(5, 30 * kernels.TILE + 53, generator=g) for _ in range(2))
    x[0], y[0] = 1e-3 * x[0], 0
    x[0, 40_000] = 12
    x[1], y[1] = x[1].sort().values, y[1].sort().values
    x[2] = x[2].sort(descending=True).values
    y[3] = x[3] + 0.01 * y[3]
    x[4, :5000], y[4, :5000] = -torch.inf, -torch.inf
    return x, y


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_kl_that_is_read_once_keeps_its_digits(kind, device) -> None:
    x, y = rows_over_many_tiles()
    want = plain_divergence(DivergenceCall(x.double(), y.double(), kind=kind))
    found = divergence(DivergenceCall(x.to(device), y.to(device), kind=kind)).cpu().double()
    others = [0, 1, 2, 4]
    torch.testing.assert_close(found[others], want[others], atol=0, rtol=2e-6)
    torch.testing.assert_close(found[3], want[3], atol=0, rtol=1e-4)


@pytest.mark.parametrize("column", [kernels.TILE, kernels.TILE + 9])  # in the lane of column 0, and in another
def test_an_infinite_kl_stays_infinite_where_later_logits_are_far_above(column, device) -> None:
    x, y = torch.zeros(1, V), torch.zeros(1, V)
    y[0, 0], x[0, column] = -torch.inf, 500.0
    found = divergence(DivergenceCall(x.to(device), y.to(device), kind="reverse_kl"))
    assert found.tolist() == [torch.inf]
