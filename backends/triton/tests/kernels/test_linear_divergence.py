"""linear_divergence in several blocks of rows, and the memory that it takes."""

import pytest
import torch

from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_torch.linear_divergence import linear_divergence as plain
from rlkernel_triton.linear_divergence import gradients, launch

N, V, D = 140, 70, 24


def results(run, device, form, dtype, **more):
    """The result and gradients of a call that is drawn anew."""
    g = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(*size, generator=g).to(device, dtype) for size in ((N, D), (V, D)))
    weight = weight / 4
    teacher = torch.randn(N, V, generator=g)
    if form == "head":
        teacher, more["teacher_weight"] = teacher[:, :D], torch.randn(V, D, generator=g).to(device) / 4
    if form == "list":
        teacher, ids = teacher.log_softmax(-1).topk(5)
        more["teacher_ids"] = ids.to(device)
    more["mask"] = (torch.rand(N, generator=g) < 0.7).to(device)
    more["temperature"] = (0.5 + torch.rand(N, generator=g)).to(device)
    up = torch.randn(N, generator=g).to(device)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    out = run(LinearDivergenceCall(*leaves, teacher.to(device), kind="reverse_kl", **more))
    return out.detach(), *torch.autograd.grad(out, leaves, up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("form", "backward"), [("head", "recompute"), ("logits", "recompute"), ("list", "recompute"), ("list", "save")]
)
def test_several_blocks_give_the_results_of_plain_torch(form, backward, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(launch, "LOGITS", 128 * V)
    monkeypatch.setattr(launch, "MULTIPLE", 128)
    monkeypatch.setattr(gradients, "COLUMNS", 32)
    found = results(launch.linear_divergence, device, form, dtype, backward=backward)
    want = results(plain, device, form, dtype)
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-3}
    torch.testing.assert_close(found[0], want[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1:], want[1:], **near)


def test_rows_that_lie_apart_have_the_gradients_of_rows_together(device) -> None:
    g = torch.Generator().manual_seed(8)
    wide = torch.randn(3, 2, 2 * D, generator=g).to(device)
    weight, teacher = torch.randn(V, D, generator=g).to(device) / 4, torch.randn(2, 3, V, generator=g).to(device)

    def gradients(hidden):
        leaves = hidden.requires_grad_(), weight.clone().requires_grad_()
        out = launch.linear_divergence(LinearDivergenceCall(*leaves, teacher, backward="save"))
        return torch.autograd.grad(out.sum(), leaves)

    apart = wide.transpose(0, 1)[..., :D]
    for found, want in zip(gradients(apart.detach()), gradients(apart.contiguous()), strict=True):
        assert torch.equal(found, want)
