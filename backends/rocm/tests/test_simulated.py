"""The shipped Triton kernels as gfx942 and gfx950 machine code, at toy sizes, against the definitions in float64."""

import importlib

import pytest
import torch
import toy_kernels as toy

import rlkernel as rlk
from cdna_simulator import OutOfBoundsError, UnsupportedKernelError
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_rocm.simulated.launcher import SimulatorLauncher, machine
from rlkernel_torch import direct
from rlkernel_triton.launchers import using

ARCHS = ("gfx942", "gfx950")
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(params=ARCHS)
def arch(request):
    """Calls of operators reach the kernels as machine code of an architecture, and nothing else."""
    backend = importlib.import_module(f"rlkernel_rocm.simulated.{request.param}").backend
    with rlk.registered(backend), rlk.use(backend.name, fallback="error"):
        yield request.param


def drawn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=g)).to(dtype)


def test_logprob_in_bf16_with_its_gradient(arch) -> None:
    x, ids = drawn(3, 900, dtype=torch.bfloat16, scale=3), torch.tensor([1, 500, 899])
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out, want = rlk.logprob(mine, ids, entropy=True), direct.logprob(theirs, ids, entropy=True)
    torch.testing.assert_close(out.logprob.double(), want.logprob, **CLOSE)
    torch.testing.assert_close(out.entropy.double(), want.entropy, **CLOSE)
    (out.logprob - 0.3 * out.entropy).sum().backward()
    (want.logprob - 0.3 * want.entropy).sum().backward()
    torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-4, rtol=2**-7)


def norm():
    """Results and gradients of a norm with a residual."""
    x, residual, g = (drawn(3, 90, seed=seed).requires_grad_() for seed in range(3))
    weight = drawn(90, seed=3).requires_grad_()
    out = rlk.rms_norm(x, weight, eps=1e-5, residual=residual, offset=0.3)
    return out.y, out.residual, *torch.autograd.grad([out.y, out.residual], [x, weight, residual], [g, g])


def test_rms_norm_has_the_bits_of_plain_torch(arch) -> None:
    """As machine code too products are rounded before they are added, and divisions and roots are those of IEEE 754."""
    found = norm()
    with rlk.use("torch"):
        want = norm()
    assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * 5


def rotated():
    """Results and gradients of heads that are normalized and rotated in part."""
    q, g_q, k, g_k = (drawn(3, heads, 40, seed=heads) for heads in (2, 3, 1, 4))
    q, k, weight = (x.requires_grad_() for x in (q, k, drawn(40, seed=7)))
    table, positions = drawn(9, 32, seed=8), torch.tensor([0, 8, 3])
    out = rlk.rope(q, k, positions, table, q_weight=weight, eps=1e-5, offset=0.3)
    return out.q, out.k, *torch.autograd.grad([out.q, out.k], [q, k, weight], [g_q[:, :2], g_k[:, :1]])


def test_rope_has_the_bits_of_plain_torch(arch) -> None:
    """No machine code fuses a product of a rotation with its sum."""
    found = rotated()
    with rlk.use("torch"):
        want = rotated()
    assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_experts_and_all_gradients_have_the_bits_of_linear(arch, dtype) -> None:
    """As machine code: 18 rows of the second expert, 3 of the fourth, 2 of none."""
    x, weight, bias = (drawn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(23, 70), (4, 20, 70), (4, 20)]))
    ends, g = torch.tensor([0, 18, 18, 21], dtype=torch.int32), drawn(23, 20, dtype=dtype, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = rlk.grouped_linear(*leaves[:2], ends, bias=leaves[2])
    d_x, d_weight, d_bias = torch.autograd.grad(y, leaves, g)
    for expert, rows in ((1, slice(0, 18)), (3, slice(18, 21))):
        of_expert = [t.clone().requires_grad_() for t in (x[rows], weight[expert], bias[expert])]
        want = rlk.linear(*of_expert[:2], bias=of_expert[2])
        wants = (want, *torch.autograd.grad(want, of_expert[:2], g[rows]))
        founds = (y[rows], d_x[rows], d_weight[expert])
        assert [torch.equal(a, b) for a, b in zip(founds, wants, strict=True)] == [True] * 3
        torch.testing.assert_close(d_bias[expert], g[rows].float().sum(0).to(dtype))
    rest = (y[21:], d_x[21:], d_weight[::2], d_bias[::2])
    assert [bool(t.any()) for t in rest] == [False] * 4


def test_whiten(arch) -> None:
    x, mask = drawn(4, 70, scale=5) + 3, torch.rand(4, 70, generator=torch.Generator().manual_seed(1)) < 0.7
    want = direct.whiten(x.double(), mask=mask)
    torch.testing.assert_close(rlk.whiten(x, mask=mask).y.double(), want.y, **CLOSE)


def test_affine_suffix_scan(arch) -> None:
    b, a = drawn(3, 90), drawn(3, 90, seed=1, scale=0.5)
    want = direct.affine_suffix_scan(b.double(), a.double())
    torch.testing.assert_close(rlk.affine_suffix_scan(b, a).y.double(), want.y, **CLOSE)


def test_policy_loss_with_its_gradient(arch) -> None:
    old, mask = -drawn(4, 40).abs(), torch.arange(40) < torch.tensor([[40], [7], [1], [33]])
    new, adv = (old + drawn(4, 40, seed=1, scale=0.2)), drawn(4, seed=2)
    mine, theirs = new.clone().requires_grad_(), new.double().requires_grad_()
    options = {"mask": mask, "kind": "grpo", "clip": (0.2, 0.28)}
    out = rlk.policy_loss(mine, old, adv, **options)
    want = direct.policy_loss(theirs, old.double(), adv.double(), **options)
    torch.testing.assert_close(out.loss.double(), want.loss, **CLOSE)
    out.loss.backward()
    want.loss.backward()
    torch.testing.assert_close(mine.grad.double(), theirs.grad, **CLOSE)


def test_sample_draws_the_reference_s_token(arch) -> None:
    logits = drawn(3, 500, scale=2)
    options = {"top_k": 20, "top_p": 0.9, "seed": torch.tensor([1, 2, 3]), "step": 5}
    out, want = rlk.sample(logits, **options), direct.sample(logits, **options)
    assert out.token.tolist() == want.token.tolist()
    torch.testing.assert_close(out.logprob, want.logprob, **CLOSE)


@pytest.mark.parametrize("order", [0, 1])
def test_the_order_of_waves_changes_no_bit(order) -> None:
    from rlkernel_triton.logprob.launch import logprob

    x, ids = drawn(3, 900, scale=3), torch.tensor([1, 500, 899])
    with using(SimulatorLauncher("gfx942")):
        want = logprob(LogprobCall(x, ids, entropy=True))
    with using(SimulatorLauncher("gfx942", order)):
        got = logprob(LogprobCall(x, ids, entropy=True))
    assert torch.equal(got.logprob, want.logprob)
    assert torch.equal(got.entropy, want.entropy)


def softmax(arch="gfx942", V=700, **fixed):
    """A launch of the toy kernel; rows of it have V columns."""
    return SimulatorLauncher(arch).bind(toy.softmax, V=V, BLOCK=1024, **fixed)


def test_a_kernel_that_reads_beyond_a_tensor_is_stopped() -> None:
    rows = torch.zeros(3, 700)
    with pytest.raises(OutOfBoundsError, match="nearest argument, 2800 bytes long"):
        softmax()((2,), rows[1], torch.zeros(2, 700))


def test_two_gpus_are_simulated_side_by_side() -> None:
    x, there = drawn(2, 700), [torch.empty(2, 700) for _ in ARCHS]
    for arch, out in zip(ARCHS, there, strict=True):
        softmax(arch)((2,), x, out)
        torch.testing.assert_close(out, x.softmax(1))


def test_a_kernel_is_read_once_however_often_it_is_bound() -> None:
    x = torch.zeros(2, 700)
    machine.cache_clear()
    for _ in range(2):
        launch = softmax()
        launch((2,), x, x.clone())
        launch((2,), x, x.clone())
    assert machine.cache_info().misses == 1


def test_a_kernel_that_takes_more_lds_than_there_is_is_refused() -> None:
    x = torch.zeros(256, 512, dtype=torch.float16)
    launch = SimulatorLauncher("gfx942").bind(toy.product, num_warps=4, M=256, K=512)
    with pytest.raises(UnsupportedKernelError, match=r"product takes \d+ bytes of LDS; a .* has 65536"):
        launch((1,), x, x, torch.zeros(256, 256))


def test_an_architecture_that_is_not_simulated_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="gfx1100"):
        SimulatorLauncher("gfx1100")
