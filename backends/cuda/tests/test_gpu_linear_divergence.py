"""linear_divergence on a Hopper GPU against float64; skipped without one."""

import pytest
import torch

from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_torch.linear_divergence import linear_divergence as plain

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

KINDS = ("forward_kl", "reverse_kl")
OPTIONS = {
    "plain": {},
    "mask and temperatures": {"mask": True, "temperature": "rows", "teacher_temperature": 0.8},
    "odd sizes": {"D": 77, "E": 50, "V": 1031},
    "several blocks": {"N": 2100, "V": 520},
}


def linear_divergence(call):
    from rlkernel_cuda.linear_divergence import launch

    return launch.linear_divergence(call)


def given(kind, backward, N=333, D=256, E=320, V=5003, **more):
    g = torch.Generator("cuda").manual_seed(3)

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=g)

    call = {
        "hidden": normal(N, D).bfloat16(), "weight": (normal(V, D) * 3 / D**0.5).bfloat16(),
        "teacher": normal(N, E).bfloat16(), "teacher_weight": (normal(V, E) * 3 / E**0.5).bfloat16(),
        "kind": kind, "backward": backward, **more,
    }  # fmt: skip
    if more.get("mask"):
        call["mask"] = torch.rand(N, device="cuda", generator=g) > 0.4
        call["hidden"] = torch.where(call["mask"][:, None], call["hidden"], torch.nan)
        call["teacher"] = torch.where(call["mask"][:, None], call["teacher"], torch.nan)
    if more.get("temperature") == "rows":
        call["temperature"] = 0.5 + torch.rand(N, device="cuda", generator=g)
    return call


def results(run, call):
    leaves = [call[name].clone().requires_grad_() for name in ("hidden", "weight")]
    out = run(LinearDivergenceCall(**{**call, "hidden": leaves[0], "weight": leaves[1]}))
    up = torch.linspace(-1, 2, out.numel(), device="cuda")
    return out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))


def wide(call):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}


def off(found, want):
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_match_float64(kind, backward, options, monkeypatch) -> None:
    from rlkernel_cuda.linear_divergence import launch

    if options.get("N", 0) > 2048:
        monkeypatch.setattr(launch, "KEPT", 0)
    call = given(kind, backward, **options)
    found, want = results(linear_divergence, call), results(plain, wide(call))
    torch.testing.assert_close(found[0].double(), want[0], atol=2e-4, rtol=1e-5)
    bound = 2.8e-3 if backward == "recompute" else 3.3e-3  # of two roundings to bf16, or of three
    assert max(off(mine, right) for mine, right in zip(found[1:], want[1:], strict=True)) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_a_confident_student_keeps_the_digits_of_its_gradient(kind, backward) -> None:
    call = given(kind, backward)
    call["hidden"] = call["hidden"] * 4
    found, want = results(linear_divergence, call), results(plain, wide(call))
    assert off(found[1], want[1]) < 3.3e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_a_student_that_nearly_is_the_teacher_keeps_its_digits(kind, backward) -> None:
    call = given(kind, backward, E=256)
    call["teacher"], call["teacher_weight"] = call["hidden"], call["weight"].clone()
    call["weight"] = (call["weight"] * (1 + 2**-7 * (torch.arange(5003, device="cuda")[:, None] % 2))).bfloat16()
    found, want = results(linear_divergence, call), results(plain, wide(call))
    assert float(want[0].max()) < 2e-3
    assert float(((found[0] - want[0]).abs() / want[0]).max()) < 1e-3
    assert off(found[1], want[1]) < 3.3e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_those_of_any_batch_with_gradients_or_without(kind) -> None:
    call = given(kind, "recompute")
    out = results(linear_divergence, call)[0]
    assert torch.equal(out, linear_divergence(LinearDivergenceCall(**call)))
    assert torch.equal(out, results(linear_divergence, {**call, "backward": "save"})[0])
    for n in (1, 7, 130):
        some = {**call, "hidden": call["hidden"][:n], "teacher": call["teacher"][:n]}
        assert torch.equal(out[:n], linear_divergence(LinearDivergenceCall(**some)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_divergence_is_nan_and_spoils_no_other(kind) -> None:
    call = given(kind, "save")
    right = results(linear_divergence, call)
    call["hidden"][3, 5] = torch.nan
    call["teacher"][200, 7] = torch.inf
    found = results(linear_divergence, call)
    others = torch.ones(333, dtype=torch.bool, device="cuda")
    others[[3, 200]] = False
    assert found[0][~others].isnan().all()
    assert torch.equal(found[0][others], right[0][others])
    assert found[1][~others].isnan().all()
    assert torch.equal(found[1][others], right[1][others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("side", "head"), [("hidden", "weight"), ("teacher", "teacher_weight")])
def test_a_row_whose_logits_are_all_minus_infinity_is_nan_and_so_is_its_gradient(kind, side, head) -> None:
    call = given(kind, "save")
    call[head][:, 0] = 1.0
    call[side][3, 0] = -torch.inf
    found, d_hidden, _ = results(linear_divergence, call)
    bad = torch.arange(333, device="cuda") == 3
    assert torch.equal(bad, found.isnan())
    assert torch.equal(bad, d_hidden.isnan().any(1))
