"""rms_norm against plain torch: the order of sums has one name in both manifests, and so the bits are the same."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.call_checks import same_results
from rlkernel_torch import backend as plain
from rlkernel_triton.claims import manifest

SHAPES = ((2, 1100), (130, 20), (70, 1))


def results(shape, dtype, device, *, residual):
    """Results and gradients of a call that is drawn anew."""
    g = torch.Generator().manual_seed(sum(shape))

    def drawn(*shape):
        return torch.randn(*shape, generator=g).to(device, dtype)

    given = {"x": drawn(*shape), "weight": drawn(shape[-1]), **({"residual": drawn(*shape)} if residual else {})}
    given = {name: x.requires_grad_() for name, x in given.items()}
    out = rlk.rms_norm(**given, eps=1e-5, offset=0.3)
    roots = [out.y, out.residual] if residual else [out.y]
    grads = torch.autograd.grad(roots, list(given.values()), [drawn(*shape) for _ in roots])
    return {f"result {i}": x for i, x in enumerate(roots)} | {f"d_{n}": d for n, d in zip(given, grads, strict=True)}


def test_the_order_of_sums_has_the_name_that_plain_torch_gives_it() -> None:
    names = {i.sums for b in (plain, manifest("triton", "cuda")) for i in b.impls if i.op == "rms_norm@1"}
    assert names == {"lanes1024/tree64/f32"}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_have_the_bits_of_plain_torch(shape, dtype, residual, device) -> None:
    found = results(shape, dtype, device, residual=residual)
    with rlk.use("torch"):
        same_results(found, results(shape, dtype, device, residual=residual), "beside plain torch")
