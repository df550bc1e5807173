"""linear_divergence of the cuda backend against plain torch in float64, compare.cu replaced by the same in torch."""

import math

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_cuda import backend
from rlkernel_cuda.linear_divergence import compare, launch
from rlkernel_torch.linear_divergence import linear_divergence as plain

# The interpreter computes both branches of a select with numpy, which warns of log(0) in the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
COLS = 256
KINDS = ("forward_kl", "reverse_kl")


def below_top(side, V):
    """The tops of the tiles of each row, [n, tiles], and base-2 units below them, [n, tiles, COLS]."""
    y = side.hidden.float() @ side.weight.float().T
    y = torch.nn.functional.pad(y[:, :V], (0, -V % COLS), value=-torch.inf).unflatten(1, (-1, COLS))
    top = y.amax(2)
    return top, (y - torch.where(top == -torch.inf, 0.0, top)[..., None]) * side.scale[:, None, None]


def bind_tiles(form, device):
    """What compare.cu makes."""

    def run(student, teacher, scratch, into):
        (top, w), (t_top, v) = below_top(student, form.V), below_top(teacher, form.V)
        center = torch.where(w == 0, w - v, -torch.inf).amax(2).clamp_min(-1e9)
        d = ((w - v) * math.log(2)).nan_to_num(nan=0.0)
        w, v = w.exp2(), v.exp2()
        p, d_p, q = (w, d, v) if form.kind == "reverse_kl" else (v, -d, w)
        moment = torch.where(p == 0, 0.0, p * d_p)
        term = (moment - p + q).clamp_min(0)
        into.sums.copy_(
            torch.stack((top, w.sum(2), t_top, v.sum(2), term.sum(2), moment.sum(2), center)).permute(2, 0, 1)
        )
        if form.save:
            reverse = (d / math.log(2) - center[..., None]).clamp(-65504, 65504)
            second = reverse if form.kind == "reverse_kl" else 2**15 * (w - v)
            for kept, x in zip(into.logits, (2**15 * w, second), strict=True):
                kept[: form.n] = x.unflatten(2, (8, 4, 4, 2)).transpose(3, 4).flatten(1).half()

    return run


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(compare, "bind_tiles", bind_tiles)
    monkeypatch.setattr(compare, "GRADIENT", (2, 2))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(launch, "KEPT", 0)
    monkeypatch.setattr(launch, "MULTIPLE", 16)


def given(kind, backward, N=21, D=16, E=24, V=521, **more):
    g = torch.Generator().manual_seed(3)

    def normal(*size):
        return torch.randn(*size, generator=g)

    call = {
        "hidden": normal(N, D).bfloat16(), "weight": (normal(V, D) * 3 / D**0.5).bfloat16(),
        "teacher": normal(N, E).bfloat16(), "teacher_weight": (normal(V, E) * 3 / E**0.5).bfloat16(),
        "kind": kind, "backward": backward, **more,
    }  # fmt: skip
    if more.get("mask") == "some":
        call["mask"] = torch.rand(N, generator=g) > 0.4
        call["hidden"] = torch.where(call["mask"][:, None], call["hidden"], torch.nan)
        call["teacher"] = torch.where(call["mask"][:, None], call["teacher"], torch.nan)
    for name in ("temperature", "teacher_temperature"):
        if more.get(name) == "rows":
            call[name] = 0.5 + torch.rand(N, generator=g)
    return call


def results(run, call):
    leaves = [call[name].clone().requires_grad_() for name in ("hidden", "weight")]
    out = run(LinearDivergenceCall(**{**call, "hidden": leaves[0], "weight": leaves[1]}))
    up = torch.linspace(-1, 2, out.numel()).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))


def wide(call):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}


OPTIONS = {
    "plain": {},
    "mask and rows' temperatures": {"mask": "some", "temperature": "rows", "teacher_temperature": 0.8},
    "teacher's temperatures": {"temperature": 1.3, "teacher_temperature": "rows"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_match_float64(kind, backward, options) -> None:
    call = given(kind, backward, **options)
    found, want = results(launch.linear_divergence, call), results(plain, wide(call))
    torch.testing.assert_close(found[0].double(), want[0], atol=2e-5, rtol=1e-5)
    for mine, right in zip(found[1:], want[1:], strict=True):
        assert (mine.double() - right).norm() / right.norm() < 1e-2  # twice what bf16 costs: it is cut off here


@pytest.mark.parametrize("kind", KINDS)
def test_a_confident_student_keeps_the_digits_of_its_gradient(kind) -> None:
    call = given(kind, "save")
    call["hidden"] = call["hidden"] * 4
    found, want = results(launch.linear_divergence, call), results(plain, wide(call))
    assert (found[1].double() - want[1]).norm() / want[1].norm() < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_nearly_is_the_teacher_keeps_the_digits_of_its_gradient(kind) -> None:
    call = given(kind, "save", E=16)
    call["teacher"], call["teacher_weight"] = call["hidden"], call["weight"].clone()
    call["weight"] = (call["weight"] * (1 + 2**-7 * (torch.arange(521)[:, None] % 2))).bfloat16()
    found, want = results(launch.linear_divergence, call), results(plain, wide(call))
    assert float(want[0].max()) < 1e-3
    assert (found[1].double() - want[1]).norm() / want[1].norm() < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("side", "head"), [("hidden", "weight"), ("teacher", "teacher_weight")])
def test_a_row_whose_logits_are_all_minus_infinity_is_nan_and_so_is_its_gradient(kind, side, head) -> None:
    call = given(kind, "save", N=3)
    call[head][:, 0] = 1.0
    call[side][1, 0] = -torch.inf
    found, d_hidden, _ = results(launch.linear_divergence, call)
    assert found.isnan().tolist() == [False, True, False]
    assert d_hidden[1].isnan().all()
    assert not d_hidden[::2].isnan().any()


@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_hidden_states_of_one_token_without_a_row_dimension_give_one_number(backward) -> None:
    call = given("forward_kl", backward, N=1)
    rows = results(launch.linear_divergence, call)
    one = results(launch.linear_divergence, {**call, "hidden": call["hidden"][0], "teacher": call["teacher"][0]})
    assert [tuple(x.shape) for x in one[:2]] == [(), (16,)]
    assert [torch.equal(a, b.view(a.shape)) for a, b in zip(one, rows, strict=True)] == [True] * 3


def test_operands_and_a_mask_of_any_strides_give_the_bits_of_contiguous_ones() -> None:
    call = given("reverse_kl", "recompute", N=15)
    for name in ("hidden", "teacher"):
        call[name] = call[name].view(3, 5, -1)
    call["mask"] = (torch.arange(15) % 4 > 0).view(3, 5)
    strided = {n: x.mT.contiguous().mT if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    right = results(launch.linear_divergence, call)
    assert [torch.equal(a, b) for a, b in zip(results(launch.linear_divergence, strided), right, strict=True)] == [
        True
    ] * 3


def test_without_gradients_values_have_the_same_bits() -> None:
    call = given("reverse_kl", "recompute")
    out = launch.linear_divergence(LinearDivergenceCall(**call))
    assert torch.equal(out, results(launch.linear_divergence, call)[0])


def test_a_temperature_beyond_fp32_makes_both_sides_uniform() -> None:
    out, d_hidden, _ = results(launch.linear_divergence, given("forward_kl", "recompute", N=3, temperature=1e39))
    torch.testing.assert_close(out, torch.zeros(3), atol=1e-6, rtol=0)
    assert not d_hidden.any()


def test_no_rows_have_no_divergence_and_a_gradient_of_zeros() -> None:
    out, d_hidden, d_weight = results(launch.linear_divergence, given("forward_kl", "recompute", N=0))
    assert (out.shape, d_hidden.shape) == ((0,), (0, 16))
    assert not d_weight.any()


def test_a_teacher_without_a_head_is_refused_by_name() -> None:
    call = given("forward_kl", "save")
    logits = LinearDivergenceCall(call["hidden"], call["weight"], torch.zeros(21, 521))
    assert "teacher_weight" in str(launch.fits(logits))
    assert launch.fits(LinearDivergenceCall(**call)) is None


@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_a_compiled_step_has_the_bits_of_an_eager_one(backward) -> None:
    call = given("reverse_kl", backward, mask="some", N=9)
    leaves = [call.pop(name).clone().requires_grad_() for name in ("hidden", "weight")]

    def step(hidden, weight):
        return rlk.linear_divergence(hidden, weight, call["teacher"], **rest).mean()

    rest = {name: x for name, x in call.items() if name != "teacher"}
    cpu = backend.impls[[impl.op for impl in backend.impls].index("linear_divergence@1")]
    cpu = cpu.model_copy(update={"requires": cpu.requires.model_copy(update={"device": "cpu", "arch": ()})})
    with rlk.registered(backend.model_copy(update={"name": "emulated", "impls": (cpu,)})), rlk.use("emulated"):
        eager = torch.autograd.grad(step(*leaves), leaves)
        compiled = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    assert [torch.equal(a, b) for a, b in zip(eager, compiled, strict=True)] == [True, True]
