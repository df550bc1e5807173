"""divergence against the formulas of TRL, Liger and verl, gradients included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import rlkernel as rlk
from rlkernel_core.definitions import divergence as definition

torch.manual_seed(0)
STUDENT, TEACHER = (torch.randn(5, 50, dtype=torch.float64) for _ in range(2))


def gkd(student, teacher, beta):
    """TRL's `GKDTrainer.generalized_jsd_loss` before its reduction: beta 0 and 1 are the KLs."""
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return functional.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return functional.kl_div(log_t, log_s, reduction="none", log_target=True).sum(-1)
    weights = torch.tensor(beta, dtype=student.dtype)
    log_m = torch.logsumexp(torch.stack([log_s + torch.log1p(-weights), log_t + weights.log()]), 0)
    of_teacher, of_student = (
        functional.kl_div(log_m, x, reduction="none", log_target=True).sum(-1) for x in (log_t, log_s)
    )
    return beta * of_teacher + (1 - beta) * of_student


def liger(student, teacher, beta):
    """Liger's JSD kernel before its reduction."""
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    m = beta * y.exp() + (1 - beta) * x.exp()
    return (beta * y.exp() * y + (1 - beta) * x.exp() * x - m * m.log()).sum(-1)


def compared(expected, **options):
    """Values and gradients of a formula of two logits, and of the operator."""
    found = []
    for f in (expected, lambda s, t: rlk.divergence(s, t, **options)):
        leaf = STUDENT.clone().requires_grad_()
        value = f(leaf, TEACHER)
        (grad,) = torch.autograd.grad(value.square().sum(), leaf)
        found.append((value.detach(), grad))
    return found


@pytest.mark.parametrize(
    "expected, options",
    [
        (lambda s, t: gkd(s, t, 0), {"kind": "forward_kl"}),
        (lambda s, t: gkd(s, t, 1), {"kind": "reverse_kl"}),
        (lambda s, t: gkd(s, t, 0.3), {"kind": "jsd", "beta": 0.3}),
        (lambda s, t: liger(s, t, 0.5), {"kind": "jsd"}),
        (lambda s, t: liger(s, t, 0.9), {"kind": "jsd", "beta": 0.9}),
        (lambda s, t: (s.softmax(-1) - t.softmax(-1)).abs().sum(-1) / 2, {"kind": "tv"}),
        (lambda s, t: gkd(s / 0.7, t / 1.3, 1), {"kind": "reverse_kl", "temperature": 0.7, "teacher_temperature": 1.3}),
    ],
    ids=["TRL, 0", "TRL, 1", "TRL, 0.3", "Liger, 0.5", "Liger, 0.9", "TV", "temperatures"],
)
def test_values_and_gradients_are_those_of_the_peers_formulas(expected, options) -> None:
    want, found = compared(expected, **options)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-10)


def test_a_list_is_verls_truncated_kl_and_the_term_of_the_tail() -> None:
    log_t, ids = TEACHER.log_softmax(-1).topk(8)

    def with_tail(s, _):
        log_s = s.log_softmax(-1).gather(-1, ids)
        tail_s, tail_t = (1 - x.exp().sum(-1) for x in (log_s, log_t))
        return (log_t.exp() * (log_t - log_s)).sum(-1) + tail_t * (tail_t / tail_s).log()

    found = []
    for f in (with_tail, lambda s, t: rlk.divergence(s, t, teacher_ids=ids)):
        leaf = STUDENT.clone().requires_grad_()
        value = f(leaf, log_t)
        found.append((value.detach(), *torch.autograd.grad(value.square().sum(), leaf)))
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-10)


def test_a_list_never_diverges_further_than_the_whole() -> None:
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        whole = rlk.divergence(STUDENT, TEACHER, kind=kind)
        before = torch.zeros_like(whole)
        for K in (1, 4, 16, 50):
            top = TEACHER.log_softmax(-1).topk(K)
            part = rlk.divergence(STUDENT, top.values, teacher_ids=top.indices, kind=kind)
            assert (part >= before - 1e-12).all()
            before = part
        torch.testing.assert_close(before, whole)


KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")


def as_defined(student, teacher, **options):
    """The operator's values and gradients, and those of the definition."""
    leaf = student.clone().requires_grad_()
    value = rlk.divergence(leaf, teacher, **options)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    ids = options.pop("teacher_ids", None)
    want = definition.divergence(
        student, teacher, ids=None if ids is None else ids.numpy(), g=np.ones(len(student)), **options
    )
    return (value.detach(), grad), tuple(torch.from_numpy(np.asarray(x)) for x in (want.values, want.grad))


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_excludes_all_but_the_list_has_an_empty_tail(kind) -> None:
    student, ids = torch.randn(2, 7, dtype=torch.float64), torch.tensor([[4, 0, 2], [1, 5, 6]])
    kept = torch.zeros(2, 7, dtype=torch.bool).scatter(1, ids, True)
    student[~kept] = -torch.inf
    log_t = torch.randn(2, 3, dtype=torch.float64).log_softmax(-1)
    found, want = as_defined(student, log_t, teacher_ids=ids, kind=kind)
    torch.testing.assert_close(found, want, equal_nan=True)
    if kind == "forward_kl":  # the teacher's tail has at least 2^-23
        assert found[0].isposinf().all()
        assert found[1].isnan().all()
    else:
        assert found[0].isfinite().all()
        assert not found[1][~kept].any()


@pytest.mark.parametrize("kind", KINDS)
def test_sides_that_put_all_mass_on_different_ids_are_as_far_apart_as_defined(kind) -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0]])
    found, want = as_defined(logits, -logits, kind=kind)
    assert want[0].isfinite().all()
    torch.testing.assert_close(found, want, check_dtype=False, atol=1e-5, rtol=1e-5)


def test_a_teacher_temperature_that_requires_a_gradient_is_told_to_detach_itself() -> None:
    T = torch.ones(5, requires_grad=True)
    with pytest.raises(rlk.ArgumentError, match=r"^teacher_temperature: .* Pass teacher_temperature\.detach\(\)"):
        rlk.divergence(STUDENT, TEACHER, teacher_temperature=T)
