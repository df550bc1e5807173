"""linear_policy_loss on Triton against the reference in float64, and its promises: blocks, memory, ratios of one."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_torch.direct import linear_policy_loss as definition
from rlkernel_triton.linear_policy_loss.launch import BLOCK, DEFAULT_WORKSPACE, rows_of_a_block, workspace

B, T, D, V = 3, 24, 16, 70
OPERANDS = ("hidden", "weight", "bias")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(seed=0):
    """A step whose ratios are near one, with NaN in hidden states that are masked."""
    hidden, weight, bias = random(B, T, D, seed=seed), 0.4 * random(V, D, seed=seed + 1), 0.1 * random(V, seed=seed + 2)
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))
    old = torch.log_softmax(hidden @ weight.T + bias, -1).gather(-1, ids[..., None])[..., 0]
    mask = random(B, T, seed=seed + 3) > -0.7
    hidden = torch.where(mask[..., None], hidden, torch.nan)
    return {
        "hidden": hidden, "weight": weight, "bias": bias, "ids": ids, "mask": mask,
        "old_logprob": old + 0.2 * random(B, T, seed=seed + 4), "advantages": random(B, T, seed=seed + 5),
    }  # fmt: skip


def run(f, given, device, dtype=None, frozen=()):
    """The result and the gradients of the operands."""
    here = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    if dtype is not None:
        here = {n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in here.items()}
    leaves = {n: here[n].detach().requires_grad_(n not in frozen) for n in OPERANDS}
    out = f(**here | leaves)
    (2 * out.loss).backward()
    return out, {n: x.grad for n, x in leaves.items()}


def agree(given, device):
    (out, grads), (want, exact) = (
        run(rlk.linear_policy_loss, given, device),
        run(definition, given, device, torch.double),
    )
    torch.testing.assert_close(out.loss.double(), want.loss, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(out.logprob.double(), want.logprob, atol=1e-5, rtol=1e-5)
    for n, x in grads.items():
        assert float((x.double() - exact[n]).norm() / exact[n].norm()) < 1e-5, n
    return out


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "gspo"},
        {"kind": "cispo", "entropy": True, "entropy_coef": 0.1, "softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8},
    ],
    ids=["sequence", "options of the head"],
)
def test_loss_and_gradients_of_several_blocks_of_rows(device, more) -> None:
    agree(step() | more, device)


def test_packed_tokens_of_no_sequence_add_nothing(device) -> None:
    given = {n: x.reshape(B * T, *x.shape[2:]) if x.shape[:2] == (B, T) else x for n, x in step().items()}
    agree(given | {"cu_seqlens": torch.tensor([0, 30, 50, 65]), "kind": "gspo"}, device)


def test_blocks_of_rows_change_nothing_beyond_rounding(device) -> None:
    given = step() | {"kind": "grpo"}
    least = workspace(BLOCK, B * T, D, V, 4)
    whole, grads = run(rlk.linear_policy_loss, given, device)
    small, parts = run(rlk.linear_policy_loss, given | {"max_workspace_bytes": least}, device)
    assert torch.equal(whole.loss, small.loss)
    for n in OPERANDS:
        torch.testing.assert_close(parts[n], grads[n], atol=1e-6, rtol=1e-5)


def test_a_workspace_too_small_is_refused_with_the_least_that_is_not(device) -> None:
    least = workspace(BLOCK, B * T, D, V, 4)
    with pytest.raises(ArgumentError, match=str(least)):
        run(rlk.linear_policy_loss, step() | {"max_workspace_bytes": least - 1}, device)


def test_the_workspace_of_a_large_head_does_not_grow_with_the_number_of_rows() -> None:
    sizes = {N: rows_of_a_block(N, 4096, 128256, 2, None) for N in (1 << 14, 1 << 16, 1 << 20)}
    assert max(sizes.values()) * 128256 * 6 <= DEFAULT_WORKSPACE


def test_an_upstream_gradient_is_not_rounded_to_16_bits(device) -> None:
    """A factor without dimensions may take the dtype of what it scales, as in an earlier reference: 0.3 was 0.30078."""
    given = {n: x[:1, :9] if x.shape[:2] == (B, T) else x for n, x in step().items()}
    given = {n: x.to(device) for n, x in given.items()} | {"kind": "grpo"}
    given = {n: x.bfloat16() if n in OPERANDS else x for n, x in given.items()}
    gradients = []
    for factor in (1.0, 0.3):
        leaves = {n: given[n].detach().clone().requires_grad_() for n in OPERANDS}
        (factor * rlk.linear_policy_loss(**given | leaves).loss).backward()
        gradients.append(leaves["weight"].grad.double())
    one, less = gradients
    assert float((less * one).sum() / (one * one).sum()) == pytest.approx(0.3, rel=5e-4)
