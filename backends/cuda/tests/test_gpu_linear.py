"""linear_logprob and linear_policy_loss on a Hopper GPU, with each kernel, against float64; skipped without one."""

import dataclasses

import pytest
import torch

from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_torch.direct import linear_logprob as reference
from rlkernel_torch.direct import linear_policy_loss as loss_reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

VARIANTS = ("shipped", "single", "pair")


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    from rlkernel_cuda.common import tiles

    if request.param != "shipped":
        tile = tiles.SINGLE if request.param == "single" else tiles.PAIR
        monkeypatch.setattr(tiles, "FORWARD", tile)
        monkeypatch.setattr(tiles, "GRADIENT", tile)
        monkeypatch.setattr(tiles, "PRODUCT", None)
    return request.param


def case(N=333, D=256, V=5003, **options):
    g = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    given = {
        "hidden": normal(N, D).bfloat16(),
        "weight": (normal(V, D) * 3 / D**0.5).bfloat16(),
        "ids": torch.randint(0, V, (N,), device="cuda", generator=g),
        **options,
    }
    if options.get("bias"):
        given["bias"] = normal(V)
    if options.get("mask"):
        given["mask"] = torch.rand(N, device="cuda", generator=g) > 0.5
        given["hidden"] = torch.where(given["mask"][:, None], given["hidden"], torch.nan)
    return given


def linear_logprob(*args, **options):
    from rlkernel_cuda.linear_logprob import launch as module

    return module.linear_logprob(LinearLogprobCall(*args, **options))


def run(operator, given, **more):
    leaves = {n: given[n].clone().requires_grad_() for n in ("hidden", "weight", "bias") if n in given}
    out = operator(**{**given, **leaves}, entropy=True, **more)
    g = torch.Generator("cuda").manual_seed(2)
    upstream = [torch.randn(out.logprob.shape, device="cuda", generator=g) for _ in range(3)]
    found = torch.autograd.grad((out.logprob, out.lse, out.entropy), list(leaves.values()), upstream)
    return out, dict(zip(leaves, found, strict=True))


def wide(given):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}


OPTIONS = {
    "plain": {},
    "everything": {"bias": True, "softcap": 8.0, "logit_scale": 2.0, "mask": True, "temperature": 0.7},
    "odd sizes": {"D": 77, "V": 1031},
}


def agree(given, mode):
    """Values and gradients match float64."""
    out, grads = run(linear_logprob, given, backward=mode)
    right, exact = run(reference, wide(given))
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(out, name).double(), getattr(right, name), atol=2e-4, rtol=1e-5)
    for name, grad in grads.items():
        # 2.5e-3 is the contract's; a few thousand roundings together may err by some percent more
        assert (grad.double() - exact[name]).norm() < 2.7e-3 * exact[name].norm(), name


@pytest.mark.parametrize("mode", ["recompute", "save"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_match_float64(variant, options, mode) -> None:
    agree(case(**options), mode)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_a_tile_in_which_no_id_is_left_changes_nothing(variant, scale) -> None:
    given = case(V=1025, bias=True, logit_scale=scale)  # the last tile has the chosen id alone, and others have none
    given["bias"][200:1024] = -torch.inf
    given["ids"] = torch.where(torch.arange(333, device="cuda") % 2 == 0, 1024, given["ids"] % 200)
    out, right = linear_logprob(**given, entropy=True), reference(**wide(given), entropy=True)
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(out, name).double(), getattr(right, name), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("mode", ["recompute", "save"])
@pytest.mark.parametrize("number", [-1e9, -1e20, -2e38])
def test_a_tile_that_a_bias_masks_by_one_number_weighs_nothing(variant, number, mode) -> None:
    given = case(V=800, bias=True)
    given["bias"][200:600] = number
    given["ids"] = torch.where(torch.arange(333, device="cuda") % 2 == 0, 300, given["ids"] % 200)
    agree(given, mode)


def test_a_row_has_the_same_bits_in_any_batch(variant) -> None:
    given = case(N=1000)
    whole = linear_logprob(**given).logprob
    turned = {**given, "hidden": given["hidden"].flip(0), "ids": given["ids"].flip(0)}
    assert torch.equal(linear_logprob(**turned).logprob.flip(0), whole)
    for n in (1, 7, 64, 129):
        part = linear_logprob(given["hidden"][:n], given["weight"], given["ids"][:n])
        assert torch.equal(part.logprob, whole[:n])
    saved, _ = run(linear_logprob, given, backward="save")
    assert torch.equal(saved.logprob, whole)


def test_a_policy_loss_in_blocks_matches_float64(variant, monkeypatch) -> None:
    from rlkernel_cuda.linear_policy_loss import launch as module

    given = case(N=3000)
    g = torch.Generator("cuda").manual_seed(4)
    rest = {
        "old_logprob": torch.randn(3000, device="cuda", generator=g) - 6,
        "advantages": torch.randn(3000, device="cuda", generator=g),
    }
    leaves = {n: given.pop(n).requires_grad_() for n in ("hidden", "weight")}
    exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    want = loss_reference(**exact, **given, **wide(rest), aggregate="token_mean")
    gradients = torch.autograd.grad(want.loss, list(exact.values()))
    for saved in (module.SAVED_LOGITS, 2 * 5008 * 1100):
        monkeypatch.setattr(module, "SAVED_LOGITS", saved)
        out = module.linear_policy_loss(LinearPolicyLossCall(**leaves, **given, **rest, aggregate="token_mean"))
        torch.testing.assert_close(out.loss.double(), want.loss, atol=1e-4, rtol=1e-4)
        for have, right in zip(torch.autograd.grad(out.loss, list(leaves.values())), gradients, strict=True):
            # A few tokens weigh most: rounding dz errs by up to 2^-9 and does not average out, 1.7e-3 for the result
            assert (have.double() - right).norm() < 3e-3 * right.norm()


def test_tiles_may_be_freed_at_once(monkeypatch) -> None:
    from rlkernel_cuda.common import tiles

    given = case()
    monkeypatch.setattr(tiles, "FORWARD", tiles.PAIR)
    late = linear_logprob(**given).logprob
    monkeypatch.setattr(tiles, "FORWARD", dataclasses.replace(tiles.PAIR, lag=False))
    assert torch.equal(linear_logprob(**given).logprob, late)


@pytest.mark.parametrize("mode", ["recompute", "save"])
def test_as_many_rows_and_logits_as_there_are(mode) -> None:
    """65536 rows and 2.6e9 logits: the last rows, which alone have an upstream gradient, are what they are alone."""
    given = case(N=65536, D=64, V=40000)
    found = []
    for rows in (slice(0, 65536), slice(65533, 65536)):
        h, w = given["hidden"][rows].clone().requires_grad_(), given["weight"].clone().requires_grad_()
        out = linear_logprob(h, w, given["ids"][rows], backward=mode)
        out.logprob[-3:].sum().backward()
        found.append((out.logprob.detach()[-3:], h.grad[-3:], w.grad))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*(f[1:] for f in found), strict=True):
        assert (a.double() - b.double()).norm() <= 3e-3 * b.double().norm()
