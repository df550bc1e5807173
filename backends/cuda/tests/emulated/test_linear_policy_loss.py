"""linear_policy_loss of the cuda backend against float64, in one block and in several, kernels emulated."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_cuda.linear_policy_loss import launch as module
from rlkernel_torch.direct import linear_policy_loss as reference

# The interpreter computes both branches of a select with numpy, which warns of log(0) in the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

linear_policy_loss = OPERATORS["linear_policy_loss"].taking_arguments(module.linear_policy_loss)

N, D, V = 80, 16, 300
TWO_BLOCKS = 2 * 304 * 65  # bytes of the logits of one block of 64 rows, and a bit


def case(**options):
    g = torch.Generator().manual_seed(3)
    given = {
        "hidden": torch.randn(N, D, generator=g).bfloat16(),
        "weight": (torch.randn(V, D, generator=g) * 3 / D**0.5).bfloat16(),
        "ids": torch.randint(0, V, (N,), generator=g),
        "advantages": torch.randn(N, generator=g),
        "old_logprob": -6 + torch.randn(N, generator=g),
        "aggregate": "token_mean",
        **options,
    }
    if options.get("mask"):
        given["mask"] = torch.rand(N, generator=g) > 0.4
        given["hidden"] = torch.where(given["mask"][:, None], given["hidden"], torch.nan)
    return given


def run(operator, given, scale=1.0, **more):
    leaves = {n: given[n].clone().requires_grad_() for n in ("hidden", "weight")}
    out = operator(**{**given, **leaves}, **more)
    grads = torch.autograd.grad(out.loss * scale, list(leaves.values()))
    return out, grads


def wide(given):
    floats = ("hidden", "weight", "advantages", "old_logprob")
    return {n: v.double() if n in floats else v for n, v in given.items()}


OPTIONS = {
    "grpo": {},
    "mask and entropy": {"mask": True, "entropy": True, "entropy_coef": 0.01},
    "softcap": {"softcap": 4.0, "temperature": 0.7},
    "sequences": {"cu_seqlens": torch.tensor([0, 40, 79]), "kind": "gspo"},
}


@pytest.mark.parametrize(
    "name, saved",
    [("grpo", module.SAVED_LOGITS), ("grpo", TWO_BLOCKS), ("mask and entropy", TWO_BLOCKS), ("softcap", TWO_BLOCKS),
     ("sequences", TWO_BLOCKS)],
)  # fmt: skip
def test_loss_and_gradients_match_float64(name, saved, monkeypatch) -> None:
    monkeypatch.setattr(module, "SAVED_LOGITS", saved)
    given = case(**OPTIONS[name])
    out, grads = run(linear_policy_loss, given, scale=3.0)
    right, exact = run(reference, wide(given), scale=3.0)
    torch.testing.assert_close(out.loss.detach().double(), right.loss.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logprob.double(), right.logprob, atol=2e-5, rtol=1e-5)
    for have, want in zip(grads, exact, strict=True):
        assert (have.double() - want).norm() < 1e-2 * want.norm()


def test_the_least_that_a_refusal_names_is_accepted() -> None:
    given = case()
    with pytest.raises(ArgumentError) as refusal:
        linear_policy_loss(**given, max_workspace_bytes=1)
    least = int(str(refusal.value).split("at least ")[1].split(",")[0])
    _, grads = run(linear_policy_loss, given, max_workspace_bytes=least)
    assert all(bool(g.isfinite().all()) for g in grads)


def test_no_tokens_give_a_loss_of_zero() -> None:
    given = case()
    none = {n: x if n in {"weight", "aggregate"} else x[:0] for n, x in given.items()}
    out, grads = run(linear_policy_loss, none)
    assert float(out.loss.detach()) == 0.0
    assert all(bool((g == 0).all()) for g in grads)
