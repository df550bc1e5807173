"""The shipped Triton kernels as gfx942 and gfx950 machine code, at toy sizes, against the definitions in float64."""

import importlib

import pytest
import torch
import toy_kernels as toy

import rlkernel as rlk
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_rocm.simulated.driver import activate, simulated
from rlkernel_rocm.simulator import OutOfBoundsError, SimulationError
from rlkernel_torch import direct

ARCHS = ("gfx942", "gfx950")
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def driver_restored():
    """Triton's driver is set for the whole process; other tests want none."""
    with simulated("gfx942"):
        yield


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
    from rlkernel_triton.logprob import logprob

    x, ids = drawn(3, 900, scale=3), torch.tensor([1, 500, 899])
    activate("gfx942")
    want = logprob(LogprobCall(x, ids, entropy=True))
    activate("gfx942", order)
    got = logprob(LogprobCall(x, ids, entropy=True))
    assert torch.equal(got.logprob, want.logprob)
    assert torch.equal(got.entropy, want.entropy)


def test_a_kernel_that_reads_beyond_a_tensor_is_stopped() -> None:
    rows = torch.zeros(3, 700)
    with pytest.raises(OutOfBoundsError, match="nearest argument, 2800 bytes long"):
        toy.softmax[(2,)](rows[1], torch.zeros(2, 700), 700, BLOCK=1024, enable_fp_fusion=True)


def test_what_was_compiled_for_one_gpu_is_not_launched_on_another() -> None:
    x = torch.zeros(2, 700)
    kept = toy.softmax[(2,)](x, x.clone(), 700, BLOCK=1024, enable_fp_fusion=True)
    with simulated("gfx950"), pytest.raises(SimulationError, match="compiled for gfx942, and gfx950 is simulated"):
        kept[(2, 1, 1)](x, x.clone(), 700, 1024)


def test_a_kernel_is_read_once_however_often_it_is_launched() -> None:
    x = torch.zeros(2, 700)
    kept = toy.softmax[(2,)](x, x.clone(), 700, BLOCK=1024, enable_fp_fusion=True)
    machine = kept.run.machine
    kept[(2, 1, 1)](x, x.clone(), 700, 1024)
    assert kept.run.machine is machine


def test_an_architecture_that_is_not_simulated_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="gfx1100"):
        activate("gfx1100")
